"""What this machine's CPU is and can do, without LLVM where the system says it too."""

from __future__ import annotations

import platform
import re
import sys
from functools import cache

_FIRST_CPU = 8192  # bytes of /proc/cpuinfo; all of it takes long where there are many
_TELLING = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")


@cache
def features() -> frozenset[str]:
    """The instruction sets that may be used, by LLVM's names."""
    if flags := _first_cpu().get("flags"):
        # Linux writes avx512_vnni where LLVM has avx512vnni, and amx_int8 where it has amx-int8.
        words = [re.sub("^(avx|avx512)_", r"\1", each) for each in flags.split()]
        return frozenset(each.replace("_", "-") for each in words)
    import llvmlite.binding

    found = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, has in found.items() if has)


def vendor() -> str:
    """What an x86-64 CPU says of its maker, "AuthenticAMD" or "GenuineIntel"; "" elsewhere."""
    return _first_cpu().get("vendor_id", "")


@cache
def identity() -> str:
    """What differs between CPUs for which LLVM may compile otherwise."""
    first = _first_cpu()
    if "flags" in first:
        return repr([first.get(name) for name in _TELLING])
    import llvmlite.binding

    return repr((llvmlite.binding.get_host_cpu_name(), sorted(features())))


@cache
def _first_cpu() -> dict[str, str]:
    """What Linux says of an x86-64 CPU; empty elsewhere."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read(_FIRST_CPU)
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
