"""Which questions are put to a candidate, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from octavo.attention import AttentionSpec, Candidate
from octavo.attention.candidates import ORDER, candidate
from octavo.attention.spec import Phase
from octavo.errors import ConfigError
from octavo.verify.checks import Check, Subject, run_checks
from octavo.verify.faults import Fault, FaultyCandidate
from octavo.verify.soak import soak
from octavo.verify.speed import speed_checks

SHAPES = ((16, 8, 128), (32, 8, 128), (9, 3, 64))  # query heads, KV heads, head size
QUICK_CPU_SHAPES = ((16, 8, 128), (9, 3, 64))
# Dtypes of queries and of keys and values. On a CPU the engine's are float32 but for prefill's with
# 8-bit activations, which may be rounded to bfloat16 (runtime/cpu_program.py).
CPU_DTYPES = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
)
GPU_DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"))


def candidates_for(device: str) -> list[str]:
    """Those that can run on the device, but for the reference, which is what they stand in for."""
    names = dict.fromkeys(name for order in ORDER.values() for name in order)
    return [name for name in names if name != "reference" and specs_for(name, device, quick=True)]


def specs_for(name: str, device: str, *, quick: bool) -> list[AttentionSpec]:
    """The kinds of layers to ask about: each shape in the usual dtypes, and one in others."""
    on_cpu = device == "cpu"
    shapes = QUICK_CPU_SHAPES if on_cpu and quick else SHAPES
    dtypes = CPU_DTYPES if on_cpu else GPU_DTYPES
    wanted = [(shape, dtypes[0]) for shape in shapes]
    if not quick:
        wanted += [(SHAPES[0], dtype) for dtype in dtypes[1:]]
    specs = [
        _spec(phase, device, *shape, *dtype) for phase in _phases(name) for shape, dtype in wanted
    ]
    return [spec for spec in specs if candidate(name).supports(spec).ok]


def verify(
    name: str,
    device: str,
    *,
    quick: bool = False,
    soak_minutes: float = 0.0,
    fault: Fault | None = None,
    model: str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Iterator[Check]:
    """Put all questions to one candidate. With a ``fault`` planted, only whether it is right: that
    is where it must show.

    Raises ConfigError where the candidate can't run on the device, or the fault not be planted.
    """
    specs = specs_for(name, device, quick=quick)
    if not specs:
        reason = candidate(name).supports(
            _spec(_phases(name)[0], device, *SHAPES[0], *GPU_DTYPES[0])
        )
        raise ConfigError(f"{name} can't be verified on {device}: {reason.reason}")
    asked: Candidate = candidate(name)
    if fault is not None:
        _check_fault(asked, specs, fault)
        asked = FaultyCandidate(asked, fault)
    subjects = [Subject(asked, spec, quick) for spec in specs]
    for subject in subjects:
        progress(f"{name}: {subject.spec.phase}")
        yield from run_checks(subject)
    if fault is not None:
        return
    progress(f"{name}: speed")
    decoding = [subject for subject in subjects if subject.spec.phase == "decode"]
    for subject in decoding if name != "reference" else []:
        if subject.spec.dtype == subjects[0].spec.dtype == subject.spec.kv_dtype:
            yield from speed_checks(subject)
    if model is not None:
        progress(f"{name}: {model}")
        from octavo.verify.model import tpot

        yield tpot(model, name, device, quick=quick)
    if soak_minutes > 0:
        yield soak(subjects[-1], soak_minutes, lambda doing: progress(f"{name}: {doing}"))


def _phases(name: str) -> list[Phase]:
    return [phase for phase, order in ORDER.items() if name in order]


def _spec(
    phase: Phase,
    device: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    kv_dtype: str,
) -> AttentionSpec:
    return AttentionSpec(
        phase=phase,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=128 if device.startswith("npu") else 16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=1 / math.sqrt(head_dim),
    )


def _check_fault(asked: Candidate, specs: list[AttentionSpec], fault: Fault) -> None:
    if fault != "off-by-one-window":
        return
    supports = [asked.supports(replace(spec, window=100)) for spec in specs]
    if not any(support.ok for support in supports):
        raise ConfigError(
            f"{fault} can't be planted in {asked.name}, which takes no window: {supports[0].reason}"
        )
