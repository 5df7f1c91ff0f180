"""Who carries a model out: an ordered list of runtimes, and a reason for every verdict.

The first that accepts the model serves; ``eager`` is last and takes any. The runtime decides what
is computed in, and so what attention is asked for. A candidate is light: it imports its runtime,
and torch or numba with it, when it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from octavo.attention.candidates import Selection, Verdict, select
from octavo.attention.spec import AttentionSpec, Phase, Support
from octavo.cache.groups import KVGroup
from octavo.checkpoint import Checkpoint, weights_nbytes
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.host import granted_cores
from octavo.models.spec import DecoderSpec
from octavo.models.weights import EMBED, layer_weights, num_parameters
from octavo.runtime import Runtime
from octavo.runtime.fused_limits import refusal as fused_refusal
from octavo.runtime.memory import DTYPE_BYTES, weight_bytes, widening_note

FLOAT_FORMATS = frozenset({"F32", "F16", "BF16"})
INT8_GROUP = 32  # columns that share a scale of the activations


@dataclass(frozen=True)
class Model:
    """What a runtime is asked to carry out, and where. Without a checkpoint (``load_format
    dummy``) its weights are random."""

    spec: DecoderSpec
    checkpoint: Checkpoint | None
    groups: Sequence[KVGroup]
    config: EngineConfig
    device: str

    @property
    def num_threads(self) -> int:
        """Threads to compute with on a CPU."""
        return self.config.threads or granted_cores()


class RuntimeCandidate(Protocol):
    """A runtime that may serve. ``attention`` names the attention candidates that it can call;
    None is any."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str | None:
        """The kind of device that it is made for; None is any."""

    @property
    def attention(self) -> frozenset[str] | None: ...

    def supports(self, model: Model) -> Support:
        """Whether it can carry the model out, as far as that doesn't hang on attention."""

    def dtypes(self, model: Model) -> tuple[str, str]:
        """What activations and what keys and values are in; for a model that it supports."""

    def weight_bytes(self, model: Model) -> int:
        """What the weights take once loaded."""

    def embed_bytes(self, model: Model) -> int:
        """What of it the embedding takes, of which a token reads one row."""

    def matmul_dtype(self, model: Model) -> str:
        """What most products are made in: "int8" where activations are quantised."""

    def precision(self, model: Model, kv_dtype: str) -> str:
        """What is computed in, and what of the checkpoint's precision is given up: a phrase."""

    def note(self, model: Model) -> str | None:
        """A sentence for the user about what loading costs, if there is something to tell."""

    def load(
        self,
        model: Model,
        selections: Sequence[Selection],
        num_blocks: tuple[int, ...],
        lap: Callable[[str], None],
    ) -> tuple[Runtime, tuple[int, ...]]:
        """Read the weights, allocate the pools: the runtime, and the blocks of each KV group that
        it has. ``num_blocks`` is what was planned; one that measures may have other numbers.
        ``lap`` is told of the end of each part that takes its time."""


@dataclass(frozen=True)
class Choice:
    """The runtime that serves, what it computes in, each KV group's attention candidates, and the
    verdict on every runtime, in order."""

    runtime: RuntimeCandidate
    dtype: str
    kv_dtype: str
    selections: Sequence[Selection]
    verdicts: Sequence[Verdict]


class EagerCandidate:
    """torch, op by op: any spec on any device."""

    name: str = "eager"
    device: str | None = None
    attention: frozenset[str] | None = None

    def supports(self, model: Model) -> Support:
        if model.config.deterministic:
            return Support(False, "has the library's products, whose sums depend on the batch")
        return self._holds(model)

    def _holds(self, model: Model) -> Support:
        quantization, kv_dtype = model.config.quantization, model.config.kv_cache_dtype
        if quantization is not None:
            return Support(False, f"doesn't quantise weights at load (quantization {quantization})")
        if kv_dtype == "int8":
            return Support(False, f"stores no {kv_dtype} keys and values")
        return Support(True)

    def dtypes(self, model: Model) -> tuple[str, str]:
        config = model.config
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if config.exact or model.device == "cpu" else "bfloat16"
        return dtype, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype

    def weight_bytes(self, model: Model) -> int:
        return weight_bytes(model.spec, self.dtypes(model)[0])

    def embed_bytes(self, model: Model) -> int:
        spec = model.spec
        return spec.vocab_size * spec.hidden_size * DTYPE_BYTES[self.dtypes(model)[0]]

    def matmul_dtype(self, model: Model) -> str:
        return self.dtypes(model)[0]

    def precision(self, model: Model, kv_dtype: str) -> str:
        if model.config.exact:
            return "float32 (exact)"
        dtype, rounded = self.dtypes(model)[0], []
        if dtype != "float32":
            rounded.append(f"weights and activations rounded to {dtype}")
        if kv_dtype != "float32":
            rounded.append(f"KV rounded to {kv_dtype}")
        return f"{dtype} ({', '.join(rounded)})" if rounded else dtype

    def note(self, model: Model) -> str | None:
        if model.checkpoint is None:
            return None
        return widening_note(model.spec, model.checkpoint, self.dtypes(model)[0])

    def load(
        self,
        model: Model,
        selections: Sequence[Selection],
        num_blocks: tuple[int, ...],
        lap: Callable[[str], None],
    ) -> tuple[Runtime, tuple[int, ...]]:
        from octavo.runtime.eager import load_eager

        runtime = load_eager(
            model.spec,
            model.checkpoint,
            model.groups,
            selections,
            num_blocks,
            device=model.device,
            dtype=self.dtypes(model)[0],
            num_threads=model.num_threads,
        )
        lap("weights")
        return runtime, num_blocks


