"""Who computes attention: an ordered list per phase, switches, and a reason for every verdict.

The first enabled candidate that supports the spec serves. Prefill and decode are chosen once, at
load, as a pair that shares a KV layout. Small decode steps may have a candidate of their own,
which reads the pair's layout. ``reference`` is last in both orders, reads any layout through its
owner, and can't be switched off. One that no certificate covers on this hardware is off until the
user asks for it. Candidates are imported when they are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

from octavo.attention.backends.reference import ReferenceCandidate
from octavo.attention.certificates import is_certified
from octavo.attention.spec import (
    AttentionSpec,
    Backend,
    Candidate,
    KVLayout,
    Phase,
    Support,
)
from octavo.errors import ConfigError
from octavo.kernels.linear.tiles import MOST_ROWS

# First choice first. The class of a candidate stands in the module of its name.
ORDER: dict[Phase, tuple[str, ...]] = {
    "prefill": ("flashinfer", "torch", "triton", "cpu", "ascend_fia", "reference"),
    "decode": ("fused", "triton", "flashinfer", "cpu", "ascend_fia", "reference"),
}
CLASSES = {
    "ascend_fia": "AscendFiaCandidate",
    "cpu": "CpuCandidate",
    "flashinfer": "FlashinferCandidate",
    "fused": "FusedCandidate",
    "reference": "ReferenceCandidate",
    "torch": "TorchCandidate",
    "triton": "TritonCandidate",
}
# Those that serve decode steps of so many rows at most, beside one that serves all others.
ROW_LIMITS = {"fused": MOST_ROWS}


@dataclass(frozen=True)
class Verdict:
    """What became of one candidate in one phase, and why: a phrase for people.

    ``possible``: it could serve but another does. ``off``: switched off, the reason says how.
    ``refused``: it can't serve this model on this device.
    """

    candidate: str
    state: Literal["chosen", "possible", "off", "refused"]
    reason: str


@dataclass(frozen=True)
class Selection:
    """The pair that serves, the specs it was chosen for, and every candidate's verdict in order.
    ``few_rows`` takes decode's place in steps of up to its limit of rows, in which all decode."""

    prefill: str
    decode: str
    prefill_spec: AttentionSpec
    decode_spec: AttentionSpec
    verdicts: dict[Phase, list[Verdict]]
    few_rows: str | None = None

    def kv_layout(self, num_blocks: int) -> KVLayout:
        """The layout of one layer's pool, which the pair shares."""
        if self.decode == "reference":
            return candidate(self.prefill).kv_layout(self.prefill_spec, num_blocks)
        return candidate(self.decode).kv_layout(self.decode_spec, num_blocks)


def candidate(name: str) -> Candidate:
    """The candidate of that name, imported now."""
    module = import_module(f"octavo.attention.backends.{name}")
    found: Candidate = getattr(module, CLASSES[name])()
    return found


def select(
    prefill_spec: AttentionSpec,
    decode_spec: AttentionSpec,
    *,
    backend: str | None = None,
    disabled: Collection[str] = (),
    uncallable: Mapping[str, str] | None = None,
) -> Selection:
    """Choose who serves. A forced ``backend`` takes every phase that it is listed for, or the small
    steps if it is for these. ``uncallable`` are candidates that the caller can't call, and why.

    Raises ConfigError for a name that isn't known, for ``reference`` or the forced backend among
    ``disabled``, where the forced backend refuses a spec, and where nobody can serve one.
    """
    _check_names(backend, disabled)
    prefills, decodes = (
        [_judge(name, spec, backend, disabled, uncallable or {}) for name in ORDER[spec.phase]]
        for spec in (prefill_spec, decode_spec)
    )
    # Decode chooses first, as most steps are decode steps. The reference prefills over any
    # layout, so a decode candidate never fails for want of a partner.
    pairs = (
        (prefill.candidate, decode.candidate)
        for decode in decodes
        for prefill in prefills
        if prefill.state == decode.state == "possible"
        and decode.candidate not in ROW_LIMITS
        and _share_layout(prefill.candidate, prefill_spec, decode.candidate, decode_spec)
    )
    pair = next(pairs, None)
    if pair is None:
        reasons = "; ".join(f"{v.candidate}: {v.reason}" for v in prefills + decodes if v.reason)
        raise ConfigError(f"no pair of attention backends can serve this model: {reasons}")
    chosen = Selection(
        *pair,
        prefill_spec,
        decode_spec,
        {"prefill": _settle(prefills, pair[0]), "decode": _settle(decodes, pair[1])},
    )
    return _with_few_rows(chosen, backend)


