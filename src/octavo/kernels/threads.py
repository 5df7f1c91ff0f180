"""Helper threads that join in on compiled work which releases the GIL.

numba's own parallel loops would bring a second OpenMP into a process that has torch's, and their
threads spin when there is nothing to do. These sleep, and nobody waits for one that has not woken
up yet: work is dealt out item by item, so whoever is awake does it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from queue import Empty, SimpleQueue

from octavo.host import granted_cores


class Helpers:
    """``num_threads - 1`` sleeping threads; the caller of :meth:`run` makes up the number."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._running = threading.Lock()
        for number in range(1, num_threads):
            name = f"octavo-cpu-{number}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work`` here and on each helper that wakes in time; return when all have ended.

        ``work`` takes items from a counter that all callers share and returns when none is left.
        Raises what it raises, here or on a helper.
        """
        with self._running:
            joined = self.num_threads - 1
            for _ in range(joined):
                self._calls.put(work)
            try:
                work()
            finally:
                joined -= self._call_off()
                outcomes = [self._outcomes.get() for _ in range(joined)]
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def _call_off(self) -> int:
        """Take back the calls that no helper has taken up: how many."""
        taken_back = 0
        while True:
            try:
                self._calls.get_nowait()
            except Empty:
                return taken_back
            taken_back += 1

    def _serve(self) -> None:
        while True:
            work = self._calls.get()
            try:
                work()
            except BaseException as error:
                self._outcomes.put(error)
            else:
                self._outcomes.put(None)


@cache
def helpers() -> Helpers:
    """The process's own helpers, started at the first call."""
    return Helpers(granted_cores())


os.register_at_fork(after_in_child=helpers.cache_clear)  # a child inherits none of the threads
