"""A Hugging Face folder: ``config.json``, ``generation_config.json`` and safetensors weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.checkpoint.config import Config, normalize_config
from octavo.checkpoint.safetensors_file import read_safetensors
from octavo.checkpoint.tensor import Checkpoint, WeightTensor
from octavo.errors import CheckpointError, UnsupportedModelError

_INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_folder(path: Path, name: str, *, with_weights: bool = True) -> Checkpoint:
    """Open a folder; the weights are mapped and not yet read, or left out.

    Raises CheckpointError (a file or tensor missing, damaged or contradictory) and
    UnsupportedModelError (quantised, adapter, pickled, multimodal, no ``tokenizer.json``).
    """
    _refuse_by_files(path)
    config = _read_json(path, "config.json")
    _refuse_by_config(config, path)
    generation_config: Config = {}
    if (path / "generation_config.json").exists():
        generation_config = _read_json(path, "generation_config.json")
    return Checkpoint(
        name=name,
        path=path,
        kind="safetensors",
        config=normalize_config(config),
        generation_config=generation_config,
        tensors=_read_weights(path) if with_weights else {},
    )


def _refuse_by_files(path: Path) -> None:
    if (path / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{path} holds an adapter (adapter_config.json), which isn't loaded yet; merge it into "
            "its base model"
        )
    if (path / "tokenizer.model").exists() and not (path / "tokenizer.json").exists():
        raise UnsupportedModelError(
            f"{path} has a tokenizer.model and no tokenizer.json; convert it once with "
            "transformers: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)"
        )


def _refuse_by_config(config: Config, path: Path) -> None:
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(
            f"{path} is quantised (quantization_config, method {method or 'not named'}), which "
            "isn't loaded yet; use a checkpoint in F32, F16 or BF16, or a GGUF"
        )
    if "text_config" in config:
        raise UnsupportedModelError(
            f"{path} is multimodal ({config.get('model_type')!r}, with a text_config), which isn't "
            "loaded yet; use a text-only checkpoint"
        )


def _read_weights(path: Path) -> dict[str, WeightTensor]:
    if (path / SINGLE).exists():  # before an index, as in transformers
        return read_safetensors(path / SINGLE)
    if (path / _INDEX).exists():
        return _read_shards(path)
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if len(found) == 1:
        return read_safetensors(path / found[0])
    if found:
        raise CheckpointError(
            f"{path} holds {len(found)} safetensors files and no {_INDEX} that says which belong "
            "to the model; fetch it"
        )
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise UnsupportedModelError(
            f"{path} holds pickled weights only ({', '.join(pickled[:4])}). Nothing is unpickled, "
            "since that runs code; convert them to safetensors"
        )
    raise CheckpointError(
        f"{path} holds no weights: neither {SINGLE} nor {_INDEX}; load_format dummy makes random "
        "ones"
    )


def _read_shards(path: Path) -> dict[str, WeightTensor]:
    weight_map = _read_json(path, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / _INDEX} has no weight_map")
    listed: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{_INDEX} places {tensor} in {shard!r}, which is no file name")
        listed.setdefault(shard, set()).add(tensor)
    tensors: dict[str, WeightTensor] = {}
    for shard, names in sorted(listed.items()):
        if not (path / shard).exists():
            raise CheckpointError(
                f"{path / shard} is missing; {_INDEX} places {len(names)} tensors in it, such as "
                f"{min(names)}"
            )
        held = read_safetensors(path / shard)
        if absent := sorted(names - held.keys()):
            raise CheckpointError(
                f"{shard} doesn't hold {', '.join(absent[:4])}, which {_INDEX} places in it"
            )
        if extra := sorted(held.keys() - names):
            raise CheckpointError(
                f"{shard} holds {', '.join(extra[:4])}, which {_INDEX} doesn't place in it"
            )
        tensors |= held
    return tensors


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((path / name).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {name}; it is no Hugging Face checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path / name} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path / name} holds no JSON object")
    return value
