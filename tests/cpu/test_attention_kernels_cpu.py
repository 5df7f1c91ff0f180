"""The cpu kernels at odd shapes, for each KV dtype and for the registers of each level.

Pools are NaN wherever nobody may look. Keys and values are numbers that the KV dtype holds exactly,
so the answer is attention in float64. ``vnni`` differs from ``avx2`` and ``plain`` in how many
sums the code keeps at once, which any CPU can run; amx's products need the CPU.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.attention import fill_pool, make_rows, make_spec, num_blocks, oracle

from octavo.attention import SplitPlan, cpu_step
from octavo.attention.backends.cpu import CpuCandidate
from octavo.kernels import levels
from octavo.kernels.host_cpu import features
from octavo.kernels.levels import level
from octavo.kernels.program import Program
from octavo.kernels.rope_write.cpu import spread_heads
from octavo.kernels.rope_write.reference import rope_write, spread
from octavo.kernels.team import team
from octavo.verify.problems import held
from octavo.verify.run import specs_for

LEVELS = sorted({"avx2", "vnni", level()})
# Heads that share a KV head, sizes of keys and values, KV dtype, level.
INT8 = [*[(3, 64, 64, "int8", name) for name in LEVELS], (5, 80, 80, "int8", level())]
OTHERS = [
    (1, 128, 128, "bfloat16", level()),
    (7, 96, 64, "float32", level()),
    (12, 64, 64, "bfloat16", level()),
]
# What is multiplied in pairs of bfloat16s, where that pays or not.
PAIRS = [
    (3, 64, 64, "bfloat16"),
    (5, 80, 80, "int8"),
    (1, 128, 128, "bfloat16"),
    (12, 64, 96, "int8"),
    (3, 8, 24, "bfloat16"),
]
SHAPE = ("group", "head_dim", "v_head_dim", "kv_dtype", "instructions")
# What each layer may have beside: all of it are arguments of one compiled kernel.
EXTRAS = [{}, {"window": 20, "soft_cap": 4.0}, {"window": 1}, {"has_sinks": True}]


@pytest.fixture
def at_level(monkeypatch):
    return lambda name: monkeypatch.setattr(cpu_step, "level", lambda: name)


def exact_rows(spec, *lens, **options):
    rows = make_rows(spec, *lens, **options)
    rows.keys, rows.values = (
        [held(torch.from_numpy(x), spec).float().numpy() for x in side]
        for side in (rows.keys, rows.values)
    )
    return rows


def check(spec, rows, splits=None, atol=1e-5, lse_atol=1e-5):
    """One step through the backend: against float64, and nothing of the poison in it."""
    backend = CpuCandidate().open(spec)
    pool = fill_pool(spec, CpuCandidate().kv_layout(spec, num_blocks(rows)), backend, rows)
    sinks = np.linspace(-1, 3, spec.num_heads, dtype=np.float32) if spec.has_sinks else None
    plan = backend.plan(rows.batch, splits)
    out, lse = backend.run(
        torch.from_numpy(rows.q), *pool, plan, None if sinks is None else torch.from_numpy(sinks)
    )
    wanted = oracle(spec, rows, sinks)
    np.testing.assert_allclose(out.numpy(), wanted[0], atol=atol)
    np.testing.assert_allclose(lse.numpy(), wanted[1], atol=lse_atol)


def spec_of(phase, group, head_dim, v_head_dim, kv_dtype, **extras):
    return make_spec(
        phase,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        kv_dtype=kv_dtype,
        block_size=32,
        **extras,
    )


@pytest.mark.parametrize(SHAPE, INT8)  # the others are test_attention_cpu's
def test_decode(at_level, group, head_dim, v_head_dim, kv_dtype, instructions):
    """Around a tile, a block and a chunk; no keys at all; cut in seven, some of them empty."""
    at_level(instructions)
    lens = [1, 15, 16, 17, 31, 32, 33, 0, 127, 128, 129, 300]
    for extras in EXTRAS:
        spec = spec_of("decode", group, head_dim, v_head_dim, kv_dtype, **extras)
        rows = exact_rows(spec, lens)
        check(spec, rows)
        if "window" not in extras:
            check(spec, rows, sevenths(lens))


def sevenths(lens):
    edges = np.array([[n * i // 7 for i in range(8)] for n in lens], np.int32)
    starts, stops = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    row_start = np.arange(len(lens) + 1, dtype=np.int32) * 7
    return SplitPlan(row_start, starts, stops, np.array(lens), 1, 1, "auto", 0, 1)


@pytest.mark.parametrize(SHAPE, INT8 + OTHERS)
def test_prefill(at_level, group, head_dim, v_head_dim, kv_dtype, instructions):
    """Whole prompts around a tile and a block, chunks, cached prefixes, a row of one token: all
    in one batch."""
    at_level(instructions)
    lens = [1, 15, 16, 17, 31, 33, 129, 40, 300, 257, 70]
    new = [1, 15, 16, 17, 31, 33, 129, 3, 20, 1, 64]
    for extras in EXTRAS:
        spec = spec_of("prefill", group, head_dim, v_head_dim, kv_dtype, **extras)
        check(spec, exact_rows(spec, lens, new))


@pytest.mark.skipif("avx512bf16" not in features(), reason="this CPU has no vdpbf16ps")
@pytest.mark.parametrize(SHAPE[:-1], PAIRS)
def test_prefill_in_pairs(monkeypatch, group, head_dim, v_head_dim, kv_dtype):
    """Queries and weights as bfloat16s: against float64 on rounded queries, so that what is left is
    the weights' rounding, 2**-9 of each, and their exp's error, 8e-5, which is their sums' too."""
    monkeypatch.setattr(cpu_step, "level", lambda: "vnni")
    monkeypatch.setattr(cpu_step, "pairs_pay", lambda: True)
    lens = [1, 15, 16, 17, 31, 33, 129, 40, 300, 257, 70]
    new = [1, 15, 16, 17, 31, 33, 129, 3, 20, 1, 64]
    for extras in EXTRAS:
        options = {"dtype": "bfloat16", **extras}
        spec = spec_of("prefill", group, head_dim, v_head_dim, kv_dtype, **options)
        rows = exact_rows(spec, lens, new)
        rows.q = torch.from_numpy(rows.q).bfloat16().float().numpy()
        largest = max(np.abs(values).max() for values in rows.values)
        check(spec, rows, atol=2**-9 * largest, lse_atol=1e-4)


