"""What the loader makes of a checkpoint against what transformers makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from octavo.checkpoint import open_checkpoint
from octavo.checkpoint.config import normalize_config

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "mscale": 1.0}},
    ],
)
def test_llama_rope(rope: dict[str, Any]) -> None:
    ours = normalize_config({"model_type": "llama", **SIZES, **rope})["rope_parameters"]
    theirs = dict(LlamaConfig(**SIZES, **rope).rope_parameters)
    theirs.pop("type", None)
    assert ours == {"full_attention": theirs}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    ],
)
def test_gemma3_rope(rope: dict[str, Any]) -> None:
    sizes = {**SIZES, "head_dim": 16}
    ours = normalize_config({"model_type": "gemma3_text", **sizes, **rope})["rope_parameters"]
    assert ours == Gemma3TextConfig(**sizes, **rope).rope_parameters


def test_what_a_config_leaves_out() -> None:
    config = {"model_type": "gemma3_text", "num_attention_heads": 4, "hidden_size": 64}
    assert normalize_config(config)["head_dim"] == Gemma3TextConfig().head_dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_saved_by_transformers(dtype: torch.dtype, shard_size: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, dtype=dtype)).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor.to_float32(), expected[name].float().numpy())
    assert checkpoint.config["head_dim"] == 16
    assert checkpoint.config["dtype"] == str(dtype).removeprefix("torch.")
