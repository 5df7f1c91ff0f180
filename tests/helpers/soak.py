"""Many clients at once: streams, whole answers, slow readers, leavers, broken bodies, prompts too
long. Every answer is checked against that of the request alone; then nothing may be left.

    python -m helpers.soak MODEL SECONDS CLIENTS PAUSE

serves MODEL (``default``: the embedded one) with two API processes and so few blocks that the
engine preempts. Each client waits PAUSE seconds between calls, on average. Ends with JSON.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from os.path import commonprefix
from pathlib import Path
from typing import Any

from helpers.server import Server, serving, texts, wait_for

COMPLETIONS = "/v1/completions"
FLAGS = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "24", "--max-model-len", "300")
PROMPTS = [f"prompt number {i} " * (i % 9 + 1) for i in range(20)]
BROKEN: list[Any] = [b"{", b"\xff", {"foo": 1}, {"prompt": "x" * 5000}, {"prompt": []}]
MEMORY_BYTES = 64 << 20  # that a process may grow by
NEAR_TIE = 0.3  # nats
PATIENCE = 300.0  # seconds: a real model on two cores keeps 64 clients waiting


def body_of(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def leave(server: Server, body: dict[str, Any], chance: random.Random) -> None:
    """Send a call, or a part of it, and close the connection some time later."""
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        sent = raw[: chance.choice([len(raw), len(raw), 5])]
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + sent)
        time.sleep(chance.random() * 0.2)


def slowly(server: Server, body: dict[str, Any], chance: random.Random) -> str:
    events = []
    for event in server.events(COMPLETIONS, body):
        events.append(event)
        if chance.random() < 0.02:
            time.sleep(0.2)
    return texts(events)


def check(server: Server, prompt: str, found: str, right: str) -> None:
    """An answer is what it is alone, but for near ties: what is computed again after a preemption
    is rounded otherwise, and so is the choice between two tokens that are as good."""
    if found == right:
        return
    assert not right.startswith(found), f"{prompt!r}: {found!r} instead of {right!r}"
    # Behind the token that departs all may be different.
    departs = len(prompt) + len(commonprefix([found, right]))  # noqa: RUF071
    scored = {"prompt": prompt + found, "max_tokens": 1, "temperature": 0, "echo": True}
    logprobs = server.post(COMPLETIONS, scored | {"logprobs": 1})["choices"][0]["logprobs"]
    columns = (logprobs[name] for name in ("text_offset", "token_logprobs", "top_logprobs"))
    gaps = [
        max(top.values()) - own
        for offset, own, top in zip(*columns, strict=True)
        if len(prompt) <= offset <= departs
    ]
    assert gaps, f"{prompt!r}: {found!r} instead of {right!r}"
    assert max(gaps) < NEAR_TIE, f"{prompt!r}: {found!r} instead of {right!r}, {max(gaps)} worse"


def one_client(
    server: Server, right: dict[str, str], seed: int, end: float, pause: float
) -> Counter[str]:
    chance, calls = random.Random(seed), Counter[str]()
    while True:
        time.sleep(chance.random() * 2 * pause)
        if time.monotonic() > end:
            return calls
        kind, prompt = chance.random(), chance.choice(PROMPTS)
        body = body_of(prompt)
        if kind < 0.4:
            calls["streams"] += 1
            found = slowly(server, body, chance)
            check(server, prompt, found, right[prompt])
        elif kind < 0.6:
            calls["whole answers"] += 1
            found = server.post(COMPLETIONS, body)["choices"][0]["text"]
            check(server, prompt, found, right[prompt])
        elif kind < 0.85:
            calls["left"] += 1
            more = {"stream": chance.random() < 0.5, "n": chance.choice([1, 3])}
            leave(server, body | more, chance)
        else:
            calls["refused"] += 1
            assert server.call("POST", COMPLETIONS, chance.choice(BROKEN)).status == 400


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


def soak(model: str, seconds: float, num_clients: int, pause: float) -> dict[str, Any]:
    """Raises where anything is wrong; returns what was done."""
    with (
        serving(None if model == "default" else model, *FLAGS, "--api-server-count", "2") as server,
        ThreadPoolExecutor(num_clients) as pool,
    ):
        server.patience = PATIENCE
        right = {
            prompt: server.post(COMPLETIONS, body_of(prompt))["choices"][0]["text"]
            for prompt in PROMPTS
        }
        # All of them at once are more than the blocks hold, however fast the machine.
        together = pool.map(lambda prompt: server.post(COMPLETIONS, body_of(prompt)), PROMPTS * 3)
        for prompt, answer in zip(PROMPTS * 3, together, strict=True):
            assert answer["choices"][0]["text"] == right[prompt]
        pids = [*server.api_pids, server.engine_pid]
        before = [resident_bytes(pid) for pid in pids]
        end = time.monotonic() + seconds
        clients = [
            pool.submit(one_client, server, right, i, end, pause) for i in range(num_clients)
        ]
        calls = sum((client.result() for client in clients), Counter[str]())
        wait_for(server.is_idle, PATIENCE)
        wait_for(lambda: server.call("GET", "/load").json == {"server_load": 0})
        after = [resident_bytes(pid) for pid in pids]
        preemptions = server.metric("octavo:num_preemptions_total")
        tokens = server.metric("octavo:generation_tokens_total")
        assert min(calls[kind] for kind in ("streams", "whole answers", "left", "refused")) > 0
        assert preemptions > 0
        for old, new in zip(before, after, strict=True):
            assert new < old + MEMORY_BYTES, (before, after)
    return {
        "seconds": seconds,
        "clients": num_clients,
        **calls,
        "generated tokens": int(tokens),
        "preemptions": int(preemptions),
        "MB before (API, API, engine)": [size >> 20 for size in before],
        "MB after": [size >> 20 for size in after],
    }


if __name__ == "__main__":
    path, seconds, num_clients, pause = sys.argv[1:]
    print(json.dumps(soak(path, float(seconds), int(num_clients), float(pause))))