def test_only_what_may_be_rounded_is_multiplied_in_pairs(monkeypatch):
    """And ``octavo verify`` asks about it."""
    monkeypatch.setattr(cpu_step, "level", lambda: "vnni")
    monkeypatch.setattr(cpu_step, "pairs_pay", lambda: True)
    dtypes = itertools.product(("float32", "bfloat16"), ("float32", "bfloat16", "int8"))
    rooms = {
        each: cpu_step._prefill_room(make_spec(dtype=each[0], kv_dtype=each[1])) for each in dtypes
    }
    in_pairs = {each for each, room in rooms.items() if room == cpu_step.PAIRS}
    assert in_pairs == {("bfloat16", "bfloat16"), ("bfloat16", "int8")}
    asked = specs_for("cpu", "cpu", quick=False)
    assert in_pairs <= {(spec.dtype, spec.kv_dtype) for spec in asked if spec.phase == "prefill"}


@pytest.mark.parametrize(
    ("vendor", "feature", "name", "pays"),
    [
        ("AuthenticAMD", "avx512bf16", "vnni", True),
        ("AuthenticAMD", "avx512bf16", "avx2", False),
        ("AuthenticAMD", "avx512vnni", "vnni", False),
        ("GenuineIntel", "avx512bf16", "vnni", False),
        ("", "avx512bf16", "vnni", False),
    ],
)
def test_pairs_pay(monkeypatch, vendor, feature, name, pays):
    monkeypatch.setattr(levels, "vendor", lambda: vendor)
    monkeypatch.setattr(levels, "features", lambda: {feature})
    monkeypatch.setattr(levels, "level", lambda: name)
    assert levels.pairs_pay.__wrapped__() is pays


@pytest.mark.parametrize("num_decodes", [0, 2, 3])
def test_a_step_of_decodes_and_prompts(num_decodes):
    """As the cpu runtime's: one plan, attend and merge for the first rows, prefill for the rest."""
    lens, new = [300, 17, 1, 40, 33, 129], [1, 1, 1, 5, 33, 2]
    spec = spec_of("decode", 3, 64, 64, "int8")
    rows = exact_rows(spec, lens, new)
    k, v = fill_pool(
        spec,
        CpuCandidate().kv_layout(spec, num_blocks(rows)),
        CpuCandidate().open(spec),
        rows,
    )
    plan = cpu_step.CpuPlan(spec, team().num_threads)
    plan.fill(rows.batch.query_start_loc, rows.batch.seq_lens, num_decodes, rows.batch.block_table)
    out = np.full((len(rows.q) + 1, 6, 64), np.nan, np.float32)
    places = {"q": rows.q, "out": out, "k_cache": k.numpy(), "v_cache": v.numpy()}
    calls = cpu_step.decode_calls(spec, plan, **places)
    team().run(Program([*calls, cpu_step.prefill_call(spec, plan, **places)]))
    np.testing.assert_allclose(out[:-1], oracle(spec, rows)[0], atol=1e-5)
    assert np.isnan(out[-1]).all()  # a buffer may be longer than the step


