"""A tiny Llama in every weight format of GGUF, end to end.

The reference is transformers in float32 on weights that the ``gguf`` package dequantised, with rows
put in order and tensors named by the tests' own rules: nothing of Octavo's reader takes part.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.checkpoints import reference_logits
from helpers.gguf_convert import folder_from_gguf
from helpers.gguf_writer import write_tiny_llama_gguf
from helpers.llm import greedy, load_llm
from helpers.reference import check_logprobs

from octavo.checkpoint.quants import FORMATS

PROMPTS = ("the weather", "h", "The quick brown fox jumps over the lazy dog, 1234567890 times.")


@pytest.mark.parametrize("runtime", ["cpu", "eager"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(tmp_path: Path, format: str, runtime: str) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_llama_gguf(file, format, seed=3)
    folder = folder_from_gguf(file, tmp_path / "dequantised")
    llm = load_llm(file, exact=True, enforce_eager=runtime == "eager")
    assert llm.report.runtime == runtime
    params = greedy(max_tokens=12, ignore_eos=True, logprobs=20, prompt_logprobs=20)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        check_logprobs(output, reference_logits(folder, ids))
