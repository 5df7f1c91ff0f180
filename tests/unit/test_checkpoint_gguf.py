"""GGUF files as checkpoints: config, names, row order, split files, and every kind of damage."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from helpers.gguf_writer import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TINY_LLAMA_KEYS,
    Tensor,
    byte_tokenizer_keys,
    tiny_llama_tensors,
    write_gguf,
    write_tiny_llama_gguf,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.checkpoint import Checkpoint, open_checkpoint, resolve_model, weights_nbytes
from octavo.checkpoint.quants import FORMATS
from octavo.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError


def installed(alias: str) -> Path:
    try:
        return resolve_model(alias)
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def write_tiny(path: Path, keys: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """A tiny Llama in F32 with keys and tensors changed; None takes one away."""
    all_keys = {k: v for k, v in (TINY_LLAMA_KEYS | (keys or {})).items() if v is not None}
    all_tensors = {k: v for k, v in (tiny_llama_tensors("F32", 0) | tensors).items() if v}
    write_gguf(path, "llama", all_keys, all_tensors)
    return path


def write_qwen(path: Path, arch: str, **keys: Any) -> Path:
    renamed = {key.replace("llama.", f"{arch}."): value for key, value in TINY_LLAMA_KEYS.items()}
    renamed = renamed | {f"{arch}.{key}": value for key, value in keys.items()}
    write_gguf(path, arch, renamed, tiny_llama_tensors("F32", 0))
    return path


def open_tiny(tmp_path: Path, keys: dict[str, Any] | None = None, **tensors: Any) -> Checkpoint:
    return open_checkpoint(write_tiny(tmp_path / "tiny.gguf", keys, **tensors))


# ---- What a sound file says


@pytest.mark.alone
def test_smollm2() -> None:
    path = installed("smollm2-135m")
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    assert time.perf_counter() - start < 0.5  # 0.04 s on the machine it was written on
    config = checkpoint.config
    assert checkpoint.kind == "gguf"
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
    assert not checkpoint.norms_include_one
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 100000.0}},
    }
    assert expected.items() <= config.items()
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    assert len(checkpoint.tensors) == 272
    assert sum(int(np.prod(t.shape)) for t in checkpoint.tensors.values()) == 134_515_008
    assert 0 <= path.stat().st_size - weights_nbytes(checkpoint) < 2_000_000  # header, vocabulary
    assert checkpoint.tensors["model.layers.29.mlp.down_proj.weight"].shape == (576, 1536)
    assert checkpoint.metadata is not None
    assert checkpoint.metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert len(checkpoint.metadata["tokenizer.ggml.merges"]) == 48900


def test_gemma3() -> None:
    checkpoint = open_checkpoint(installed("gemma3-270m"))
    assert checkpoint.norms_include_one
    config = checkpoint.config
    expected = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    assert expected.items() <= config.items()
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]
    layer = {name for name in checkpoint.tensors if name.startswith("model.layers.0.")}
    assert layer == {
        f"model.layers.0.{stem}.weight"
        for stem in (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }


@pytest.mark.parametrize("format", FORMATS)
def test_tiny_llama_in_every_format(format: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama_gguf(path, format, seed=7)
    checkpoint = open_checkpoint(path, name="tiny")
    assert checkpoint.name == "tiny"
    assert checkpoint.generation_config["eos_token_id"] == [257, 259]  # </s>, <|im_end|>
    assert not checkpoint.config["tie_word_embeddings"]
    stored = tiny_llama_tensors(format, seed=7)
    head = checkpoint.tensors["lm_head.weight"]
    assert head.format == format
    blocks = stored["output.weight"][0]
    expected = gguf.quants.dequantize(blocks, GgmlType[format]) if format != "F16" else blocks
    np.testing.assert_array_equal(head.to_float32(), expected.astype(np.float32))
    norm = checkpoint.tensors["model.norm.weight"]
    np.testing.assert_array_equal(norm.to_float32(), stored["output_norm.weight"][0])
    assert norm.data.shape == (1, 4 * HIDDEN)


# ---- O28: the rows of q and k


def converter_order(weights: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to q and k of a Llama."""
    rows = weights.shape[0]
    halves = weights.reshape(num_heads, 2, rows // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def test_the_order_of_a_head_of_eight(tmp_path: Path) -> None:
    """The case's own numbers: file row i holds Hugging Face's row [0, 4, 1, 5, 2, 6, 3, 7][i]."""
    keys = {
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 16,
        "llama.rope.dimension_count": 8,
    }
    head = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    rows = np.concatenate([head + 8 * i for i in range(32)]).astype(np.float32)
    weights = np.repeat(rows[:, None], HIDDEN, axis=1)
    tensors: dict[str, Tensor] = {
        "blk.0.attn_q.weight": (weights, "F32"),
        "blk.0.attn_k.weight": (weights[:128], "F32"),
        "blk.0.attn_q.bias": (rows, "F32"),
        "blk.0.attn_k.bias": (rows[:128].astype(np.float16), "F16"),
        "blk.0.attn_v.bias": (rows[:128], "F32"),
    }
    checkpoint = open_tiny(tmp_path, keys, **tensors)
    for name, count in (("q_proj", 256), ("k_proj", 128)):
        for kind in ("weight", "bias"):
            tensor = checkpoint.tensors[f"model.layers.0.self_attn.{name}.{kind}"]
            column = tensor.to_float32().reshape(count, -1)[:, 0]
            np.testing.assert_array_equal(column, np.arange(count))
    v_bias = checkpoint.tensors["model.layers.0.self_attn.v_proj.bias"]
    np.testing.assert_array_equal(v_bias.to_float32(), rows[:128])
    assert checkpoint.config["attention_bias"]


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_rows_are_moved_whole_in_every_format(format: str, tmp_path: Path) -> None:
    ours = tiny_llama_tensors(format, seed=3)
    stored = dict(ours)
    for name, heads in (("blk.0.attn_q.weight", HEADS), ("blk.0.attn_k.weight", KV_HEADS)):
        stored[name] = converter_order(ours[name][0], heads), format
    path = tmp_path / "permuted.gguf"
    write_gguf(path, "llama", TINY_LLAMA_KEYS, stored)
    tensors = open_checkpoint(path).tensors
    for name, gguf_name in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v")):
        tensor = tensors[f"model.layers.0.self_attn.{name}.weight"]
        blocks = ours[f"blk.0.{gguf_name}.weight"][0]
        np.testing.assert_array_equal(tensor.data, blocks.view(np.uint8))
        expected = blocks if format == "F16" else gguf.quants.dequantize(blocks, GgmlType[format])
        np.testing.assert_array_equal(tensor.to_float32(), expected.astype(np.float32))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_stay(arch: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_qwen(tmp_path / "qwen.gguf", arch))
    assert checkpoint.config["model_type"] == arch
    q = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert q.row_order is None
    stored = tiny_llama_tensors("F32", 0)["blk.0.attn_q.weight"][0]
    np.testing.assert_array_equal(q.to_float32(), stored)
    assert np.shares_memory(q.data, q.stored)


# ---- Config


def test_head_dim_from_key_length(tmp_path: Path) -> None:
    keys = {"attention.key_length": 128, "attention.value_length": 128}
    path = write_qwen(tmp_path / "q.gguf", "qwen3", **keys, **{"rope.dimension_count": 128})
    assert open_checkpoint(path).config["head_dim"] == 128


def test_absent_kv_heads_mean_heads(tmp_path: Path) -> None:
    tensors = tiny_llama_tensors("F32", 0)
    wide = {
        f"blk.{i}.attn_{x}.weight": tensors[f"blk.{i}.attn_q.weight"] for i in (0, 1) for x in "kv"
    }
    checkpoint = open_tiny(tmp_path, {"llama.attention.head_count_kv": None}, **wide)
    assert checkpoint.config["num_key_value_heads"] == HEADS


def test_one_value_per_layer(tmp_path: Path) -> None:
    config = open_tiny(tmp_path, {"llama.attention.head_count_kv": [2, 2]}).config
    assert config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModelError, match="head_count_kv varies from layer to layer"):
        open_tiny(tmp_path, {"llama.attention.head_count_kv": [2, 1]})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"scaling.type": "none"}, {"rope_type": "default"}),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2}),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 512,
                "scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 2048,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_scaling(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    prefixed = {f"llama.rope.{key}": value for key, value in keys.items()}
    prefixed["llama.rope.freq_base"] = 5e5
    rope = open_tiny(tmp_path, prefixed).config["rope_parameters"]
    assert rope == {"full_attention": expected | {"rope_theta": 5e5}}


