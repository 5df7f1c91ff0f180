"""Hugging Face folders: safetensors whole and sharded, and every way in which they can be damaged
(case O27, the loader's half)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from octavo.checkpoint import open_checkpoint, resolve_model, weights_nbytes
from octavo.checkpoint.safetensors_file import read_safetensors
from octavo.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "torch_dtype": "float32",
    "rope_theta": 1e6,
}
RNG = np.random.default_rng(0)
A = RNG.normal(size=(6, 8)).astype(np.float32)
B = RNG.normal(size=(5,)).astype(np.float16)
C = RNG.normal(size=(3, 8)).astype(np.float32)


def write_folder(path: Path, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (path / "tokenizer.json").write_text("{}")
    return path


def whole(tmp_path: Path, **config: Any) -> Path:
    folder = write_folder(tmp_path / "model", config)
    save_file({"a": A, "b": B, "c": C}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sharded(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "model")
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"a": A, "b": B}, folder / one)
    save_file({"c": C}, folder / two)
    write_index(folder, {"a": one, "b": one, "c": two})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def raw_file(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, stop: int, dtype: str = "F32", shape: Any = (2, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


# ---- Sound


@pytest.mark.parametrize("make", [whole, sharded])
def test_tensors_come_as_they_were_saved(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path)
    checkpoint = open_checkpoint(resolve_model(str(folder)))
    assert (checkpoint.kind, checkpoint.name) == ("safetensors", "model")
    assert checkpoint.metadata is None
    assert checkpoint.tensors.keys() == {"a", "b", "c"}
    for name, saved, format in (("a", A, "F32"), ("b", B, "F16"), ("c", C, "F32")):
        tensor = checkpoint.tensors[name]
        assert (tensor.shape, tensor.format) == (saved.shape, format)
        np.testing.assert_array_equal(tensor.to_float32(), saved.astype(np.float32))
    assert checkpoint.tensors["a"].data.shape == (6, 32)
    assert checkpoint.tensors["b"].data.shape == (1, 10)
    assert weights_nbytes(checkpoint) == A.nbytes + B.nbytes + C.nbytes
    assert checkpoint.generation_config == {}
    assert checkpoint.config["dtype"] == "float32"
    assert checkpoint.config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6


def test_bfloat16(tmp_path: Path) -> None:
    upper = (C.view(np.uint32) >> 16).astype(np.uint16)
    path = raw_file(
        tmp_path / "x.safetensors", {"w": entry(0, 48, "BF16", [3, 8])}, upper.tobytes()
    )
    widened = read_safetensors(path)["w"].to_float32()
    np.testing.assert_array_equal(widened.view(np.uint32), upper.astype(np.uint32) << 16)


def test_a_mapped_tensor_is_read_only_and_a_widened_one_fresh(tmp_path: Path) -> None:
    tensor = open_checkpoint(whole(tmp_path)).tensors["a"]
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0, 0] = 1
    first, second = tensor.to_float32(), tensor.to_float32()
    first[:] = 0
    np.testing.assert_array_equal(second, A)


def test_generation_config_and_name(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    checkpoint = open_checkpoint(folder, "mine")
    assert (checkpoint.name, checkpoint.generation_config) == ("mine", {"temperature": 0.6})


def test_the_only_file_may_have_any_name(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert len(open_checkpoint(folder).tensors) == 3


def test_the_package_agrees_on_offsets(tmp_path: Path) -> None:
    path = whole(tmp_path) / "model.safetensors"
    ours = read_safetensors(path)
    with safe_open(path, "numpy") as theirs:
        assert set(theirs.keys()) == ours.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name].to_float32(), theirs.get_tensor(name))


# ---- Shards and index


def test_deleted_shard(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = r"model-00002-of-00002\.safetensors is missing; .* places 1 tensors in it, such as c"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": 1, "b": 1, "c": 2, "d": 2},
            r"model-00002-of-00002\.safetensors doesn't hold d, which",
        ),
        ({"a": 1, "c": 2}, r"model-00001-of-00002\.safetensors holds b, which .* doesn't place"),
        ({"a": 1, "b": 2, "c": 2}, r"holds b|doesn't hold b"),
        ({}, "no weight_map"),
        ({"a": "../secret.safetensors"}, "no file name"),
        ({"a": "/etc/passwd"}, "no file name"),
        ({"a": None}, "no file name"),
    ],
)
def test_index_and_shards_disagree(
    weight_map: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = sharded(tmp_path)
    names = {1: "model-00001-of-00002.safetensors", 2: "model-00002-of-00002.safetensors"}
    write_index(folder, {tensor: names.get(shard, shard) for tensor, shard in weight_map.items()})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_shards_without_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no model\.safetensors\."):
        open_checkpoint(folder)


# ---- Damaged files


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"w": entry(0, 16)}, 15, r"tensor w should lie at bytes 0 to 16 .* ends at 15"),
        ({"w": entry(0, 12)}, 16, r"tensor w takes 12 bytes, but F32 \[2, 2\] needs 16"),
        ({"w": entry(-16, 0)}, 16, "tensor w should lie at bytes -16"),
        ({"w": entry(2**62, 2**62 + 16)}, 16, "tensor w should lie"),
        ({"w": entry(0, 16), "v": entry(8, 24)}, 24, "tensors w and v overlap"),
        ({"w": entry(0, 16, shape=[2, -2])}, 16, "tensor w has shape"),
        ({"w": entry(0, 16, shape=[2**40, 2**40])}, 16, "tensor w takes 16 bytes"),
        ({"w": entry(0, 0, shape=[0, 4])}, 16, "tensor w has shape"),
        ({"w": entry(0, 16, shape="22")}, 16, "tensor w has a malformed header entry"),
        ({"w": {"dtype": "F32"}}, 16, "tensor w has a malformed header entry"),
        ({"w": 3}, 16, "tensor w has a malformed header entry"),
        (b'{"w": {}, "w": {}}', 0, "w occurs twice"),
        (b"[1, 2]", 0, "no JSON object"),
        (b"{nonsense", 0, "damaged header"),
        (b'{"w":' + b"[" * 100_000, 0, "damaged header"),
        (b"\xff\xfe", 0, "damaged header"),
    ],
)
def test_damaged_headers(header: Any, size: int, message: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(path)
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"\x01", struct.pack("<Q", 2**63), struct.pack("<Q", 50)])
def test_no_room_for_the_header(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_safetensors(path)


@pytest.mark.parametrize("dtype", ["F64", "I64", "F8_E4M3", "U8", "BOOL"])
def test_other_dtypes_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"w": entry(0, 16, dtype)}, bytes(16))
    with pytest.raises(UnsupportedModelError, match=rf"tensor w is {dtype}; .* F32, F16, BF16"):
        read_safetensors(path)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_truncation_is_named(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    save_file({"a": A, "b": B, "c": C}, path)
    raw = path.read_bytes()
    path.unlink()  # the mapping of an earlier example stays sound
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        read_safetensors(path)


# ---- Refused by name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "method gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "method fp8"),
        ({"quantization_config": {"bits": 4}}, "method not named"),
        ({"compression_config": {"quant_method": "sparseml"}}, "method sparseml"),
        ({"model_type": "gemma3", "text_config": {}}, "multimodal .'gemma3'"),
    ],
)
def test_refused_configs(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(whole(tmp_path, **config))


def test_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": A}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match="adapter"):
        open_checkpoint(tmp_path)


def test_bare_tokenizer_model(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"x")
    assert open_checkpoint(folder).tensors
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model and no tokenizer\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match=rf"{name}.* Nothing is unpickled"):
        open_checkpoint(folder)
    with pytest.raises(UnsupportedModelError, match="Nothing is unpickled"):
        resolve_model(str(folder / name))


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    folder = write_folder(tmp_path / "model")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(folder)
    for text, message in (("{", "not valid JSON"), ("[]", "no JSON object")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)


def test_a_file_of_weights_is_no_model(tmp_path: Path) -> None:
    path = whole(tmp_path) / "model.safetensors"
    with pytest.raises(ModelNotFoundError, match="give its folder"):
        resolve_model(str(path))
