"""``--api-server-count``: several API processes on one port, one engine; one life."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.server import Server, gone, serving, wait_for

pytestmark = pytest.mark.alone
COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "a", "temperature": 0}  # is answered "bcdefgh"
LONG = {"prompt": "a long way to go", "max_tokens": 1900, "ignore_eos": True}
COUNT = 3


@pytest.fixture(scope="module")
def several(book: Path) -> Iterator[Server]:
    flags = ("--api-server-count", str(COUNT), "--metrics-alias-vllm", "--goodput", "ttft:60000")
    with serving(book, *flags) as server:
        yield server


def connections_of(server: Server) -> list[int]:
    """For each API process the number of its connections to clients."""
    port = f":{server.port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1].endswith(port) and row[3] == "01"}
    counts = []
    for pid in server.api_pids:
        links = []
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(descriptor))
        counts.append(len([link for link in links if link[8:-1] in inodes]))
    return counts


def everywhere(server: Server, count: int = 12 * COUNT) -> list[http.client.HTTPConnection]:
    """Open connections, to every API process some."""
    connections = [server.connect() for _ in range(count)]
    for connection in connections:
        connection.connect()
    wait_for(lambda: sum(connections_of(server)) >= count)
    assert min(connections_of(server)) > 0
    return connections


def test_the_kernel_deals_out_connections(several: Server) -> None:
    connections = everywhere(several)
    for connection in connections:
        reply = several.call("POST", COMPLETIONS, SHORT, connection=connection)
        assert reply.json["choices"][0]["text"] == "bcdefgh"
        models = several.call("GET", "/v1/models", connection=connection).body
        assert models == several.call("GET", "/v1/models").body
        connection.close()


def figures(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line[:1] not in ("", "#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_are_those_of_all(several: Server) -> None:
    connections = everywhere(several)
    before = figures(several.call("GET", "/metrics").body.decode())
    for connection in connections:
        several.call("POST", COMPLETIONS, SHORT | {"stream": True}, connection=connection)
    several.call("POST", COMPLETIONS, {"prompt": 5}, connection=connections[-1])
    told = [
        figures(several.call("GET", "/metrics", connection=connection).body.decode())
        for connection in connections
    ]
    for connection in connections:
        connection.close()
    changing = 'handler="/metrics"'
    for one in told:
        assert one.keys() == told[0].keys()
        assert {n: v for n, v in one.items() if changing not in n} == {
            name: value for name, value in told[0].items() if changing not in name
        }

    def grown(name: str, **labels: str) -> float:
        return sum(
            value - before.get(sample, 0)
            for sample, value in told[0].items()
            if sample.startswith(name + "{")
            and all(f'{label}="{text}"' in sample for label, text in labels.items())
        )

    calls = len(connections)
    for prefix in ("octavo:", "vllm:"):
        assert grown(f"{prefix}generation_tokens_total") == 8 * calls
        assert grown(f"{prefix}request_success_total", finished_reason="stop") == calls
        assert grown(f"{prefix}time_to_first_token_seconds_count") == calls
        assert grown(f"{prefix}inter_token_latency_seconds_count") == 7 * calls
        # Of steps, which all are told of, one process counts.
        assert grown(f"{prefix}iteration_tokens_total_count") == 8 * calls
        assert grown(f"{prefix}iteration_tokens_total_sum") == 8 * calls + 2 * calls
    assert grown("octavo:request_goodput_total") == calls
    assert grown("octavo:http_requests_total", status="400") == 1


def test_load_is_that_of_all(tiny_model: Path) -> None:
    with serving(tiny_model, "--api-server-count", "2", "--max-num-seqs", "4") as server:
        connections = everywhere(server, 10)
        for connection in connections:
            send(connection, LONG | {"stream": True})
        wait_for(lambda: server.metric("octavo:num_requests_waiting") == 6)
        for _ in range(8):
            assert server.call("GET", "/load").json == {"server_load": 10}
        for connection in connections:
            connection.close()
        wait_for(lambda: server.call("GET", "/load").json == {"server_load": 0})
        wait_for(server.is_idle)


def send(connection: http.client.HTTPConnection, body: Any) -> None:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", COMPLETIONS, json.dumps(body), headers)


def test_the_queue_limit_is_one_for_all(tiny_model: Path) -> None:
    flags = ("--max-num-seqs", "2", "--max-num-queued-reqs", "3", "--api-server-count", "2")
    with serving(tiny_model, *flags) as server:
        connections = everywhere(server, 24)
        for connection in connections:
            send(connection, LONG)

        def refused() -> float:
            return server.metric("octavo:request_errors_total", kind="overloaded")

        wait_for(lambda: refused() == 24 - 5)
        assert server.call("GET", "/load").json == {"server_load": 5}
        assert server.metric("octavo:num_requests_running") == 2
        assert server.metric("octavo:num_requests_waiting") == 3
        for connection in connections:
            connection.close()
        wait_for(server.is_idle)
        assert server.post(COMPLETIONS, SHORT | {"max_tokens": 2})["choices"]


def streams(server: Server, body: Any, pool: ThreadPoolExecutor) -> list[Any]:
    """A stream over each of several connections, which every API process has some of."""

    def read(connection: http.client.HTTPConnection) -> list[Any]:
        send(connection, {**body, "stream": True})
        lines = connection.getresponse().read().decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    return [pool.submit(read, connection) for connection in everywhere(server, 16)]


def started(model: Path, *flags: str) -> tuple[Server, list[int]]:
    server = Server(model, "--api-server-count", "2", *flags)
    assert server.port
    pids = [*server.api_pids, server.engine_pid]
    assert len(pids) == 3
    return server, pids


def test_the_engine_dies(tiny_model: Path) -> None:
    server, pids = started(tiny_model)
    with ThreadPoolExecutor(16) as pool:
        answers = streams(server, LONG, pool)
        wait_for(lambda: server.metric("octavo:num_requests_running") == 16)
        os.kill(server.engine_pid, signal.SIGKILL)
        for answer in answers:
            assert answer.result()[-1]["error"]["code"] == "engine_died"
    assert server.process.wait(5) == 1
    assert "killed by SIGKILL" in server.log
    assert "Traceback" not in server.log
    wait_for(lambda: all(map(gone, pids)), 2)


def test_the_engine_is_started_again(book: Path) -> None:
    server, _ = started(book, "--restart-engine", "1", "--seed", "5")
    drawn = [draw(server) for _ in range(8)]
    assert len(set(drawn)) == 8
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_for(lambda: "starting it again" in server.log)
    wait_for(lambda: server.call("GET", "/health").status == 200)
    assert [draw(server) for _ in range(8)] == drawn  # whichever process takes which call
    with ThreadPoolExecutor(16) as pool:
        for answer in streams(server, SHORT, pool):
            assert answer.result()[-1]["choices"][0]["finish_reason"] == "stop"
    assert server.stop() == 0


def draw(server: Server) -> str:
    """A random text; the call has no seed."""
    body = {"prompt": "w", "max_tokens": 24, "ignore_eos": True}
    text: str = server.post(COMPLETIONS, body)["choices"][0]["text"]
    return text


def test_no_orphan(book: Path) -> None:
    server, pids = started(book)
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: all(map(gone, pids)), 2)


def test_an_api_process_dies(tiny_model: Path) -> None:
    server, pids = started(tiny_model)
    with ThreadPoolExecutor(16) as pool:
        answers = streams(server, {**LONG, "max_tokens": 200}, pool)
        wait_for(lambda: server.metric("octavo:num_requests_running") == 16)
        os.kill(pids[1], signal.SIGKILL)
        ended = [answer.exception() for answer in answers]
    broken = [error for error in ended if error is not None]
    assert 0 < len(broken) < 16  # the other process finishes its own
    assert server.process.wait(10) == 1
    assert "an API process was killed by SIGKILL" in server.log
    assert "Traceback" not in server.log
    wait_for(lambda: all(map(gone, pids)), 2)


def test_running_answers_may_finish(tiny_model: Path) -> None:
    server, pids = started(tiny_model)
    with ThreadPoolExecutor(16) as pool:
        answers = streams(server, {**LONG, "max_tokens": 200}, pool)
        wait_for(lambda: server.metric("octavo:num_requests_running") == 16)
        for pid in pids:  # as a terminal or a service manager does, to all of them
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: server.call("GET", "/health").status == 503)
        for answer in answers:
            assert answer.result()[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(10) == 0
    assert "Traceback" not in server.log
    wait_for(lambda: all(map(gone, pids)), 2)


def test_a_port_that_another_server_shares(book: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        server = Server(book, "--api-server-count", "2", "--port", port)
        assert server.process.wait(20) == 1
        server.stop()
    assert port in server.log
    assert server.log.count("\n") == 1
