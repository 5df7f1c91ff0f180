"""A whole decode step of the fused kernels in a CUDA graph: right, and how fast.

    python bench/gpu_decode.py [--model 0.6b 8b] [--rows 1] [--context 128 8192 ...] [--stages]

Random weights and histories in the real shapes, bf16; pages of 16 tokens in random order; one step
a graph, whose first launch waits for the step before. Compared with the same step in float32 torch.
``--stages`` adds what is saved when a stage is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.spec import AttentionSpec
from octavo.kernels.embed.triton import embed
from octavo.kernels.embed.triton import square_columns as embed_columns
from octavo.kernels.linear.tiles import Tile
from octavo.kernels.linear_add.triton import linear_add, square_columns
from octavo.kernels.norm_gate_up.triton import norm_gate_up
from octavo.kernels.norm_linear.triton import norm_linear
from octavo.kernels.read.triton import make_reader, read_memory
from octavo.kernels.rope_attention.reference import rope_attention as reference_attention
from octavo.kernels.rope_attention.triton import (
    Cut,
    Scratch,
    choose_cut,
    make_scratch,
    rope_attention,
)
from octavo.models.spec import DecoderSpec, LayerSpec, RopeSpec
from octavo.runtime.torch_weights import DecoderTensors, random_weights

BLOCK_SIZE = 16
STAGES = ("norm_qkv", "attention", "out_proj", "norm_ffn_up", "ffn_down", "norm_head")
Tiles = dict[str, Tile | None]


def qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> DecoderSpec:
    rope = RopeSpec(theta=1e6, rotary_dim=128)
    return DecoderSpec(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerSpec(rope),) * layers,
        max_position=131_072,
        norm_eps=1e-6,
        attention_scale=128**-0.5,
        qk_norm=True,
        tied_embeddings=tied,
    )


MODELS = {
    "0.6b": qwen3(1024, 3072, 28, 16, tied=True),
    "8b": qwen3(4096, 12_288, 36, 32, tied=False),
}


@dataclass(frozen=True)
class Model:
    spec: DecoderSpec
    weights: DecoderTensors
    caches: list[tuple[Tensor, Tensor]]
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Step:
    """The buffers of a step of M rows, and its inputs."""

    ids: Tensor
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    x: Tensor
    h: Tensor
    embed_squares: Tensor
    o_squares: Tensor
    down_squares: Tensor
    qkv: Tensor
    attention: Tensor
    ffn: Tensor
    logits: Tensor
    scratch: Scratch


def make_model(spec: DecoderSpec, num_tokens: int) -> Model:
    weights = random_weights(spec, device="cuda", dtype=torch.bfloat16, seed=0)
    for layer in weights.layers:
        for norm in (layer.attn_norm, layer.ffn_norm):
            norm.uniform_(0.5, 1.5)
        assert layer.qk_norm is not None
        layer.qk_norm[: spec.num_heads] = 0.5 + torch.rand(spec.head_dim, device="cuda")
        layer.qk_norm[spec.num_heads :] = 0.5 + torch.rand(spec.head_dim, device="cuda")
    shape = (num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    caches = [
        (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(),
            torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(),
        )
        for _ in spec.layers
    ]
    inverse = 1e6 ** -(torch.arange(0, 128, 2, device="cuda").double() / 128)
    angles = torch.arange(num_tokens + 1, device="cuda").double()[:, None] * inverse
    return Model(spec, weights, caches, angles.cos().float(), angles.sin().float())


def attention_spec(spec: DecoderSpec) -> AttentionSpec:
    return AttentionSpec(
        phase="decode",
        device="cuda",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.head_dim,
        scale=spec.attention_scale,
    )


def make_step(model: Model, lens: list[int], tiles: Tiles, splits: int) -> Step:
    spec, rows = model.spec, len(lens)
    blocks = [math.ceil(n / BLOCK_SIZE) for n in lens]
    ids = torch.randperm(len(model.caches[0][0]) - 1, device="cuda")[: sum(blocks)].int()
    table = torch.full((rows, max(blocks)), -1, dtype=torch.int32, device="cuda")
    slots = []
    for row, part in enumerate(ids.split(blocks)):
        table[row, : len(part)] = part
        slots.append(int(part[-1]) * BLOCK_SIZE + (lens[row] - 1) % BLOCK_SIZE)

    def buffer(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.full((rows, columns), torch.nan, device="cuda", dtype=dtype)

    o_shape = (spec.hidden_size, spec.q_size, rows, tiles.get("out_proj"))
    down_shape = (spec.hidden_size, spec.intermediate_size, rows, tiles.get("ffn_down"))
    return Step(
        ids=torch.randint(spec.vocab_size, (rows,), device="cuda"),
        block_table=table,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.tensor(slots, device="cuda"),
        x=buffer(spec.hidden_size, torch.float32),
        h=buffer(spec.hidden_size, torch.bfloat16),
        embed_squares=buffer(embed_columns(spec.hidden_size), torch.float32),
        o_squares=buffer(square_columns(*o_shape), torch.float32),
        down_squares=buffer(square_columns(*down_shape), torch.float32),
        qkv=buffer(spec.q_size + 2 * spec.kv_size, torch.bfloat16),
        attention=buffer(spec.q_size, torch.bfloat16),
        ffn=buffer(spec.intermediate_size, torch.bfloat16),
        logits=buffer(spec.vocab_size, torch.float32),
        scratch=make_scratch(attention_spec(spec), rows, splits),
    )


def launch(model: Model, step: Step, cut: Cut, tiles: Tiles, left_out: str = "") -> None:
    """One decode step."""
    spec, weights = model.spec, model.weights
    attn = attention_spec(spec)
    eps = spec.norm_eps
    norms = [layer.attn_norm for layer in weights.layers] + [weights.final_norm]
    embed(step.ids, weights.embed, norms[0], step.x, step.h, step.embed_squares)
    squares = step.embed_squares
    for i, layer in enumerate(weights.layers):
        assert layer.qk_norm is not None
        if left_out != "norm_qkv":
            tile = tiles.get("norm_qkv")
            norm_linear(step.h, squares, layer.qkv, step.qkv, eps=eps, tile=tile)
        if left_out != "attention":
            rope_attention(
                attn,
                step.qkv,
                *model.caches[i],
                step.block_table,
                step.seq_lens,
                step.slot_mapping,
                model.cos,
                model.sin,
                step.attention,
                cut=cut,
                scratch=step.scratch,
                q_norm=layer.qk_norm[0],
                k_norm=layer.qk_norm[-1],
                eps=eps,
            )
        if left_out != "out_proj":
            stream = (step.x, layer.ffn_norm, step.h, step.o_squares)
            linear_add(step.attention, layer.o, *stream, tile=tiles.get("out_proj"))
        if left_out != "norm_ffn_up":
            tile = tiles.get("norm_ffn_up")
            norm_gate_up(step.h, step.o_squares, layer.gate_up, step.ffn, eps=eps, tile=tile)
        if left_out != "ffn_down":
            stream = (step.x, norms[i + 1], step.h, step.down_squares)
            linear_add(step.ffn, layer.down, *stream, tile=tiles.get("ffn_down"))
        squares = step.down_squares
    if left_out != "norm_head":
        tile = tiles.get("norm_head")
        norm_linear(step.h, squares, weights.head, step.logits, eps=eps, tile=tile)


def reference(model: Model, step: Step) -> Tensor:
    """Logits of the same step, in float32 torch."""
    spec, weights, eps = model.spec, model.weights, model.spec.norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight

    x = weights.embed[step.ids].float()
    nowhere = torch.full_like(step.slot_mapping, -1)
    for layer, caches in zip(weights.layers, model.caches, strict=True):
        assert layer.qk_norm is not None
        attention = reference_attention(
            attention_spec(spec),
            norm(x, layer.attn_norm) @ layer.qkv.float().T,
            *caches,
            step.block_table,
            step.seq_lens,
            nowhere,
            model.cos,
            model.sin,
            q_norm=layer.qk_norm[0],
            k_norm=layer.qk_norm[-1],
            eps=eps,
        )
        x = x + attention @ layer.o.float().T
        gate, up = (norm(x, layer.ffn_norm) @ layer.gate_up.float().T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ layer.down.float().T
    return norm(x, weights.final_norm) @ weights.head.float().T


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def graph_ms(graph: torch.cuda.CUDAGraph, replays: int = 20, rounds: int = 5) -> float:
    """Median milliseconds of a replay."""
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / replays)
    return statistics.median(times)


def read_gb_s() -> float:
    numbers, sums = make_reader("cuda")
    ms = graph_ms(capture(lambda: read_memory(numbers, sums)), replays=5)
    return numbers.nbytes / ms / 1e6


def step_bytes(model: Model, lens: list[int]) -> int:
    spec, weights = model.spec, model.weights
    layers = sum(
        tensor.nbytes
        for layer in weights.layers
        for tensor in vars(layer).values()
        if tensor is not None
    )
    token = 2 * spec.kv_size * 2 * spec.num_layers
    return layers + weights.head.nbytes + token * sum(lens)


def error(model: Model, step: Step, cut: Cut, tiles: Tiles) -> float:
    """Relative error of the logits against the reference."""
    step.logits.fill_(torch.nan)
    want = reference(model, step)
    launch(model, step, cut, tiles)
    return float((step.logits - want).norm() / want.norm())


def measure(
    name: str, rows: int, contexts: list[int], ceiling: float, *, stages: bool
) -> list[dict[str, object]]:
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    model = make_model(MODELS[name], rows * max(contexts))
    results = []
    for context in contexts:
        lens = [context] * rows
        cut = choose_cut(attention_spec(model.spec), rows, context, num_sms)
        step = make_step(model, lens, {}, cut.splits)
        off = error(model, step, cut, {})
        ms = graph_ms(capture(partial(launch, model, step, cut, {})))
        floor = step_bytes(model, lens) / ceiling / 1e6
        print(
            f"{name} {rows} x {context:,}: {ms:.3f} ms, floor {floor:.3f} ({floor / ms:.0%}),"
            f" error {off:.1e}, {cut}"
        )
        saved = {}
        for stage in STAGES if stages else ():
            graph = capture(partial(launch, model, step, cut, {}, stage))
            saved[stage] = round((ms - graph_ms(graph)) * 1e3, 1)
        if stages:
            print(f"  us saved without: {saved}, rest {ms * 1e3 - sum(saved.values()):.1f}")
        results.append(
            {"model": name, "rows": rows, "context": context, "ms": round(ms, 4)}
            | {"floor_ms": round(floor, 4), "error": off, "saved_us": saved}
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["0.6b", "8b"], choices=MODELS)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", nargs="+", type=int, default=[128, 8192, 32_768, 131_072])
    parser.add_argument("--stages", action="store_true")
    args = parser.parse_args()
    ceiling = read_gb_s()
    print(f"{torch.cuda.get_device_name()}, read ceiling {ceiling:,.0f} GB/s")
    results = []
    for name in args.model:
        results += measure(name, args.rows, args.context, ceiling, stages=args.stages)
        torch.cuda.empty_cache()
    print(json.dumps({"read_gb_s": round(ceiling), "steps": results}))


if __name__ == "__main__":
    main()
