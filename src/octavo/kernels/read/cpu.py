"""How fast a CPU's memory can be read, by as many threads as the kernels use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.late import carray
from octavo.kernels.program import Program, fetch_add, int64s, op
from octavo.kernels.team import team

NUM_BYTES = 256 << 20  # more than most caches hold
PART = 1 << 17  # numbers, 1 MB


class Reader:
    """Memory of ones, and the program that adds them up."""

    def __init__(self) -> None:
        self.numbers: NDArray[np.int64] = np.ones(NUM_BYTES // 8, np.int64)
        self._total = np.zeros(1, np.int64)
        call = add_up.bind(numbers=self.numbers, count=len(self.numbers), total=self._total)
        self._program = Program([call])

    def read(self) -> None:
        """Read it all, once: the threads take parts until none is left."""
        self._total[0] = 0
        team().run(self._program)
        if self._total[0] != len(self.numbers):
            raise RuntimeError("the threads didn't share the parts out evenly")


@op(numbers="i8", count="i8", total="i8")
def add_up(thread, num_threads, counter, args):
    a = carray(args, 1)[0]
    while True:
        start = fetch_add(counter, 1) * PART
        if start >= a.count:
            return
        total = np.int64(0)
        for number in int64s(a.numbers + 8 * start, min(PART, a.count - start)):
            total += number
        fetch_add(a.total, total)