def open_pair(selection: Selection) -> tuple[Backend, Backend]:
    """The chosen backends for prefill and decode, ready to run; the heavy imports happen here."""
    names = (selection.prefill, selection.decode)
    specs = (selection.prefill_spec, selection.decode_spec)
    if names.count("reference") != 1:
        prefill, decode = (candidate(n).open(s) for n, s in zip(names, specs, strict=True))
        return prefill, decode
    guest = names.index("reference")
    owner = candidate(names[1 - guest]).open(specs[1 - guest])
    reference = ReferenceCandidate().open(specs[guest], owner)
    return (reference, owner) if guest == 0 else (owner, reference)


def _check_names(backend: str | None, disabled: Collection[str]) -> None:
    for name in [*disabled, *([] if backend is None else [backend])]:
        if name not in CLASSES:
            raise ConfigError(
                f"attention backend {name!r} is unknown; the known ones are {', '.join(CLASSES)}"
            )
    if "reference" in disabled:
        raise ConfigError("attention backend 'reference' is the last resort: it can't be disabled")
    if backend in disabled:
        raise ConfigError(f"attention backend {backend!r} is both asked for and disabled")


def _judge(
    name: str,
    spec: AttentionSpec,
    backend: str | None,
    disabled: Collection[str],
    uncallable: Mapping[str, str],
) -> Verdict:
    """The verdict on one candidate by itself; who is chosen is settled later."""
    if name in disabled:
        return Verdict(name, "off", f"--disable-attention-backend {name}")
    if name != backend and backend in ORDER[spec.phase] and backend not in ROW_LIMITS:
        return Verdict(name, "off", f"--attention-backend {backend}")
    support = candidate(name).supports(spec)
    if support.ok and name in uncallable:
        support = Support(False, uncallable[name])
    if support.ok and name != backend and not is_certified(name, spec.device):
        reason = f"no certificate covers it; --attention-backend {name} turns it on"
        return Verdict(name, "off", reason)
    if support.ok:
        return Verdict(name, "possible", "")
    if name == backend:
        raise ConfigError(
            f"attention backend {name!r} was asked for, but it can't serve {spec.phase}: "
            f"{support.reason}"
        )
    return Verdict(name, "refused", support.reason)


def _share_layout(
    prefill: str, prefill_spec: AttentionSpec, decode: str, decode_spec: AttentionSpec
) -> bool:
    if "reference" in (prefill, decode):
        return True
    layout = candidate(prefill).kv_layout(prefill_spec, num_blocks=1)
    return layout == candidate(decode).kv_layout(decode_spec, num_blocks=1)


def _settle(verdicts: list[Verdict], chosen: str) -> list[Verdict]:
    """The verdicts of one phase once it is known who serves."""
    settled = []
    passed = False
    for verdict in verdicts:
        if verdict.candidate == chosen:
            passed = True
            verdict = replace(verdict, state="chosen", reason="the first that can serve")
        elif verdict.state == "possible":
            reason = f"{chosen} comes first" if passed else "its KV layout isn't the other phase's"
            verdict = replace(verdict, reason=reason)
        settled.append(verdict)
    return settled


def _with_few_rows(selection: Selection, backend: str | None) -> Selection:
    """With a candidate for small decode steps, where one can serve over the pair's layout."""
    spec, verdicts = selection.decode_spec, selection.verdicts["decode"]
    layout = selection.kv_layout(num_blocks=1)
    few = [v for v in verdicts if v.candidate in ROW_LIMITS and v.state == "possible"]
    few = [v for v in few if candidate(v.candidate).kv_layout(spec, num_blocks=1) == layout]
    if not few:
        if backend in ROW_LIMITS:
            raise ConfigError(
                f"attention backend {backend!r} was asked for, but it can't read the KV layout of "
                f"{selection.decode!r}, which serves the steps of more rows"
            )
        return selection
    name = few[0].candidate
    reasons = {
        name: f"steps of few rows, {ROW_LIMITS[name]} at most, all of them decoding",
        selection.decode: "all other steps",
    }
    settled = [
        replace(v, state="chosen", reason=reasons[v.candidate]) if v.candidate in reasons else v
        for v in verdicts
    ]
    return replace(selection, verdicts={**selection.verdicts, "decode": settled}, few_rows=name)
