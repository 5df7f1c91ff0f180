"""The cpu runtime's logits against transformers in float32: exact, every family and batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import FAMILIES, family, reference_logits, tiny
from helpers.driver import Driver, Float32, Row, load_cpu_runtime, relative_error
from helpers.gguf_writer import write_tiny_llama_gguf

from octavo.kernels.program import PAIR_OF_LINES
from octavo.runtime.cpu_program import floats

TOLERANCE = 1e-5  # of the largest logit: what float32 sums in another order come to
BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 300)
IDS = np.random.default_rng(1).integers(0, 320, 304).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(tmp_path_factory.mktemp(request.param), request.param)


def load(model: Path, **options: Any) -> Driver:
    return load_cpu_runtime(model, exact=True, **options)


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


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gemma3", {"final_logit_softcapping": 5.0, "attention_bias": True}),
        ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),
        ("gemma3", {"sliding_window": 5}),
        ("llama", {"head_dim": 80}),
        ("llama", {"head_dim": 16}),
    ],
    ids=str,
)
def test_settings(tmp_path: Path, name: str, overrides: dict[str, Any]) -> None:
    model = family(tmp_path, name, **overrides)
    ids = IDS[:70]
    close(load(model).run(ids, chunk=40, decode_from=60), reference_logits(model, ids))


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("rope", ROPES)
def test_ropes(tmp_path: Path, rope: str) -> None:
    model = family(tmp_path, "llama", rope_parameters={**ROPES[rope], "rope_theta": 10000.0})
    close(load(model).run(IDS, decode_from=290), reference_logits(model, IDS))


def test_partial_rotation(tmp_path: Path) -> None:
    """Against eager, which is held against transformers' Phi-3."""
    from helpers.driver import load as load_eager

    model = tiny(tmp_path, partial_rotary_factor=0.5)
    ids = [i % 261 for i in IDS[:60]]
    close(load(model).run(ids, decode_from=50), load_eager(model).run(ids, decode_from=50))


# ---- quantised: what 8-bit activations cost, and what they don't depend on

# The largest difference to the dequantised model's logits, relative to the largest of them, of a
# tiny random model: its two layers average little out.
ROUNDING = 0.08


@pytest.fixture(scope="module", params=["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp(request.param) / "tiny.gguf"
    write_tiny_llama_gguf(file, request.param, seed=3)
    return file


def run(model: Path, **options: Any) -> Float32:
    ids = [i % 256 for i in IDS[:90]]
    return load_cpu_runtime(model, **options).run(ids, chunk=40, decode_from=80)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_rounding(quantised: Path, kv_dtype: str) -> None:
    found = run(quantised, kv_cache_dtype=kv_dtype)
    assert relative_error(found, run(quantised, exact=True)) < ROUNDING


def test_int8_weights(model: Path) -> None:
    ids = IDS[:60]
    found = load_cpu_runtime(model, quantization="int8").run(ids, decode_from=50)
    assert 0 < relative_error(found, reference_logits(model, ids)) < ROUNDING


@pytest.mark.parametrize("exact", [False, True])
def test_the_same_bits_with_any_number_of_threads(quantised: Path, exact: bool) -> None:
    options: dict[str, Any] = {"exact": exact, "split_kv": "fixed", "split_kv_tokens": 16}
    expected = run(quantised, num_threads=1, **options)
    for num_threads in (2, 3):
        assert (run(quantised, num_threads=num_threads, **options) == expected).all()


def test_the_same_bits_in_any_batch(quantised: Path) -> None:
    """A row decodes alone and beside others, of which one is in prefill."""
    ids = [i % 256 for i in IDS]
    driver = load_cpu_runtime(quantised, split_kv="fixed", split_kv_tokens=16)
    alone, beside, other, long = (driver.sequence() for _ in range(4))
    driver.step([(alone, ids[:50])])
    driver.step([(beside, ids[:50]), (other, ids[60:70])])
    for i in range(50, 56):
        [expected] = driver.step([(alone, ids[i : i + 1])])
        chunks = [(other, ids[i + 9 : i + 10]), (beside, ids[i : i + 1]), (long, ids[:7])]
        found = driver.step(chunks)
        assert (found[1] == expected).all()


@pytest.mark.parametrize("shape", [(1, 576), (2048, 576), (2048, 9, 64)])
def test_buffers_begin_at_a_cache_line(shape: tuple[int, ...]) -> None:
    """numpy's large arrays begin 16 bytes behind a page."""
    kept = [floats(*shape) for _ in range(4)]
    for array in kept:
        assert array.shape == shape
        assert array.flags.c_contiguous
        assert array.ctypes.data % PAIR_OF_LINES == 0
