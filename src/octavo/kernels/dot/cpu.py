"""How fast a CPU's cores make the dot products of quantised weights, in registers."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import time
from itertools import pairwise

from octavo.kernels.late import carray, intrinsic, types
from octavo.kernels.linear.cpu_dot import LEVELS
from octavo.kernels.program import Op, Program, fetch_add, op
from octavo.kernels.team import Team
from octavo.kernels.vector_ir import I32, I64, broadcast, fill, loop, variable

# Words of weights in registers, and chains of dot products that don't wait for each other: so many
# that no instruction has to wait, and that registers hold them.
SHAPES = {"amx": (8, 12), "vnni": (8, 12), "avxvnni": (4, 10), "avx2": (8, 3), "plain": (8, 3)}
ROUNDS = 200_000  # some milliseconds, so that waking the threads doesn't count
SECONDS = 0.3  # of turns: in some processes one core alone is at work for the first 30 ms


def int8_rate(level: str, crew: Team) -> float:
    """Multiplications and additions a second of all threads together, with 4-bit weights, by the
    instructions of a level (``amx``: of ``vnni``, not in tiles): the best of some turns."""
    program = dot_program(level, crew)
    crew.run(program)  # compiles
    begins = [time.perf_counter()]
    while begins[-1] < begins[0] + SECONDS:
        crew.run(program)
        begins.append(time.perf_counter())
    return dot_operations(level, crew) / min(end - begin for begin, end in pairwise(begins))


def dot_program(level: str, crew: Team) -> Program:
    """The level's dot products of 4-bit weights, by each thread as many."""
    return Program([_dot_op(level).bind(items=crew.num_threads)])


def dot_operations(level: str, crew: Team) -> int:
    """Multiplications and additions of :func:`dot_program`."""
    words, chains = SHAPES[level]
    return 2 * 4 * LEVELS[level].lanes * words * chains * ROUNDS * crew.num_threads


def _dot_op(level: str) -> Op:
    @op(items="i8")
    def dots(thread, num_threads, counter, args):
        a = carray(args, 1)[0]
        while fetch_add(counter, 1) < a.items:
            if _multiply(level, ROUNDS) == 1:  # or LLVM would drop the products
                fetch_add(counter, 1)

    return dots


@intrinsic(prefer_literal=True)
def _multiply(typing, level, rounds):
    """Dot products in chains. Where they don't begin with their chain's sum, each chain has
    activations of its own: LLVM would otherwise compute what they have in common once."""

    def emit(context, b, signature, arguments):
        chosen = LEVELS[level.literal_value]
        (words, chains), lanes = SHAPES[level.literal_value], chosen.lanes
        weights = [fill(I32, 0x01020304 + i, lanes) for i in range(words)]
        sums = [variable(b, fill(I32, i, lanes)) for i in range(chains)]
        with loop(b, I64(0), arguments[1]) as i:
            word = broadcast(b, b.trunc(i, I32), lanes)
            for number, total in enumerate(sums):
                own = word if chosen.accumulates else b.add(word, fill(I32, number, lanes))
                b.store(chosen.dot(b, weights, [own] * words, 4, b.load(total)), total)
        result = b.load(sums[0])
        for total in sums[1:]:
            result = b.xor(result, b.load(total))
        return b.zext(b.extract_element(result, I32(0)), I64)

    return types.int64(level, types.int64), emit
