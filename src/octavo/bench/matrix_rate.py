"""How fast a device multiplies: the library's product of two large square matrices, or, where
products are of 8-bit activations on a CPU, their dot products in registers."""

from __future__ import annotations

import time
from statistics import median

ROUNDS = 20


def matrix_rate(device: str, dtype: str) -> float:
    """10**12 operations a second in ``dtype``: of an int8 product by all cores that are granted."""
    if dtype != "int8":
        return _library_rate(device, dtype)
    from octavo.kernels.dot.cpu import int8_rate
    from octavo.kernels.levels import level
    from octavo.kernels.team import team

    return int8_rate(level(), team()) / 1e12


def _library_rate(device: str, dtype: str) -> float:
    """Of ``torch.mm``, with the threads that torch has: the median of some."""
    import torch

    on_gpu = device != "cpu"
    side = 8192 if on_gpu else 1024
    a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)

    def seconds() -> float:
        """Of one product; the device is awaited, whose launch takes a hundredth of the time."""
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds()  # the library chooses and loads its kernel
    return 2 * side**3 / median(seconds() for _ in range(ROUNDS)) / 1e12
