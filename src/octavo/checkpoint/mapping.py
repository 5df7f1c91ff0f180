"""Mapping a file into memory: bytes are read when touched, and shared between processes."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from octavo.checkpoint.quants import Bytes
from octavo.errors import CheckpointError


def map_file(path: Path) -> Bytes:
    """A read-only uint8 view of a whole file; it stays mapped for as long as a view lives."""
    return np.frombuffer(map_bytes(path), np.uint8)


def map_bytes(path: Path) -> mmap.mmap:
    """A whole file, of which a slice is bytes: quicker than a view's where there are many."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path} is empty; fetch the file again") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
