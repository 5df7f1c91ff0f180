"""What a streamed token costs the API process: CPU microseconds, with an engine that does nothing.

The null engine gives every running request one token a step and makes a step each ``--step-ms``
milliseconds (0: back to back). ``--streams`` clients read raw sockets in a process of their own.

    python bench/server_stream.py --streams 256 --tokens 200 --step-ms 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODULE = "server_stream"


class NullEngine:
    """An engine's face without a model: the ids of "hello " in turn."""

    def __init__(self, step_seconds: float) -> None:
        self.limits = SimpleNamespace(max_num_seqs=4096, block_size=16, num_blocks=(1,))
        self.max_total_tokens = 8192
        self._step_seconds = step_seconds
        self._requests: dict[str, Any] = {}
        self._next = 0.0
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    finish = abort

    def step(self) -> list[Any]:
        from octavo.engine.loop import RequestUpdate

        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._step_seconds
        self._steps += 1
        updates = []
        for request in list(self._requests.values()):
            count = len(request.output_token_ids)
            request.append(b"hello "[count % 6])
            ended = count + 1 >= request.params.max_tokens
            reason = "length" if ended else None
            ids = request.output_token_ids[-1:]
            updates.append(
                RequestUpdate(request.request_id, ids, None, None, reason, None, 0, request.metrics)
            )
            if ended:
                del self._requests[request.request_id]
        return updates

    def stats(self) -> Any:
        from octavo.engine.loop import EngineStats

        return EngineStats(len(self._requests), 0, 0.0, self._steps, 0, 0, 0, 0, 0, {})


def null_engine_process() -> None:
    """Stands in for ``octavo.server.engine_process``."""
    from octavo.server import engine_process

    engine = NullEngine(float(os.environ["NULL_STEP_MS"]) / 1000)
    report = SimpleNamespace(
        runtime="null", attention_backend="null", precision="null", load_seconds=0.0, notes=()
    )
    engine_process.build_engine = lambda config: SimpleNamespace(  # type: ignore[assignment]
        engine=engine, report=report
    )
    engine_process.main()


def serve(model: str, port: int) -> None:
    from octavo.config import EngineConfig
    from octavo.server.config import ServerConfig
    from octavo.server.serve import serve as run
    from octavo.server.supervisor import Supervisor

    Supervisor.engine_module = MODULE
    run(ServerConfig(port=port, disable_log_stats=True), EngineConfig(model=model))


async def one_stream(port: int, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    chunks = 0
    while True:
        data = await reader.read(1 << 16)
        chunks += data.count(b"data: {")
        if not data or b"[DONE]" in data:
            writer.close()
            return chunks


async def clients(port: int, streams: int, tokens: int) -> int:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
    ).encode()
    return sum(await asyncio.gather(*(one_stream(port, body) for _ in range(streams))))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--model", default="")
    parser.add_argument("--port", type=int, default=18123)
    options = parser.parse_args()
    here = Path(__file__).resolve().parent
    env = {
        **os.environ,
        "PYTHONPATH": str(here),
        "NULL_STEP_MS": str(options.step_ms),
        "SERVE_MODEL": options.model,
        "SERVE_PORT": str(options.port),
    }
    server = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", env=env)
    try:
        while True:
            try:
                await clients(options.port, 1, 5)
                break
            except OSError:
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        await clients(options.port, 8, 50)  # warm
        before, began = cpu_seconds(server.pid), time.monotonic()
        chunks = await clients(options.port, options.streams, options.tokens)
        used, wall = cpu_seconds(server.pid) - before, time.monotonic() - began
        tokens = options.streams * options.tokens
        print(
            f"{options.streams} streams, {tokens} tokens in {chunks} chunks, {wall:.2f} s: "
            f"{1e6 * used / tokens:.1f} us of CPU a token, {1e6 * used / chunks:.1f} us a chunk"
        )
    finally:
        server.terminate()
        await server.wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve(os.environ["SERVE_MODEL"] or None, int(os.environ["SERVE_PORT"]))  # type: ignore
    elif "NULL_STEP_MS" not in os.environ:
        asyncio.run(main())
    else:  # as python -m, in place of the engine process
        null_engine_process()
