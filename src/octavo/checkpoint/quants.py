"""Weight formats: how a row of weights lies in bytes, and how it is widened to float32.

A quantised row is a run of blocks; a block holds ``block_size`` weights and their scales in
``block_bytes`` bytes. Layouts are those of ggml (``ggml-common.h``); widening follows ggml's own
order of operations, so results agree with it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# A chunk's intermediates (a few bytes a weight) should stay in a core's second-level cache.
_CHUNK_WEIGHTS = 128 * 1024


@dataclass(frozen=True)
class WeightFormat:
    """``widen(blocks [n], out float32 [n, block_size])`` fills ``out`` and keeps nothing."""

    block_size: int
    block: np.dtype[Any]
    widen: Callable[[Any, Floats], None]

    @property
    def block_bytes(self) -> int:
        return self.block.itemsize


def row_nbytes(format: str, columns: int) -> int:
    """Bytes of a row of ``columns`` weights; ValueError if they don't fill whole blocks."""
    layout = FORMATS[format]
    blocks, rest = divmod(columns, layout.block_size)
    if rest:
        raise ValueError(f"{columns} columns don't fill {format} blocks of {layout.block_size}")
    return blocks * layout.block_bytes


def dequantize(
    data: Bytes,
    format: str,
    out: Floats | None = None,
    *,
    row_order: npt.NDArray[np.intp] | None = None,
) -> Floats:
    """Widen rows to float32.

    ``data`` uint8 ``[rows, row_bytes]`` -> float32 ``[rows, columns]``, C-contiguous; written to
    ``out`` when given. With ``row_order`` row ``i`` of the result is row ``row_order[i]`` of
    ``data``. numpy releases the interpreter lock in the inner loops, so threads may share the work.
    """
    layout = FORMATS[format]
    rows, row_bytes = data.shape
    columns = row_bytes // layout.block_bytes * layout.block_size
    if out is None:
        out = np.empty((rows, columns), dtype=np.float32)
    step = max(1, _CHUNK_WEIGHTS // max(1, columns))
    for start in range(0, rows, step):
        index = slice(start, start + step) if row_order is None else row_order[start : start + step]
        blocks = data[index].reshape(-1).view(layout.block)
        layout.widen(blocks, out[start : start + step].reshape(-1, layout.block_size))
    return out


def _widen_plain(blocks: Any, out: Floats) -> None:
    out[:, 0] = blocks


def _widen_bf16(blocks: Any, out: Floats) -> None:
    # bfloat16 is the upper half of a float32.
    np.left_shift(blocks, np.uint32(16), out=out[:, 0].view(np.uint32), dtype=np.uint32)


def _scale(field: Any) -> Floats:
    """A float16 field of every block as a float32 column ``[n, 1]``."""
    column: Floats = field.astype(np.float32)[:, None]
    return column


def _nibbles(qs: Any) -> Bytes:
    """``[n, k]`` bytes -> ``[n, 2k]`` values: the k low nibbles, then the k high ones."""
    n, k = qs.shape
    values = np.empty((n, 2, k), dtype=np.uint8)
    np.bitwise_and(qs, 0x0F, out=values[:, 0])
    np.right_shift(qs, 4, out=values[:, 1])
    return values.reshape(n, 2 * k)


def _fifth_bits(qh: Any) -> Bytes:
    """``[n, 4]`` bytes -> ``[n, 32]`` values of 0 or 16: bit i of the word is weight i's."""
    return np.unpackbits(qh, axis=1, bitorder="little") << np.uint8(4)


def _widen_q8_0(blocks: Any, out: Floats) -> None:
    np.multiply(blocks["qs"], _scale(blocks["d"]), out=out)


def _widen_q4_0(blocks: Any, out: Floats) -> None:
    q = _nibbles(blocks["qs"]).view(np.int8)
    q -= 8
    np.multiply(q, _scale(blocks["d"]), out=out)


def _widen_q4_1(blocks: Any, out: Floats) -> None:
    np.multiply(_nibbles(blocks["qs"]), _scale(blocks["d"]), out=out)
    out += _scale(blocks["m"])


def _widen_q5_0(blocks: Any, out: Floats) -> None:
    q = _nibbles(blocks["qs"])
    q |= _fifth_bits(blocks["qh"])
    signed = q.view(np.int8)
    signed -= 16
    np.multiply(signed, _scale(blocks["d"]), out=out)


def _widen_q5_1(blocks: Any, out: Floats) -> None:
    q = _nibbles(blocks["qs"])
    q |= _fifth_bits(blocks["qh"])
    np.multiply(q, _scale(blocks["d"]), out=out)
    out += _scale(blocks["m"])


def _k_scales(blocks: Any) -> tuple[Floats, Floats]:
    """Scale and minimum ``[n, 8, 1]`` of the eight sub-blocks of Q4_K and Q5_K.

    Twelve bytes hold sixteen 6-bit numbers: scales 0-3 and minima 0-3 in the low six bits of bytes
    0-3 and 4-7; of numbers 4-7 the low four bits are the nibbles of bytes 8-11 and the high two
    bits are the top bits of bytes 0-7.
    """
    packed = blocks["scales"]
    first, second, nibbles = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (nibbles & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (nibbles >> 4) | ((second >> 2) & 0x30)], axis=1)
    return (
        (scales * _scale(blocks["d"]))[:, :, None],
        (minima * _scale(blocks["dmin"]))[:, :, None],
    )


