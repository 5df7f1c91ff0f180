"""The engine's settings: vLLM's argument names, used alike by ``LLM(...)`` and the command line."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SplitMode = Literal["off", "auto", "fixed"]
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]

DEFAULT_SPLIT_TOKENS = 256  # keys in a segment of ``fixed`` splits


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that can be set about an engine; ``None`` and ``"auto"`` mean: decided at load.

    Raises :class:`ConfigError` on construction where a value is out of range or two contradict.
    """

    model: str | None = None
    """Folder, .gguf file, Hugging Face id, repo:quant or alias; None is the embedded default."""

    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer, instead of the checkpoint's own."""

    revision: str | None = None
    """Branch, tag or commit of a Hugging Face model."""

    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights in the model's real shapes, for measuring speed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""

    dtype: Dtype = "auto"
    """What to compute in; auto is float32 on a CPU and bfloat16 on a GPU."""

    quantization: Literal["int8"] | None = None
    """int8: weights of a checkpoint in F32, F16 or BF16 are rounded to 8 bits at load."""

    kv_cache_dtype: KVDtype = "auto"
    """What keys and values are stored in; auto is the dtype computed in, bfloat16 on a CPU."""

    threads: int | None = None
    """Threads to compute with on a CPU; as many as cores are granted if left out."""

    exact: bool = False
    """Dequantised weights, float32 activations and KV, no TF32."""

    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens; the model's own limit if left out."""

    max_num_seqs: int = 64
    """Most requests that run at once."""

    max_num_batched_tokens: int = 2048
    """Most tokens a step computes; longer prompts are read in chunks."""

    block_size: int = 16
    """Tokens in a block of the KV cache."""

    gpu_memory_utilization: float = 0.9
    """Share of the device's free memory for weights and KV cache."""

    num_gpu_blocks_override: int | None = None
    """KV blocks to use, instead of as many as memory allows."""

    enable_prefix_caching: bool = True
    """Reuse the KV cache of prompts that begin alike."""

    async_scheduling: bool | None = None
    """Launch the next step before the last one's tokens are known; auto: on a GPU only."""

    enforce_eager: bool = False
    """Use the eager runtime, op by op, whatever else is available; with deterministic, the cuda
    runtime without CUDA graphs."""

    attention_backend: str | None = None
    """The attention candidate to use, instead of the first that supports the model."""

    disable_attention_backend: tuple[str, ...] = ()
    """Attention candidates not to use."""

    deterministic: bool = False
    """On a GPU: the same bits for a request alone, in any batch, chunked, cached or preempted."""

    split_kv: SplitMode = "auto"
    """How decode attention cuts the history: auto, off, or fixed (the same in any batch)."""

    split_kv_tokens: int = DEFAULT_SPLIT_TOKENS
    """Length of a segment with split_kv fixed."""

    generation_config: Literal["auto", "vllm"] = "auto"
    """vllm: ignore the sampling defaults of the checkpoint's generation_config.json."""

    chat_template: str | None = None
    """A file with a jinja chat template, instead of the checkpoint's."""

    skip_tokenizer_init: bool = False
    """Token ids in, token ids out."""

    seed: int | None = None
    """Makes requests without a seed of their own reproducible from run to run."""

    def __post_init__(self) -> None:
        for name, low in (
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 1),
            ("num_gpu_blocks_override", 1),
            ("split_kv_tokens", 1),
            ("threads", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} is {value!r}, it must be a whole number")
            if value < low:
                raise ConfigError(f"{name} is {value}, it must be at least {low}")
        for name, hint in get_type_hints(type(self)).items():
            choices = _choices(hint)
            if choices and getattr(self, name) not in choices:
                words = ", ".join(str(choice) for choice in choices)
                raise ConfigError(f"{name} is {getattr(self, name)!r}, it must be one of {words}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {share!r}, it must be a number above 0 and at most 1"
            )
        if self.deterministic and self.attention_backend not in (None, "triton"):
            raise ConfigError(
                "deterministic computes attention with triton, but attention_backend is "
                f"{self.attention_backend}; leave one of them out"
            )
        if self.exact:
            for name in ("dtype", "kv_cache_dtype"):
                value = getattr(self, name)
                if value not in ("auto", "float32"):
                    raise ConfigError(f"exact computes in float32, but {name} is {value}")
            if self.quantization is not None:
                raise ConfigError(
                    f"exact gives nothing up, but quantization is {self.quantization}; "
                    "leave one of them out"
                )


def _choices(hint: Any) -> tuple[Any, ...]:
    """What a field may be, where its type is a Literal, or one that may be left out."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    literals = [kind for kind in get_args(hint) if get_origin(kind) is Literal]
    return (*get_args(literals[0]), None) if literals else ()


def engine_config(model: str | os.PathLike[str] | None, options: dict[str, Any]) -> EngineConfig:
    """The config of ``LLM(model, **options)``, paths as text; an unknown option is a TypeError
    naming it."""
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise TypeError(f"LLM got an unknown argument {name!r}; {hint}")
    for name in ("tokenizer", "chat_template"):
        if isinstance(options.get(name), os.PathLike):
            options = options | {name: os.fspath(options[name])}
    if model is not None and not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model is {model!r:.60}; give a name or a path, or nothing")
    return EngineConfig(model=None if model is None else os.fspath(model), **options)
