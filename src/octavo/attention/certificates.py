"""Certificates: which candidates ``octavo verify`` has accepted, and on what kind of hardware.

A certificate is a JSON file. The project's own come with the package and hold for the code beside
them; a user's lie in the user's data folder and hold for the versions that they name.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

# The package whose code computes, beside our own.
KERNEL_PACKAGES = {
    "ascend_fia": "torch_npu",
    "cpu": "numba",
    "flashinfer": "flashinfer-python",
    "fused": "triton",
    "reference": "torch",
    "torch": "torch",
    "triton": "triton",
}
PROJECT_FOLDER = Path(__file__).parents[1] / "verify" / "certificates"


def is_certified(candidate: str, device: str) -> bool:
    """Whether a certificate covers the candidate on this device. The reference needs none."""
    if candidate == "reference":
        return True
    wanted = {"candidate": candidate, "hardware": hardware_of(device), "passed": True}
    if _any_has(PROJECT_FOLDER, wanted):
        return True
    return _any_has(user_folder(), wanted | {"versions": versions(candidate)})


def user_folder() -> Path:
    """Where this user's certificates lie."""
    return platformdirs.user_data_path("octavo") / "certificates"


def versions(candidate: str) -> dict[str, str]:
    """What a user's certificate holds for: Octavo and the package that brings the kernel."""
    from importlib import metadata  # 20 ms

    from octavo import __version__

    package = KERNEL_PACKAGES[candidate]
    try:
        return {"octavo": __version__, package: metadata.version(package)}
    except metadata.PackageNotFoundError:
        return {"octavo": __version__}


@cache
def hardware_of(device: str) -> str:
    """The kind of hardware that a kernel is compiled for: a GPU's architecture (``sm_90``), a
    CPU's widest vectors (``avx512``, ``avx2``) or else its name (``arm64``), ``npu``."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        return _gpu_architecture(int(number or 0)) or "unknown GPU"
    if kind != "cpu":
        return kind
    flags = set(_cpu_flags())
    if "avx512f" in flags:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= flags else platform.machine()


def read_certificate(path: Path) -> dict[str, Any]:
    """What the file says; a file that can't be read says nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _any_has(folder: Path, wanted: dict[str, Any]) -> bool:
    return any(wanted.items() <= read_certificate(path).items() for path in folder.glob("*.json"))


def _gpu_architecture(number: int) -> str | None:
    """Asked of the driver itself: torch would take seconds. None where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, number):
            return None
        capability.append(value.value)
    return "sm_{}{}".format(*capability)


def _cpu_flags() -> list[str]:
    """What numba compiles for: what the CPU has, or what the user says."""
    said = os.environ.get("NUMBA_CPU_FEATURES")
    if said:
        return [feature[1:] for feature in said.split(",") if feature.startswith("+")]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return []
    return next((line.split() for line in lines if line.startswith("flags")), [])
