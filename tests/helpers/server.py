"""A server under test: started as a user would, on a free port, spoken with over plain HTTP."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READY = re.compile(r"ready on https?://\S+:(\d+) ")
PATIENCE = 60.0


@dataclass
class Reply:
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape."""
        assert set(self.json) == {"error"}, self.json
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]


class Server:
    """``octavo serve MODEL FLAGS``, from its start until :meth:`stop`. ``patience`` is how many
    seconds a call waits for news."""

    patience = PATIENCE

    def __init__(
        self, model: Path | str | None, *flags: str, env: Mapping[str, str] | None = None
    ) -> None:
        named = () if model is None else (str(model),)  # else the embedded one
        port = () if "--port" in flags else ("--port", "0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", *named, *port, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        atexit.register(self.process.kill)  # where a test fails half-way; its engine follows
        self.log = ""
        self._port: int | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def port(self) -> int:
        wait_for(lambda: self._port is not None or self.process.poll() is not None)
        assert self._port is not None, self.log
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """The process id of the engine process."""
        [pid] = self.engine_pids
        return pid

    @property
    def engine_pids(self) -> list[int]:
        """None until the engine's process has begun."""
        return self._children("engine_process")

    @property
    def api_pids(self) -> list[int]:
        """The process ids of the API processes, the parent of all first."""
        return [self.process.pid, *self._children("api_process")]

    def _children(self, module: str) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [int(pid) for pid in path.read_text().split()]
        return [pid for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_text()]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Reply:
        """One call. A body that is no bytes is sent as JSON."""
        own = connection or self.connect()
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = dict(headers or {})
        if raw is not None:
            sent.setdefault("Content-Type", "application/json")
        own.request(method, path, raw, sent)
        response = own.getresponse()
        reply = Reply(response.status, dict(response.headers), response.read())
        if connection is None:
            own.close()
        return reply

    def post(self, path: str, body: Any, **options: Any) -> Any:
        """The JSON of a call that must succeed."""
        reply = self.call("POST", path, body, **options)
        assert reply.status == 200, reply.body
        return reply.json

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """All events of a stream, without the last, which must be [DONE]."""
        return list(self.events(path, body))

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        connection = self.connect()
        sent = json.dumps({**body, "stream": True})
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        done = False
        while line := response.readline():
            assert not done, "something follows [DONE]"
            data = line.decode().removesuffix("\n")
            assert response.readline() == b"\n"
            done = data == "data: [DONE]"
            if not done:
                assert data.startswith("data: ")
                yield strict_json(data.removeprefix("data: "))
        assert done, "the stream ends without [DONE]"
        connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        total = 0.0
        for line in self.call("GET", "/metrics").body.decode().splitlines():
            if line.startswith(f"{name}{{") and all(
                f'{label}="{value}"' in line for label, value in labels.items()
            ):
                total += float(line.rpartition(" ")[2])
        return total

    def is_idle(self) -> bool:
        """Nothing runs or waits and no KV block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(f"octavo:{name}") == 0 for name in names)

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Signal the end, wait for it, return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line
            if found := _READY.search(line):
                self._port = int(found[1])


@contextmanager
def serving(model: Path | str | None, *flags: str, **options: Any) -> Iterator[Server]:
    """A ready server, which must end well."""
    server = Server(model, *flags, **options)
    try:
        assert server.port
        yield server
    finally:
        code = server.stop()
    assert code == 0, server.log
    assert "Traceback" not in server.log, server.log


def gone(pid: int) -> bool:
    """Whether this process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come to pass"
        time.sleep(0.01)


def strict_json(text: str | bytes) -> Any:
    """As RFC 8259 has it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def texts(events: Sequence[Any], index: int = 0) -> str:
    """The text of one choice of a stream, of either kind."""
    text = ""
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                piece = choice.get("text", choice.get("delta", {}).get("content"))
                text += piece or ""
    return text