def test_gemma3_scales_only_its_global_rope(tmp_path: Path) -> None:
    keys = {
        "attention.sliding_window": 8,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "rope.freq_base": 1e6,
    }
    config = open_checkpoint(write_qwen(tmp_path / "g.gguf", "gemma3", **keys)).config
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert config["layer_types"] == ["sliding_attention"] * 2


def llama3_divisors(theta: float, factor: float) -> NDArray[np.float32]:
    """As llama.cpp's converter writes rope_freqs, term by term."""
    divisors = []
    for i in range(0, HEAD_DIM, 2):
        frequency = 1.0 / theta ** (i / HEAD_DIM)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_of_llama3(factor: float, tmp_path: Path) -> None:
    freqs = llama3_divisors(5e5, factor), "F32"
    keys = {"llama.rope.freq_base": 5e5}
    checkpoint = open_tiny(tmp_path, keys, **{"rope_freqs.weight": freqs})
    assert checkpoint.config["rope_parameters"]["full_attention"] == {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.tensors)


def test_other_rope_freqs_are_refused(tmp_path: Path) -> None:
    freqs = llama3_divisors(5e5, 8.0)
    freqs[20] *= 1.001
    keys = {"llama.rope.freq_base": 5e5}
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight .* not those of Llama 3"):
        open_tiny(tmp_path, keys, **{"rope_freqs.weight": (freqs, "F32")})
    ones = np.ones(HEAD_DIM // 2, np.float32), "F32"
    rope = open_tiny(tmp_path, keys, **{"rope_freqs.weight": ones}).config["rope_parameters"]
    assert rope["full_attention"]["rope_type"] == "default"


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    config = open_tiny(tmp_path, {"llama.attention.sliding_window": 8}).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 8)


