"""What a streamed chunk costs the client of ``octavo bench serve``, and how true its times are.

A process of its own sends each of ``--streams`` clients a chunk every ``--step-ms`` milliseconds.
What the client reports beyond that step is its own doing, or the machine's.

    python bench/client_stream.py --streams 256 --tokens 100 --step-ms 10
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time

import numpy as np
import uvloop

from octavo.bench.config import LoadConfig
from octavo.bench.dataset import Sample
from octavo.bench.serve import run_load
from octavo.bench.serve_figures import token_gaps

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}]}\n\n'
)


async def pace(port: int, tokens: int, step_seconds: float) -> None:
    """The server: whatever is asked, chunks at their times."""

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"stream":true')
        writer.write(HEAD)
        began = time.monotonic()
        for i in range(tokens):
            await asyncio.sleep(max(0.0, began + i * step_seconds - time.monotonic()))
            writer.write(_chunk(CHUNK))
        usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens
        writer.write(_chunk(usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(stream, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--port", type=int, default=18124)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(pace(options.port, options.tokens, options.step_ms / 1000))
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *sys.argv[1:]], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        load = LoadConfig(port=options.port, model="m")
        samples = [Sample("hi", None, options.tokens)] * options.streams
        before = time.process_time()
        result = uvloop.run(run_load(load, samples))
        used = time.process_time() - before
    finally:
        server.terminate()
        server.wait()
    failed = sum(answer.error is not None for answer in result.answers)
    gaps = [gap * 1e3 for one in result.answers for gap in token_gaps(one, options.tokens)]
    chunks = options.streams * options.tokens
    p50, p90, p99 = np.percentile(gaps, (50, 90, 99))
    print(
        f"{options.streams} streams, {chunks} chunks, {failed} failed, {result.duration:.2f} s: "
        f"{1e6 * used / chunks:.1f} us of CPU a chunk; a step of {options.step_ms:g} ms is seen as "
        f"{np.mean(gaps):.2f} ms, p50 {p50:.2f}, p90 {p90:.2f}, p99 {p99:.2f}"
    )


if __name__ == "__main__":
    main()
