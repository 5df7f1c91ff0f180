"""One stream through ``octavo serve`` on a GPU: random weights, real shapes.

    python bench/gpu_serve.py [--models 0.6b,8b] [--contexts 128,8192,32768] [--starts 2]

Starts the server as a user does, says after how many seconds /health answers, then asks for one
stream after the other: milliseconds a token from the first event to the last, by the client's
clock. With ``--starts 2`` the first start may find empty caches and the second finds them full. A
line a figure, one of JSON at the end. The tokenizer is Qwen3's, from tests/data.
"""

from __future__ import annotations

import argparse
import http.client
import json
import lzma
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "tests" / "data" / "tokenizers"
PORT = 18_125
TOKENS = 129
START_SECONDS = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--contexts", default="128,8192,32768")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    arguments = parser.parse_args()
    contexts = [int(word) for word in arguments.contexts.split(",")]
    figures: dict[str, Any] = {}
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            fill(Path(folder), model, max(contexts) + 256)
            for start in range(arguments.starts):
                name = f"{model} start {start + 1}"
                figures[name] = served(
                    Path(folder), contexts, arguments.max_num_seqs, max(contexts) + 256
                )
                print(f"{name}: {figures[name]}", flush=True)
    print(json.dumps(figures))


def fill(folder: Path, model: str, max_model_len: int) -> None:
    """Make a checkpoint's folder without weights."""
    config = json.loads((ROOT / "bench" / "models" / f"qwen3-{model}" / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], max_model_len)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        packed = (TOKENIZER / f"qwen3_{name}.xz").read_bytes()
        (folder / name).write_bytes(lzma.decompress(packed))


def served(folder: Path, contexts: list[int], max_num_seqs: int, longest: int) -> dict[str, Any]:
    began = time.monotonic()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "octavo",
            "serve",
            str(folder),
            "--load-format",
            "dummy",
            "--served-model-name",
            "m",
            "--port",
            str(PORT),
            "--max-model-len",
            str(longest),
            "--max-num-seqs",
            str(max_num_seqs),
            "--max-num-batched-tokens",
            "8192",
        ]
    )
    try:
        wait_for_health(server, began)
        figures: dict[str, Any] = {"ready_s": round(time.monotonic() - began, 2)}
        rng = random.Random(0)
        for context in contexts:
            streamed(rng, context, 8)
            runs = [streamed(rng, context, TOKENS) for _ in range(3)]
            ttft, tpot, events = min(runs, key=lambda run: run[1])
            figures[str(context)] = {
                "ms_a_token": round(tpot * 1e3, 4),
                "all": [round(run[1] * 1e3, 4) for run in runs],
                "ttft_ms": round(ttft * 1e3, 1),
                "events": events,
            }
        return figures
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def wait_for_health(server: subprocess.Popen[bytes], began: float) -> None:
    while time.monotonic() < began + START_SECONDS:
        if server.poll() is not None:
            sys.exit(f"octavo serve ended with {server.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.02)  # or the question would be half of the server's work
    sys.exit(f"octavo serve wasn't ready after {START_SECONDS:g} s")


def streamed(rng: random.Random, context: int, count: int) -> tuple[float, float, int]:
    """Seconds to the first event with text, seconds a token after it, and events with text."""
    ids = [rng.randrange(500, 100_000) for _ in range(context)]
    body = {"model": "m", "prompt": ids, "max_tokens": count, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    began = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), headers)
    answer = connection.getresponse()
    times = []
    while line := answer.readline():
        if line.startswith(b"data: {") and b'"text"' in line:
            times.append(time.perf_counter())
    if answer.status != 200 or not times:
        sys.exit(f"octavo serve answered {answer.status} with {len(times)} events")
    return times[0] - began, (times[-1] - times[0]) / (count - 1), len(times)


if __name__ == "__main__":
    main()
