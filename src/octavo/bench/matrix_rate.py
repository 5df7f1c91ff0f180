"""How fast a device multiplies: the library's product of two large square matrices."""

from __future__ import annotations

import time
from statistics import median

ROUNDS = 20


def matrix_rate(device: str, dtype: str) -> float:
    """TFLOP/s of ``torch.mm`` in ``dtype``, with the threads that torch has: the median of some."""
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
