"""From a config to an engine that is ready to answer: every choice is made and reported here."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.attention.candidates import Selection
from octavo.cache import kv_groups
from octavo.checkpoint import Checkpoint, open_checkpoint, resolve_model
from octavo.config import EngineConfig
from octavo.engine.limits import EngineLimits
from octavo.engine.loop import Engine
from octavo.errors import ConfigError, InsufficientMemoryError
from octavo.frontend import Frontend
from octavo.host import free_memory, granted_cores
from octavo.models.families import spec_from_config
from octavo.models.weights import check_weights
from octavo.runtime.candidates import Choice, Model, choose_runtime, refusal_note
from octavo.runtime.memory import plan_kv
from octavo.sampling_params import SamplingParams
from octavo.text import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from octavo.engine.grammar import GrammarCompiler

MOST_THREADS_A_CORE = 16
_SPIN_COUNT = "200"  # some 10 us: a pause takes 140 cycles on recent CPUs

# generation_config.json's names for what SamplingParams calls otherwise; the rest are equal.
_GENERATION_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class LoadReport:
    """What was loaded and chosen. ``precision`` says what is computed in and what that gives up;
    ``notes`` are sentences for the user, such as what the checkpoint's own settings change;
    ``phases`` are the parts of ``load_seconds``, in order."""

    model: str
    runtime: str
    attention_backend: str  # decode's, and prefill's where that is another
    precision: str
    max_model_len: int
    kv_cache_tokens: int
    load_seconds: float
    phases: dict[str, float]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """Both sides of a loaded model."""

    engine: Engine
    frontend: Frontend
    default_params: SamplingParams
    report: LoadReport


@dataclass(frozen=True)
class TextSide:
    """What a process without the engine needs of a model. ``defaults`` are the sampling parameters
    that the checkpoint's generation_config.json sets."""

    model: str
    frontend: Frontend
    tokenizer: Tokenizer
    vocab_size: int
    defaults: dict[str, Any]


def load_text_side(config: EngineConfig) -> TextSide:
    """The text side alone, for a server whose engine is another process: no weights are read.

    Raises the classes of :mod:`octavo.errors`, see there.
    """
    if config.skip_tokenizer_init:
        raise ConfigError("a server needs the tokenizer; leave out skip_tokenizer_init")
    checkpoint = open_model(config)
    vocab_size = spec_from_config(checkpoint.config).vocab_size
    tokenizer = _load_tokenizer(config, checkpoint)
    return TextSide(
        model=checkpoint.name,
        frontend=Frontend(
            tokenizer, vocab_size=vocab_size, eos_token_ids=tokenizer.eos_ids, seed=config.seed
        ),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        defaults=_generation_defaults(config, checkpoint),
    )


