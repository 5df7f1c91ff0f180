"""The GGUF container: header, metadata and tensor table of a mapped file (versions 2 and 3).

Nothing in a file is trusted: every length is held against the bytes that are left before it is
used, so a truncated or hostile file is a :class:`CheckpointError` that names what is cut.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.checkpoint.mapping import map_bytes
from octavo.checkpoint.quants import FORMATS, Bytes, row_nbytes
from octavo.errors import CheckpointError, UnsupportedModelError

T = TypeVar("T", int, float, str, list[str])

# ggml's type ids. Those without an entry in FORMATS are here to be refused by name.
_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Metadata value types, as struct (and numpy) letters.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING = 8
_ARRAY = 9
_U64 = struct.Struct("<Q")

_MAX_ARRAY = 1 << 24  # elements; vocabularies and merge lists stay below a million
_MAX_DIMS = 4
_PART_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor under the file's own name. ``shape`` is row-major (the file's order reversed);
    ``data`` is a uint8 view of the mapped file, ``[rows, row_bytes]``, a vector being one row."""

    name: str
    shape: tuple[int, ...]
    format: str
    data: Bytes


@dataclass(frozen=True)
class GgufFile:
    """``name`` is the file's, for messages. ``metadata``: numbers and booleans as Python's, strings
    ``str``, arrays of strings ``list[str]``, arrays of numbers numpy arrays."""

    name: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type[T]) -> T | None:
        """A metadata value that must be of type ``kind`` (int counts as float) if it is there."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, int) and kind is float:
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"{self.name}: metadata {key} is {str(value)[:60]!r}; {kind.__name__} is expected"
            )
        return value


def part_paths(path: Path) -> list[Path] | None:
    """All parts that llama.cpp's gguf-split would have written beside ``path``, first to last;
    None if the name isn't a part's (``NAME-00001-of-00003.gguf``)."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return None
    count = int(match["count"])
    return [
        path.with_name(f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def first_part(path: Path) -> Path:
    """The part that stands for a split file; ``path`` itself if it isn't split."""
    parts = part_paths(path)
    return parts[0] if parts else path


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file, or all parts of a split one (given any of them).

    Raises CheckpointError (not a GGUF file, truncated, a part missing) and UnsupportedModelError
    (version, byte order, tensor type).
    """
    part = _read_part(path)
    count = part.get("split.count", int) or 1
    if count == 1:
        return part
    paths = part_paths(path)
    if paths is None or len(paths) != count:
        raise CheckpointError(
            f"{path.name} is one of {count} parts, but its name doesn't end in "
            f"-NNNNN-of-{count:05d}.gguf; give the parts back the names that gguf-split wrote"
        )
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise CheckpointError(
            f"{path.name} is one of {count} parts, of which {len(missing)} are missing: "
            f"{', '.join(missing[:4])}"
        )
    return _join([_read_part(p) for p in paths])


def _join(parts: list[GgufFile]) -> GgufFile:
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        stated = part.metadata.get("split.no"), part.metadata.get("split.count")
        if stated != (number, len(parts)):
            raise CheckpointError(
                f"{part.name} should be split.no {number} of split.count {len(parts)}, but says "
                f"{stated[0]} of {stated[1]}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.name}: tensor {name} is in an earlier part as well")
            tensors[name] = tensor
    first = parts[0]
    expected = first.get("split.tensors.count", int)
    if expected not in (None, len(tensors)):
        raise CheckpointError(
            f"{first.name}: split.tensors.count is {expected}, but the parts hold {len(tensors)}"
        )
    return GgufFile(first.name, first.metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    mapped = map_bytes(path)
    cursor = _Cursor(mapped, path.name)
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise CheckpointError(f"{path.name} is not a GGUF file: it begins with {magic!r}")
    version = cursor.number("I", "the version")
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(
            f"{path.name} is a big-endian GGUF; only little-endian files are read"
        )
    if version not in (2, 3):
        raise UnsupportedModelError(f"{path.name} is GGUF version {version}; 2 and 3 are read")
    num_tensors = cursor.number("Q", "the tensor count")
    num_keys = cursor.number("Q", "the metadata count")

    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"the name of metadata key {index} of {num_keys}")
        if key in metadata:
            raise CheckpointError(f"{path.name}: metadata key {key} occurs twice")
        metadata[key] = cursor.value(cursor.number("I", f"the type of {key}"), key)

    table: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index} of {num_tensors}")
        what = f"the table entry of tensor {name}"
        num_dims = cursor.number("I", what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{path.name}: tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.number("Q", what) for _ in range(num_dims))[::-1]
        if name in table:
            raise CheckpointError(f"{path.name}: tensor {name} occurs twice")
        table[name] = shape, cursor.number("I", what), cursor.number("Q", what)

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path.name}: general.alignment is {alignment}, which is no power of two"
        )
    data_start = -(-cursor.position // alignment) * alignment
    data = np.frombuffer(mapped, np.uint8)[data_start:]
    tensors = _map_tensors(data, table, alignment, path.name)
    return GgufFile(path.name, metadata, tensors)


def _map_tensors(
    data: Bytes, table: dict[str, tuple[tuple[int, ...], int, int]], alignment: int, file_name: str
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    extents: list[tuple[int, int, str]] = []
    for name, (shape, type_id, offset) in table.items():
        format = _TENSOR_TYPES.get(type_id, f"type {type_id}")
        if format not in FORMATS:
            raise UnsupportedModelError(
                f"{file_name}: tensor {name} is {format}; the formats that work are "
                f"{', '.join(FORMATS)}"
            )
        if 0 in shape:
            raise CheckpointError(f"{file_name}: tensor {name} has shape {list(shape)}")
        try:
            row_bytes = row_nbytes(format, shape[-1])
        except ValueError as error:
            raise CheckpointError(f"{file_name}: tensor {name}: {error}") from None
        rows = prod(shape[:-1])
        stop = offset + rows * row_bytes
        if offset % alignment:
            raise CheckpointError(
                f"{file_name}: tensor {name} begins at {offset}, not a multiple of {alignment}"
            )
        if stop > data.size:
            raise CheckpointError(
                f"{file_name} is truncated: tensor {name} needs bytes {offset} to {stop} of the "
                f"data, which ends at {data.size}; fetch the file again"
            )
        extents.append((offset, stop, name))
        tensors[name] = GgufTensor(name, shape, format, data[offset:stop].reshape(rows, row_bytes))
    for (_, stop, name), (offset, _, other) in pairwise(sorted(extents)):
        if offset < stop:
            raise CheckpointError(f"{file_name}: tensors {name} and {other} overlap")
    return tensors


class _Cursor:
    """Reads forward through the header; every read names what it is after."""

    def __init__(self, buffer: mmap, file_name: str) -> None:
        self.buffer = buffer
        self.file_name = file_name
        self.position = 0

    def take(self, size: int, what: str) -> bytes:
        start, stop = self.position, self.position + size
        if stop > len(self.buffer):
            raise self.cut(what, size)
        self.position = stop
        return self.buffer[start:stop]

    def cut(self, what: str, size: int) -> CheckpointError:
        left = len(self.buffer) - self.position
        return CheckpointError(
            f"{self.file_name} is truncated or damaged: {what} needs {size} bytes at "
            f"{self.position}, but {left} are left; fetch the file again"
        )

    def number(self, letter: str, what: str) -> Any:
        layout = struct.Struct("<" + letter)
        return layout.unpack(self.take(layout.size, what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file_name}: {what} is not UTF-8: {error}") from None

    def value(self, type_id: int, key: str) -> Any:
        if type_id in _NUMBERS:
            value = self.number(_NUMBERS[type_id], key)
            if _NUMBERS[type_id] == "f":  # the shortest decimal that means it: 1e-5, not 9.99...e-6
                return float(str(np.float32(value)))
            return value
        if type_id == _STRING:
            return self.string(key)
        if type_id == _ARRAY:
            element = self.number("I", key)
            count = self.number("Q", key)
            if count > _MAX_ARRAY:
                raise CheckpointError(
                    f"{self.file_name}: {key} claims {count} elements; the limit is {_MAX_ARRAY}"
                )
            if element in _NUMBERS:
                dtype = np.dtype("<" + _NUMBERS[element])
                return np.frombuffer(self.take(count * dtype.itemsize, key), dtype=dtype)
            if element == _STRING:
                return self.strings(count, key)
            type_id = element
        raise CheckpointError(f"{self.file_name}: {key} has the unknown value type {type_id}")

    def strings(self, count: int, key: str) -> list[str]:
        """A tokenizer has hundreds of thousands of these, hence no call per field."""
        buffer, position, end = self.buffer, self.position, len(self.buffer)
        unpack: Callable[..., tuple[int]] = _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0] if start <= end else end + 1
                if position > end:
                    self.position = min(start, end)
                    what = f"string {len(strings)} of {key}"
                    raise self.cut(what, position - self.position)
                strings.append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.file_name}: string {len(strings)} of {key} is not UTF-8: {error}"
            ) from None
        self.position = position
        return strings
