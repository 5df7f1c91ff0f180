"""Weight matrices of a checkpoint, permuted once into blocks of 16 rows."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.quants import Bytes
from octavo.checkpoint.tensor import WeightTensor
from octavo.errors import UnsupportedModelError
from octavo.kernels.linear.cpu_formats import FLOAT_BYTES, FORMATS, GROUP, ROWS
from octavo.kernels.linear.cpu_pack import pack_op
from octavo.kernels.program import Program
from octavo.kernels.team import Team, team

Number = TypeVar("Number", np.int64, np.float32)


@dataclass(frozen=True)
class PackedLinear:
    """One or several matrices with the same columns, packed.

    ``format``: a name of ``checkpoint.quants.FORMATS``, or INT8 (int8 with one float32 scale a
    row). ``rows`` (N) and ``columns`` (K) are without padding; with ``gated`` the rows of gate and
    of up lie in alternate blocks, and ``rows`` counts both. ``data``: uint8, 64-byte aligned.
    """

    format: str
    rows: int
    columns: int
    data: Bytes
    gated: bool = False

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.format, self.columns)

    @property
    def num_blocks(self) -> int:
        return len(self.data) // self.block_bytes


def block_bytes(format: str, columns: int) -> int:
    """Bytes of a packed block of 16 rows."""
    if format in FLOAT_BYTES:
        return columns * ROWS * FLOAT_BYTES[format]
    return FORMATS[format].block_bytes(columns)


def pack(
    tensors: Sequence[WeightTensor],
    *,
    int8: bool = False,
    gated: bool = False,
    crew: Team | None = None,
) -> PackedLinear:
    """Stack matrices ``[N_i, K]`` of one format in order and pack them.

    ``gated``: there are two, gate and up, with the same rows, and they are put together for
    ``linear(..., activation=...)``. ``int8``: quantise F32, F16 or BF16 to int8, one scale for
    each row (largest magnitude / 127). ``crew``: by default the process's team. The pages of a
    mapped file are given back afterwards.

    Raises UnsupportedModelError where the matrices don't go together.
    """
    before, columns = tensors[0].format, tensors[0].shape[-1]
    names = ", ".join(tensor.name for tensor in tensors)
    if any(t.format != before or t.shape[1:] != (columns,) for t in tensors):
        shapes = ", ".join(f"{t.format} {list(t.shape)}" for t in tensors)
        raise UnsupportedModelError(f"{names} can't be stacked: they are {shapes}")
    if gated and (len(tensors) != 2 or tensors[0].shape != tensors[1].shape):
        raise UnsupportedModelError(f"{names} are no gate and up matrix of the same shape")
    after = "INT8" if int8 else before
    if int8 and before not in FLOAT_BYTES:
        raise UnsupportedModelError(f"{names}: {before} weights are quantised already")
    if after not in FLOAT_BYTES and columns % GROUP:
        raise UnsupportedModelError(
            f"{names}: {columns} columns don't fill groups of {GROUP}; leave int8 out"
        )
    sources = _sources(tensors, gated)
    nbytes = block_bytes(after, columns)
    packed = PackedLinear(
        after,
        rows=sum(tensor.shape[0] for tensor in tensors),
        columns=columns,
        data=aligned_zeros(len(sources) // ROWS * nbytes),
        gated=gated,
    )
    call = pack_op(before, after).bind(
        sources=sources,
        target=packed.data,
        block_bytes=nbytes,
        num_blocks=len(sources) // ROWS,
        columns=columns,
    )
    (crew or team()).run(Program([call]))
    for tensor in tensors:
        release_pages(tensor.stored)
    return packed


def _sources(tensors: Sequence[WeightTensor], gated: bool) -> NDArray[np.int64]:
    """The address of each packed row in the file, 0 for padding."""
    parts = []
    for tensor in tensors:
        stored = tensor.stored
        order = np.arange(len(stored)) if tensor.row_order is None else tensor.row_order
        parts.append(stored.ctypes.data + order.astype(np.int64) * stored.strides[0])
    return in_packed_order(parts, gated=gated)


def in_packed_order(parts: Sequence[NDArray[Number]], *, gated: bool) -> NDArray[Number]:
    """A number for each row of some matrices, in the order of the packed rows; 0 for padding."""
    if gated:
        gate, up = (_fill_blocks(part).reshape(-1, ROWS) for part in parts)
        return np.stack([gate, up], axis=1).reshape(-1)
    return _fill_blocks(np.concatenate(parts))


def _fill_blocks(numbers: NDArray[Number]) -> NDArray[Number]:
    return np.pad(numbers, (0, -len(numbers) % ROWS))


def aligned_zeros(nbytes: int) -> Bytes:
    """Zeroed memory that begins at a cache line, cut from large pieces in pages of 2 MB where the
    system has them: a step reads all weights once, and would look up as many pages of 4 KB. What of
    a piece isn't used is never touched, and costs nothing."""
    global _piece
    size = -(-nbytes // 64) * 64
    with _guard:
        if len(_piece) < size:
            # Python's default is shared memory, which mostly has no pages of 2 MB.
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, max(size, _PIECE_BYTES), flags=private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a system without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            _piece = np.frombuffer(memory, np.uint8)
        zeros, _piece = _piece[:nbytes], _piece[size:]
    return zeros


_PIECE_BYTES = 64 << 20
_piece: Bytes = np.empty(0, np.uint8)  # what is left of the newest
_guard = Lock()


def release_pages(data: Bytes) -> None:
    """Give back the memory of a mapped file's whole pages; reading brings them again."""
    whole_file = data
    while isinstance(whole_file.base, np.ndarray):
        whole_file = whole_file.base
    mapping = whole_file.base.obj if isinstance(whole_file.base, memoryview) else None
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    page = mmap.PAGESIZE
    start = data.ctypes.data - whole_file.ctypes.data
    first = -(-start // page) * page
    whole = (start + data.nbytes) // page * page - first
    if whole > 0:
        mapping.madvise(mmap.MADV_DONTNEED, first, whole)
