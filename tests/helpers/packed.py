"""Random matrices in every format, for the tests of packed products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.quants import FORMATS, row_nbytes
from octavo.checkpoint.tensor import WeightTensor

FILE_FORMATS = tuple(FORMATS)


def random_tensor(format: str, rows: int, columns: int, seed: int = 0) -> WeightTensor:
    """Every bit random, scales of either sign and finite."""
    rng = np.random.default_rng(seed)
    layout = FORMATS[format].block
    data = rng.integers(0, 256, (rows, row_nbytes(format, columns)), np.uint8)
    view = data.view(layout)
    fields = layout.names or ()
    for field in {"d", "m", "dmin"} & set(fields):
        view[field] = rng.normal(0, 0.05, view.shape)
    if not fields:
        plain = rng.normal(0, 1, view.shape).astype(np.float32)
        view[...] = plain.view(np.uint32) >> 16 if format == "BF16" else plain
    return WeightTensor(f"{format} {rows}x{columns}", (rows, columns), format, data)


def dequantized(tensor: WeightTensor, packed_format: str) -> NDArray[np.float64]:
    """The weights that a packed matrix stands for."""
    w = tensor.to_float32()
    if packed_format != "INT8":
        return w.astype(np.float64)
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    # 20 bits, rounded up.
    scale = ((scale.view(np.uint32) + 15) & ~np.uint32(15)).view(np.float32)
    q = np.rint(w / np.where(scale == 0, 1, scale))
    return q.astype(np.float64) * scale.astype(np.float64)