def build_engine(config: EngineConfig, *, with_text: bool = True) -> Loaded:
    """Find, check, plan, load, in this order: what can't work is refused before weights are read.
    Without text, for a process that is given ids, the tokenizer is loaded once a structured output
    needs it.

    Raises the classes of :mod:`octavo.errors`, see there.
    """
    laps = [("", time.monotonic())]

    def lap(phase: str) -> None:
        laps.append((phase, time.monotonic()))

    checkpoint = open_model(config)
    model = describe_model(config, checkpoint)
    spec, groups = model.spec, model.groups
    if model.device == "cuda" and not config.enforce_eager:
        from octavo.runtime.cuda_early import begin

        begin(model)
    choice = choose_runtime(model)
    lap("open")
    # torch's OpenMP threads spin while they wait. Beside any other busy program that ruins both
    # (1.3 tok/s against 14), so they sleep soon; it has to be said before torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    with ThreadPoolExecutor(1) as beside:  # both take a second
        finding = beside.submit(_find_tokenizer, config, checkpoint) if with_text else None
        max_model_len, num_blocks, length_note = _plan_blocks(model, choice)
        lap("plan")
        import_module(f"octavo.runtime.{choice.runtime.name}")
        lap("runtime import")
        tokenizer, tokenizer_note = (None, None) if finding is None else finding.result()
        lap("tokenizer")
    params, params_note = _default_params(config, checkpoint)
    notes = [
        refusal_note(model, choice),
        choice.runtime.note(model),
        length_note,
        _threads_note(model),
        tokenizer_note,
        params_note,
    ]
    model = replace(model, config=replace(config, max_model_len=max_model_len))
    runtime, num_blocks = choice.runtime.load(model, choice.selections, num_blocks, lap)
    limits = _limits(model, max_model_len, num_blocks)

    def grammars() -> GrammarCompiler:
        from octavo.engine.grammar import GrammarCompiler  # 30 ms

        return GrammarCompiler(tokenizer or _load_tokenizer(config, checkpoint), spec.vocab_size)

    has_tokenizer = tokenizer is not None or not with_text
    engine = Engine(runtime, groups, limits, grammars if has_tokenizer else None)
    if engine.max_total_tokens < max_model_len:
        notes.append(
            f"the KV blocks hold {engine.max_total_tokens} tokens: a request ends there, not at "
            f"max_model_len {max_model_len}"
        )
    frontend = Frontend(
        tokenizer,
        vocab_size=spec.vocab_size,
        eos_token_ids=_eos_token_ids(checkpoint) if tokenizer is None else tokenizer.eos_ids,
        seed=config.seed,
    )
    lap("engine")
    report = LoadReport(
        model=checkpoint.name,
        runtime=choice.runtime.name,
        attention_backend=_attention_name(choice.selections[0]),
        precision=choice.runtime.precision(model, choice.kv_dtype),
        max_model_len=max_model_len,
        kv_cache_tokens=num_blocks[0] * config.block_size,
        load_seconds=laps[-1][1] - laps[0][1],
        phases={phase: end - start for (_, start), (phase, end) in pairwise(laps)},
        notes=tuple(note for note in notes if note),
    )
    return Loaded(engine, frontend, params, report)


def _threads_note(model: Model) -> str | None:
    """A sentence on threads that can't all run at once: each step waits for the last of them."""
    threads, cores = model.config.threads or 1, granted_cores()
    if model.device != "cpu" or threads <= cores:
        return None
    return (
        f"threads is {threads}, but cores are {cores}: those without one hold up all; leave it out"
    )


def check_plan(config: EngineConfig) -> None:
    """Raise what :func:`build_engine` would raise before it reads weights, for a process that is
    about to start another for it. On a GPU only torch knows how much memory is free, and importing
    that takes as long as finding it out there.
    """
    model = describe_model(config, open_model(config))
    choice = choose_runtime(model)
    if model.device == "cpu":
        _plan_blocks(model, choice)


def open_model(config: EngineConfig) -> Checkpoint:
    """The checkpoint that the config names, opened: described, its weights not yet read."""
    real = config.load_format == "auto"
    path = resolve_model(config.model, revision=config.revision, with_weights=real)
    known_by_name = config.model is not None and not Path(config.model).exists()
    return open_checkpoint(path, config.model if known_by_name else None, with_weights=real)


def describe_model(config: EngineConfig, checkpoint: Checkpoint) -> Model:
    """What a runtime is asked for; the weights are held against the config."""
    spec = spec_from_config(checkpoint.config)
    real = config.load_format == "auto"
    device = choose_device(config)
    if device == "cpu":
        _check_threads(config.threads or 1, granted_cores())
    if real:
        spec = check_weights(spec, checkpoint)
    return Model(
        spec=spec,
        checkpoint=checkpoint if real else None,
        groups=kv_groups(spec),
        config=config,
        device=device,
    )


def _check_threads(threads: int, cores: int) -> None:
    """ConfigError for threads that would never end: every step is handed from thread to thread some
    200 times, so that 64 on 2 cores write 3 tokens a second."""
    most = MOST_THREADS_A_CORE * cores
    if threads > most:
        raise ConfigError(
            f"threads is {threads}, but cores are {cores}: it must be at most {most}, and is best "
            "left out"
        )


def choose_device(config: EngineConfig) -> str:
    """The device to run on; auto is the GPU where NVIDIA's driver is loaded: torch isn't asked."""
    if config.device == "cpu" or not Path("/proc/driver/nvidia/version").exists():
        if config.device == "cuda":
            raise ConfigError("device is cuda, but there is no NVIDIA GPU here; use device cpu")
        return "cpu"
    return "cuda"