def test_recommended_sampling(tmp_path: Path) -> None:
    keys = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.eot_token_id": 259,
    }
    assert open_tiny(tmp_path, keys).generation_config == {
        "eos_token_id": [257, 259],
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }


# ---- Refused by name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.type": "adapter"}, "type 'adapter', not a model"),
        ({"general.type": "mmproj"}, "type 'mmproj'"),
        ({"general.quantization_version": 1}, "quantization_version is 1"),
        ({"llama.expert_count": 8}, r"llama\.expert_count"),
        ({"llama.attention.scale": 0.1}, r"llama\.attention\.scale"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
        ({"llama.rope.dimension_count": 32}, "dimension_count is 32"),
        ({"llama.attention.value_length": 32}, "64 for keys and 32 for values"),
    ],
)
def test_refused_keys(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_tiny(tmp_path, keys)


def test_a_dense_model_may_say_it_has_no_experts(tmp_path: Path) -> None:
    open_tiny(tmp_path, {"llama.expert_count": 0, "llama.expert_used_count": 0})


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported.*llama, qwen2"):
        open_checkpoint(write_qwen(tmp_path / "m.gguf", "mamba"))


def test_unknown_tensors(tmp_path: Path) -> None:
    extra = np.ones(4, np.float32), "F32"
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_sinks\.weight, mystery"):
        open_tiny(tmp_path, **{"blk.0.attn_sinks.weight": extra, "mystery": extra})


@pytest.mark.parametrize("format", ["Q2_K", "Q3_K", "IQ4_XS", "IQ2_XXS", "TQ1_0", "MXFP4"])
def test_unsupported_formats(format: str, tmp_path: Path) -> None:
    row = np.zeros((4, gguf.GGML_QUANT_SIZES[GgmlType[format]][1]), np.uint8)
    with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.ffn_up\.weight is {format};"):
        open_tiny(tmp_path, **{"blk.0.ffn_up.weight": (row, format)})


def test_a_missing_key_and_a_wrong_type_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llama\.block_count is absent"):
        open_tiny(tmp_path, {"llama.block_count": None})
    with pytest.raises(CheckpointError, match=r"block_count is 4000000000, but the file holds 21"):
        open_tiny(tmp_path, {"llama.block_count": 4_000_000_000})
    with pytest.raises(CheckpointError, match=r"llama\.block_count is 'two'; int is expected"):
        open_tiny(tmp_path, {"llama.block_count": "two"})
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.eos_token_id is 'x'; int"):
        open_tiny(tmp_path, {"tokenizer.ggml.eos_token_id": "x"})
    with pytest.raises(CheckpointError, match=r"no tensor token_embd\.weight"):
        open_tiny(tmp_path, **{"token_embd.weight": None})


def test_q_rows_that_are_no_heads(tmp_path: Path) -> None:
    wrong = np.zeros((192, HIDDEN), np.float32), "F32"
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight has 192 rows.*4 heads"):
        open_tiny(tmp_path, **{"blk.0.attn_q.weight": wrong})


# ---- Split files


def write_parts(folder: Path, count: int = 3) -> list[Path]:
    """As llama.cpp's gguf-split writes them: the first part alone has the metadata."""
    tensors = list(tiny_llama_tensors("F16", 5).items())
    paths = []
    for number in range(count):
        path = folder / f"tiny-{number + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        keys = TINY_LLAMA_KEYS if number == 0 else {}
        for key, value in keys.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        for name, (array, _) in tensors[number::count]:
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_split_file_from_any_part(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    whole = tiny_llama_tensors("F16", 5)
    for path in [tmp_path, *parts]:
        assert resolve_model(str(path)) == parts[0]
        checkpoint = open_checkpoint(path if path.is_file() else parts[0])
        assert len(checkpoint.tensors) == len(whole)
    head = checkpoint.tensors["lm_head.weight"].to_float32()
    np.testing.assert_array_equal(head, tiny_llama_tensors("F16", 5)["output.weight"][0])


def test_split_file_damage(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    parts[1].rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"missing: tiny-00002-of-00003\.gguf"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003\.gguf should be split.no 1"):
        open_checkpoint(parts[0])
    (tmp_path / "kept").rename(parts[1])
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts, but its name"):
        open_checkpoint(renamed)


# ---- Damage


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    keys = TINY_LLAMA_KEYS | byte_tokenizer_keys()
    write_gguf(path, "llama", keys, tiny_llama_tensors("Q4_K", 0))
    return path.read_bytes()


def open_bytes(tmp_path: Path, raw: bytes) -> Checkpoint:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    return open_checkpoint(path)


def header(version: int = 3, tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = struct.pack("<Q", 2**63)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "empty"),
        (b"GG", "the magic number"),
        (b"ggjt" + bytes(60), "not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF\x03\x00", "the version"),
        (header(keys=2**63), "metadata key 0"),
        (header(tensors=2**63), "tensor 0 of"),
        (header(keys=1, body=HUGE), "the name of metadata key 0"),
        (header(keys=1, body=text("k") + struct.pack("<I", 8) + HUGE), "k needs"),
        (header(keys=1, body=text("k") + struct.pack("<II", 9, 4) + HUGE), "k claims"),
        (header(keys=1, body=text("k") + struct.pack("<IIQ", 9, 4, 2**24)), "k needs 67108864"),
        (header(keys=1, body=text("k") + struct.pack("<IIQ", 9, 8, 2**24)), "string 0 of k"),
        (header(keys=1, body=text("k") + struct.pack("<IIQ", 9, 8, 2) + HUGE), "string 0 of k"),
        (header(keys=1, body=text("k") + struct.pack("<IIQ", 9, 9, 1)), "unknown value type 9"),
        (header(keys=1, body=text("k") + struct.pack("<I", 77)), "k has the unknown value type 77"),
        (header(keys=1, body=struct.pack("<Q", 1) + b"\xff"), "not UTF-8"),
        (header(keys=2, body=(text("k") + struct.pack("<IB", 7, 1)) * 2), "k occurs twice"),
        (header(tensors=1, body=text("t") + struct.pack("<I", 9)), "t has 9 dimensions"),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 0, 0, 0)), r"shape \[0\]"),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 8, 0, 5)), "begins at 5"),
        (
            header(tensors=1, body=text("t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)),
            "tensor t needs bytes",
        ),
        (header(tensors=1, body=text("t") + struct.pack("<IQIQ", 1, 9, 2, 0)), "9 columns"),
        (
            header(keys=1, body=text("general.alignment") + struct.pack("<II", 4, 24)),
            "no power of two",
        ),
    ],
)
def test_hostile_files(raw: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_bytes(tmp_path, raw)


def test_versions_and_byte_order(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="version 1; 2 and 3 are read"):
        open_bytes(tmp_path, header(version=1))
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        open_bytes(tmp_path, header(version=3 << 24))


def test_version_2_is_read(tiny_bytes: bytes, tmp_path: Path) -> None:
    assert open_bytes(tmp_path, b"GGUF\x02" + tiny_bytes[5:]).config["hidden_size"] == HIDDEN


def test_overlapping_tensors(tmp_path: Path) -> None:
    entry = struct.pack("<IQIQ", 1, 64, 0, 0)
    raw = header(tensors=2, body=text("a") + entry + text("b") + entry) + bytes(400)
    with pytest.raises(CheckpointError, match="tensors a and b overlap"):
        open_bytes(tmp_path, raw)


def test_a_truncated_file_names_the_tensor(tiny_bytes: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"truncated: tensor output\.weight needs bytes"):
        open_bytes(tmp_path, tiny_bytes[:-100])


@settings(deadline=None, max_examples=60)
@given(length=st.integers(0, 20_000))
def test_any_truncation_is_a_checkpoint_error(
    length: int, tiny_bytes: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(CheckpointError):
        open_bytes(tmp_path_factory.getbasetemp(), tiny_bytes[:length])


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_flipped_byte_of_the_header_is_an_error_or_harmless(
    data: st.DataObject, tiny_bytes: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(tiny_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 12_000))] = data.draw(st.integers(0, 255))
    try:
        checkpoint = open_bytes(tmp_path_factory.getbasetemp(), bytes(raw))
    except (CheckpointError, UnsupportedModelError):
        return
    for tensor in checkpoint.tensors.values():
        assert tensor.to_float32().shape == tensor.shape
