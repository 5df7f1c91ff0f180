"""Is the answer right? Each check asks one question of a candidate and says by which limit.

Cosine >= 0.999 is the project's own measure; it misses a dropped key on a long history and any
error of the log-sum-exp, so it never stands alone: the error against float64, needles, poison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionSpec, Backend, Candidate
from octavo.verify.problems import (
    Problem,
    cut_to,
    exact,
    hide_needles,
    make_pool,
    make_problem,
    rows_of,
    solve,
    write_tokens,
)

Figure = float | int | str

MIN_COSINE = 0.999
# Largest error of a head's output, as a share of its norm: weights and output are rounded.
MAX_ERROR = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}
MAX_LSE_ERROR = 1e-4
MAX_STEPS = 0.501  # that int8 may round by: half a step, and what float32 adds
SPLITS = (1, 2, 7, 16, 33)


@dataclass(frozen=True)
class Check:
    """One question's answer. ``passed`` is None where the candidate doesn't offer what is asked."""

    name: str
    figures: dict[str, Figure]
    limit: str
    passed: bool | None


@dataclass(frozen=True)
class Subject:
    """What is asked: a candidate, for one kind of layer, in ``auto`` mode."""

    candidate: Candidate
    spec: AttentionSpec
    quick: bool

    def open(self, **changes: object) -> tuple[AttentionSpec, Backend]:
        """The candidate for the spec with some changes; raises :class:`NotOffered`."""
        spec = replace(self.spec, **changes)  # type: ignore[arg-type]
        support = self.candidate.supports(spec)
        if not support.ok:
            raise NotOffered(support.reason)
        return spec, self.candidate.open(spec)


class NotOffered(Exception):
    """The candidate refuses a spec; the message is its reason."""


def run_checks(subject: Subject) -> Iterator[Check]:
    """All checks of this file, one after the other."""
    for name, check in CHECKS.items():
        title = f"{name} · {subject.spec.phase} {shape_name(subject.spec)}"
        yield ask(title, partial(check, subject))


def ask(title: str, check: Callable[[], Check]) -> Check:
    """A check's answer under its title. One that raises has failed, and says with what."""
    try:
        return replace(check(), name=title)
    except NotOffered as refusal:
        return Check(title, {"not offered": str(refusal)}, "", None)
    except Exception as error:  # whatever a driver, a compiler or an operator comes up with
        what = (str(error).strip().splitlines() or [""])[-1]
        return Check(title, {"raised": f"{type(error).__name__}: {what}"}, "no error", False)


def shape_name(spec: AttentionSpec) -> str:
    """Such as ``32/8 x 128 bfloat16``."""
    name = f"{spec.num_heads}/{spec.num_kv_heads} x {spec.head_dim} {spec.dtype}"
    return name if spec.kv_dtype == spec.dtype else f"{name}, KV {spec.kv_dtype}"


# ---- the checks


def round_trip(subject: Subject) -> Check:
    """What is written is what is read, bit for bit, through the block table; and int8 rounds any
    other numbers to the nearest of a token's and head's 255 steps."""
    spec, backend = subject.open()
    problem = make_problem(spec, [1, spec.block_size, 5 * spec.block_size + 3])
    wrong = sum(int((read != wrote).sum()) for read, wrote in _written(subject, backend, problem))
    figures: dict[str, Figure] = {"numbers that differ": wrong}
    if spec.kv_dtype != "int8":
        return Check("", figures, "none", wrong == 0)
    others = replace(
        problem,
        keys=[k * (1 + k.sin() / 3) for k in problem.keys],
        values=[v * (1 + v.sin() / 3) for v in problem.values],
    )
    steps = max(
        _largest((read - wrote).abs() * 127 / wrote.abs().amax(-1, keepdim=True))
        for read, wrote in _written(subject, backend, others)
    )
    figures["rounded by, in steps"] = steps
    return Check("", figures, f"none, {MAX_STEPS:g} steps", wrong == 0 and steps <= MAX_STEPS)


