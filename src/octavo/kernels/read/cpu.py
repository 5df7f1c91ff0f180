"""How fast a CPU's memory can be read, by as many threads as the kernels use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.jit import jit
from octavo.kernels.threads import helpers

NUM_BYTES = 256 << 20  # more than most caches hold
PART = 1 << 17  # numbers, 1 MB


def make_reader() -> NDArray[np.int64]:
    """What :func:`read_memory` reads."""
    return np.ones(NUM_BYTES // 8, np.int64)


def read_memory(numbers: NDArray[np.int64]) -> None:
    """Read it all, once: the threads take parts until none is left."""
    parts = iter(range(0, len(numbers), PART))
    sums = []

    def work() -> None:
        for start in parts:
            sums.append(add_up(numbers[start : start + PART]))

    helpers().run(work)
    if sum(sums) != len(numbers):
        raise RuntimeError("the threads didn't share the parts out evenly")


@jit
def add_up(numbers):
    total = np.int64(0)
    for number in numbers:
        total += number
    return total
