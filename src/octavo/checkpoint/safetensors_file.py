"""The safetensors container: one JSON header, then the tensors' bytes.

A reader of our own because the ``safetensors`` package hands numpy no bfloat16: it would need torch
(1.5 s to import) or a copy. A header is believed only as far as the file bears it out.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from octavo.checkpoint.mapping import map_file
from octavo.checkpoint.quants import Bytes, row_nbytes
from octavo.checkpoint.tensor import WeightTensor
from octavo.errors import CheckpointError, UnsupportedModelError

_DTYPES = ("F32", "F16", "BF16")  # their names are those of our formats
_MAX_HEADER = 100_000_000  # bytes; the package's own limit


def read_safetensors(path: Path) -> dict[str, WeightTensor]:
    """The tensors of one file by name, mapped.

    Raises CheckpointError naming file and tensor (truncated, offsets out of range or overlapping, a
    name twice) and UnsupportedModelError for dtypes other than F32, F16 and BF16.
    """
    file = map_file(path)
    header_size = int.from_bytes(file[:8].tobytes(), "little")
    if header_size > min(_MAX_HEADER, file.size - 8):
        raise CheckpointError(
            f"{path.name} is truncated or damaged: its header should take {header_size} bytes of a "
            f"file of {file.size} (the limit is {_MAX_HEADER}); fetch the file again"
        )
    header = _parse_header(file[8 : 8 + header_size].tobytes(), path.name)
    data = file[8 + header_size :]
    tensors: dict[str, WeightTensor] = {}
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name], start, stop = _map_tensor(data, name, entry)
        except ValueError as error:
            raise CheckpointError(f"{path.name}: tensor {name} {error}") from None
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path.name}: tensor {name} {error}") from None
        extents.append((start, stop, name))
    for (_, stop, name), (start, _, other) in pairwise(sorted(extents)):
        if start < stop:
            raise CheckpointError(f"{path.name}: tensors {name} and {other} overlap")
    return tensors


def _map_tensor(data: Bytes, name: str, entry: Any) -> tuple[WeightTensor, int, int]:
    """ValueError says what is wrong with the entry, to follow the tensor's name."""
    match entry:
        case {"dtype": str(dtype), "shape": list(dims), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise ValueError("has a malformed header entry")
    if not all(isinstance(dim, int) and dim > 0 for dim in dims) or not dims:
        raise ValueError(f"has shape {dims}")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"is {dtype}; the dtypes that work are {', '.join(_DTYPES)}")
    shape = tuple(dims)
    rows, row_bytes = prod(shape[:-1]), row_nbytes(dtype, shape[-1])
    if stop - start != rows * row_bytes:
        raise ValueError(f"takes {stop - start} bytes, but {dtype} {dims} needs {rows * row_bytes}")
    if not 0 <= start <= stop <= data.size:
        raise ValueError(
            f"should lie at bytes {start} to {stop} of the data, which ends at {data.size}: the "
            "file is truncated or damaged; fetch it again"
        )
    return WeightTensor(name, shape, dtype, data[start:stop].reshape(rows, row_bytes)), start, stop


def _parse_header(text: bytes, file_name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in names if names.count(key) > 1)
            raise ValueError(f"{twice} occurs twice")
        return keys

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file_name} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file_name} has a damaged header: it is no JSON object")
    return header
