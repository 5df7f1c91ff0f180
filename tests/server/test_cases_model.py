"""Reported faults O24 to O26, O28 to O33 and O40 over HTTP: models that answer as they should, and
models that are refused at start, by name and before anything is served.

Where the HTTP half of each case is (what is offline only lies in tests/e2e):

| case | here as |
|---|---|
| O01 to O07, O34 | test_cases_stream.py |
| O08 to O13, O15, O16 | test_cases_sampling.py |
| O14, O17 to O21, O23, O27 | test_cases_engine.py |
| O22, O38 | test_lifecycle.py |
| O24 to O26, O28 to O33, O40 | this file |
| O35 | test_tools.py |
| O36 | test_bodies.py |
| O37 | test_access.py |
| O39 | test_bench_serve.py |

O31 to O33 and O40 (experts, FP8, GPTQ, several ranks) have no answers to check over HTTP: this
engine refuses them, so their half is the refusal.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.checkpoints import BOS, BYTE_VOCAB, tiny
from helpers.gguf_convert import gguf_from_folder
from helpers.server import Server, serving

COMPLETIONS = "/v1/completions"
PROMPT = [7 * i % 251 for i in range(40)]
ODD_TEXT = "I'll pay 12345 dollars\n\n\n  in   Cafés — 你好 🌶 don't"
MILLION = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Server]]:
    """Servers of models with something special, two started at a time.

    ``folder`` and ``gguf`` have the same weights with heads larger than hidden / heads, and a RoPE
    theta that one says in the new place and the other in GGUF's.
    """
    folder = tmp_path_factory.mktemp("models")
    odd = {"head_dim": 32, "vocab_size": BYTE_VOCAB + 1}
    new_place = tiny(folder / "new", rope_theta=None, rope_parameters=MILLION, **odd)
    window = {"model_type": "mistral", "sliding_window": 8, "num_hidden_layers": 1}
    models = {
        "folder": new_place,
        "gguf": gguf_from_folder(
            new_place, folder / "model.gguf", keys={"llama.rope.freq_base": MILLION["rope_theta"]}
        ),
        "window": tiny(folder / "window", rope_scaling=YARN, **window),
    }
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        started = pool.map(lambda model: stack.enter_context(serving(model)), models.values())
        yield dict(zip(models, started, strict=True))


def scores(server: Server, prompt: list[int] = PROMPT) -> list[float]:
    """Log probabilities of a prompt's tokens, the first apart, and of four that follow."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    [choice] = server.post(COMPLETIONS, body | {"echo": True, "logprobs": 1})["choices"]
    found: list[float] = choice["logprobs"]["token_logprobs"][1:]
    return found


def test_o24_a_window_of_eight(served: Mapping[str, Server]) -> None:
    server = served["window"]
    prompt = list(PROMPT)
    before = scores(server, prompt)[-4]  # of the first token after the prompt
    prompt[31] ^= 1  # 8 before the last: outside
    assert scores(server, prompt)[-4] == before
    prompt[32] ^= 1
    assert scores(server, prompt)[-4] != before


def test_o25_o28_o30_a_folder_and_its_gguf_say_the_same(served: Mapping[str, Server]) -> None:
    """Theta from two places, heads of a stated size, and q and k rows in two orders."""
    found = scores(served["folder"])
    assert scores(served["gguf"]) == pytest.approx(found, abs=1e-4)


def test_o26_the_stretched_length_is_the_limit(served: Mapping[str, Server]) -> None:
    """max_position_embeddings has YaRN's factor in it already."""
    [model] = served["window"].call("GET", "/v1/models").json["data"]
    assert model["max_model_len"] == 2048
    reply = served["window"].call("POST", COMPLETIONS, {"prompt": [5] * 2049})
    assert reply.error["code"] == "context_length_exceeded"
    assert len(scores(served["window"], [5] * 1000)) == 1003  # beyond the trained 512


def test_o29_a_text_comes_back(served: Mapping[str, Server]) -> None:
    server = served["gguf"]
    tokens = server.post("/tokenize", {"prompt": ODD_TEXT})["tokens"]
    assert tokens == [BOS, *ODD_TEXT.encode()]
    assert server.post("/detokenize", {"tokens": tokens[1:]}) == {"prompt": ODD_TEXT}


# ---- refused at start

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "O25": ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "foo"),
    "O26 dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
    "O26 longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    "O31": ({**MIXTRAL, "num_local_experts": 4, "num_experts_per_tok": 2}, "MixtralForCausalLM"),
    "O32": ({"quantization_config": FP8}, "fp8"),
    "O33 GPTQ": ({"quantization_config": GPTQ}, "gptq"),
    "O33 AWQ": ({"quantization_config": AWQ}, "awq"),
    "O29": ({}, "no-such-pre"),  # the split of words that its GGUF file names
    "O40": ({}, "--tensor-parallel-size"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[int, str]]:
    """The exit code of ``octavo serve`` for each of these, and what it says; two at a time."""
    folder = tmp_path_factory.mktemp("refused")
    models = {case: tiny(folder / case, **config) for case, (config, _) in REFUSED.items()}
    source = tiny(folder / "source", vocab_size=BYTE_VOCAB + 1)
    odd = {"tokenizer.ggml.pre": "no-such-pre"}
    models["O29"] = gguf_from_folder(source, folder / "model.gguf", keys=odd)

    def start(case: str) -> tuple[int, str]:
        flags = ("--tensor-parallel-size", "2") if case == "O40" else ()
        command = [sys.executable, "-m", "octavo", "serve", str(models[case]), "--port", "0"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(REFUSED, pool.map(start, REFUSED), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_what_this_engine_cannot_do(outcomes: Mapping[str, tuple[int, str]], case: str) -> None:
    code, said = outcomes[case]
    assert code == (2 if case == "O40" else 1)  # the wrong flag is wrong usage
    assert REFUSED[case][1] in said
    assert "ready" not in said
    assert "Traceback" not in said
