"""GGUF files for tests, written with the ``gguf`` package: any metadata, any tensors, and a tiny
Llama in every weight format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType
from helpers.checkpoints import CHATML, EOS, SPECIAL_TOKENS, _byte_alphabet
from numpy.typing import NDArray

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 256, 2, 4, 2, 64, 512
MERGES = ("h e", "Ġ t", "Ġt he")

TINY_LLAMA_KEYS: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 2048,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
}

Tensor = tuple[NDArray[Any], str]


def write_gguf(
    path: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write one file. Values of ``keys``: bool, int (uint32), float (float32), str or a list; a
    tensor is ``(array, format)``: floats ``[out, in]`` for a plain format, else uint8 blocks
    ``[out, row_bytes]``."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, (array, format) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=GgmlType[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_llama_gguf(path: Path, format: str, seed: int) -> None:
    """A random Llama (hidden 256, 2 layers, 4 heads, 2 KV heads, untied) whose matrices are all in
    ``format`` and whose norms are F32, with a byte tokenizer of three merges and ChatML."""
    write_gguf(
        path, "llama", TINY_LLAMA_KEYS | byte_tokenizer_keys(), tiny_llama_tensors(format, seed)
    )


def byte_tokenizer_keys() -> dict[str, Any]:
    """Ids 0..255 are that byte, 256.. ``SPECIAL_TOKENS``, then one token per merge."""
    tokens = [*_byte_alphabet(), *SPECIAL_TOKENS, *(merge.replace(" ", "") for merge in MERGES)]
    control = {SPECIAL_TOKENS.index(text) + 256 for text in SPECIAL_TOKENS}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in control else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def tiny_llama_tensors(format: str, seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    vocab = 256 + len(SPECIAL_TOKENS) + len(MERGES)

    def matrix(rows: int, columns: int) -> Tensor:
        return random_rows(format, rows, columns, rng), format

    def norm() -> Tensor:
        return rng.normal(1, 0.1, HIDDEN).astype(np.float32), "F32"

    tensors = {"token_embd.weight": matrix(vocab, HIDDEN)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        tensors |= {
            f"{block}attn_norm.weight": norm(),
            f"{block}attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{block}attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{block}ffn_norm.weight": norm(),
            f"{block}ffn_gate.weight": matrix(FFN, HIDDEN),
            f"{block}ffn_up.weight": matrix(FFN, HIDDEN),
            f"{block}ffn_down.weight": matrix(HIDDEN, FFN),
        }
    return tensors | {"output_norm.weight": norm(), "output.weight": matrix(vocab, HIDDEN)}


def random_rows(
    format: str, rows: int, columns: int, rng: np.random.Generator, std: float = 0.1
) -> NDArray[Any]:
    """Random weights of about the standard deviation ``std`` as GGUFWriter takes them. ``gguf``
    quantises to the legacy formats; K-quants are random blocks with fitting scales."""
    if format.endswith("_K"):
        return random_k_blocks(format, rows * columns // 256, rng, std).reshape(rows, -1)
    weights = rng.normal(0, std, (rows, columns)).astype(np.float32)
    return np.asarray(gguf.quants.quantize(weights, GgmlType[format]))


def random_k_blocks(
    format: str, blocks: int, rng: np.random.Generator, std: float
) -> NDArray[np.uint8]:
    """Uint8 ``[blocks, block_bytes]``: all bits random but for the float16 scales, which give
    weights of mean near 0 and standard deviation near ``std``."""
    raw = rng.integers(0, 256, (blocks, gguf.GGML_QUANT_SIZES[GgmlType[format]][1]), np.uint8)
    # Values are d * scale * q - dmin * minimum (Q6_K: d * scale * q) of uniform integers.
    spread = {"Q4_K": 240, "Q5_K": 480, "Q6_K": 1370}[format]
    d = rng.uniform(0.5, 1.5, blocks) * std / spread
    if format == "Q6_K":
        raw[:, -2:] = _float16_bytes(d)
    else:
        raw[:, :2] = _float16_bytes(d)
        raw[:, 2:4] = _float16_bytes(d * (7.5 if format == "Q4_K" else 15.5))
    return raw


def _float16_bytes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return values.astype("<f2")[:, None].view(np.uint8)
