"""What a streamed token costs the API process: CPU microseconds, with an engine that does nothing.

The null engine gives every running request one token a step and makes a step each ``--step-ms``
milliseconds (0: back to back). ``--streams`` clients read raw sockets in a process of their own.
The calls themselves are counted with the tokens, and what a call of one token costs is told beside.

Machines differ, and the same one from hour to hour: the turn of a loop of Python and the floor, a
bare ``send`` of 250 bytes to each of as many connections, are measured before and after.

    python bench/server_stream.py --streams 256 --tokens 200 --step-ms 10
    python bench/server_stream.py --own

``--own`` measures our own part of a chunk alone, in one process: from the engine's message to the
application's ``send``, without uvicorn, sockets and other processes, in turns of the loop that is
timed after each step. That figure holds on a machine that is busy as well.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import selectors
import socket
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
        from octavo.engine.delivery import RequestUpdate

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
        runtime="null", attention_backend="null", precision="null", phases={}, notes=()
    )
    engine_process.build_engine = lambda config, with_text: SimpleNamespace(  # type: ignore[assignment]
        engine=engine, report=report
    )
    engine_process.main()


def serve(model: str, port: int) -> None:
    from octavo.config import EngineConfig
    from octavo.server.config import ServerConfig
    from octavo.server.processes import ChildProcess
    from octavo.server.serve import serve as run

    config = ServerConfig(port=port, disable_log_stats=True)
    run(config, EngineConfig(model=model), ChildProcess(MODULE))


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


def call_of(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "stream": True, "max_tokens": tokens, "ignore_eos": True}


async def clients(port: int, streams: int, tokens: int) -> int:
    body = json.dumps(call_of(tokens)).encode()
    return sum(await asyncio.gather(*(one_stream(port, body) for _ in range(streams))))


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process so far, outside the kernel and in it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


async def cost(port: int, pid: int, streams: int, tokens: int) -> tuple[float, float, int]:
    """CPU microseconds of the API process outside the kernel and in it, and chunks."""
    before = cpu_seconds(pid)
    chunks = await clients(port, streams, tokens)
    user, kernel = (1e6 * (now - then) for now, then in zip(cpu_seconds(pid), before, strict=True))
    return user, kernel, chunks


def turn(count: int) -> float:
    """CPU microseconds of one turn of a loop of Python."""
    began, total = time.process_time(), 0
    for i in range(count):
        total += i & 7
    return 1e6 * (time.process_time() - began) / count


def bare_send(streams: int, rounds: int = 50) -> float:
    """CPU microseconds of the least that a chunk can cost."""
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
        if not (reader := os.fork()):
            selector = selectors.DefaultSelector()
            for _ in range(streams):
                connection = socket.create_connection(listener.getsockname())
                selector.register(connection, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                        os._exit(0)
        connections = [listener.accept()[0] for _ in range(streams)]
        sent = 0.0
        for _ in range(rounds):
            began = time.process_time()
            for connection in connections:
                connection.send(b"x" * 250)
            sent += time.process_time() - began
            time.sleep(0.01)
        for connection in connections:
            connection.close()
        os.waitpid(reader, 0)
    return 1e6 * sent / rounds / streams


async def own_part(model: str, streams: int, steps: int) -> None:
    """Play the engine to an application in this process; its clients take what they are sent."""
    import msgspec

    from octavo.config import EngineConfig
    from octavo.engine.build import load_text_side
    from octavo.engine.delivery import RequestUpdate
    from octavo.engine.loop import EngineStats
    from octavo.outputs import RequestMetrics
    from octavo.server import messages
    from octavo.server.app import Api, make_app
    from octavo.server.config import ServerConfig
    from octavo.server.engine_client import EngineClient
    from octavo.server.metrics import Metrics
    from octavo.server.parsers import choose_parsers
    from octavo.server.prepare import Serving

    text = load_text_side(EngineConfig(model=model or None))
    client = EngineClient(text.frontend, Metrics("model"))
    client.ready = messages.Ready(8192, 16, 1, "null", "null", "null", {}, [])
    parsers = choose_parsers(text.tokenizer, "auto", "auto")
    serving = Serving(
        client, text.tokenizer, "model", text.vocab_size, text.defaults, parsers=parsers
    )
    app = make_app(Api(ServerConfig(), serving, ["model"], 0))
    body = msgspec.json.encode(call_of(steps + 1))
    head = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    head["headers"] = [(b"content-type", b"application/json")]

    async def one() -> None:
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for part in parts:
                return part
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            pass

        await app(dict(head), receive, send)

    calls = [asyncio.create_task(one()) for _ in range(streams)]
    while client.num_answers < streams:
        await asyncio.sleep(0)
    names = sorted(client._answers)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # the API process's
    costs = []
    for step in range(steps):
        ids = [b"hello "[step % 6]]
        updates = [
            RequestUpdate(name, ids, None, None, None, None, 0, RequestMetrics(1.0, 1.0))
            for name in names
        ]
        stats = EngineStats(streams, 0, 0.0, step, 0, 0, 0, step * streams, 0, {})
        raw = messages.encode(messages.Step(updates, stats))
        began = time.process_time()
        client._take(messages.decode_from_engine(raw))
        for _ in range(2):  # the streams' turn
            await asyncio.sleep(0)
        cost = 1e6 * (time.process_time() - began) / streams
        costs.append((cost / turn(50_000), cost))
    turns, micros = (sorted(values)[steps // 2] for values in zip(*costs, strict=True))
    print(f"our own part of a chunk: {turns:.0f} turns of the loop, {micros:.1f} us (medians)")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--model", default="")
    parser.add_argument("--port", type=int, default=18123)
    parser.add_argument("--own", action="store_true")
    options = parser.parse_args()
    if options.own:
        return await own_part(options.model, options.streams, options.tokens)
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
        turns, sends = [turn(1_000_000)], [bare_send(options.streams)]
        call = sum((await cost(options.port, server.pid, options.streams, 1))[:2])
        began = time.monotonic()
        user, kernel, chunks = await cost(options.port, server.pid, options.streams, options.tokens)
        wall = time.monotonic() - began
        turns.append(turn(1_000_000))
        sends.append(bare_send(options.streams))
        tokens = options.streams * options.tokens
        used = user + kernel
        print(
            f"{options.streams} streams, {tokens} tokens in {chunks} chunks, {wall:.2f} s: "
            f"{used / tokens:.1f} us of CPU a token ({kernel / tokens:.1f} in the kernel), "
            f"{used / chunks:.1f} us a chunk, {2 * used / tokens / sum(turns):.0f} turns a token\n"
            f"a call {call / options.streams:.0f} us, without it {(used - call) / tokens:.1f} us a "
            f"token; a turn {1e3 * turns[0]:.0f} and {1e3 * turns[1]:.0f} ns, a bare send "
            f"{sends[0]:.1f} and {sends[1]:.1f} us, before and after"
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
