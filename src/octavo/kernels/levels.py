"""What instructions the CPU kernels may use: a *level*, the best that the CPU has or one forced.

amx      vnni, and products of 8-bit tiles where there are 16 tokens and more
vnni     AVX-512 with its 8-bit dot product: vectors of 512 bits
avxvnni  avx2 with that dot product: most of Intel's desktops and laptops
avx2     AVX2 with FMA: 256 bits
plain    no instruction of any one CPU is named: LLVM makes of it what there is, on ARM too
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

from octavo.errors import ConfigError
from octavo.kernels.host_cpu import features, vendor

_VNNI = ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "f16c", "fma")
_NEEDS = {
    "amx": (*_VNNI, "amx-tile", "amx-int8", "amx-bf16"),
    "vnni": _VNNI,
    "avxvnni": ("avx2", "f16c", "fma", "avxvnni"),
    "avx2": ("avx2", "f16c", "fma"),
    "plain": (),
}
LEVELS = tuple(_NEEDS)  # best first


@cache
def level() -> str:
    """The level of this process: OCTAVO_CPU where it is set, else the best that the CPU has.

    Raises ConfigError where OCTAVO_CPU is no level, or one that the CPU lacks.
    """
    usable = usable_levels()
    forced = os.environ.get("OCTAVO_CPU")
    if not forced:
        return usable[0]
    if forced not in usable:
        why = "this CPU lacks it" if forced in LEVELS else "there is no such level"
        raise ConfigError(f"OCTAVO_CPU={forced}: {why}; here it may be {', '.join(usable)}")
    return forced


@cache
def usable_levels() -> tuple[str, ...]:
    """The levels that this CPU has, best first."""
    has = set(features())
    if has.issuperset(_VNNI):
        has.add("avxvnni")  # AVX-512 has that instruction too
    names = [name for name, needs in _NEEDS.items() if has.issuperset(needs)]
    if "amx" in names and not _ask_for_tiles():
        names.remove("amx")
    return tuple(names)


@cache
def pairs_pay() -> bool:
    """Whether a dot product of pairs of bfloat16s takes no longer than an FMA does: where AMD's
    CPUs have it. Intel's start one every second cycle (bench/LOG.md)."""
    return level() == "vnni" and "avx512bf16" in features() and vendor() == "AuthenticAMD"


def _ask_for_tiles() -> bool:
    """Linux lets a process use the tile registers once it has asked:
    arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for all of its threads."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    result: int = ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18)
    return result == 0
