"""Many clients at once: streams, whole answers, leavers, broken bodies, prompts too long.

Every answer is checked against that of the request alone. The engine has few blocks, so that it
preempts. OCTAVO_SOAK_SECONDS says how long, 5 if unset; OCTAVO_SOAK_CLIENTS how many, 64.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from helpers.server import Server, serving, texts, wait_for

SECONDS = float(os.environ.get("OCTAVO_SOAK_SECONDS", "5"))
CLIENTS = int(os.environ.get("OCTAVO_SOAK_CLIENTS", "64"))
COMPLETIONS = "/v1/completions"
PROMPTS = [f"prompt number {i} " * (i % 9 + 1) for i in range(20)]
BROKEN: list[Any] = [b"{", b"\xff", {"foo": 1}, {"prompt": "x" * 5000}, {"prompt": []}]


def body_of(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}


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


def one_client(server: Server, right: dict[str, str], seed: int, end: float) -> int:
    chance, answers = random.Random(seed), 0
    while time.monotonic() < end:
        kind, prompt = chance.random(), chance.choice(PROMPTS)
        body = body_of(prompt)
        if kind < 0.4:
            assert slowly(server, body, chance) == right[prompt]
        elif kind < 0.6:
            assert server.post(COMPLETIONS, body)["choices"][0]["text"] == right[prompt]
        elif kind < 0.85:
            more = {"stream": chance.random() < 0.5, "n": chance.choice([1, 3])}
            leave(server, body | more, chance)
        else:
            assert server.call("POST", COMPLETIONS, chance.choice(BROKEN)).status == 400
        answers += 1
    return answers


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


def test_many_clients(tiny_model: Path) -> None:
    flags = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "60", "--max-model-len", "300")
    with serving(tiny_model, *flags) as server, ThreadPoolExecutor(CLIENTS) as pool:
        right = {
            prompt: server.post(COMPLETIONS, body_of(prompt))["choices"][0]["text"]
            for prompt in PROMPTS
        }
        pids = (server.process.pid, server.engine_pid)
        before = [resident_kb(pid) for pid in pids]
        end = time.monotonic() + SECONDS
        clients = [pool.submit(one_client, server, right, i, end) for i in range(CLIENTS)]
        assert all(client.result() > 0 for client in clients)
        wait_for(server.is_idle, 5)
        assert server.metric("octavo:num_preemptions_total") > 0
        assert server.call("GET", "/load").json == {"server_load": 0}
        for pid, size in zip(pids, before, strict=True):
            assert resident_kb(pid) < size + 64 * 1024
