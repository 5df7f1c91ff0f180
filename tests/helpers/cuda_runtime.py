"""The ``cuda`` runtime without a GPU: its kernels in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from helpers.driver import Driver

from octavo.attention.backends.triton import TritonBackend
from octavo.attention.candidates import Selection
from octavo.cache.groups import kv_groups
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.models.families import spec_from_config
from octavo.models.weights import check_weights
from octavo.runtime.candidates import choose_attention
from octavo.runtime.cuda import CudaRuntime, Limits
from octavo.runtime.cuda_stages import Attention
from octavo.runtime.eager import make_layers
from octavo.runtime.torch_weights import load_weights


def load(
    model: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    dtype: str = "float32",
    max_rows: int = 8,
    max_tokens: int = 320,
    max_model_len: int = 320,
    num_slots: int = 7,
    fused: bool = False,
    deterministic: bool = False,
    short_prefill: bool = False,
) -> Driver:
    """A checkpoint, every slot of its KV pools NaN. ``short_prefill``: short rows have attention of
    their own, as where another candidate takes the long ones."""
    checkpoint = open_checkpoint(model)
    spec = check_weights(spec_from_config(checkpoint.config), checkpoint)
    groups = kv_groups(spec)
    config = EngineConfig(
        block_size=block_size,
        attention_backend="triton",
        deterministic=deterministic,
        split_kv_tokens=16,
    )
    selections = choose_attention(config, spec, groups, "cuda", dtype, dtype)
    kind = getattr(torch, dtype)
    weights = load_weights(spec, checkpoint, device="cpu", dtype=kind, num_threads=1)

    def prefill(selection: Selection) -> TritonBackend:
        return TritonBackend(replace(selection.prefill_spec, device="cpu"), 0)

    attention = [
        Attention(
            TritonBackend(replace(selection.decode_spec, device="cpu"), num_slots),
            prefill(selection),
            prefill(selection) if short_prefill else None,
        )
        for selection in selections
    ]
    runtime = CudaRuntime(
        spec,
        weights,
        make_layers(spec, weights, groups, selections, [num_blocks] * len(groups)),
        attention,
        Limits(max_tokens, max_rows, -(-max_model_len // block_size)),
        max_model_len=max_model_len,
        graphs=False,
        fused=fused,
        deterministic=deterministic,
    )
    for layer in runtime.layers:
        layer.k_cache.fill_(float("nan"))
        layer.v_cache.fill_(float("nan"))
    return Driver(runtime, groups, block_size, num_blocks)
