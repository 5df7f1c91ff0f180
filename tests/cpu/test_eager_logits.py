"""The eager runtime's logits against transformers in float32, every family and every batching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import (
    FAMILIES,
    family,
    gemma3_path,
    hf_from_checkpoint,
    model_logits,
    reference_logits,
    smollm2_path,
    tiny,
    write_safetensors,
)
from helpers.driver import Driver, Float32, Row, load, relative_error

from octavo.checkpoint import open_checkpoint

TOLERANCE = 1e-4
BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 300)
IDS = np.random.default_rng(1).integers(0, 320, 304).tolist()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(tmp_path_factory.mktemp(request.param), request.param)


def close(logits: Float32, reference: Float32) -> None:
    assert logits.shape == reference.shape
    assert relative_error(logits, reference) < TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_and_decode(model: Path, length: int) -> None:
    reference = reference_logits(model, IDS)
    ids = IDS[: length + 4]
    close(load(model, block_size=BLOCK).run(ids, decode_from=length), reference[: len(ids)])


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill(model: Path, chunk: int) -> None:
    close(load(model).run(IDS, chunk=chunk), reference_logits(model, IDS))


def test_mixed_batches(model: Path) -> None:
    """Decodes, chunks and whole prompts share steps; each row's logits are as if alone."""
    driver = load(model)
    prompts = [IDS[i:] for i in range(5)]
    rows = [driver.sequence() for _ in prompts]
    found: list[list[Float32]] = [[] for _ in prompts]
    rng = np.random.default_rng(3)
    while any(row.length < 40 + 9 * i for i, row in enumerate(rows)):
        chunks: list[tuple[Row, list[int]]] = []
        for i, row in enumerate(rows):
            size = min(int(rng.choice([1, 1, 1, 7, 33])), 40 + 9 * i - row.length)
            if size > 0:
                chunks.append((row, prompts[i][row.length : row.length + size]))
        for (row, _), logits in zip(chunks, driver.step(chunks), strict=True):
            found[rows.index(row)].append(logits)
    for prompt, row, logits in zip(prompts, rows, found, strict=True):
        close(np.concatenate(logits), reference_logits(model, prompt[: row.length]))


def test_only_the_wanted_logits(model: Path) -> None:
    driver = load(model)
    reference = reference_logits(model, IDS)
    first, second = driver.sequence(), driver.sequence()
    a, b = driver.step([(first, IDS[:20]), (second, IDS[:5])], logits="last")
    close(a, reference[19:20])
    close(b, reference[4:5])
    batch, _ = driver.batch([(first, IDS[20:22])])
    batch.logits_indices.resize(0, refcheck=False)  # a chunk in mid-prompt wants none
    driver.runtime.forward(batch)
    assert driver.runtime.logits.shape == (0, 320)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn tuned": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_past_the_original_length(tmp_path: Path, rope: str) -> None:
    model = family(tmp_path, "llama", rope_parameters={**ROPES[rope], "rope_theta": 10000.0})
    close(load(model).run(IDS, decode_from=290), reference_logits(model, IDS))


def test_partial_rotation(tmp_path: Path) -> None:
    """transformers' Llama can't, its Phi-3 can: the same decoder with fused projections."""
    from transformers import AutoModelForCausalLM, Phi3Config

    model = tiny(tmp_path, partial_rotary_factor=0.5)
    tensors = open_checkpoint(model).tensors
    state = {name: torch.from_numpy(tensor.to_float32()) for name, tensor in tensors.items()}
    for layer in range(2):
        for part, whole in (
            (["q_proj", "k_proj", "v_proj"], "self_attn.qkv_proj"),
            (["gate_proj", "up_proj"], "mlp.gate_up_proj"),
        ):
            prefix = f"model.layers.{layer}."
            folder = whole.split(".")[0]
            rows = [state.pop(f"{prefix}{folder}.{name}.weight") for name in part]
            state[f"{prefix}{whole}.weight"] = torch.cat(rows)
    config = Phi3Config(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
        pad_token_id=0,
    )
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    reference.load_state_dict(state)
    ids = [i % 261 for i in IDS[:60]]
    close(load(model).run(ids, decode_from=50), model_logits(reference, ids))


# ---- other shapes and settings of the families


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gemma3", {"final_logit_softcapping": 5.0, "attention_bias": True}),
        ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),  # the pattern: every 6th full
        ("gemma3", {"sliding_window": 5}),
    ],
    ids=str,
)
def test_settings(tmp_path: Path, name: str, overrides: dict[str, Any]) -> None:
    model = family(tmp_path, name, **overrides)
    ids = IDS[:70]
    close(load(model).run(ids, chunk=40, decode_from=60), reference_logits(model, ids))


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 192, 256])
def test_head_sizes(tmp_path: Path, head_dim: int) -> None:
    """O30: hidden 64 and 4 heads, but heads of another size."""
    model = family(tmp_path, "llama", head_dim=head_dim)
    ids = IDS[:40]
    close(load(model).run(ids, decode_from=34), reference_logits(model, ids))


