"""llama.cpp as the other side of ``bench/cpu_engine.py``: a process that measures on demand.

It runs under any Python that has llama-cpp-python. A line of JSON in is a task, a line out its
result; times are seconds. Only the low-level API is used, so that nothing of its Python lies in a
measured loop but one call a token.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

import llama_cpp as lib


class Model:
    def __init__(self, path: str, threads: int, context: int, flash: bool, slots: int) -> None:
        lib.llama_log_set(_QUIET, None)
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx = context
        options.n_batch = 2048
        options.n_ubatch = 512
        options.n_seq_max = slots
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True
        options.flash_attn_type = 1 if flash else 0
        self.context = lib.llama_init_from_model(self.model, options)
        self.memory = lib.llama_get_memory(self.context)
        vocabulary = lib.llama_model_get_vocab(self.model)
        self.vocab_size = lib.llama_vocab_n_tokens(vocabulary)
        self.held = 0  # tokens in the KV cache of sequence 0

    def feed(self, ids: list[int], start: int, sequence: int = 0) -> None:
        """Compute tokens of a sequence; logits of the last one."""
        for first in range(0, len(ids), 2048):
            piece = ids[first : first + 2048]
            batch = lib.llama_batch_init(len(piece), 0, 1)
            batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                batch.token[i] = token
                batch.pos[i] = start + first + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = first + i == len(ids) - 1
            if lib.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            lib.llama_batch_free(batch)

    def best(self, index: int = -1) -> int:
        logits = lib.llama_get_logits_ith(self.context, index)
        array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocab_size)).contents
        return int(_argmax(array))

    def prefill(self, ids: list[int]) -> float:
        lib.llama_memory_clear(self.memory, True)
        self.held = 0
        begin = time.perf_counter()
        self.feed(ids, 0)
        self.best()
        return time.perf_counter() - begin

    def decode(self, ids: list[int], steps: int) -> float:
        """Mean seconds a token behind a prompt, which is kept for the next call."""
        if self.held != len(ids):
            self.prefill(ids)
            self.held = len(ids)
        else:
            lib.llama_memory_seq_rm(self.memory, 0, len(ids) - 1, -1)
            self.feed(ids[-1:], len(ids) - 1)
        token = self.best()
        begin = time.perf_counter()
        for i in range(steps):
            self.feed([token], len(ids) + i)
            token = self.best()
        seconds = (time.perf_counter() - begin) / steps
        lib.llama_memory_seq_rm(self.memory, 0, len(ids), -1)
        return seconds

    def concurrent(self, prompts: list[list[int]], steps: int) -> float:
        """Tokens a second of all sequences together, prompts included in the time."""
        lib.llama_memory_clear(self.memory, True)
        self.held = 0
        count = len(prompts)
        begin = time.perf_counter()
        newest = []
        for sequence, ids in enumerate(prompts):
            self.feed(ids, 0, sequence)
            newest.append(self.best())
        batch = lib.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for step in range(steps - 1):
            for i, token in enumerate(newest):
                batch.token[i] = token
                batch.pos[i] = len(prompts[i]) + step
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = i
                batch.logits[i] = True
            if lib.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            newest = [self.best(i) for i in range(count)]
        lib.llama_batch_free(batch)
        return count * steps / (time.perf_counter() - begin)


try:
    import numpy as _np

    def _argmax(array: object) -> int:
        return int(_np.ctypeslib.as_array(array).argmax())
except ImportError:  # pragma: no cover - llama-cpp-python brings numpy

    def _argmax(array: object) -> int:
        values = list(array)  # type: ignore[call-overload]
        return values.index(max(values))


@lib.llama_log_callback
def _QUIET(level: int, text: bytes, data: object) -> None:
    pass


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    model = Model(**settings)
    print(json.dumps({"vocab_size": model.vocab_size}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        kind = task.pop("task")
        result = resident() if kind == "resident" else getattr(model, kind)(**task)
        print(json.dumps(result), file=answers)


if __name__ == "__main__":
    main()
