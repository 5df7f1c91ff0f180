"""``octavo verify``: may a candidate be trusted on this machine?"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from octavo.cli.options import Model, Switch
from octavo.cli.tables import print_table
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.verify.faults import Fault
    from octavo.verify.report import Report

Device = Literal["auto", "cpu", "cuda", "npu"]
FaultName = Literal[
    "drop-newest", "swap-pages", "skip-split", "base2-lse", "stale-plan", "off-by-one-window"
]


class VerificationError(OctavoError):
    """Something that was verified isn't right."""


def verify(
    model: Model = None,
    /,
    *,
    device: Device = "auto",
    candidate: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    quick: Switch = False,
    soak: float = 0.0,
    plant: FaultName | None = None,
    output: Path | None = None,
) -> None:
    """Put attention candidates to the test on this machine, and certify those that pass.

    A certified candidate serves without being asked for. Ends with 1 where a check fails.

    Parameters
    ----------
    model
        Also measure the time per output token of this model, split and unsplit.
    device
        Where to test.
    candidate
        The candidate to test, instead of all that can run on the device; may be given several
        times.
    quick
        Fewer shapes and shorter histories: seconds instead of minutes. What passes doesn't
        replace a full run's certificate.
    soak
        Then keep each candidate busy for so many minutes.
    plant
        Plant a fault, to see the checks find it. Nothing is certified.
    output
        Folder for the certificates, instead of the user's, which is the one that counts.
    """
    from octavo.attention.candidates import CLASSES
    from octavo.attention.certificates import user_folder
    from octavo.engine.build import choose_device

    for name in candidate:
        if name not in CLASSES:
            raise ConfigError(
                f"attention candidate {name!r} is unknown; the known ones are {', '.join(CLASSES)}"
            )
    if soak < 0:
        raise ConfigError(f"soak is {soak:g} minutes, it must be at least 0")
    where = device if device == "npu" else choose_device(EngineConfig(device=device))
    from octavo.verify.run import candidates_for

    names = candidate or tuple(candidates_for(where))
    failed = []
    for name in names:
        report = _put_to_the_test(name, where, model, quick, soak, plant)
        _print(report)
        if not report.passed:
            failed.append(name)
        if plant is None or output is not None:
            _certify(report, output or user_folder())
    if failed:
        planted = f" (with {plant} planted)" if plant else ""
        raise VerificationError(f"{', '.join(failed)} failed{planted}; see the rows marked FAILED")
    if plant:
        print(f"octavo: no check noticed {plant}", file=sys.stderr)


def _certify(report: Report, folder: Path) -> None:
    from octavo.verify.report import fuller_certificate, write_certificate

    verdict = f"{report.candidate} {'passed' if report.passed else 'failed'}"
    fuller = fuller_certificate(report, folder)
    if fuller is None:
        print(f"{verdict}: {write_certificate(report, folder)}")
    else:
        print(f"{verdict}; the certificate of a full run stays: {fuller}")


def _put_to_the_test(
    name: str, device: str, model: str | None, quick: bool, soak: float, plant: Fault | None
) -> Report:
    from octavo.verify.report import Report
    from octavo.verify.run import verify as checks_of

    began = time.monotonic()
    with _progress() as show:
        checks = []
        for check in checks_of(
            name,
            device,
            quick=quick,
            soak_minutes=soak,
            fault=plant,
            model=model,
            progress=show,
        ):
            checks.append(check)
            show(f"{name}: {len(checks)} checks, {check.name}")
    return Report(
        candidate=name,
        device=device,
        command=shlex.join(["octavo", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
        checks=checks,
        planted=plant,
        quick=quick,
    )


def _print(report: Report) -> None:
    from octavo.verify.report import table

    print_table(table(report), width_of_a_log=180)  # it wraps badly at 80


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr where it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda doing: None
        return
    from rich.console import Console

    with Console(stderr=True).status("verifying", spinner="dots") as status:
        yield lambda doing: status.update(doing)