def test_soft_capped_attention(tmp_path: Path) -> None:
    """transformers' Gemma 3 keeps attn_logit_softcapping and doesn't apply it, so its Gemma 2
    formula is asked for by hand."""
    from transformers import AutoModelForCausalLM
    from transformers.models.gemma3 import modeling_gemma3

    model = family(tmp_path, "gemma3", attn_logit_softcapping=2.0)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = modeling_gemma3.eager_attention_forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, "softcap": 2.0})

    reference.config._attn_implementation = "eager"
    modeling_gemma3.eager_attention_forward = capped
    try:
        expected = model_logits(reference, IDS[:50])
    finally:
        modeling_gemma3.eager_attention_forward = plain
    assert relative_error(model_logits(reference, IDS[:50]), expected) > 1e-2  # it matters
    close(load(model).run(IDS[:50], decode_from=40), expected)


@pytest.mark.parametrize("different", [False, True])
def test_a_head_beside_a_tied_embedding(tmp_path: Path, different: bool) -> None:
    """O27 (b) and (c): a head that differs is used, as transformers does."""
    model = tiny(tmp_path, tie_word_embeddings=True)
    tensors = {name: t.to_float32() for name, t in open_checkpoint(model).tensors.items()}
    head = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"] = head[::-1].copy() if different else head
    write_safetensors(model / "model.safetensors", tensors)
    ids = [i % 261 for i in IDS[:20]]
    close(load(model).run(ids), reference_logits(model, ids))


# ---- O24: the edge of a sliding window


@pytest.fixture
def one_layer_window(tmp_path: Path) -> Path:
    return tiny(tmp_path, model_type="mistral", sliding_window=8, num_hidden_layers=1)


@pytest.mark.parametrize("length", [7, 8, 9, 40])
@pytest.mark.parametrize("chunk", [1, 4, 16, None])
def test_window_edge(one_layer_window: Path, length: int, chunk: int | None) -> None:
    ids = [i % 261 for i in IDS[: length + 20]]
    logits = load(one_layer_window).run(ids, chunk=chunk, decode_from=length)
    close(logits, reference_logits(one_layer_window, ids))


@pytest.mark.parametrize("chunk", [1, 16, None])
def test_window_reaches_eight_keys(one_layer_window: Path, chunk: int | None) -> None:
    ids = [i % 261 for i in IDS[:40]]

    def last(position: int) -> Float32:
        changed = [*ids]
        changed[position] = (ids[position] + 1) % 261
        return load(one_layer_window).run(changed, chunk=chunk)[-1]

    unchanged = load(one_layer_window).run(ids, chunk=chunk)[-1]
    assert (last(31) == unchanged).all()
    assert (last(32) != unchanged).any()


def test_windows_of_two_layers_add_up(tmp_path: Path) -> None:
    """One layer sees 8 keys; two see 15 tokens."""
    model = tiny(tmp_path, model_type="mistral", sliding_window=8)
    ids = [i % 261 for i in IDS[:40]]
    logits = {
        position: load(model).run([*ids[:position], 5, *ids[position + 1 :]])[-1]
        for position in (24, 25)
    }
    unchanged = load(model).run(ids)[-1]
    assert (logits[24] == unchanged).all()
    assert (logits[25] != unchanged).any()


# ---- O25: one meaning, many spellings


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": None},
        {
            "rope_theta": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ],
    ids=["top", "parameters", "both", "null scaling", "per layer type"],
)
def test_rope_theta_spellings(tmp_path: Path, spelling: dict[str, Any]) -> None:
    ids = [i % 261 for i in IDS[:64]]
    expected = reference_logits(tiny(tmp_path / "plain", rope_theta=1e6), ids)
    logits = load(tiny(tmp_path / "spelled", **spelling)).run(ids)
    assert relative_error(logits, expected) < 1e-5
    assert relative_error(logits, reference_logits(tiny(tmp_path / "10000"), ids)) > 1e-3


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=["type", "rope_type", "parameters"],
)
def test_rope_scaling_spellings(tmp_path: Path, spelling: dict[str, Any]) -> None:
    ids = [i % 261 for i in IDS[:64]]
    model = tiny(tmp_path / "linear", **spelling)
    logits = load(model).run(ids)
    assert relative_error(logits, reference_logits(model, ids)) < 1e-5
    assert relative_error(logits, reference_logits(tiny(tmp_path / "plain"), ids)) > 1e-3


# ---- real models


@pytest.mark.parametrize("path", [smollm2_path, gemma3_path])
def test_real_model(path: Any) -> None:
    checkpoint = open_checkpoint(path())
    vocab = checkpoint.config["vocab_size"]
    ids = np.random.default_rng(5).integers(0, vocab, 36).tolist()
    driver: Driver = load(checkpoint, num_blocks=8, num_threads=2)
    logits = driver.run(ids, chunk=20, decode_from=32)
    close(logits, model_logits(hf_from_checkpoint(checkpoint), ids))
