"""The outcome as a certificate (JSON), a page to read (Markdown) and a table for the terminal."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from octavo.attention.certificates import hardware_of, read_certificate, versions
from octavo.verify.checks import Check, Figure

FORMAT = 1
PACKAGES = ("torch", "triton", "numba", "flashinfer-python", "torch-npu", "numpy")


@dataclass(frozen=True)
class Report:
    """What was asked of one candidate, where, and what came out."""

    candidate: str
    device: str
    command: str
    date: str  # ISO, UTC
    seconds: float
    checks: Sequence[Check]
    planted: str | None = None
    quick: bool = False

    @property
    def passed(self) -> bool:
        """Nothing failed, and something was asked."""
        results = {check.passed for check in self.checks}
        return True in results and False not in results

    @property
    def certifies(self) -> bool:
        """A candidate with a fault in it isn't the candidate."""
        return self.passed and self.planted is None


def write_certificate(report: Report, folder: Path) -> Path:
    """Write both files, in place of older ones for the same candidate and hardware; the JSON's
    path. One that didn't pass certifies nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    hardware = hardware_of(report.device)
    path = certificate_path(report, folder)
    certificate = {
        "format": FORMAT,
        "candidate": report.candidate,
        "hardware": hardware,
        "passed": report.certifies,
        "quick": report.quick,
        "versions": versions(report.candidate),
        "machine": machine(report.device),
        "command": report.command,
        "date": report.date,
        "seconds": round(report.seconds, 1),
        "checks": [
            {
                "name": check.name,
                "figures": {name: _plain(figure) for name, figure in check.figures.items()},
                "limit": check.limit,
                "passed": check.passed,
            }
            for check in report.checks
        ],
    }
    path.write_text(json.dumps(certificate, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(_page(certificate, report.checks), encoding="utf-8")
    return path


def certificate_path(report: Report, folder: Path) -> Path:
    """Where the report's certificate lies."""
    hardware = hardware_of(report.device)
    return folder / f"{report.candidate}-{hardware}.json".replace(" ", "-")


def fuller_certificate(report: Report, folder: Path) -> Path | None:
    """The certificate of a full run of the same versions, where one lies there and the report is of
    a quick run that found nothing."""
    if not (report.quick and report.certifies):
        return None
    path = certificate_path(report, folder)
    full = {"versions": versions(report.candidate), "passed": True, "quick": False}
    return path if full.items() <= read_certificate(path).items() else None


def machine(device: str) -> dict[str, str]:
    """The hardware by name, the system, and every package that has a part in it."""
    found = {"system": platform.platform(), "python": platform.python_version()}
    if device.startswith("cuda"):
        gpu = torch.cuda.get_device_properties(torch.device(device))
        found |= {"gpu": gpu.name, "cuda": str(torch.version.cuda)}
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            found["driver"] = driver.read_text().splitlines()[0]
    found["cpu"] = cpu_name()
    for variable in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):  # compiled for another CPU
        if variable in os.environ:
            found[variable] = os.environ[variable]
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The CPU's name as it gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(report: Report) -> Table:
    """For people, the failures standing out."""
    title = f"{report.candidate} on {report.device} ({hardware_of(report.device)})"
    shown = Table("", "check", "figures", "limit", title=title, title_justify="left")
    shown.box = box.SIMPLE_HEAD
    words = {True: ("ok", None), False: ("FAILED", "bold red"), None: ("-", "dim")}
    for check in report.checks:
        word, style = words[check.passed]
        shown.add_row(word, check.name, _figures(check), check.limit, style=style)
    return shown


def _page(certificate: dict[str, Any], checks: Sequence[Check]) -> str:
    verdict = "passed" if certificate["passed"] else "**failed**"
    lines = [
        f"# `{certificate['candidate']}` on {certificate['hardware']}: {verdict}",
        "",
        f"`{certificate['command']}`, {certificate['date']}, {certificate['seconds']} s",
        "",
        *(f"- {name}: {value}" for name, value in certificate["machine"].items()),
        "",
        "| | check | figures | limit |",
        "|---|---|---|---|",
    ]
    words = {True: "ok", False: "**FAILED**", None: "not offered"}
    lines += [
        f"| {words[check.passed]} | {check.name} | {_figures(check)} | {check.limit} |"
        for check in checks
    ]
    return "\n".join(lines) + "\n"


def _figures(check: Check) -> str:
    return ", ".join(f"{name} {_readable(figure)}" for name, figure in check.figures.items())


def _readable(figure: Figure) -> str:
    if isinstance(figure, float):
        return f"{figure:.6f}" if 0.9 < figure <= 1 else f"{figure:.3g}"
    return f"{figure:,}" if isinstance(figure, int) else figure


def _plain(figure: Figure) -> Figure:
    """JSON has no NaN and no infinity."""
    return figure if not isinstance(figure, float) or math.isfinite(figure) else str(figure)
