"""A checkpoint held against its spec (O27): every tensor is used or named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import tiny, write_safetensors

from octavo.checkpoint import open_checkpoint
from octavo.errors import CheckpointError
from octavo.models.families import spec_from_config
from octavo.models.spec import DecoderSpec
from octavo.models.weights import check_weights, num_parameters

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def check(model: Path, remove: str = "", **put: Any) -> DecoderSpec:
    """The spec that a TINY checkpoint runs with once tensors are removed and put into it."""
    tensors = {name: t.to_float32() for name, t in open_checkpoint(model).tensors.items()}
    tensors.pop(remove, None)
    tensors |= {name.replace("__", "."): value for name, value in put.items()}
    write_safetensors(model / "model.safetensors", tensors)
    checkpoint = open_checkpoint(model)
    return check_weights(spec_from_config(checkpoint.config), checkpoint)


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    spec = check(tiny(tmp_path))
    assert not spec.tied_embeddings
    tensors = open_checkpoint(tmp_path).tensors.values()
    assert num_parameters(spec) == sum(np.prod(tensor.shape) for tensor in tensors)


def test_tied_without_a_head(tmp_path: Path) -> None:
    """O27 (a)."""
    assert check(tiny(tmp_path, tie_word_embeddings=True)).tied_embeddings


def test_tied_with_an_equal_head(tmp_path: Path) -> None:
    """O27 (b): harmless."""
    model = tiny(tmp_path, tie_word_embeddings=True)
    embed = open_checkpoint(model).tensors[EMBED].to_float32()
    assert check(model, lm_head__weight=embed).tied_embeddings


def test_tied_with_a_different_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """O27 (c): the head in the checkpoint is used, with a warning."""
    model = tiny(tmp_path, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        spec = check(model, lm_head__weight=np.ones((261, 64), np.float32))
    assert not spec.tied_embeddings
    assert HEAD in caplog.text


def test_untied_without_a_head(tmp_path: Path) -> None:
    """O27 (d)."""
    with pytest.raises(CheckpointError, match=f"missing: {HEAD}"):
        check(tiny(tmp_path), remove=HEAD)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_no_word_about_ties(tmp_path: Path, model_type: str) -> None:
    """O27 (e): the architecture's default, which needs a head here."""
    model = tiny(tmp_path, model_type=model_type)
    config = json.loads((model / "config.json").read_text())
    del config["tie_word_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    assert not check(model).tied_embeddings
    with pytest.raises(CheckpointError, match=HEAD):
        check(model, remove=HEAD)


def test_a_missing_tensor(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        check(tiny(tmp_path), remove=name)


def test_a_wrong_shape(tmp_path: Path) -> None:
    """O27 (h)."""
    with pytest.raises(CheckpointError, match=r"model.norm.weight \(65,\) instead of \(64,\)"):
        check(tiny(tmp_path), model__norm__weight=np.ones(65, np.float32))


def test_an_unknown_tensor(tmp_path: Path) -> None:
    """O27 (i): an error, since nothing says that it may be left out."""
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(CheckpointError, match=f"unknown: {name}"):
        check(tiny(tmp_path), **{name: np.ones(64, np.float32)})


def test_rotary_buffers_of_old_checkpoints(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    check(tiny(tmp_path), **{name: np.ones(8, np.float32)})


def test_many_problems_in_one_message(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError) as error:
        check(model, model__extra=np.ones(1, np.float32))
    message = str(error.value)
    assert "model.layers.2." in message
    assert "and 10 more" in message  # of the 18 tensors of two layers
    assert "unknown: model.extra" in message
