"""The fused attention kernel of :mod:`octavo.kernels.rope_attention.triton`, device side.

``triton_new.py`` makes the new queries, key and value, ``triton_merge.py`` puts partials together
and writes answers. Here are a block's share of the history, and its way through shared memory.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from octavo.kernels.gluon import async_copy, gl, jit, mma_v2, next_power_of_2
from octavo.kernels.rope_attention.triton_layouts import (
    copy_layout,
    merge_layout,
    score_layout,
    tile_memory,
)
from octavo.kernels.rope_attention.triton_merge import merge_shares, merge_warps, write_answers
from octavo.kernels.rope_attention.triton_new import cap, new_tile, query_of, score_new
from octavo.kernels.rope_attention.triton_rows import (
    all_rows,
    first_rows,
    for_both,
    rows_of,
    scale_rows,
)


@jit(do_not_specialize=["stride_table"])
def rope_attention_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    slot_mapping,
    out,
    lse,
    part_out,
    part_m,
    part_l,
    counters,
    eps,
    scale,  # times log2(e)
    soft_cap,  # times log2(e)
    stride_qkv,
    stride_table,
    stride_out,
    K_STRIDES: tl.constexpr,  # of block, token and head
    V_STRIDES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QK_NORM: tl.constexpr,
    SINGLE: tl.constexpr,
    SHARE: tl.constexpr,
    WHOLE: tl.constexpr,
    MOST_SHARES: tl.constexpr,
    FEW_SHARES: tl.constexpr,
    LSE: tl.constexpr,
    W: tl.constexpr,  # warps with keys of their own
    P: tl.constexpr,  # warps: as many, or two for each of these
    KEYS: tl.constexpr,  # of a tile, for each warp
    STAGES: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    MERGED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (splits, Hkv, R)."""
    if DEPENDENT:
        gdc_launch_dependents()
    split, splits = gl.program_id(0), gl.num_programs(0)
    head, row = gl.program_id(1), gl.program_id(2)
    row64 = row.to(gl.int64)
    TOKENS: tl.constexpr = W * KEYS

    # The share: history keys [start, stop), and the new key where the share ends the row.
    seq_len = gl.load(seq_lens + row)
    newest = seq_len - 1
    visible_from = gl.maximum(seq_len - WINDOW, 0) if WINDOW else 0
    if SHARE:
        reach = gl.minimum(seq_len, WINDOW) if WINDOW else seq_len
        share = gl.maximum(
            (reach + TOKENS * MOST_SHARES - 1) // (TOKENS * MOST_SHARES) * TOKENS, SHARE
        )
        first_share = visible_from // share
        count = gl.maximum((seq_len + share - 1) // share - first_share, 1)
        if split >= count:
            return  # a row's first block waits, so that this kernel doesn't end before the last
        begin = (first_share + split) * share
        start = gl.maximum(begin, visible_from)
        stop = gl.minimum(begin + share, newest)
        ends_row = (begin < seq_len) & (seq_len <= begin + share)
        first = start
    else:
        count = splits
        first_tile = visible_from // TOKENS
        num_tiles = (seq_len + TOKENS - 1) // TOKENS - first_tile
        begin = split * num_tiles // splits
        end = (split + 1) * num_tiles // splits
        start = gl.maximum((first_tile + begin) * TOKENS, visible_from)
        stop = gl.minimum((first_tile + end) * TOKENS, newest)
        ends_row = (begin < end) & (end == num_tiles)
        first = (first_tile + begin) * TOKENS

    table = block_table + row64 * stride_table
    k_head = k_cache + head.to(gl.int64) * K_STRIDES[2]
    v_head = v_cache + head.to(gl.int64) * V_STRIDES[2]
    history = (table, k_head, v_head, first, start, stop)
    k_tiles, v_tiles, blocks = _begin_copies(
        *history, K_STRIDES, V_STRIDES, HEAD_DIM, BLOCK_SIZE, STAGES, W, P, KEYS, D
    )
    new_rows, new_value = new_tile(
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        k_head,
        v_head,
        slot_mapping,
        row,
        head,
        newest,
        ends_row,
        eps,
        stride_qkv,
        K_STRIDES,
        V_STRIDES,
        NUM_KV_HEADS,
        GROUP,
        HEAD_DIM,
        ROTARY,
        BLOCK_SIZE,
        QK_NORM,
        0 if WHOLE else STAGES - 1,
        P,
        G,
        D,
        DEPENDENT,
    )
    HEADS: tl.constexpr = next_power_of_2(GROUP)
    query = query_of(new_rows, W, P, G, D)
    new_scores = score_new(new_rows, query, scale, soft_cap, SOFT_CAP, GROUP, W, P, G, D)
    m, l, acc = _read_history(
        k_tiles,
        v_tiles,
        blocks,
        *history,
        query,
        scale,
        soft_cap,
        SOFT_CAP,
        WINDOW,
        K_STRIDES,
        V_STRIDES,
        HEAD_DIM,
        BLOCK_SIZE,
        WHOLE,
        rows_of(HEADS, G, D),
        STAGES,
        W,
        P,
        KEYS,
        G,
        D,
    )
    m, l, acc = merge_warps(m, l, acc, new_scores, new_value, ends_row, HEADS, G, W, P, D)

    MERGED_WARPS: tl.constexpr = gl.SliceLayout(0, merge_layout(W, HEADS, D, P))
    heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, MERGED_WARPS))
    dv = gl.arange(0, D, layout=gl.SliceLayout(0, MERGED_WARPS))
    of_head = (heads < GROUP)[:, None] & (dv < HEAD_DIM)[None, :]
    first_head = (row * NUM_KV_HEADS + head) * GROUP
    outs = out + row64 * stride_out + head * (GROUP * HEAD_DIM)
    if SINGLE or (SHARE and count == 1):
        write_answers(m, l, acc, heads, dv, outs, lse, first_head, LSE, GROUP, HEAD_DIM)
    else:
        places = (first_head + heads) * splits + split
        gl.store(part_m + places, m, mask=heads < GROUP)
        gl.store(part_l + places, l, mask=heads < GROUP)
        gl.store(part_out + (places[:, None] * HEAD_DIM + dv[None, :]), acc, mask=of_head)
        gl.thread_barrier()  # all threads have stored before one of them tells
        counter = counters + row * NUM_KV_HEADS + head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
            gl.thread_barrier()
            parts = (part_out, part_m, part_l, first_head, splits, count)
            if SHARE and count <= FEW_SHARES:
                merge_shares(*parts, outs, lse, LSE, GROUP, HEADS, HEAD_DIM, P, D, FEW_SHARES)
            else:
                merge_shares(*parts, outs, lse, LSE, GROUP, HEADS, HEAD_DIM, P, D, MERGED)
            gl.store(counter, 0)