def _plan_blocks(model: Model, choice: Choice) -> tuple[int, tuple[int, ...], str | None]:
    """The longest request, each KV group's number of blocks, and a note where the model's own
    limit had to be lowered."""
    config, groups = model.config, model.groups
    own_limit = model.spec.max_position
    max_model_len = config.max_model_len or own_limit
    if max_model_len > own_limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model's positions end at {own_limit}; "
            f"set it to at most {own_limit}"
        )
    if config.num_gpu_blocks_override is not None:
        return max_model_len, (config.num_gpu_blocks_override,) * len(groups), None

    def plan(length: int) -> tuple[int, ...]:
        return plan_kv(
            model.spec,
            groups,
            [selection.kv_layout(1) for selection in choice.selections],
            block_size=config.block_size,
            weights=choice.runtime.weight_bytes(model),
            dtype=choice.dtype,
            free_bytes=_free_memory(model.device),
            utilization=config.gpu_memory_utilization,
            max_model_len=length,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
            fill=model.device != "cpu",
        )

    try:
        return max_model_len, plan(max_model_len), None
    except InsufficientMemoryError as error:
        if config.max_model_len is not None or not error.fitting_model_len:
            raise
        fitting = error.fitting_model_len
        note = (
            f"max_model_len is {fitting} tokens instead of the model's {own_limit}: memory has no "
            "room for more"
        )
        return fitting, plan(fitting), note


def _limits(model: Model, max_model_len: int, num_blocks: tuple[int, ...]) -> EngineLimits:
    config = model.config
    on_gpu = model.device != "cpu"
    return EngineLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=on_gpu if config.async_scheduling is None else config.async_scheduling,
        deterministic=config.deterministic,
    )


def _free_memory(device: str) -> int:
    if device == "cpu":
        return free_memory()
    from octavo.runtime.eager import free_device_memory

    return free_device_memory(device)


def _find_tokenizer(
    config: EngineConfig, checkpoint: Checkpoint
) -> tuple[Tokenizer | None, str | None]:
    """None where it is to be skipped and, with a note, where random weights come with no text."""
    if config.skip_tokenizer_init:
        return None, None
    nowhere = (
        config.load_format == "dummy"
        and config.tokenizer is None
        and checkpoint.kind == "safetensors"
        and not (checkpoint.path / "tokenizer.json").exists()
    )
    if nowhere:
        return None, f"{checkpoint.path} has no tokenizer.json: token ids in, token ids out"
    return _load_tokenizer(config, checkpoint), None


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    folder = None if config.tokenizer is None else Path(config.tokenizer)
    tokenizer = load_tokenizer(checkpoint, folder)
    if config.chat_template is None:
        return tokenizer
    try:
        template = Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {config.chat_template!r} can't be read ({error}); give a file with a "
            "jinja template"
        ) from error
    return replace(tokenizer, chat_templates={"default": template})


def _default_params(
    config: EngineConfig, checkpoint: Checkpoint
) -> tuple[SamplingParams, str | None]:
    """What requests without parameters get, and a note where the checkpoint changes it."""
    given = _generation_defaults(config, checkpoint)
    if not given:
        return SamplingParams(), None
    changes = ", ".join(f"{name} {value}" for name, value in given.items())
    note = f"the checkpoint's generation_config.json sets the defaults {changes}"
    return SamplingParams(**given), note


def _generation_defaults(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The sampling parameters that generation_config.json sets, by our names."""
    if config.generation_config == "vllm":
        return {}
    return {
        ours: checkpoint.generation_config[theirs]
        for theirs, ours in _GENERATION_NAMES.items()
        if checkpoint.generation_config.get(theirs) is not None
    }


def _eos_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """The ids that end an answer, where there is no tokenizer to ask."""
    found: set[int] = set()
    for source in (checkpoint.config, checkpoint.generation_config):
        ids = source.get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def _attention_name(selection: Selection) -> str:
    names = [selection.few_rows, selection.decode, selection.prefill]
    return " + ".join(dict.fromkeys(name for name in names if name is not None))
