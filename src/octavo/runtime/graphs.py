"""Launches that come again and again, as CUDA graphs that are captured when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """The first launch under a key goes kernel by kernel, which compiles what has to be; the second
    is captured; from then on it is one launch. What is launched reads and writes buffers that stay
    where they are, and belongs to one stream, the current one: all graphs share the memory in
    between. ``enabled`` off never captures.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._launched: set[Hashable] = set()
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None and self._enabled and key in self._launched:
            graph = self._graphs[key] = self._capture(launch)
        if graph is not None:
            graph.replay()
        else:
            launch()
            self._launched.add(key)

    def _capture(self, launch: Callable[[], None]) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on calling CUDA meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        return graph
