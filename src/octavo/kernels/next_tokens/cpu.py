"""See ``reference``: an op that stands behind each of several decode steps in one program."""

from __future__ import annotations

from octavo.kernels.late import carray
from octavo.kernels.program import fetch_add, int32s, int64s, op


@op(num_rows="i8", best="i8", ids="i8", chosen="i8", state="i8", copies="i8", num_copies="i8")
def next_tokens(thread, num_threads, counter, args):
    """``state`` int64 [2]: the number of the step that is done, which goes up by one, and how many
    there are; ``num_rows``: where R lies, an int64. ``chosen`` int32 [steps, R]. ``copies`` int64
    [num_copies, 3]: target, values of the step after the first, and bytes (a multiple of 4) of one
    step's values; the values of further steps follow. One thread does it all."""
    if fetch_add(counter, 1) != 0:
        return
    a = carray(args, 1)[0]
    num_rows = int64s(a.num_rows, 1)[0]
    state = int64s(a.state, 2)
    step = state[0]
    state[0] = step + 1
    best, ids = int32s(a.best, num_rows), int32s(a.ids, num_rows)
    chosen = int32s(a.chosen + 4 * step * num_rows, num_rows)
    for i in range(num_rows):
        chosen[i] = best[i]
        ids[i] = max(best[i], 0)
    if step + 1 == state[1]:
        return
    copies = int64s(a.copies, (a.num_copies, 3))
    for i in range(a.num_copies):
        words = copies[i, 2] // 4
        target, values = int32s(copies[i, 0], words), int32s(copies[i, 1] + 4 * step * words, words)
        for j in range(words):
            target[j] = values[j]
