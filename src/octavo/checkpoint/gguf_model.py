"""A GGUF file as a Hugging Face checkpoint: tensor names and row order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.checkpoint.config import Config
from octavo.checkpoint.gguf_config import ROPE_FREQS, architecture, generation_config, model_config
from octavo.checkpoint.gguf_file import GgufFile, read_gguf
from octavo.checkpoint.quants import FORMATS
from octavo.checkpoint.tensor import Checkpoint, WeightTensor
from octavo.errors import CheckpointError, UnsupportedModelError

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d*)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")


def open_gguf(path: Path, name: str) -> Checkpoint:
    """Open a GGUF file (all parts of a split one) as a checkpoint.

    Raises CheckpointError (damaged, contradictory) and UnsupportedModelError (architecture, tensor,
    format or metadata key that Octavo can't carry out).
    """
    file = read_gguf(path)
    arch = architecture(file)
    config = model_config(file, arch)
    return Checkpoint(
        name=name,
        path=path,
        kind="gguf",
        config=config,
        generation_config=generation_config(file),
        tensors=_tensors(file, arch, config),
        metadata=file.metadata,
        norms_include_one=arch == "gemma3",
    )


def _tensors(file: GgufFile, arch: str, config: Config) -> dict[str, WeightTensor]:
    layer_names = _GEMMA3_LAYER_NAMES if arch == "gemma3" else _LAYER_NAMES
    heads = {}
    if arch == "llama":
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, WeightTensor] = {}
    unknown: list[str] = []
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FREQS:
            continue  # already in the config
        match = _TENSOR_NAME.fullmatch(tensor.name)
        stem = match and (layer_names if match["layer"] else _GLOBAL_NAMES).get(match["stem"])
        if match is None or stem is None:
            unknown.append(tensor.name)
            continue
        prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
        name = f"{prefix}{stem}.{match['kind']}"
        weight = WeightTensor(name, tensor.shape, tensor.format, tensor.data)
        if match["stem"] in heads:
            try:
                weight = _half_split(weight, heads[match["stem"]], config["head_dim"])
            except ValueError as error:
                raise CheckpointError(f"{file.name}: tensor {tensor.name} {error}") from None
        tensors[name] = weight
    if unknown:
        raise UnsupportedModelError(
            f"{file.name} holds tensors that architecture {arch} doesn't know: "
            f"{', '.join(sorted(unknown)[:8])}{' ...' if len(unknown) > 8 else ''}"
        )
    return tensors


def _half_split(weight: WeightTensor, num_heads: int, head_dim: int) -> WeightTensor:
    """q or k of architecture llama with the rows of each head back in Hugging Face's order.

    llama.cpp rotates neighbours (0, 1), (2, 3), ... there, so its converter interleaves the halves
    of a head: a head of 8 is stored as rows 0 4 1 5 2 6 3 7 of Hugging Face's. Rows are moved
    whole, whatever their format. ValueError says what stands against it.
    """
    rows = weight.shape[0]
    if rows != num_heads * head_dim or head_dim % 2:
        raise ValueError(f"has {rows} rows, which are not {num_heads} heads of {head_dim}")
    order = np.arange(rows).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    if len(weight.shape) > 1:
        return replace(weight, row_order=order)
    if FORMATS[weight.format].block_size > 1:
        raise ValueError(f"is a vector in {weight.format}, whose elements can't be reordered")
    elements = weight.stored.reshape(rows, -1)[order]
    return replace(weight, stored=elements.reshape(1, -1))