@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_rope_write(kv_dtype, with_norm, rotary_dim):
    """Seven tokens, one of them stored nowhere; compared in the pool to half a step of rounding.
    What is rounded coarsely is spread before: keys and values for int8, normed keys for
    bfloat16; and for int8 norms are balanced."""
    spec = make_spec(num_heads=6, num_kv_heads=2, kv_dtype=kv_dtype)
    backend, layout = CpuCandidate().open(spec), CpuCandidate().kv_layout(spec, 4)
    tokens, slots = 7, np.array([0, 1, 17, -1, 31, 63, 40], np.int32)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, 10 * 64, generator=generator)
    angles = torch.randn(tokens, rotary_dim // 2, generator=generator)
    weights = torch.randn(8, 64, generator=generator) if with_norm else None
    pools = [
        torch.zeros(shape, dtype=getattr(torch, layout.dtype))
        for shape in (layout.k_shape, layout.v_shape)
    ]
    wanted_weights = weights
    if weights is not None and kv_dtype == "int8":
        wanted_weights = torch.from_numpy(cpu_step.balance(weights.numpy(), 2, rotary_dim))
    wanted_pools = [torch.zeros(4, 16, 2, 64) for _ in "kv"]
    wanted_q = rope_write(
        qkv,
        torch.arange(tokens),
        angles.cos(),
        angles.sin(),
        *wanted_pools,
        torch.from_numpy(slots),
        num_heads=6,
        qk_norm=wanted_weights,
        eps=1e-6,
    )
    spread_keys = 64 if kv_dtype == "int8" or (kv_dtype == "bfloat16" and with_norm) else 0
    wanted_q = spread(wanted_q, spread_keys)
    wanted_pools[0] = spread(wanted_pools[0], spread_keys)
    wanted_pools[1] = spread(wanted_pools[1], 64 if kv_dtype == "int8" else 0)
    plan = cpu_step.CpuPlan(spec, team().num_threads)
    starts = np.arange(tokens + 1, dtype=np.int32)
    lens, table = np.ones(tokens, np.int32), np.zeros((tokens, 1), np.int32)
    plan.fill(starts, lens, tokens, table, slots)
    q = np.zeros((tokens, 6, 64), np.float32)
    call = cpu_step.rope_write_call(
        spec,
        plan,
        qkv=qkv.numpy(),
        q=q,
        cos=angles.cos().numpy(),
        sin=angles.sin().numpy(),
        k_cache=pools[0].view(torch.uint8).numpy(),
        v_cache=pools[1].view(torch.uint8).numpy(),
        rotary_dim=rotary_dim,
        qk_norm=None if weights is None else weights.numpy(),
        norm_eps=1e-6,
    )
    team().run(Program([call]))
    torch.testing.assert_close(torch.from_numpy(q), wanted_q, atol=2e-6, rtol=1e-5)
    got = backend.gather(*pools, torch.arange(4, dtype=torch.int32), 64)
    for found, wanted in zip(got, wanted_pools, strict=True):
        wanted = wanted.view(64, 2, 64)
        half_step = {
            "float32": 0 * wanted,
            "bfloat16": wanted.abs() / 256,
            "int8": wanted.abs().amax(-1, keepdim=True) / 254,
        }[kv_dtype]
        error = (found.float() - wanted).abs()
        assert (error <= 1.01 * half_step + 1e-5).all()
        assert (found[wanted.abs().amax((1, 2)) == 0] == 0).all()  # no other slot is written


def test_what_bfloat16_rounds():
    """To the nearest, to the even one of two; a NaN stays one, as does an infinity."""
    spec = make_spec(num_kv_heads=1, head_dim=8, v_head_dim=24, kv_dtype="bfloat16")
    backend, layout = CpuCandidate().open(spec), CpuCandidate().kv_layout(spec, 2)
    pools = [torch.zeros(shape, dtype=torch.bfloat16) for shape in (layout.k_shape, layout.v_shape)]
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23, 3.4e38, -1e-40]
    numbers = torch.tensor([*ties, math.nan, -math.inf]).roll(3)
    v = torch.cat([numbers, -numbers, numbers.flip(0)])
    slots = torch.tensor([17, 18])
    backend.write(
        numbers.expand(2, 1, 8).contiguous(), v.expand(2, 1, 24).contiguous(), *pools, slots
    )
    for found, wanted in zip(
        backend.gather(*pools, torch.arange(2, dtype=torch.int32), 20), (numbers, v), strict=True
    ):
        wanted = wanted.bfloat16().expand(2, 1, -1)
        torch.testing.assert_close(found[17:19], wanted, rtol=0, atol=0, equal_nan=True)
        assert (found[:17] == 0).all()
        assert (found[19:] == 0).all()


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 24), (256, 256), (96, 0)])
@pytest.mark.parametrize("group", [1, 3])
def test_balanced_norms(group, head_dim, rotary_dim):
    """Scores are what they were, by the reference in float64, where weights are 0 or one of a
    norm's is the largest by far; and keys of such a norm err less in int8."""
    kv_heads, tokens = 2, 50
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = normal(kv_heads * (group + 1), head_dim)
    weights[:, 5] = weights[0, 1] = weights[-1, 2] = 0
    weights[:-kv_heads, 7], weights[-kv_heads:, 7] = 0.1, 30
    weights = weights.float()
    balanced = torch.from_numpy(cpu_step.balance(weights.numpy(), kv_heads, rotary_dim))
    qkv = normal(tokens, (kv_heads * (group + 2)) * head_dim)
    angles = normal(tokens, rotary_dim // 2)

    def scores(qk_norm, size=0):
        """Of all queries with all keys, and those with keys as int8 has them."""
        pools = [torch.zeros(4, 16, kv_heads, head_dim, dtype=torch.float64) for _ in "kv"]
        q = rope_write(
            qkv,
            torch.arange(tokens),
            angles.cos(),
            angles.sin(),
            *pools,
            torch.arange(tokens),
            num_heads=kv_heads * group,
            qk_norm=qk_norm.double(),
            eps=1e-6,
        )
        q, k = spread(q, size), spread(pools[0].view(64, kv_heads, head_dim)[:tokens], size)
        steps = k.abs().amax(-1, keepdim=True) / 127
        q = q.view(tokens, kv_heads, group, head_dim)
        return [torch.einsum("ihgd,jhd->hgij", q, x) for x in (k, (k / steps).round() * steps)]

    before, after = (scores(x, head_dim & -head_dim) for x in (weights, balanced))
    wanted = scores(weights)[0]
    for found, _ in (before, after):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    old, new = (float((rounded - wanted).norm()) for _, rounded in (before, after))
    assert new < 0.7 * old


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (80, 16), (96, 32), (256, 256), (16, 1)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_spread_heads(head_dim, size, tokens):
    """As the matrix says; no more tokens than there are; twice gives what was there before."""
    x = torch.randn(tokens + 1, 3, head_dim, generator=torch.Generator().manual_seed(1))
    found = x.clone()
    call = spread_heads.bind(
        count=np.array([tokens], np.int64),
        x=found.numpy(),
        num_heads=3,
        head_dim=head_dim,
        size=size,
    )
    team().run(Program([call]))
    torch.testing.assert_close(found[:tokens], spread(x[:tokens], size), atol=1e-6, rtol=1e-5)
    assert (found[tokens] == x[tokens]).all()
    team().run(Program([call]))
    torch.testing.assert_close(found, x, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("mode", ["auto", "fixed", "off"])
def test_a_plan_hangs_on_lengths_only(mode, window):
    """Whatever it was filled with before: longer rows, shorter ones, more or fewer."""
    spec = make_spec(num_heads=6, num_kv_heads=2, split_mode=mode, window=window, split_tokens=64)
    kept = cpu_step.CpuPlan(spec, 2)
    rng = np.random.default_rng(0)
    lens = np.array([17, 900], np.int32)
    for _ in range(200):
        lens = lens + rng.choice([1, 1, 1, -9]) if rng.random() < 0.9 else rng.integers(0, 2000, 3)
        lens = np.maximum(lens, 0).astype(np.int32)
        starts, table = np.arange(len(lens) + 1, dtype=np.int32), np.zeros((len(lens), 1), np.int32)
        fresh = cpu_step.CpuPlan(spec, 2)
        for plan in (kept, fresh):
            plan.fill(starts, lens, len(lens), table)
        first = np.maximum(lens - window, 0) if window else 0 * lens
        for row, cuts in enumerate(kept.splits.boundaries):
            edges = [first[row], *(stop for _, stop in cuts)]
            assert cuts == list(itertools.pairwise(edges))
            assert edges[-1] == lens[row]
            assert all(start < stop for start, stop in cuts)
        assert kept.splits.boundaries == fresh.splits.boundaries
