"""Reported faults O22 and O38: clients that leave, start, stop, and processes that are killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.server import Server, gone, serving, wait_for

pytestmark = pytest.mark.alone
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "a long way to go", "max_tokens": 1900, "ignore_eos": True}


# ---- O22: a client that leaves


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, "--max-num-seqs", "2") as server:
        server.post(COMPLETIONS, {"prompt": "warm", "max_tokens": 2})
        yield server


def leave(server: Server, body: dict[str, Any], read: int) -> None:
    """Send a call, read so many bytes of the answer, and close the connection."""
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        if read:
            assert connection.recv(read)
        else:
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (LONG, 0),
        ({**LONG, "stream": True}, 1),
        ({**LONG, "n": 4}, 0),
        ({**LONG, "n": 4, "stream": True}, 1),
        ({**LONG, "prompt": ["a", "b", "c"]}, 0),
    ],
)
def test_o22_a_client_that_leaves(tiny_server: Server, body: dict[str, Any], read: int) -> None:
    before = tiny_server.metric("octavo:request_success_total", finished_reason="abort")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: leave(tiny_server, body, read), range(8)))
    wait_for(tiny_server.is_idle, 2.0)
    generated = tiny_server.metric("octavo:generation_tokens_total")
    aborted = tiny_server.metric("octavo:request_success_total", finished_reason="abort")
    answers = 3 if isinstance(body["prompt"], list) else body.get("n", 1)
    assert aborted - before == 8 * answers
    assert tiny_server.call("GET", "/load").json == {"server_load": 0}
    assert tiny_server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})["choices"]
    assert tiny_server.metric("octavo:generation_tokens_total") == generated + 2


def test_a_body_that_never_comes(tiny_server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as connection:
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.05)
    assert tiny_server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})["choices"]


# ---- O38: starts in vain


def started(*flags: str) -> tuple[int, float, str]:
    """The exit code, the CPU seconds that it took, whatever else the machine does, and what was
    said."""
    began = cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=30,
        check=False,
    )
    return done.returncode, cpu_seconds() - began, done.stdout + done.stderr


def cpu_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_o38_the_port_is_taken(book: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, seconds, said = started(str(book), "--port", port)
    assert code == 1
    assert seconds < 2
    assert said.count("\n") == 1
    assert port in said


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("--host", "203.0.113.1"), "203.0.113.1"),
        (("--ssl-keyfile", "key.pem"), "ssl_certfile"),
        (("--ssl-keyfile", "no.pem", "--ssl-certfile", "no.pem"), "no.pem"),
        (("--ssl-keyfile", __file__, "--ssl-certfile", __file__), "PEM"),
        (("--goodput", "speed:1"), "speed:1"),
        (("--port", "70000"), "70000"),
        (("--max-model-len", "100000"), "100000"),
        (("--gpu-memory-utilization", "0.0000001"), "memory"),
    ],
)
def test_o38_what_cannot_start_says_why(book: Path, flags: tuple[str, ...], word: str) -> None:
    model = () if flags[0].startswith("/") else (str(book),)
    port = () if "--port" in flags else ("--port", "0")
    code, seconds, said = started(*model, *port, *flags)
    assert code in (1, 2)
    assert seconds < 2
    assert word in said
    assert "Traceback" not in said
    assert "ready" not in said


# ---- O38: readiness and stopping


def test_o38_not_ready_is_never_200(book: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(book, "--port", str(port), "--enable-log-requests")
    statuses = []
    while b"200" not in statuses and server.process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                statuses.append(connection.recv(1000).split(b" ")[1])
        except OSError:
            time.sleep(0.01)
    assert set(statuses) == {b"503", b"200"}
    assert "/health" not in server.log  # a probe that hears "not yet" is no failure
    assert server.metric("octavo:request_errors_total") == 0
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})["choices"]
    assert server.stop() == 0


def test_o38_a_signal_while_loading(book: Path) -> None:
    server = Server(book)
    wait_for(lambda: bool(server.engine_pids))  # it begins before anything is loaded
    engine, began = server.engine_pid, time.monotonic()
    assert server.stop() in (0, -signal.SIGTERM)
    assert time.monotonic() - began < 5
    assert "ready" not in server.log
    wait_for(lambda: gone(engine), 2)


def in_background(server: Server, pool: ThreadPoolExecutor, count: int, body: Any) -> list[Any]:
    def collect() -> list[Any]:
        return server.stream(COMPLETIONS, body)

    return [pool.submit(collect) for _ in range(count)]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_o38_running_answers_may_finish(tiny_model: Path, sig: int) -> None:
    server = Server(tiny_model, "--max-num-seqs", "3")
    body = {**LONG, "max_tokens": 300}
    with ThreadPoolExecutor(8) as pool:
        answers = in_background(server, pool, 8, body)
        wait_for(lambda: server.metric("octavo:num_requests_waiting") == 5)
        assert server.metric("octavo:num_requests_running") == 3
        engine = server.engine_pid
        server.process.send_signal(sig)
        wait_for(lambda: server.call("GET", "/health").status == 503)
        refused = server.call("POST", COMPLETIONS, {"prompt": "a"})
        assert refused.status == 503
        assert "shutting down" in refused.error["message"]
        for answer in answers:
            events = answer.result()
            assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(10) == 0
    assert gone(engine)


def test_o38_answers_beyond_the_grace_are_cut(tiny_model: Path) -> None:
    server = Server(tiny_model, "--shutdown-timeout", "0.2")
    with ThreadPoolExecutor(3) as pool:
        answers = in_background(server, pool, 2, LONG)
        whole = pool.submit(server.call, "POST", COMPLETIONS, LONG)
        wait_for(lambda: server.metric("octavo:num_requests_running") == 3)
        server.process.send_signal(signal.SIGTERM)
        for answer in answers:
            assert "shutting down" in answer.result()[-1]["error"]["message"]
        assert whole.result().status == 503
    assert server.process.wait(5) == 0


def test_o38_a_second_interrupt_is_the_end(tiny_model: Path) -> None:
    server = Server(tiny_model)
    assert server.port
    engine = server.engine_pid
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        raw = json.dumps({**LONG, "stream": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        connection.recv(1)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(5) == 130
        assert time.monotonic() - began < 1
    wait_for(lambda: gone(engine), 2)


# ---- processes that are killed


def test_the_engine_dies(tiny_model: Path) -> None:
    server = Server(tiny_model)
    with ThreadPoolExecutor(3) as pool:
        answers = in_background(server, pool, 2, LONG)
        whole = pool.submit(server.call, "POST", COMPLETIONS, LONG)
        wait_for(lambda: server.metric("octavo:num_requests_running") == 3)
        os.kill(server.engine_pid, signal.SIGKILL)
        for answer in answers:
            assert answer.result()[-1]["error"]["code"] == "engine_died"
        assert whole.result().status == 500
    assert server.process.wait(5) == 1
    assert "killed by SIGKILL" in server.log
    assert "Traceback" not in server.log


def test_the_engine_is_started_again(book: Path) -> None:
    server = Server(book, "--restart-engine", "1")
    body = {"prompt": "a", "temperature": 0}
    for _ in range(2):
        assert server.post(COMPLETIONS, body)["choices"][0]["text"] == "bcdefgh"
        engine = server.engine_pid
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: server.process.poll() is not None or "starting it again" in server.log)
        if server.process.poll() is None:
            wait_for(lambda: server.call("GET", "/health").status == 200)
    assert server.process.wait(5) == 1
    assert server.log.count("starting it again") == 1


def test_the_engine_hangs(tiny_model: Path) -> None:
    # Nothing is compiled, so that no step takes long.
    flags = ("--enforce-eager", "--attention-backend", "reference", "--watchdog-timeout", "2")
    server = Server(tiny_model, *flags, "--restart-engine", "1")
    short = {"prompt": "a", "max_tokens": 2}
    assert server.post(COMPLETIONS, short)["choices"]

    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)  # it has nothing to do: that is no hang
    time.sleep(2.5)
    os.kill(engine, signal.SIGCONT)
    assert server.post(COMPLETIONS, short)["choices"]

    with ThreadPoolExecutor(3) as pool:
        answers = in_background(server, pool, 2, {**LONG, "max_tokens": 300})
        wait_for(lambda: server.metric("octavo:num_requests_running") == 2)
        os.kill(server.process.pid, signal.SIGSTOP)  # nor is it one where nobody listens
        time.sleep(2.5)
        os.kill(server.process.pid, signal.SIGCONT)
        for answer in answers:
            assert answer.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.engine_pid == engine

        for last in (False, True):
            answers = in_background(server, pool, 2, LONG)
            whole = pool.submit(server.call, "POST", COMPLETIONS, LONG)
            wait_for(lambda: server.metric("octavo:num_requests_running") == 3)
            os.kill(server.engine_pid, signal.SIGSTOP)
            for answer in answers:
                error = answer.result()[-1]["error"]
                assert error["code"] == "engine_died"
                assert "no step for 2 s" in error["message"]
            assert whole.result().status == 500
            if not last:
                wait_for(lambda: server.call("GET", "/health").status == 200)
                assert server.post(COMPLETIONS, short)["choices"]
    assert server.process.wait(5) == 1
    server.stop()
    assert "watchdog_timeout" in server.log
    assert "Traceback" not in server.log
    assert gone(engine)


def test_a_stuck_client(tiny_model: Path) -> None:
    server = Server(tiny_model)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900, "n": 2}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20, "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        stuck.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_for(lambda: server.metric("octavo:num_requests_running") == 2)
        # Others don't notice, and its answers are made, and their blocks are free.
        other = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
        assert server.post(COMPLETIONS, other)["choices"]
        wait_for(server.is_idle)
        assert server.metric("octavo:request_success_total", finished_reason="length") == 3
        began = time.monotonic()
        assert server.stop() == 0
        assert 1.5 < time.monotonic() - began < 8  # it did hold the server up
    assert "Traceback" not in server.log


def test_a_clock_jump(tiny_model: Path, tmp_path: Path) -> None:
    hours = tmp_path / "hours"
    hours.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        f"real, path = time.time, {str(hours)!r}\n"
        "time.time = lambda: real() + 3600 * float(open(path).read() or 0)\n"
    )
    with serving(tiny_model, env={"PYTHONPATH": str(tmp_path)}) as server:
        began = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            answers = in_background(server, pool, 2, {**LONG, "max_tokens": 600})
            for jump in ("5", "-9"):
                wait_for(lambda: server.metric("octavo:num_requests_running") == 2)
                hours.write_text(jump)
            for answer in answers:
                assert answer.result()[-1]["choices"][0]["finish_reason"] == "length"
        created = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})["created"]
        assert abs(time.time() - 9 * 3600 - created) < 60  # it did jump
        lasted = time.monotonic() - began
        for name in ("e2e_request_latency", "request_decode_time", "time_to_first_token"):
            assert 0 < server.metric(f"octavo:{name}_seconds_sum") < 3 * lasted


def test_no_orphan(book: Path) -> None:
    server = Server(book)
    assert server.port
    engine = server.engine_pid
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: gone(engine), 2)
