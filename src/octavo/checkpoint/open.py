"""Opening what ``resolve_model`` found."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoint.folder import open_folder
from octavo.checkpoint.gguf_model import open_gguf
from octavo.checkpoint.tensor import Checkpoint


def open_checkpoint(
    path: Path, name: str | None = None, *, with_weights: bool = True
) -> Checkpoint:
    """Open a ``.gguf`` file or a Hugging Face folder; weights are mapped and not yet read.

    ``name`` is what the model is called; the file's or folder's name by default. A folder opened
    without weights needs none. Raises CheckpointError for damage and UnsupportedModelError for
    what Octavo can't compute.
    """
    name = name or path.name.removesuffix(".gguf")
    if path.is_dir():
        return open_folder(path, name, with_weights=with_weights)
    return open_gguf(path, name)
