"""The engine's process between requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.server.engine_process import EngineServer


class Socket:
    """Has a message from the ``arrives``-th poll on; ``polls`` are the timeouts it was given."""

    def __init__(self, arrives: int) -> None:
        self.arrives = arrives
        self.polls: list[int | None] = []

    def poll(self, timeout: int | None) -> bool:
        self.polls.append(timeout)
        return len(self.polls) >= self.arrives


class Idle:
    """An engine with so much to do in idle time."""

    def __init__(self, left: int) -> None:
        self.left = left

    def use_idle_time(self) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.mark.parametrize(
    ("arrives", "polls", "left"),
    [(1, [250], 9), (3, [250, 0, 0], 7), (11, [250] + [0] * 9 + [None], -1)],
    ids=["at once", "meanwhile", "late"],
)
def test_idle_time_is_used_after_a_while(arrives: int, polls: list[int | None], left: int) -> None:
    socket: Any = Socket(arrives)
    engine: Any = Idle(9)
    EngineServer(engine, socket, [], None, random.Random(0))._wait_for_message()
    assert socket.polls == polls
    assert engine.left == left
