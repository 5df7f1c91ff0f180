"""What must hold of the block pools between any two calls of the engine."""

from __future__ import annotations

from collections import Counter

from octavo.cache import KVCache
from octavo.engine.loop import Engine


def check_pools(engine: Engine) -> None:
    """Every reference is accounted for: no block is lost, and none is held that isn't used."""
    kv: KVCache = engine._kv
    scheduler = engine._scheduler
    assert {*scheduler.running, *scheduler.waiting} == set(engine._requests.values())
    for group, pool in enumerate(kv.pools):
        held: Counter[int] = Counter()
        for request in scheduler.running:
            table = request.blocks.tables[group]
            entries = table.entries[: table.length].tolist()
            assert all((block >= 0) == (i >= table.first_live) for i, block in enumerate(entries))
            held.update(block for block in entries if block >= 0)
        for request in scheduler.waiting:
            assert request.blocks.tables[group].length == 0
        for _, owner, blocks in kv._returning:
            if owner is pool:
                held.update(blocks)
        assert pool.ref_counts == [held[block] for block in range(pool.num_blocks)]
        free = [block for block in range(pool.num_blocks) if held[block] == 0]
        assert sorted([*pool._blank, *pool._reusable]) == free
        assert pool.num_free == len(free)
        known = {b: c.key for b, c in enumerate(pool._contents) if c is not None}
        assert {key: block for block, key in known.items()} == pool._by_key
        assert not any(pool._contents[block] for block in pool._blank)
        assert all(pool._contents[block] for block in pool._reusable)


def check_queues(engine: Engine) -> None:
    """Both queues are in order, within the limits, and nobody overtook an equal."""
    running = [request.order for request in engine._scheduler.running]
    waiting = [request.order for request in engine._scheduler.waiting]
    assert running == sorted(running)
    assert waiting == sorted(waiting)
    assert len(running) <= engine.limits.max_num_seqs
    for priority, arrival in waiting:
        assert all(other < arrival for level, other in running if level == priority)


def check_idle(engine: Engine) -> None:
    """Nothing to do: every block is free."""
    assert not engine.has_work
    assert engine.stats().kv_cache_usage == 0
    assert not engine._kv.blocks_are_returning
    check_pools(engine)