class CudaCandidate(EagerCandidate):
    """CUDA graphs and kernels of our own, for any spec on an NVIDIA GPU."""

    name = "cuda"
    device = "cuda"

    def supports(self, model: Model) -> Support:
        return self._holds(model)

    def load(
        self,
        model: Model,
        selections: Sequence[Selection],
        num_blocks: tuple[int, ...],
        lap: Callable[[str], None],
    ) -> tuple[Runtime, tuple[int, ...]]:
        from octavo.runtime.cuda_load import load_cuda

        return load_cuda(model, self.dtypes(model)[0], selections, num_blocks, lap)


class CpuCandidate:
    """Compiled ops on the cores of a CPU, without torch."""

    name = "cpu"
    device = "cpu"
    attention = frozenset({"cpu"})

    def supports(self, model: Model) -> Support:
        config = model.config
        if config.dtype not in ("auto", "float32"):
            return Support(False, f"computes in float32, not in {config.dtype}")
        problem = _unquantisable(model) if config.quantization == "int8" else _ungated(model)
        return Support(not problem, problem)

    def dtypes(self, model: Model) -> tuple[str, str]:
        config = model.config
        if config.kv_cache_dtype != "auto":
            return "float32", config.kv_cache_dtype
        return "float32", "float32" if config.exact else "bfloat16"

    def weight_bytes(self, model: Model) -> int:
        if model.config.quantization == "int8":
            return num_parameters(model.spec)
        if model.checkpoint is None:
            return weight_bytes(model.spec, "bfloat16")
        return weights_nbytes(model.checkpoint)

    def embed_bytes(self, model: Model) -> int:
        if model.config.quantization is None and model.checkpoint is not None:
            return model.checkpoint.tensors[EMBED].nbytes
        width = 1 if model.config.quantization == "int8" else DTYPE_BYTES["bfloat16"]
        return model.spec.vocab_size * model.spec.hidden_size * width

    def matmul_dtype(self, model: Model) -> str:
        exact = model.config.exact or _weight_format(model) in FLOAT_FORMATS
        return "float32" if exact else "int8"

    def precision(self, model: Model, kv_dtype: str) -> str:
        if model.config.exact:
            return "float32 (exact)"
        activations = "8-bit" if self.matmul_dtype(model) == "int8" else "float32"
        return f"{_weight_format(model)} weights, {activations} activations, {kv_dtype} KV"

    def note(self, model: Model) -> str | None:
        return None

    def load(
        self,
        model: Model,
        selections: Sequence[Selection],
        num_blocks: tuple[int, ...],
        lap: Callable[[str], None],
    ) -> tuple[Runtime, tuple[int, ...]]:
        from octavo.runtime.cpu import load_cpu

        runtime = load_cpu(model, selections, num_blocks)
        lap("weights")
        return runtime, num_blocks


# First choice first.
ORDER: tuple[RuntimeCandidate, ...] = (CudaCandidate(), CpuCandidate(), EagerCandidate())


def choose_runtime(model: Model) -> Choice:
    """The first runtime that accepts the model and the attention that can be had for it.

    Raises ConfigError where none does, and what :func:`~octavo.attention.candidates.select` raises
    for the last one.
    """
    if model.config.deterministic and model.device != "cuda":
        raise ConfigError(
            f"deterministic needs an NVIDIA GPU, and the device is {model.device}; leave it out"
        )
    verdicts: list[Verdict] = []
    chosen: tuple[RuntimeCandidate, list[Selection]] | None = None
    for candidate in ORDER:
        # Deterministic, eager is the same kernels without graphs.
        eager = model.config.enforce_eager and not model.config.deterministic
        if eager and candidate.name != "eager":
            verdicts.append(Verdict(candidate.name, "off", "--enforce-eager"))
        elif chosen is not None:
            reason = f"{chosen[0].name} comes first"
            verdicts.append(Verdict(candidate.name, "possible", reason))
        else:
            support, selections = _judge(candidate, model)
            if support.ok:
                chosen = candidate, selections
                verdicts.append(Verdict(candidate.name, "chosen", "the first that can serve"))
            else:
                verdicts.append(Verdict(candidate.name, "refused", support.reason))
    if chosen is None:
        reasons = "; ".join(f"{each.candidate} {each.reason}" for each in verdicts)
        raise ConfigError(f"no runtime can carry this model out: {reasons}")
    runtime, selections = chosen
    return Choice(runtime, *runtime.dtypes(model), selections, verdicts)


