"""The threads that run programs: pinned, spinning for a moment, then asleep.

numba's own parallel loops would bring a second OpenMP into a process that has torch's, and their
threads spin when there is nothing to do. Here the caller is one of the team. The others wait for
the next program in compiled code, without the GIL, since the next layer or step mostly follows at
once; when none comes they sleep in the system, so that idle burns nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from octavo.host import granted_cores
from octavo.kernels.jit import jit
from octavo.kernels.program import Program, fetch_add, int64s, run_ops, wait_until

_SPINS = 2000  # looks, of some 40 ns each, that a thread without work takes before it sleeps
# What leader and helpers share, int64: programs begun, helpers done with theirs (both since the
# team began), and the program: address of its code, number of its ops, address of its counters.
_BEGUN, _DONE, _CODE, _NUM_OPS, _COUNTERS = range(5)


class Team:
    """``num_threads - 1`` helpers; the caller of :meth:`run` makes up the number.

    Where there is one thread for each CPU that the process may use, each is pinned to its own (the
    caller while it runs a program): beside another busy program that keeps half of the speed where
    threads that the system moves about keep a quarter.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._turn = threading.Lock()  # one program at a time
        self._shared = np.zeros(5, np.int64)
        self._guard = threading.Lock()  # of _asleep
        self._asleep = [False] * num_threads
        self._wake = [threading.Semaphore(0) for _ in range(num_threads)]
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._cpus = cpus if num_threads > 1 and len(cpus) == num_threads else []
        for number in range(1, num_threads):
            name = f"octavo-cpu-{number}"
            threading.Thread(target=self._serve, args=(number,), name=name, daemon=True).start()

    def run(self, program: Program) -> None:
        """Run a program to its end."""
        code, counters = program.code, program.counters
        with self._turn:
            counters[:] = 0
            arguments = (code.ctypes.data, len(code), counters.ctypes.data)
            if self.num_threads == 1:
                run_ops(*arguments, 0, 1)
                return
            with self._pinned():
                _begin(self._shared.ctypes.data, *arguments)
                self._wake_sleepers()
                _lead(self._shared.ctypes.data, self.num_threads)

    def _wake_sleepers(self) -> None:
        with self._guard:
            for number, asleep in enumerate(self._asleep):
                if asleep:
                    self._asleep[number] = False
                    self._wake[number].release()

    def _serve(self, number: int) -> None:
        """A helper's life."""
        if self._cpus:
            os.sched_setaffinity(0, {self._cpus[number]})
        num_done = 0
        while True:
            num_done = _help(self._shared.ctypes.data, num_done, number, self.num_threads, _SPINS)
            with self._guard:
                self._asleep[number] = self._shared[_BEGUN] == num_done
            if self._asleep[number]:
                self._wake[number].acquire()

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        """Hold the calling thread to the first CPU."""
        if not self._cpus:
            yield
            return
        os.sched_setaffinity(0, self._cpus[:1])
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._cpus)


def team(num_threads: int | None = None) -> Team:
    """The process's own team of so many threads, or as many as cores are granted; begun at the
    first call."""
    return _team(num_threads or granted_cores())


@cache
def _team(num_threads: int) -> Team:
    return Team(num_threads)


os.register_at_fork(after_in_child=_team.cache_clear)  # a child inherits none of the threads


@jit
def _begin(shared, code, num_ops, counters):
    """Hand a program to the helpers that are awake."""
    words = int64s(shared, 5)
    words[_CODE], words[_NUM_OPS], words[_COUNTERS] = code, num_ops, counters
    fetch_add(shared + 8 * _BEGUN, 1)


@jit
def _lead(shared, num_threads):
    """The caller's part, and the wait until no helper looks at the program any more."""
    words = int64s(shared, 5)
    run_ops(words[_CODE], words[_NUM_OPS], words[_COUNTERS], 0, num_threads)
    wait_until(shared + 8 * _DONE, words[_BEGUN] * (num_threads - 1), -1)


@jit
def _help(shared, num_done, thread, num_threads, spins):
    """A helper's part of every program that begins within ``spins`` looks of the one before; how
    many there have been then."""
    words = int64s(shared, 5)
    while wait_until(shared + 8 * _BEGUN, num_done + 1, spins):
        run_ops(words[_CODE], words[_NUM_OPS], words[_COUNTERS], thread, num_threads)
        num_done += 1
        fetch_add(shared + 8 * _DONE, 1)
    return num_done
