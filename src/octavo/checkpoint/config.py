"""One shape for every ``config.json``, whichever transformers version wrote it.

transformers 4 wrote ``torch_dtype``, a top-level ``rope_theta`` and ``rope_scaling`` (with ``type``
or ``rope_type``); transformers 5 writes ``dtype`` and ``rope_parameters``, flat or one dict per
layer type. Gemma 3 used to write ``rope_local_base_freq``. All of them end here as one thing.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from octavo.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]

LAYER_TYPES = ("full_attention", "sliding_attention")

# What transformers' configuration classes assume for a key that a file leaves out.
_DEFAULT_THETA = 10_000.0
_GEMMA3_THETA: Config = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
_DEFAULT_HEAD_DIM = {"qwen3": 128, "gemma3_text": 256}

_COMMON_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor"}
_REQUIRED_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {"factor", "original_max_position_embeddings"},
}
_OPTIONAL_KEYS = {
    "yarn": {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
}
_ROPE_SOURCES = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
)


def normalize_config(config: Config) -> Config:
    """A copy of ``config`` in which each setting that Octavo reads has one name and one place.

    - ``rope_parameters``: ``{"full_attention": {...}, "sliding_attention": {...}}``, each with
      ``rope_type``, ``rope_theta`` and what its type needs. A layer type that is absent rotates as
      ``full_attention`` does. ``rope_theta``, ``rope_scaling``, ``rope_local_base_freq`` and
      ``partial_rotary_factor`` are gone from the top level.
    - ``dtype`` in place of ``torch_dtype``.
    - ``head_dim`` and ``num_key_value_heads`` filled in where the file leaves them out.

    Raises CheckpointError where two places contradict each other or a value makes no sense, and
    UnsupportedModelError for a RoPE type or setting that Octavo doesn't know.
    """
    normal = {key: value for key, value in config.items() if key not in _ROPE_SOURCES}
    if (dtype := normal.pop("torch_dtype", None)) is not None:
        _put(normal, "dtype", dtype, "torch_dtype")
    normal["rope_parameters"] = _rope_parameters(config)
    return normal | _head_counts(config)


def _head_counts(config: Config) -> Config:
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = num_heads
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = _count(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} isn't a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    return {"head_dim": _head_dim(config, num_heads), "num_key_value_heads": num_kv_heads}


def _head_dim(config: Config, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _count(config, "head_dim")
    model_type = str(config.get("model_type"))
    if "head_dim" not in config and model_type in _DEFAULT_HEAD_DIM:
        return _DEFAULT_HEAD_DIM[model_type]
    hidden_size = _count(config, "hidden_size")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} isn't a multiple of num_attention_heads {num_heads}, and "
            "the config states no head_dim"
        )
    return hidden_size // num_heads


def _rope_parameters(config: Config) -> dict[str, Config]:
    ropes: dict[str, Config] = {"full_attention": {}}
    for source in ("rope_parameters", "rope_scaling"):
        given = config.get(source) or {}
        if not isinstance(given, dict):
            raise CheckpointError(f"{source} is {given!r}; a dict or null is expected")
        for layer_type, parameters in _by_layer_type(given, source).items():
            rope = ropes.setdefault(layer_type, {})
            for key, value in parameters.items():
                if value is not None:
                    name = "rope_type" if key == "type" else key
                    _put(rope, name, value, f"{source}.{key}")

    if (theta := config.get("rope_theta")) is not None:
        _put(ropes["full_attention"], "rope_theta", theta, "rope_theta")
    if (theta := config.get("rope_local_base_freq")) is not None:
        sliding = ropes.setdefault("sliding_attention", {})
        _put(sliding, "rope_theta", theta, "rope_local_base_freq")

    if str(config.get("model_type", "")).startswith("gemma3"):
        ropes.setdefault("sliding_attention", {})
        default_theta: Config = _GEMMA3_THETA
    else:
        shared = ropes["full_attention"].get("rope_theta", _DEFAULT_THETA)
        default_theta = dict.fromkeys(LAYER_TYPES, shared)
    for layer_type, rope in ropes.items():
        rope.setdefault("rope_theta", default_theta[layer_type])
        if (part := config.get("partial_rotary_factor")) is not None:
            _put(rope, "partial_rotary_factor", part, "partial_rotary_factor")
        _complete(rope, config)
        _check_rope(rope, layer_type)
    return ropes


def _by_layer_type(given: Config, source: str) -> dict[str, Config]:
    """``{"full_attention": {...}, ...}`` from a flat dict or from one nested by layer type."""
    if not any(isinstance(value, dict) for value in given.values()):
        return {"full_attention": given}
    for layer_type, parameters in given.items():
        if layer_type not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"{source} has an entry for {layer_type!r}; known layer types are "
                f"{', '.join(LAYER_TYPES)}"
            )
        if not isinstance(parameters, dict | None):
            raise CheckpointError(f"{source}.{layer_type} is {parameters!r}; a dict is expected")
    return {layer_type: parameters or {} for layer_type, parameters in given.items()}


def _complete(rope: Config, config: Config) -> None:
    """Fill in what transformers derives from the context length."""
    rope.setdefault("rope_type", "default")
    if rope["rope_type"] not in ("llama3", "yarn"):
        return
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or longest
    if original is not None:
        original = rope.setdefault("original_max_position_embeddings", original)
    if rope["rope_type"] == "yarn" and _is_positive(longest) and _is_positive(original):
        rope.setdefault("factor", longest / original)


def _check_rope(rope: Config, layer_type: str) -> None:
    rope_type = rope["rope_type"]
    if not isinstance(rope_type, str) or rope_type not in _REQUIRED_KEYS:
        raise UnsupportedModelError(
            f"RoPE type {rope_type!r} is not supported; the types that work are "
            f"{', '.join(_REQUIRED_KEYS)}"
        )
    required = _REQUIRED_KEYS[rope_type]
    if missing := required - rope.keys():
        raise CheckpointError(
            f"RoPE type {rope_type!r} of {layer_type} needs {', '.join(sorted(missing))}"
        )
    known = _COMMON_KEYS | required | _OPTIONAL_KEYS.get(rope_type, set())
    if unknown := rope.keys() - known:
        raise UnsupportedModelError(
            f"RoPE type {rope_type!r} of {layer_type} carries {', '.join(sorted(unknown))}, which "
            "Octavo doesn't apply; the result would differ from the model's"
        )
    for key in rope.keys() - {"rope_type", "truncate"}:
        if not _is_positive(rope[key]):
            raise CheckpointError(
                f"RoPE setting {key} is {rope[key]!r}; a positive number is expected"
            )
    if not isinstance(rope.get("truncate", True), bool):
        raise CheckpointError(f"RoPE setting truncate is {rope['truncate']!r}; true or false")
    if rope.get("partial_rotary_factor", 1) > 1:
        raise CheckpointError(
            f"partial_rotary_factor is {rope['partial_rotary_factor']}; the limit is 1, the whole "
            "head"
        )


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _put(into: Config, key: str, value: Any, source: str) -> None:
    """Set ``key`` unless another place of the config has said otherwise."""
    if key in into and into[key] != value:
        raise CheckpointError(
            f"the config contradicts itself: {source} is {value!r}, but {key} is {into[key]!r} "
            "elsewhere in it"
        )
    into[key] = value


def _count(config: Config, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key} is {value!r} in the config; a positive integer is needed")
    return value
