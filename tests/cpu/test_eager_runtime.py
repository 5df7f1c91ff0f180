"""The eager runtime beside its logits: sampled ids, dtypes, weights in memory, candidates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import EOS, chain, family, markov, reference_logits, smollm2_path, tiny
from helpers.driver import load, relative_error

from octavo.cache.groups import kv_groups
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.engine.batch import StepBatch
from octavo.engine.sampling import SamplingBatch, SamplingRow, make_sampling_batch
from octavo.models.families import spec_from_config
from octavo.runtime.candidates import choose_attention
from octavo.runtime.eager import EagerRuntime, load_eager
from octavo.runtime.memory import widening_note
from octavo.runtime.torch_weights import load_weights, random_weights
from octavo.sampling_params import SamplingParams

IDS = np.random.default_rng(2).integers(0, 261, 80).tolist()


def greedy(batch: StepBatch) -> SamplingBatch:
    params = SamplingParams(temperature=0.0)
    rows = [SamplingRow(params, [0], [], 0, 0, 0) for _ in batch.sample_indices]
    return make_sampling_batch(rows, sample_indices=batch.sample_indices, vocab_size=261)


def test_ids_still_on_the_device(tmp_path: Path) -> None:
    """A -1 stands for what the last sample chose for a row of its step, whatever the row is now."""
    model = markov(tmp_path, {**chain("a", "b", "c", "d"), **chain("x", "y", "z", EOS)})
    driver = load(model)
    runtime = driver.runtime
    first, second, third = (driver.sequence() for _ in range(3))

    # Rows 0 and 1 sample, row 2 is a chunk in mid-prompt.
    batch, _ = driver.batch([(first, [97]), (second, [120]), (third, [100, 100])])
    batch = replace(batch, sample_indices=batch.sample_indices[:2], sample_rows=np.arange(2))
    runtime.forward(batch)
    assert runtime.wait(runtime.sample(greedy(batch))).token_ids.tolist() == [98, 121]

    # The rows have changed places, and one has an id that the host knows.
    batch, _ = driver.batch([(second, [0]), (third, [97]), (first, [0])])
    batch = replace(
        batch,
        input_ids=np.array([-1, 97, -1], np.int32),
        id_rows=np.array([1, -1, 0], np.int32),
    )
    runtime.forward(batch)
    assert runtime.sample(greedy(batch)).token_ids.tolist() == [122, 98, 99]


def test_nothing_to_sample(tmp_path: Path) -> None:
    driver = load(tiny(tmp_path))
    batch, _ = driver.batch([(driver.sequence(), IDS[:5])])
    none = np.empty(0, np.int32)
    batch = replace(batch, logits_indices=none, sample_indices=none, sample_rows=none)
    driver.runtime.forward(batch)
    assert len(driver.runtime.sample(greedy(batch)).token_ids) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.005)])
def test_narrow_dtypes(tmp_path: Path, name: str, dtype: str, tolerance: float) -> None:
    model = family(tmp_path, name)
    driver = load(model, dtype=dtype)
    assert driver.runtime.layers[0].weights.qkv.dtype == getattr(torch, dtype)
    assert driver.runtime.layers[0].k_cache.dtype == getattr(torch, dtype)
    logits = driver.run(IDS[:40], decode_from=30)
    assert logits.dtype == np.float32
    assert relative_error(logits, reference_logits(model, IDS[:40])) < tolerance


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_chosen_candidates(tmp_path: Path, name: str, block_size: int) -> None:
    """Whatever pair is chosen here, with its own KV layout."""
    model = family(tmp_path, name)
    driver = load(model, backend=None, block_size=block_size)
    logits = driver.run(IDS, chunk=33, decode_from=60)
    assert relative_error(logits, reference_logits(model, IDS)) < 1e-4


def test_other_block_sizes(tmp_path: Path) -> None:
    model = family(tmp_path, "gemma3")
    logits = load(model, block_size=5).run(IDS, chunk=33, decode_from=60)
    assert relative_error(logits, reference_logits(model, IDS)) < 1e-4


def test_a_tied_embedding_is_held_once(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny(tmp_path, tie_word_embeddings=True))
    spec = spec_from_config(checkpoint.config)
    weights = load_weights(spec, checkpoint, device="cpu", dtype=torch.float32, num_threads=1)
    assert weights.head is weights.embed


def test_threads_share_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the work is cut, also where the file keeps the rows in another order."""
    checkpoint = open_checkpoint(smollm2_path())
    spec = spec_from_config({**checkpoint.config, "num_hidden_layers": 1})
    monkeypatch.setattr("octavo.runtime.torch_weights._TASK_WEIGHTS", 576 * 7)
    weights = load_weights(spec, checkpoint, device="cpu", dtype=torch.float32, num_threads=4)
    for role, parts in (
        ("qkv", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("gate_up", ["mlp.gate_proj", "mlp.up_proj"]),
    ):
        names = [f"model.layers.0.{part}.weight" for part in parts]
        rows = np.concatenate([checkpoint.tensors[name].to_float32() for name in names])
        np.testing.assert_array_equal(getattr(weights.layers[0], role), rows)


def test_widening_is_announced() -> None:
    checkpoint = open_checkpoint(smollm2_path())
    spec = spec_from_config(checkpoint.config)
    note = widening_note(spec, checkpoint, "float32")
    assert note is not None
    assert "Q4_1, Q8_0 to float32: 0.10 GB in the file, 0.54 GB in memory" in note


def test_nothing_to_announce(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny(tmp_path))
    assert widening_note(spec_from_config(checkpoint.config), checkpoint, "float32") is None


def dummy(model: Path, seed: int) -> EagerRuntime:
    spec = spec_from_config(open_checkpoint(model).config)
    groups = kv_groups(spec)
    selections = choose_attention(EngineConfig(), spec, groups, "cpu", "float32", "float32")
    blocks = [4] * len(groups)
    return load_eager(spec, None, groups, selections, blocks, num_threads=1, seed=seed)


def test_dummy_weights(tmp_path: Path) -> None:
    model = family(tmp_path, "gemma3")
    one, same, other = (dummy(model, seed).layers[1].weights for seed in (1, 1, 2))
    real = load(model).runtime.layers[1].weights
    for role, tensor in vars(real).items():
        assert (tensor is None) == (getattr(one, role) is None)
        if tensor is not None:
            assert getattr(one, role).shape == tensor.shape
    assert torch.equal(one.qkv, same.qkv)
    assert not torch.equal(one.qkv, other.qkv)
    assert 0 < float(one.qkv.std()) < 0.1


def test_float32_is_float32(tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("medium")
    dummy(tiny(tmp_path), 0)
    assert torch.get_float32_matmul_precision() == "highest"


def test_random_weights_of_a_narrow_dtype(tmp_path: Path) -> None:
    spec = spec_from_config(open_checkpoint(tiny(tmp_path)).config)
    weights = random_weights(spec, device="cpu", dtype=torch.bfloat16, seed=0)
    assert weights.embed.dtype == torch.bfloat16
    assert weights.final_norm.dtype == torch.float32
