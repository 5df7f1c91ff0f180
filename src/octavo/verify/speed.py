"""Does splitting pay? Where the plan splits a long history it must be faster than unsplit, and a
short one must lose less than 5 %."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from octavo.verify.checks import Check, Subject, ask, shape_name
from octavo.verify.timing import make_workload, num_splits, sample_us

MAX_LOSS = 0.05
ATTEMPTS = 3  # a busy machine can spoil a measurement, but not three


def speed_checks(subject: Subject) -> Iterator[Check]:
    """Split against unsplit, batch by length."""
    quick, on_cpu = subject.quick, subject.spec.device == "cpu"
    long = [(1, 32_768)]
    if not quick:
        long += [(2, 32_768)] if on_cpu else [(1, 131_072), (4, 32_768), (16, 32_768)]
    short = [(1, 256)] if quick else [(1, 64), (1, 256), (1, 512), (8, 256)]
    for batch_size, length in long + short:
        must_gain = (batch_size, length) in long
        name = f"split against unsplit, {batch_size} x {length:,} · {shape_name(subject.spec)}"
        yield ask(name, partial(split_against_unsplit, subject, batch_size, length, must_gain))


def split_against_unsplit(subject: Subject, batch_size: int, length: int, must_gain: bool) -> Check:
    """The same step in ``auto`` and in ``off`` mode, in turns. ``must_gain`` where it is split."""
    shape = batch_size, length
    off = subject.open(split_mode="off")[0]
    both = off, subject.spec
    unsplit_splits, splits = (num_splits(subject.candidate, spec, *shape) for spec in both)
    if splits == unsplit_splits == 1 and subject.spec.device == "cpu":
        return Check("", {"splits": 1}, "the plan doesn't split it: the same work", True)
    cold_bytes = 64 << 20 if subject.quick else 256 << 20
    seconds = 0.15 if subject.quick else 0.5
    unsplit, split = (
        make_workload(subject.candidate, spec, *shape, cold_bytes=cold_bytes) for spec in both
    )
    limit = 1.0 if must_gain and (splits or 0) > 1 else 1 + MAX_LOSS
    for attempt in range(1, ATTEMPTS + 1):
        turns = [sample_us(work, subject.spec.device, seconds) for work in (unsplit, split) * 2]
        unsplit_us, split_us = min(turns[0] + turns[2]), min(turns[1] + turns[3])
        ratio = split_us / unsplit_us
        if ratio < limit or attempt == ATTEMPTS:
            break
    return Check(
        "",
        {
            "splits": "untold" if splits is None else splits,
            "split us": split_us,
            "unsplit us": unsplit_us,
            "split / unsplit": ratio,
            "attempts": attempt,
        },
        f"split / unsplit < {limit:g}",
        ratio < limit,
    )
