"""The record through which attention ops find a step's rows: counts, and addresses of arrays.

A program is bound once, so its records hold the address of this one, which never moves; the arrays
that it names are new in each step.
"""

from __future__ import annotations

import numpy as np

from octavo.kernels.late import intrinsic, numba, types

HEADER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "num_tokens",  # T
            "num_decodes",  # the first rows, of one token each
            "slot_mapping",  # int32 [T]
            "block_table",  # int32 [R, table_width]
            "table_width",
            "num_segments",
            "segments",  # int32 [S, 4]: row, start, stop, number; longest first
            "row_start",  # int32 [num_decodes + 1]: a row's segments by their numbers
            "part_out",  # float32 [S, H, Dv]
            "part_m",  # float32 [S, H]
            "part_l",  # float32 [S, H]
            "scratch",  # num_threads x scratch_bytes
            "scratch_bytes",
            "num_tiles",
            "tiles",  # int32 [num_tiles, 4]: row, first token, tokens, position of the first
        )
    ]
)


@intrinsic
def plan_at(typing, address):
    """The :data:`HEADER` at an address."""

    record = numba.from_dtype(HEADER)

    def emit(context, b, signature, arguments):
        return b.inttoptr(arguments[0], context.get_value_type(record))

    return record(types.int64), emit
