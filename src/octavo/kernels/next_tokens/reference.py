"""The same in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


def next_tokens(
    best: Int32, ids: Int32, chosen: Int32, follows: Sequence[tuple[NDArray[Any], NDArray[Any]]]
) -> None:
    """After a step ``best`` [R] goes to ``chosen`` [R] and, a -1 as 0, to ``ids`` [R]; of every
    (target, values) the values, of the target's shape, go to the target."""
    chosen[:] = best
    ids[: len(best)] = np.maximum(best, 0)
    for target, values in follows:
        target[:] = values
