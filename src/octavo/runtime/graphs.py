"""Launches that come again and again, as CUDA graphs that are captured when they first come, or
before, when there is time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """A launch is captured under its key, and from then on it is one launch. What is launched reads
    and writes memory that was there before, or that nobody looks at afterwards: the graphs share
    what they allocate. It belongs to one stream, the current one. ``enabled`` off never captures.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        if self._enabled:
            self.capture(key, launch)
            self._graphs[key].replay()
        else:
            launch()

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Have the graph, which takes as long as to launch."""
        if key in self._graphs:
            return
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel that is launched for the first time is loaded meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="relaxed")
        try:
            launch()
        finally:
            graph.capture_end()
        self._graphs[key] = graph