def _widen_q4_k(blocks: Any, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    q = _nibbles(blocks["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    weights = out.reshape(-1, 8, 32)
    np.multiply(q, scales, out=weights)
    weights -= minima


def _widen_q5_k(blocks: Any, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    q = _nibbles(blocks["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    # Bit j of qh[i] is the fifth bit of weight i of sub-block j.
    fifth = blocks["qh"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]
    fifth &= 1
    fifth <<= 4
    q |= fifth
    weights = out.reshape(-1, 8, 32)
    np.multiply(q, scales, out=weights)
    weights -= minima


def _widen_q6_k(blocks: Any, out: Floats) -> None:
    # Two halves of 128 weights; in a half, 64 bytes give four low bits of two runs of 64 weights
    # and 32 bytes give the two high bits of four runs of 32.
    q = _nibbles(blocks["ql"].reshape(-1, 64)).reshape(-1, 4, 32)
    high = blocks["qh"].reshape(-1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high &= 3
    high <<= 4
    q |= high
    signed = q.view(np.int8)
    signed -= 32
    scales = blocks["scales"] * _scale(blocks["d"])
    np.multiply(signed.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


_F16 = ("d", "<f2")
_K_HEAD = [_F16, ("dmin", "<f2"), ("scales", "u1", 12)]

FORMATS: dict[str, WeightFormat] = {
    "F32": WeightFormat(1, np.dtype("<f4"), _widen_plain),
    "F16": WeightFormat(1, np.dtype("<f2"), _widen_plain),
    "BF16": WeightFormat(1, np.dtype("<u2"), _widen_bf16),
    "Q8_0": WeightFormat(32, np.dtype([_F16, ("qs", "i1", 32)]), _widen_q8_0),
    "Q4_0": WeightFormat(32, np.dtype([_F16, ("qs", "u1", 16)]), _widen_q4_0),
    "Q4_1": WeightFormat(32, np.dtype([_F16, ("m", "<f2"), ("qs", "u1", 16)]), _widen_q4_1),
    "Q5_0": WeightFormat(32, np.dtype([_F16, ("qh", "u1", 4), ("qs", "u1", 16)]), _widen_q5_0),
    "Q5_1": WeightFormat(
        32, np.dtype([_F16, ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]), _widen_q5_1
    ),
    "Q4_K": WeightFormat(256, np.dtype([*_K_HEAD, ("qs", "u1", 128)]), _widen_q4_k),
    "Q5_K": WeightFormat(
        256, np.dtype([*_K_HEAD, ("qh", "u1", 32), ("qs", "u1", 128)]), _widen_q5_k
    ),
    "Q6_K": WeightFormat(
        256,
        np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _F16]),
        _widen_q6_k,
    ),
}
