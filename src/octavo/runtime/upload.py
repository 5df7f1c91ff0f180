"""Small arrays of integers on their way to the device, without a wait on either side."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Upload:
    """Up to ``num_ints`` int32 at a time, always to the same place: fill :meth:`array`,
    :meth:`send` it, launch what reads ``device``, and call :meth:`launched`.

    The copy runs on a stream of its own, as soon as the last readers have ended, while other
    kernels still run. Two arrays on the host take turns.
    """

    def __init__(self, num_ints: int, device: torch.device) -> None:
        self.device = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self._hosts = [pinned(num_ints, device) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._turn = 0
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._arrived: list[Any] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._read: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def array(self) -> NDArray[np.int32]:
        """Where the next integers go."""
        if self._stream is not None:
            self._arrived[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> None:
        """Copy the first ``count`` integers, for kernels launched from now on."""
        host = self._hosts[self._turn][:count]
        if self._stream is None:
            self.device[:count] = host
            return
        arrived = self._arrived[self._turn]
        self._turn = 1 - self._turn
        self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            self.device[:count].copy_(host, non_blocking=True)
            arrived.record(self._stream)
        torch.cuda.current_stream().wait_event(arrived)

    def launched(self) -> None:
        """Everything that reads what was sent is launched."""
        if self._stream is not None:
            self._read.record()


def pinned(shape: int | tuple[int, ...], device: torch.device) -> Tensor:
    """int32 in host memory that the device can reach."""
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
