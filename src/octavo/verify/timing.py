"""How long a candidate takes, on keys and values that come from memory and not from a cache."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise

import numpy as np
import torch

from octavo.attention import AttentionBatch, AttentionSpec, Candidate, plan_splits
from octavo.host import free_memory

COLD_BYTES = 256 << 20  # a launch comes back to the same keys after this many others
MAX_COPIES = 512


@dataclass(frozen=True)
class Workload:
    """One decode step, ready to be launched: ``launch(i)`` reads copy ``i`` of the history."""

    launch: Callable[[int], object]
    copies: int
    graph: bool  # whether the launches may be captured
    num_bytes: int  # that a launch must move: keys, values, queries and output


def make_workload(
    candidate: Candidate,
    spec: AttentionSpec,
    batch_size: int,
    length: int,
    *,
    cold_bytes: int = COLD_BYTES,
) -> Workload:
    """``batch_size`` rows of ``length`` random keys each, in shuffled blocks."""
    backend, batch = candidate.open(spec), _batch(spec, batch_size, length)
    plan = backend.plan(batch)
    token_bytes = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * _itemsize(spec.kv_dtype)
    kv_bytes = batch_size * length * token_bytes
    copies = min(MAX_COPIES, -(-cold_bytes // kv_bytes))
    layout = candidate.kv_layout(spec, batch.block_table.size)
    dtype = getattr(torch, layout.dtype)
    keys, values = (
        [torch.randn(shape, device=spec.device, dtype=dtype) for _ in range(copies)]
        for shape in (layout.k_shape, layout.v_shape)
    )
    q = torch.randn(
        batch_size,
        spec.num_heads,
        spec.head_dim,
        device=spec.device,
        dtype=getattr(torch, spec.dtype),
    )

    def launch(i: int) -> object:
        return backend.run(q, keys[i], values[i], plan)

    return Workload(
        launch,
        copies,
        _is_cuda(spec.device) and candidate.supports(replace(spec, graph=True)).ok,
        kv_bytes + q.nbytes + q.nbytes // spec.head_dim * spec.v_head_dim,
    )


def pool_bytes(
    spec: AttentionSpec, batch_size: int, length: int, *, cold_bytes: int = COLD_BYTES
) -> int:
    """About what :func:`make_workload` allocates."""
    token_bytes = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * _itemsize(spec.kv_dtype)
    return max(batch_size * length * token_bytes, cold_bytes)


def free_bytes(device: str) -> int:
    """Memory that can be had on the device."""
    if _is_cuda(device):
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def num_splits(
    candidate: Candidate, spec: AttentionSpec, batch_size: int, length: int
) -> int | None:
    """Segments of each row. Where the device cuts, by its slots, what the host's planner would do
    with as many; None where nobody tells."""
    backend, batch = candidate.open(spec), _batch(spec, batch_size, length)
    plan = backend.plan(batch)
    if hasattr(plan, "cut"):  # the same for all rows
        return int(plan.cut.splits)
    splits = getattr(plan, "splits", None)
    slots = getattr(backend, "num_slots", None)
    if splits is None and slots is not None:
        splits = plan_splits(
            batch.seq_lens,
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            num_cores=slots,
            mode=spec.split_mode,
            split_tokens=spec.split_tokens,
            window=spec.window,
        )
    return None if splits is None else int(splits.num_splits.max(initial=0))


def _batch(spec: AttentionSpec, batch_size: int, length: int) -> AttentionBatch:
    blocks = -(-length // spec.block_size)
    ids = np.random.default_rng(0).permutation(batch_size * blocks).astype(np.int32)
    return AttentionBatch(
        np.arange(batch_size + 1, dtype=np.int32),
        np.full(batch_size, length, np.int32),
        ids.reshape(batch_size, blocks),
    )


def sample_us(work: Workload, device: str, seconds: float) -> list[float]:
    """Microseconds a launch, once for each round through the copies, for about ``seconds``.

    On a GPU by its own clock, from a CUDA graph where the launches can be captured; elsewhere by
    the host's, with the device awaited, and the rounds left out in which other programs took our
    cores (unless they always did)."""
    if not _is_cuda(device):
        return _by_host(work, device, seconds)
    replay = _captured(work) if work.graph else lambda: _round(work)
    replay()
    start, end = _event(), _event()
    start.record()
    replay()
    end.record()
    end.synchronize()
    rounds = max(5, min(200, int(seconds * 1e3 / max(start.elapsed_time(end), 1e-3))))
    events = [_event() for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 / work.copies for a, b in pairwise(events)]


def read_bandwidth(device: str, seconds: float = 0.5) -> float:
    """GB/s of a kernel that only reads, with the threads or the GPU that attention has."""
    if _is_cuda(device):
        from octavo.kernels.read import triton as gpu

        reader = gpu.make_reader(device)
        work = Workload(lambda i: gpu.read_memory(*reader), 2, True, reader[0].nbytes)
    elif device != "cpu":
        import_module(f"torch_{device.partition(':')[0]}")  # torch knows the device by then
        numbers = torch.zeros(1 << 28, device=device)
        work = Workload(lambda i: numbers.sum(), 2, False, numbers.nbytes)
    else:
        from octavo.kernels.read import cpu

        memory = cpu.Reader()
        work = Workload(lambda i: memory.read(), 1, False, memory.numbers.nbytes)
    return work.num_bytes / min(sample_us(work, device, seconds)) / 1e3


def _by_host(work: Workload, device: str, seconds: float) -> list[float]:
    def wait() -> None:
        if device != "cpu":
            getattr(torch, device.partition(":")[0]).synchronize()

    _round(work)
    wait()
    samples: list[float] = []
    undisturbed: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 3:
        preempted = _times_preempted()
        began = time.perf_counter()
        _round(work)
        wait()
        samples.append((time.perf_counter() - began) * 1e6 / work.copies)
        if _times_preempted() == preempted:
            undisturbed.append(samples[-1])
    return undisturbed or samples


def _times_preempted() -> int:
    """How often another process took a core from one of our threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _round(work: Workload) -> None:
    for i in range(work.copies):
        work.launch(i)


def _captured(work: Workload) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work.launch(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _round(work)
    return graph.replay


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"
