"""Child processes that live as long as their parent wants them to, and not a moment longer.

A child is told everything over its standard input, in frames of msgpack. That pipe is also how it
learns that its parent has gone, by whatever death: it closes, and the child ends at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

ENGINE_MODULE = "octavo.server.engine_process"

_STOP_SECONDS = 2.0
_LENGTH_BYTES = 4


class ChildProcess:
    """``python -m MODULE``, which waits to be told what to do; ``pass_fds`` are the file
    descriptors it inherits."""

    def __init__(self, module: str, pass_fds: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal reaches the parent only
            pass_fds=pass_fds,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._verdict: str | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Any) -> None:
        """Send it a message; one that is dead is told nothing, :meth:`wait` says so."""
        from octavo.server.messages import encode  # 0.1 s, and the child has begun meanwhile

        assert self._process.stdin is not None
        raw = encode(message)
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
            self._process.stdin.flush()

    def wait(self) -> str:
        """Wait for its end and say how it came."""
        code = self._process.wait()
        if self._verdict is not None:
            return self._verdict
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self, verdict: str) -> None:
        """Kill it where it hangs: first by SIGABRT, at which Python says where that is.
        :meth:`wait` then gives the verdict."""
        self._verdict = verdict
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()

    def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """End it: it goes when its standard input closes, or else is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ---- what a process does first


def log_to_stderr() -> None:
    """Every API process's lines look the same."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def begin() -> bytes:
    """The raw message that this child was started with. Signals are left to its parent: a service
    manager sends them to every process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = _read_message()
    if start is None:
        sys.exit(1)
    return start


def listen(heard: Callable[[bytes], None]) -> None:
    """Hand every further message to ``heard``, in a thread; end this child with its parent."""

    def work() -> None:
        while (raw := _read_message()) is not None:
            heard(raw)
        os._exit(1)  # from a thread, in whatever the main thread is busy with

    threading.Thread(target=work, daemon=True).start()


def _read_message() -> bytes | None:
    """The next frame, or None where the parent has closed the pipe."""
    head = _read_bytes(_LENGTH_BYTES)
    return None if head is None else _read_bytes(int.from_bytes(head, "little"))


def _read_bytes(count: int) -> bytes | None:
    """Not by way of ``sys.stdin``, whose lock a thread that waits would hold at exit."""
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            return None
        data += part
    return data
