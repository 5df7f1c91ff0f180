"""The team of threads and the programs that it runs."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from numba import carray

from octavo.kernels.program import Program, fetch_add, float32s, int64s, next_run, op
from octavo.kernels.team import Team, team


@op(values="i8", size="i8", amount="f4")
def add_to_each(thread, num_threads, counter, args):
    a = carray(args, 1)[0]
    values = float32s(a.values, a.size)
    while True:
        item = fetch_add(counter, 1)
        if item >= a.size:
            return
        values[item] += a.amount


@op(done_by="i8", size="i8")
def sign_each(thread, num_threads, counter, args):
    """Item i says who did it: 100 for each time, and the thread."""
    a = carray(args, 1)[0]
    done_by = int64s(a.done_by, a.size)
    first, stop = next_run(-1, thread, num_threads, counter, a.size)
    while first < a.size:
        for item in range(first, stop):
            done_by[item] += 100 + thread
        first, stop = next_run(stop, thread, num_threads, counter, a.size)


@op(seen="i8", size="i8")
def prefix_sum(thread, num_threads, counter, args):
    """Item i is the sum of the two before it: right only if the op before has ended."""
    a = carray(args, 1)[0]
    seen = int64s(a.seen, a.size)
    if thread == num_threads - 1:
        for i in range(1, a.size):
            seen[i] += seen[i - 1]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_every_item_is_done_once_and_ops_keep_their_order(num_threads):
    crew = Team(num_threads)
    values, seen = np.zeros(100, np.float32), np.zeros(50, np.int64)
    first = add_to_each.bind(values=values, size=len(values), amount=1.0)
    second = prefix_sum.bind(seen=seen, size=len(seen))
    program = Program([first, second, second, first])
    for turn in range(1, 40):
        seen[:] = 1
        crew.run(program)
        assert (values == 2 * turn).all()
        assert seen[-1] == 50 * 51 // 2


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 5, 6, 64, 100])
def test_most_items_are_dealt_in_runs(num_threads, size):
    done_by, share = np.zeros(size + 1, np.int64), size * 7 // (8 * num_threads)
    Team(num_threads).run(Program([sign_each.bind(done_by=done_by, size=size)]))
    runs = np.repeat(100 + np.arange(num_threads), share)
    assert done_by[: len(runs)].tolist() == runs.tolist()
    assert set(done_by[len(runs) : size]) <= set(range(100, 100 + num_threads))
    assert done_by[size] == 0


def test_a_record_can_be_changed_between_runs():
    values = np.zeros(3, np.float32)
    call = add_to_each.bind(values=values, size=3, amount=1.0)
    program = Program([call])
    team().run(program)
    call.record["size"] = 1
    team().run(program)
    assert values.tolist() == [2, 1, 1]


@pytest.mark.alone
def test_helpers_that_fell_asleep_wake_up():
    crew = Team(3)
    values = np.zeros(10, np.float32)
    program = Program([add_to_each.bind(values=values, size=10, amount=1.0)])
    for turn in range(1, 6):
        crew.run(program)
        assert (values == turn).all()
        time.sleep(0.02)
        assert crew._asleep[1:] == [True, True]
    used = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - used < 0.02


def test_callers_in_several_threads_take_turns():
    crew = Team(2)
    values = np.zeros(10, np.float32)
    program = Program([add_to_each.bind(values=values, size=10, amount=1.0)])
    callers = [
        threading.Thread(target=lambda: [crew.run(program) for _ in range(50)]) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert (values == 200).all()


def test_the_caller_keeps_its_affinity():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("affinity is Linux's")
    before = os.sched_getaffinity(0)
    Team(len(before)).run(
        Program([add_to_each.bind(values=np.zeros(1, np.float32), size=1, amount=0)])
    )
    assert os.sched_getaffinity(0) == before


def test_a_missing_field_is_named():
    with pytest.raises(TypeError, match=r"add_to_each: amount"):
        add_to_each.bind(values=0, size=0)


def test_a_forked_child_starts_its_own_team():
    before = team()
    child = os.fork()
    if child == 0:
        os._exit(0 if team() is not before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