@jit
def _begin_copies(
    table,
    k_head,
    v_head,
    first,
    start,
    stop,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Shared memory [STAGES, W, KEYS, D] for keys and for values, into which the first tiles are
    being copied; and the blocks of the tile behind them."""
    TILE: tl.constexpr = tile_memory(D)
    k_tiles = gl.allocate_shared_memory(k_head.dtype.element_ty, [STAGES, W, KEYS, D], TILE)
    v_tiles = gl.allocate_shared_memory(v_head.dtype.element_ty, [STAGES, W, KEYS, D], TILE)
    blocks = _blocks(table, first, start, stop, BLOCK_SIZE, W, P, KEYS, D)
    for i in gl.static_range(STAGES):
        tile = (k_tiles.index(i), v_tiles.index(i), first + i * W * KEYS)
        places = (k_head, v_head, blocks, start, stop)
        _copy_tile(*tile, *places, K_STRIDES, V_STRIDES, HEAD_DIM, BLOCK_SIZE, W, P, KEYS, D)
        async_copy.commit_group()
        # One tile ahead, as no copy can begin without them.
        ahead = first + (i + 1) * W * KEYS
        blocks = _blocks(table, ahead, start, stop, BLOCK_SIZE, W, P, KEYS, D)
    return k_tiles, v_tiles, blocks


@jit
def _read_history(
    k_tiles,
    v_tiles,
    blocks,
    table,
    k_head,
    v_head,
    first,
    start,
    stop,
    query,
    scale,
    soft_cap,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """The warps' partials ``m``, ``l`` [W, ROWS] and ``acc`` [W, G, D] of the tiles from ``first``
    up to ``stop``, of which the first is there; of those behind, each begins to be copied when
    there is room for it. ``WHOLE``: all are there, and are ``STAGES``. A tile without keys changes
    no bit."""
    TOKENS: tl.constexpr = W * KEYS
    MMA: tl.constexpr = score_layout(W, P)
    of_share = (start, stop, scale, soft_cap)
    there = ()  # scores of the tiles that are: none waits for another
    for i in gl.static_range(STAGES if WHOLE else 1):
        k_tile, place = k_tiles.index(i), first + i * TOKENS
        there += (_scores(k_tile, query, place, *of_share, SOFT_CAP, WINDOW, ROWS, W, P, KEYS, G),)
    if P > W:
        there = for_both(there, W, P, G, KEYS)
    m = gl.max(there[0], 2)
    weights = gl.exp2(there[0] - gl.where(m == float("-inf"), 0.0, m)[:, :, None])
    l = gl.sum(weights, 2)
    acc = gl.zeros([W, G, D], gl.float32, layout=MMA)
    acc = _weigh(weights, v_tiles.index(0), acc, W, P, KEYS, G)
    if WHOLE:
        for i in gl.static_range(1, STAGES):
            m, l, acc = _go_on(m, l, acc, there[i], v_tiles.index(i), ROWS, W, P, KEYS, G, D)
    else:
        tiles = (stop - first + TOKENS - 1) // TOKENS
        for i in range(1, tiles):
            # Tile i + STAGES - 1 comes where tile i - 1 was.
            ahead = first + (i + STAGES - 1) * TOKENS
            if ahead < stop:
                gl.thread_barrier()  # all warps are through with the tile that is overwritten
                slot = (i - 1) % STAGES
                tile = (k_tiles.index(slot), v_tiles.index(slot), ahead)
                places = (k_head, v_head, blocks, start, stop)
                _copy_tile(
                    *tile, *places, K_STRIDES, V_STRIDES, HEAD_DIM, BLOCK_SIZE, W, P, KEYS, D
                )
                blocks = _blocks(table, ahead + TOKENS, start, stop, BLOCK_SIZE, W, P, KEYS, D)
            async_copy.commit_group()
            async_copy.wait_group(STAGES - 1)
            gl.thread_barrier()
            place = first + i * TOKENS
            k_tile = k_tiles.index(i % STAGES)
            scores = _scores(k_tile, query, place, *of_share, SOFT_CAP, WINDOW, ROWS, W, P, KEYS, G)
            v_tile = v_tiles.index(i % STAGES)
            m, l, acc = _go_on(m, l, acc, scores, v_tile, ROWS, W, P, KEYS, G, D)
    async_copy.wait_group(0)
    gl.thread_barrier()
    return m, l, acc


@jit
def _go_on(
    m,
    l,
    acc,
    scores,
    v_tile,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """The partials with another tile, of which there are ``scores`` [W, ROWS, KEYS]."""
    new_m = gl.maximum(m, gl.max(scores, 2))
    yardstick = gl.where(new_m == float("-inf"), 0.0, new_m)
    discount = gl.exp2(m - yardstick)
    weights = gl.exp2(scores - yardstick[:, :, None])
    l = l * discount + gl.sum(weights, 2)
    acc = scale_rows(acc, discount, ROWS, W, P, G, D)
    return new_m, l, _weigh(weights, v_tile, acc, W, P, KEYS, G)


@jit
def _scores(
    k_tile,
    query,
    first,
    start,
    stop,
    scale,
    soft_cap,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    G: tl.constexpr,
):
    """Of the tile from ``first`` on [W, ROWS, KEYS], in base 2; -inf outside [start, stop)."""
    MMA: tl.constexpr = score_layout(W, P)
    k = k_tile.permute((0, 2, 1)).load(gl.DotOperandLayout(1, MMA, 2))
    scores = mma_v2(query, k, gl.zeros([W, G, KEYS], gl.float32, layout=MMA)) * scale
    if SOFT_CAP:
        scores = cap(scores, soft_cap)
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
    key = first + warp[:, None, None] * KEYS + key[None, None, :]
    valid = key < stop
    if WINDOW:
        valid &= key >= start
    return first_rows(gl.where(valid, scores, float("-inf")), ROWS, W, P, G, KEYS)


@jit
def _weigh(
    weights, v_tile, acc, W: tl.constexpr, P: tl.constexpr, KEYS: tl.constexpr, G: tl.constexpr
):
    """``acc`` [W, G, D] and the tile's values by ``weights`` [W, ROWS, KEYS]."""
    MMA: tl.constexpr = score_layout(W, P)
    v = v_tile.load(gl.DotOperandLayout(1, MMA, 2))
    weights = all_rows(weights.to(v.dtype), W, P, G, KEYS)
    return mma_v2(gl.convert_layout(weights, gl.DotOperandLayout(0, MMA, 2)), v, acc)


@jit
def _copy_tile(
    k_tile,
    v_tile,
    first,
    k_head,
    v_head,
    blocks,
    start,
    stop,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Ask for the tile of keys and values from ``first`` on; those outside [start, stop) are
    zero."""
    keys = _keys(first, W, P, KEYS, D)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, copy_layout(W, D, P))))
    there = ((keys >= start) & (keys < stop))[:, :, None] & (d < HEAD_DIM)[None, None, :]
    blocks = blocks.to(gl.int64)
    slots = (keys % BLOCK_SIZE).to(gl.int64)
    k = k_head + (blocks * K_STRIDES[0] + slots * K_STRIDES[1])[:, :, None] + d[None, None, :]
    v = v_head + (blocks * V_STRIDES[0] + slots * V_STRIDES[1])[:, :, None] + d[None, None, :]
    async_copy.async_copy_global_to_shared(k_tile, k, mask=there)
    async_copy.async_copy_global_to_shared(v_tile, v, mask=there)


@jit
def _blocks(
    table,
    first,
    start,
    stop,
    BLOCK_SIZE: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """The blocks that hold a tile's keys, of those in [start, stop)."""
    keys = _keys(first, W, P, KEYS, D)
    return gl.load(table + keys // BLOCK_SIZE, mask=(keys >= start) & (keys < stop), other=0)


@jit
def _keys(first, W: tl.constexpr, P: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    """The keys [W, KEYS] of the tile from ``first`` on, as they are copied."""
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, copy_layout(W, D, P))))
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, copy_layout(W, D, P))))
    return first + warp[:, None] * KEYS + key[None, :]
