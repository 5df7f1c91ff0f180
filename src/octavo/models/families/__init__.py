"""Model families: each file turns a checkpoint's ``config.json`` into a spec of the one decoder."""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.families.fields import Parameters
from octavo.models.families.gemma3 import gemma3_spec
from octavo.models.families.llama import llama_spec
from octavo.models.families.mistral import mistral_spec
from octavo.models.families.qwen2 import qwen2_spec
from octavo.models.families.qwen3 import qwen3_spec
from octavo.models.spec import DecoderSpec

__all__ = ["spec_from_config"]

_SPECS = {
    "llama": llama_spec,
    "mistral": mistral_spec,
    "qwen2": qwen2_spec,
    "qwen3": qwen3_spec,
    "gemma3_text": gemma3_spec,
}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
}


def spec_from_config(config: Parameters) -> DecoderSpec:
    """The spec of a checkpoint, from its normalised ``config.json`` (``Checkpoint.config``).

    Absent fields take the architecture's defaults, those of transformers. Raises
    :class:`UnsupportedModelError` for an architecture, field or value that can't be computed yet,
    and :class:`CheckpointError` for one that makes no sense; both name it.
    """
    architectures = config.get("architectures") or []
    for name in architectures:
        if name not in _MODEL_TYPES:
            raise _unsupported(f"architecture {name!r}")
    model_type = config.get("model_type") or (
        _MODEL_TYPES[architectures[0]] if architectures else None
    )
    if model_type not in _SPECS:
        raise _unsupported(f"model_type {model_type!r}")
    return _SPECS[model_type](config)


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} isn't supported yet; the known ones are "
        f"{', '.join(_MODEL_TYPES)} (model_type {', '.join(_SPECS)})"
    )