def refusal_note(model: Model, choice: Choice) -> str | None:
    """A sentence where a runtime for this device had to leave the model to a slower one."""
    made_for = {candidate.name for candidate in ORDER if candidate.device == model.device}
    refused = [
        f"{verdict.candidate} {verdict.reason}"
        for verdict in choice.verdicts
        if verdict.state == "refused" and verdict.candidate in made_for
    ]
    return f"runtime {choice.runtime.name}: {'; '.join(refused)}" if refused else None


def _judge(candidate: RuntimeCandidate, model: Model) -> tuple[Support, list[Selection]]:
    if candidate.device not in (None, model.device):
        return Support(False, f"runs on {candidate.device}, not on {model.device}"), []
    support = candidate.supports(model)
    if not support.ok:
        return support, []
    dtype, kv_dtype = candidate.dtypes(model)
    try:
        selections = choose_attention(
            model.config,
            model.spec,
            model.groups,
            model.device,
            dtype,
            kv_dtype,
            graph=candidate.name == "cuda",
        )
    except ConfigError as error:
        if candidate is ORDER[-1]:
            raise
        return Support(False, f"has no attention: {error}"), []
    if candidate.attention is not None:
        for selection in selections:
            for phase in ("decode", "prefill"):
                problem = _missing_attention(candidate.attention, selection, phase)
                if problem:
                    return Support(False, problem), []
    return Support(True), selections


def _missing_attention(callable_: frozenset[str], selection: Selection, phase: Phase) -> str:
    """Why a runtime that can call these candidates can't take what was selected, or nothing."""
    chosen = selection.decode if phase == "decode" else selection.prefill
    if chosen in callable_:
        return ""
    reasons = [
        f"{each.candidate} {each.reason}"
        for each in selection.verdicts[phase]
        if each.candidate in callable_
    ]
    return f"can't call {phase} attention {chosen!r} ({'; '.join(reasons)})"


def choose_attention(
    config: EngineConfig,
    spec: DecoderSpec,
    groups: Sequence[KVGroup],
    device: str,
    dtype: str,
    kv_dtype: str,
    *,
    graph: bool = False,
) -> list[Selection]:
    """Each KV group's pair of attention candidates, with every candidate's verdict. ``graph``:
    decode is captured in CUDA graphs. Deterministic, triton's alone don't look at the batch."""
    backend, split_mode = config.attention_backend, config.split_kv
    if config.deterministic:
        backend = "triton"
        split_mode = "fixed" if split_mode == "auto" else split_mode
    no_fused = "is for the cuda runtime's graphs"
    if graph:
        no_fused = fused_refusal(spec, dtype, split_mode)

    def wanted(phase: Phase, group: KVGroup) -> AttentionSpec:
        return AttentionSpec(
            phase=phase,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=config.block_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.head_dim,
            scale=spec.attention_scale,
            window=group.window,
            soft_cap=spec.attention_soft_cap,
            split_mode=split_mode,
            split_tokens=config.split_kv_tokens,
            graph=graph and phase == "decode",
        )

    return [
        select(
            wanted("prefill", group),
            wanted("decode", group),
            backend=backend,
            disabled=config.disable_attention_backend,
            uncallable={"fused": no_fused} if no_fused else None,
        )
        for group in groups
    ]


def _weight_format(model: Model) -> str:
    """What most weights are multiplied in on a CPU."""
    return "int8" if model.config.quantization == "int8" else _main_format(model)


def _main_format(model: Model) -> str:
    """The format that holds most of the model's weights."""
    if model.checkpoint is None:
        return "BF16"
    sizes: dict[str, int] = {}
    for tensor in model.checkpoint.tensors.values():
        sizes[tensor.format] = sizes.get(tensor.format, 0) + prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name])


def _unquantisable(model: Model) -> str:
    """Why a model can't be quantised to int8 at load, or nothing."""
    spec = model.spec
    for width in (spec.hidden_size, spec.q_size, spec.intermediate_size):
        if width % INT8_GROUP:
            return f"quantises to int8 in groups of {INT8_GROUP} columns, the model has {width}"
    if _main_format(model) not in FLOAT_FORMATS:
        return f"doesn't quantise {_main_format(model)} weights again (quantization int8)"
    return ""


def _ungated(model: Model) -> str:
    """Why gate and up can't be one product, or nothing."""
    if model.checkpoint is None:
        return ""
    for layer in range(model.spec.num_layers):
        weights = layer_weights(model.spec, layer)
        gate, up = (model.checkpoint.tensors[weights[role].name] for role in ("gate", "up"))
        if gate.format != up.format:
            return f"needs gate and up in one format; in layer {layer}: {gate.format}, {up.format}"
    return ""
