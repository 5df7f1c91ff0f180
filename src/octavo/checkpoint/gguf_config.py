"""A GGUF's metadata translated to the vocabulary of ``config.json``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import numpy as np

from octavo.checkpoint.config import Config, normalize_config
from octavo.checkpoint.gguf_file import GgufFile, GgufTensor
from octavo.checkpoint.quants import Floats, dequantize
from octavo.errors import CheckpointError, UnsupportedModelError

N = TypeVar("N", int, float, str)

# Frequency divisors of Llama 3's RoPE, [head_dim / 2]; a tensor since no metadata key names them.
ROPE_FREQS = "rope_freqs.weight"

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

# Keys that describe the file and don't change the result. (Of the vocabulary's size the embedding
# has the last word.)
_DESCRIPTIVE_KEYS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_EXPERT_KEYS = {"expert_count", "expert_used_count"}  # harmless where 0: a dense model

# Tokens that end a turn beside eos, where the file's own chat template uses them: the keys that
# should name them (eot, eom) are often missing. llama.cpp stops at them too.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")

_SAMPLING: dict[str, tuple[str, type[float] | type[int]]] = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
}


def architecture(file: GgufFile) -> str:
    """``general.architecture``, once it is sure that the file holds a model that Octavo knows."""
    kind = file.get("general.type", str) or "model"
    if kind != "model":
        raise UnsupportedModelError(
            f"{file.name} holds a GGUF of type {kind!r}, not a model; give the model's own file"
        )
    version = file.get("general.quantization_version", int) or 2
    if version != 2:
        raise UnsupportedModelError(
            f"{file.name}: general.quantization_version is {version}, but 2 is read; convert the "
            "model again"
        )
    arch = file.get("general.architecture", str)
    if arch is None:
        raise CheckpointError(f"{file.name} has no metadata key general.architecture")
    if arch not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"{file.name}: architecture {arch!r} is not supported; those that work are "
            f"{', '.join(_MODEL_TYPES)}"
        )
    return arch


def generation_config(file: GgufFile) -> Config:
    """``generation_config.json`` as the metadata states it: the ids that end a text, and the
    sampling settings that the model's makers recommend (``general.sampling.*``)."""
    tokens = file.get("tokenizer.ggml.tokens", list) or []
    template = file.get("tokenizer.chat_template", str) or ""
    ends = [file.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom")]
    ends += [tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens]
    config: Config = {"eos_token_id": list(dict.fromkeys(i for i in ends if i is not None))}
    for key, (name, kind) in _SAMPLING.items():
        if (value := file.get(f"general.sampling.{key}", kind)) is not None:
            config[name] = value
    return config


def model_config(file: GgufFile, arch: str) -> Config:
    """The normalised config. A key of the architecture that nothing here reads is refused, since it
    would change the result unseen.

    What Gemma 3 doesn't record follows llama.cpp and transformers' ``Gemma3TextConfig``: five
    sliding layers to one of full attention, local RoPE base 10,000, queries scaled by head_dim
    (in the 27B by hidden_size / heads).
    """
    keys = _Keys(file, arch)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.name} has no tensor token_embd.weight")
    num_heads = keys.need("attention.head_count", int)
    num_layers = keys.need("block_count", int)
    if num_layers > len(file.tensors):
        raise CheckpointError(
            f"{file.name}: {arch}.block_count is {num_layers}, but the file holds "
            f"{len(file.tensors)} tensors"
        )
    config: Config = {
        "model_type": _MODEL_TYPES[arch],
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.need("embedding_length", int),
        "intermediate_size": keys.need("feed_forward_length", int),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", int) or num_heads,
        "head_dim": keys.take("attention.key_length", int),
        "max_position_embeddings": keys.need("context_length", int),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        config[f"{name}_token_id"] = file.get(f"tokenizer.ggml.{key}_token_id", int)
    if arch == "gemma3":
        config |= _gemma3(config, keys)
    else:
        config["hidden_act"] = "silu"
    if arch != "qwen2":  # Qwen2 always has biases on q, k and v, and no key that says so
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        if window := keys.take("attention.sliding_window", int):
            config |= {"model_type": "mistral", "sliding_window": window}  # Llama with a window

    config = normalize_config(config | _rope(keys))
    _set_rotary_dim(config, keys, arch)
    if (freqs := file.tensors.get(ROPE_FREQS)) is not None:
        _set_llama3_scaling(config, freqs, keys)
    value_length = keys.take("attention.value_length", int) or config["head_dim"]
    if value_length != config["head_dim"]:
        raise UnsupportedModelError(
            f"{file.name}: heads of {config['head_dim']} for keys and {value_length} for values; "
            "Octavo needs them equal"
        )
    keys.refuse_the_rest()
    return config


def _gemma3(config: Config, keys: _Keys) -> Config:
    layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
    head_dim = config["head_dim"] or hidden_size // config["num_attention_heads"]
    query_scalar = hidden_size // config["num_attention_heads"] if layers == 62 else head_dim
    pattern = keys.take("attention.sliding_window_pattern", int) or 6
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "sliding_window": keys.need("attention.sliding_window", int),
        "layer_types": [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(layers)
        ],
        "query_pre_attn_scalar": query_scalar,
        "attn_logit_softcapping": keys.take("attn_logit_softcapping", float),
        "final_logit_softcapping": keys.take("final_logit_softcapping", float),
        "rope_local_base_freq": keys.take("rope.freq_base_swa", float),
    }