def accuracy(subject: Subject) -> Check:
    """Random rows of many lengths in one batch."""
    spec, backend = subject.open()
    problem = make_problem(spec, *_lengths(spec, subject.quick))
    return _compared(
        problem, *solve(backend, problem, make_pool(subject.candidate, backend, problem))
    )


def needles(subject: Subject) -> Check:
    """One key carries nearly all the weight: the first, the newest, or one beside a cut."""
    segment = 2 * max(subject.spec.block_size, 64)
    spec, backend = subject.open(split_mode="fixed", split_tokens=segment)
    segments = 3 if subject.quick else 9
    length = segments * segment + 37
    cuts = range(segment, length, segment)
    places = [0, length - 1, *(cut - side for cut in cuts for side in (1, 0))]
    new = 1
    if spec.phase == "prefill":  # the newest keys must be hidden from the older queries
        new = 35
        places += [length - new - 1, length - new, length - 2]
    problem = make_problem(spec, [length] * len(places), [new] * len(places))
    hide_needles(problem, places)
    pool = make_pool(subject.candidate, backend, problem)
    return _compared(problem, *solve(backend, problem, pool), needles=len(places))


def poison(subject: Subject) -> Check:
    """NaN in every slot that nobody owns changes no bit, whatever the rest of the table names."""
    spec, backend = subject.open()
    block = spec.block_size
    lens = [2 * block + n for n in range(1, block + 1, max(1, block // 8))] + [1, 9 * block - 1]
    counts = [1] * len(lens)
    if spec.phase == "prefill":
        counts = [min(n, 1 + 5 * i) for i, n in enumerate(lens)]
    else:
        lens, counts = [0, *lens, 0], [1, *counts, 1]  # rows that only pad the batch
    problem = make_problem(spec, lens, counts)
    out, lse = solve(backend, problem, make_pool(subject.candidate, backend, problem))
    clean = make_pool(subject.candidate, backend, problem, fill=0.0)
    clean_out, clean_lse = solve(backend, problem, clean)
    found = _compared(problem, out, lse)
    changed = int((out != clean_out).sum() + (lse != clean_lse).sum())
    return replace(
        found,
        figures={"numbers that poison changes": changed, **found.figures},
        limit=f"none, {found.limit}",
        passed=bool(found.passed) and changed == 0,
    )


def batch_invariance(subject: Subject) -> Check:
    """In ``fixed`` mode a row's bits depend on nothing but the row."""
    spec, backend = subject.open(split_mode="fixed", split_tokens=256)
    lens = [900, 1000, 120, 500, 1, 257]
    counts = [1] * len(lens) if spec.phase == "decode" else [30, 129, 120, 1, 1, 257]
    problem = make_problem(spec, lens, counts)
    pool = make_pool(subject.candidate, backend, problem)
    out, lse = solve(backend, problem, pool)
    edges = problem.batch.query_start_loc
    differ = 0
    others: list[Sequence[int]] = [[row] for row in range(len(lens))]
    for rows in [*others, range(len(lens) - 1, -1, -1)]:
        some = rows_of(problem, rows)
        some_out, some_lse = solve(backend, some, pool)
        tokens = np.concatenate([np.arange(edges[row], edges[row + 1]) for row in rows])
        same = torch.equal(some_out, out[tokens]) and torch.equal(some_lse, lse[tokens])
        differ += not same
    return Check("", {"batches that differ": differ, "of": len(lens) + 1}, "none", differ == 0)


def splits_agree(subject: Subject) -> Check:
    """However often the history is cut, the answer is the same but for rounding."""
    if subject.spec.phase == "prefill":
        raise NotOffered("prefill isn't cut by the plan")
    block = subject.spec.block_size
    length = 33 * 9 * block if subject.quick else 33 * 14 * block
    found: dict[int, tuple[Tensor, Tensor]] = {}
    problem: Problem | None = None
    for splits in SPLITS:
        segment = -(-length // splits // block) * block
        changes = {"split_mode": "fixed", "split_tokens": segment} if splits > 1 else {}
        try:
            spec, backend = subject.open(**({"split_mode": "off"} | changes))
        except NotOffered:
            continue
        problem = problem or make_problem(spec, [length, length - block // 2])
        pool = make_pool(subject.candidate, backend, problem)
        found[splits] = solve(backend, problem, pool)
    if problem is None or len(found) < 2:
        raise NotOffered("takes fewer than two of these numbers of splits")
    want = exact(problem)
    each = [errors(out, lse, *want) for out, lse in found.values()]
    first, first_lse = next(iter(found.values()))
    spread = [errors(out, lse, first.double(), first_lse.double()) for out, lse in found.values()]
    largest = {
        "spread": max(one["error"] for one in spread),
        "error": max(one["error"] for one in each),
        "LSE spread": max(one["LSE error"] for one in spread),
    }
    limit = MAX_ERROR[problem.spec.dtype]
    passed = max(largest["spread"], largest["error"]) <= limit
    return Check(
        "",
        {"splits": ", ".join(map(str, found))} | largest,
        f"errors <= {limit:g}, LSE <= {MAX_LSE_ERROR:g}",
        passed and largest["LSE spread"] <= MAX_LSE_ERROR,
    )


def replanned(subject: Subject) -> Check:
    """One backend, step after step: rows grow by a token, shrink and grow again."""
    spec, backend = subject.open()
    new = 1 if spec.phase == "decode" else 5
    whole = np.array([40, 700, 1025], np.int32)
    problem = make_problem(spec, whole.tolist(), [new] * len(whole))
    pool = make_pool(subject.candidate, backend, cut_to(problem, whole - 3))
    worst: list[Check] = []
    for lens in (whole - 3, whole - 2, whole - 1, whole, whole // 4, whole):
        for row, n in enumerate(lens.tolist()):
            write_tokens(backend, problem, pool, row, n - 1, n)
        step = cut_to(problem, lens)
        worst.append(_compared(step, *solve(backend, step, pool)))
    failed = [check for check in worst if not check.passed]
    shown = (failed or worst)[0]
    return replace(shown, figures={"steps": len(worst), "wrong": len(failed), **shown.figures})


def full_batch(subject: Subject) -> Check:
    """Many rows, for which a candidate may have kernels of its own: some long, some only padding,
    with a window, a cap and sinks where those are offered."""
    lens = [9000, 700] + [0, 1, 15, 16, 17, 33, 100, 257] * (4 if subject.quick else 12)
    counts = [1] * len(lens)
    if subject.spec.phase == "prefill":
        lens = [max(n, 1) for n in lens]
        counts = [min(n, 1 + row % 20) for row, n in enumerate(lens)]
    found: list[Check] = []
    for changes in ({}, {"window": 90, "soft_cap": 2.0, "has_sinks": True}):
        try:
            spec, backend = subject.open(**changes)
        except NotOffered:
            if not changes:
                raise
            continue
        problem = make_problem(spec, lens, counts)
        pool = make_pool(subject.candidate, backend, problem)
        found.append(_compared(problem, *solve(backend, problem, pool), rows=len(lens)))
    return next((check for check in found if not check.passed), found[0])


def window(subject: Subject) -> Check:
    """A sliding window ends within a block: the oldest visible key is seen, that before it not."""
    spec, backend = subject.open(window=100)
    size = 100
    lens = [1, size - 1, size, size + 1, 700, 700, 3000]
    counts = [1] * len(lens) if spec.phase == "decode" else [1, 99, 40, 101, 3, 1, 300]
    problem = make_problem(spec, lens, counts)
    places = [max(0, n - size - count + 1) for n, count in zip(lens, counts, strict=True)]
    places[3] = max(0, places[3] - 1)
    places[4] -= 1
    hide_needles(problem, places)
    pool = make_pool(subject.candidate, backend, problem)
    return _compared(problem, *solve(backend, problem, pool))


def soft_cap(subject: Subject) -> Check:
    """Scores are capped before the softmax."""
    return _feature(subject, soft_cap=2.0)


def sinks(subject: Subject) -> Check:
    """Each head's sink joins in, once."""
    return _feature(subject, has_sinks=True)


CHECKS: dict[str, Callable[[Subject], Check]] = {
    "write and gather": round_trip,
    "accuracy": accuracy,
    "needles": needles,
    "poison": poison,
    "alone and in a batch": batch_invariance,
    "numbers of splits": splits_agree,
    "step after step": replanned,
    "full batch": full_batch,
    "sliding window": window,
    "soft cap": soft_cap,
    "sinks": sinks,
}


# ---- what they share


def errors(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> dict[str, float]:
    """The least cosine of a head's output, its largest error as a share of its norm and by number,
    and the largest error of the log-sum-exp. Whatever isn't finite where it should be counts as
    infinitely wrong; an empty row must be exactly 0 and -inf."""
    out, lse = out.double(), lse.double()
    zero, wrong = want.new_zeros(()), want.new_full((), math.inf)
    norm = want.norm(dim=-1)
    if_empty = torch.where((out == 0).all(-1), zero, wrong)
    error = torch.where(norm == 0, if_empty, (out - want).norm(dim=-1) / norm)
    cosine = torch.nn.functional.cosine_similarity(out, want, dim=-1)
    if_empty = torch.where(lse == want_lse, zero, wrong)
    lse_error = torch.where(want_lse == -math.inf, if_empty, (lse - want_lse).abs())
    return {
        "cosine": -_largest(-torch.where(norm == 0, 1.0, cosine)),
        "error": _largest(error),
        "max abs": _largest((out - want).abs()),
        "LSE error": _largest(lse_error),
    }


def _largest(values: Tensor) -> float:
    """NaN counts as infinite."""
    return float(values.where(~values.isnan(), math.inf).max())


def _written(
    subject: Subject, backend: Backend, problem: Problem
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values as they are read and as they were written, row by row."""
    pool = make_pool(subject.candidate, backend, problem)
    table = torch.from_numpy(problem.batch.block_table).to(problem.spec.device)
    for row, wrote in enumerate(zip(problem.keys, problem.values, strict=True)):
        for read, original in zip(
            backend.gather(*pool, table[row], len(wrote[0])), wrote, strict=True
        ):
            yield read.to(original.dtype), original


def _compared(problem: Problem, out: Tensor, lse: Tensor, **more: Figure) -> Check:
    figures = errors(out, lse, *exact(problem))
    limit = MAX_ERROR[problem.spec.dtype]
    return Check(
        "",
        {**more, **figures},
        f"cosine >= {MIN_COSINE}, error <= {limit:g}, LSE <= {MAX_LSE_ERROR:g}",
        figures["cosine"] >= MIN_COSINE
        and figures["error"] <= limit
        and figures["LSE error"] <= MAX_LSE_ERROR,
    )


def _feature(subject: Subject, **changes: object) -> Check:
    spec, backend = subject.open(**changes)
    lens = [3, 40, 700, 1500]
    counts = [1] * len(lens) if spec.phase == "decode" else [3, 1, 300, 40]
    problem = make_problem(spec, lens, counts)
    return _compared(
        problem, *solve(backend, problem, make_pool(subject.candidate, backend, problem))
    )


def _lengths(spec: AttentionSpec, quick: bool) -> tuple[list[int], list[int]]:
    """Rows' lengths and how many of their tokens are new."""
    block = spec.block_size
    on_cpu = spec.device == "cpu"
    if spec.phase == "decode":
        lens = [1, 2, block - 1, block, block + 1, 2 * block + 1, 250, 1000, 4097]
        if not quick:
            lens += [16_384, 32_768 + 5] if on_cpu else [32_768 + 5, 131_072]
        return lens, [1] * len(lens)
    rows = [(1, 1), (block + 1, block + 1), (130, 130), (300, 40), (64, 1), (1000, 257)]
    if not quick:
        rows += [(2048, 2048), (4099, 512)] if on_cpu else [(2048, 2048), (32_768 + 5, 1000)]
    return [length for length, _ in rows], [new for _, new in rows]
