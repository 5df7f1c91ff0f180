"""Where weights come from: a folder, a GGUF file, the hub; opened without reading the weights."""

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.resolve import resolve_model
from octavo.checkpoint.tensor import Checkpoint, WeightTensor, weights_nbytes

__all__ = ["Checkpoint", "WeightTensor", "open_checkpoint", "resolve_model", "weights_nbytes"]