def _rope(keys: _Keys) -> Config:
    """RoPE as transformers 4 would write it; llama.cpp takes a factor without a type as linear."""
    factor = keys.take("rope.scaling.factor", float) or keys.take("rope.scale_linear", float)
    rope_type = keys.take("rope.scaling.type", str) or ("linear" if factor else "none")
    theta = keys.take("rope.freq_base", float)
    if rope_type == "none" or factor in (None, 0.0, 1.0):
        return {"rope_theta": theta}
    scaling: Config = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        scaling |= {
            "original_max_position_embeddings": keys.take(
                "rope.scaling.original_context_length", int
            ),
            "beta_fast": keys.take("rope.scaling.yarn_beta_fast", float),
            "beta_slow": keys.take("rope.scaling.yarn_beta_slow", float),
        }
    return {"rope_theta": theta, "rope_scaling": scaling}


def _set_rotary_dim(config: Config, keys: _Keys, arch: str) -> None:
    head_dim = config["head_dim"]
    rotary_dim = keys.take("rope.dimension_count", int) or head_dim
    if rotary_dim == head_dim:
        return
    if arch == "llama":
        raise UnsupportedModelError(
            f"{keys.file.name}: llama.rope.dimension_count is {rotary_dim}, but heads have "
            f"{head_dim}; how their rows are ordered then is not defined"
        )
    for rope in config["rope_parameters"].values():
        rope["partial_rotary_factor"] = rotary_dim / head_dim


def _set_llama3_scaling(config: Config, freqs: GgufTensor, keys: _Keys) -> None:
    """Recognise the parameters that llama.cpp's converter made ``rope_freqs`` from.

    The largest divisor is the factor; the other parameters are the same in all of Meta's models
    (the file may state the original length). They are taken only if the formula gives back the
    tensor to float32 accuracy; any other tensor is refused.
    """
    stated = dequantize(freqs.data, freqs.format).reshape(-1)
    rope = config["rope_parameters"]["full_attention"]
    original = keys.take("rope.scaling.original_context_length", int) or 8192
    scaling: Config = {
        "rope_type": "llama3",
        "factor": float(str(stated.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    plain = rope["rope_type"] == "default" and "partial_rotary_factor" not in rope
    if plain and stated.size == config["head_dim"] // 2:
        if (stated == 1).all():
            return
        expected = _llama3_divisors(rope["rope_theta"], config["head_dim"], scaling)
        if np.allclose(stated, expected, rtol=2e-6, atol=0):
            rope |= scaling
            return
    raise UnsupportedModelError(
        f"{keys.file.name}: {ROPE_FREQS} holds {stated.size} RoPE divisors up to "
        f"{scaling['factor']:g} that are not those of Llama 3, which Octavo can't carry out exactly"
    )


def _llama3_divisors(theta: float, head_dim: int, scaling: Config) -> Floats:
    """What Llama 3 divides each frequency by: 1 for wavelengths below original / high_freq_factor,
    the factor above original / low_freq_factor, and in between a blend of their reciprocals."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors: Floats = (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)
    return divisors


class _Keys:
    """The architecture's metadata keys; those not taken are refused at the end."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file = file
        self.prefix = f"{arch}."
        self.left = {key for key in file.metadata if key.startswith(self.prefix)}

    def take(self, key: str, kind: type[N]) -> N | None:
        """The value of the key after the prefix, None if absent; a number isn't negative. An array
        (one value per layer) counts as its one value where that is the same everywhere."""
        full_key = self.prefix + key
        self.left.discard(full_key)
        file = self.file
        if isinstance(layers := file.metadata.get(full_key), np.ndarray):
            if layers.size == 0 or (layers != layers[0]).any():
                raise UnsupportedModelError(
                    f"{file.name}: {full_key} varies from layer to layer, which Octavo can't carry "
                    "out"
                )
            file = replace(file, metadata={full_key: layers[0].item()})
        value = file.get(full_key, kind)
        if isinstance(value, int | float) and value < 0:
            raise CheckpointError(f"{file.name}: {full_key} is {value}; it can't be negative")
        return value

    def need(self, key: str, kind: type[N]) -> N:
        value = self.take(key, kind)
        if not value:
            raise CheckpointError(f"{self.file.name}: metadata {self.prefix}{key} is absent or 0")
        return value

    def refuse_the_rest(self) -> None:
        harmless = {self.prefix + key for key in _DESCRIPTIVE_KEYS}
        dense = {self.prefix + key for key in _EXPERT_KEYS}
        harmless |= {key for key in dense if self.file.metadata.get(key) == 0}
        if unread := sorted(self.left - harmless):
            raise UnsupportedModelError(
                f"{self.file.name}: metadata {', '.join(unread)} changes the result in a way that "
                "Octavo doesn't carry out"
            )
