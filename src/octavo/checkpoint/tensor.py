"""A checkpoint as the engine sees it, whatever file format it came from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octavo.checkpoint.quants import Bytes, Floats, dequantize


@dataclass(frozen=True)
class WeightTensor:
    """One tensor under Hugging Face's name, in the format in which the file holds it.

    ``shape`` is logical: ``[out, in]`` for a matrix, ``[n]`` for a bias or norm. ``stored`` is a
    uint8 view of the mapped file, ``[rows, row_bytes]``; a vector is one row. ``row_order`` is set
    where the file keeps the rows in another order than Hugging Face (row ``i`` is
    ``stored[row_order[i]]``); for readers of ``data`` and ``to_float32`` that is already mended.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    stored: Bytes
    row_order: np.ndarray[Any, np.dtype[np.intp]] | None = None

    @cached_property
    def data(self) -> Bytes:
        """The rows in Hugging Face's order, uint8 ``[rows, row_bytes]``: the mapped file itself,
        or one copy made on first use where the file has another order."""
        return self.stored if self.row_order is None else self.stored[self.row_order]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.stored.nbytes

    def to_float32(self) -> Floats:
        """The weights widened to a fresh C-contiguous float32 array of ``shape``."""
        return dequantize(self.stored, self.format, row_order=self.row_order).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its description read, its weights mapped and not yet read.

    ``config`` speaks ``config.json``'s vocabulary for both kinds and is normalised (see
    ``checkpoint/config.py``). ``metadata`` is a GGUF's own, tokenizer included: strings are
    ``str``, arrays of strings ``list[str]``, arrays of numbers numpy arrays. ``norms_include_one``:
    the file stores RMSNorm weights as ``weight + 1`` (llama.cpp does for Gemma).
    """

    name: str
    path: Path
    kind: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, WeightTensor]
    metadata: dict[str, Any] | None = None
    norms_include_one: bool = False


def weights_nbytes(checkpoint: Checkpoint) -> int:
    """Bytes of all weights as stored; what reading the model once costs."""
    return sum(tensor.nbytes for tensor in checkpoint.tensors.values())
