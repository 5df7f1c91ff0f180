"""Folder to GGUF and back, by the rules of llama.cpp's converter, written again for the tests.

``gguf`` (the package) quantises and dequantises, so nothing here is Octavo's own code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from helpers.checkpoints import (
    Float32,
    save_byte_tokenizer,
)
from helpers.gguf_writer import Tensor, write_gguf
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HF_NAMES = {gguf_name: name for name, gguf_name in _GGUF_NAMES.items()}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type


def gguf_from_folder(
    folder: Path,
    file: Path,
    *,
    arch: str = "llama",
    format: str = "F32",
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A float32 checkpoint with the BYTE tokenizer as a GGUF file, its matrices in ``format``.

    ``keys`` go over the metadata; None leaves a key out. ``arch`` "llama" has the rows of q and k
    interleaved. The model's vocabulary must be larger than the tokenizer's: the first id without
    text becomes the merge of two NUL bytes, since a GGUF list of merges can't be empty.
    """
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    interleaved = {"attn_q": heads, "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        gguf_name = _rename(name, _GGUF_NAMES, "model.layers.", "blk.")
        if arch == "llama" and (count := interleaved.get(gguf_name.split(".")[-2])):
            array = _interleave(array, count)
        tensors[gguf_name] = _stored(array, format if array.ndim == 2 else "F32")
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": _rope_theta(config),
        f"{arch}.rope.dimension_count": head_dim,
        **_tokenizer_keys(folder, config["vocab_size"]),
        **(keys or {}),
    }
    write_gguf(file, arch, {k: v for k, v in metadata.items() if v is not None}, tensors)
    return file


def folder_from_gguf(file: Path, folder: Path) -> Path:
    """A GGUF file of arch "llama" as a float32 checkpoint, with the dequantised weights.

    The BYTE tokenizer stands in for the file's own: for prompts of token ids.
    """
    reader = gguf.GGUFReader(file)

    def key(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    def llama(name: str) -> Any:
        return key(f"llama.{name}")

    heads, kv_heads = llama("attention.head_count"), llama("attention.head_count_kv")
    interleaved = {"attn_q": heads, "attn_k": kv_heads}
    tensors: dict[str, Float32] = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if count := interleaved.get(tensor.name.split(".")[-2]):
            array = _half_split(array, count)
        tensors[_rename(tensor.name, _HF_NAMES, "blk.", "model.layers.")] = array
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": llama("attention.layer_norm_rms_epsilon"),
        "rope_theta": llama("rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "eos_token_id": key("tokenizer.ggml.eos_token_id"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    save_byte_tokenizer(folder)
    return folder


def _rename(name: str, names: Mapping[str, str], layers: str, new_layers: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith(layers):
        return f"{names[stem]}.{kind}"
    layer, _, rest = stem.removeprefix(layers).partition(".")
    return f"{new_layers}{layer}.{names[rest]}.{kind}"


def _interleave(array: Float32, num_heads: int) -> Float32:
    """Rows of Hugging Face's half-split order as llama.cpp stores them: 0 4 1 5 2 6 3 7."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _half_split(array: Float32, num_heads: int) -> Float32:
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def _stored(array: Float32, format: str) -> Tensor:
    return np.asarray(gguf.quants.quantize(array, gguf.GGMLQuantizationType[format])), format


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def _tokenizer_keys(folder: Path, vocab_size: int) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = tokenizer.get_added_tokens_decoder()
    tokens, types = [], []
    nul = tokenizer.id_to_token(0)
    for token_id in range(vocab_size):
        if token_id in added:
            tokens.append(str(added[token_id]))
            types.append(_CONTROL if added[token_id].special else _USER_DEFINED)
        elif (text := tokenizer.id_to_token(token_id)) is not None:
            tokens.append(text)
            types.append(_NORMAL)
        else:
            tokens.append(f"[PAD{token_id}]" if nul * 2 in tokens else nul * 2)
            types.append(_UNUSED if tokens[-1] != nul * 2 else _NORMAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{nul} {nul}"],
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id(settings["bos_token"]),
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id(settings["eos_token"]),
        "tokenizer.ggml.add_bos_token": settings["add_bos_token"],
        "tokenizer.chat_template": settings.get("chat_template"),
    }
