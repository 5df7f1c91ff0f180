"""The offline API, ``LLM``, with small models: what it takes, gives, and leaves behind."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import BOS, EOS, chain, markov, tiny, uniform26, write_safetensors
from helpers.llm import answer, both_ways, greedy, ids, is_idle, load_llm, stats
from safetensors.numpy import load_file

import octavo
from octavo import LLM, SamplingParams
from octavo.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    OctavoError,
)

TmpFactory = pytest.TempPathFactory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: TmpFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def llm(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return load_llm(folder, async_scheduling=request.param, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: TmpFactory) -> LLM:
    return load_llm(markov(tmp_path_factory.mktemp("letters"), uniform26()))


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: TmpFactory) -> LLM:
    return load_llm(markov(tmp_path_factory.mktemp("alphabet"), chain(*"ABCDEFGH", EOS)))


# ---- loading


def test_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match="'max_model_length'; did you mean max_model_len"):
        LLM(max_model_length=5)
    with pytest.raises(TypeError, match="'zzz'; known are model, "):
        LLM(zzz=1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 0},
        {"max_model_len": 4096},  # the model's positions end at 2048
        {"max_model_len": "64"},
        {"max_num_seqs": 0},
        {"max_num_seqs": 1.5},
        {"block_size": True},
        {"max_num_batched_tokens": 8, "max_num_seqs": 16},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": "0.5"},
        {"exact": True, "dtype": "bfloat16"},
        {"device": "gpu"},
        {"dtype": "float33"},
        {"kv_cache_dtype": "fp9"},
        {"load_format": "pt"},
        {"split_kv": "always"},
        {"generation_config": "mine"},
        {"chat_template": "no/such/file"},
    ],
    ids=str,
)
def test_options_that_cannot_be_had(folder: Path, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ConfigError, match=name):
        LLM(str(folder), **options)


@pytest.mark.parametrize(
    "options", [{"attention_backend": "flash"}, {"disable_attention_backend": ["flash"]}], ids=str
)
def test_attention_backends_that_are_not_there(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'flash' is unknown"):
        LLM(str(folder), **options)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_a_path_is_a_model(folder: Path) -> None:
    llm = LLM(folder, tokenizer=folder, threads=1, exact=True)
    assert answer(llm, "a b", greedy(max_tokens=2)).finished
    with pytest.raises(ConfigError, match="model is 5"):
        LLM(5)  # type: ignore[arg-type]


def test_the_report(llm: LLM, folder: Path) -> None:
    report = llm.report
    assert report.model == folder.name
    assert report.runtime == "cpu"
    assert report.precision == "float32 (exact)"
    assert report.max_model_len == 2048
    assert report.kv_cache_tokens >= 2048
    assert report.load_seconds > 0
    assert report.notes == ()


def test_more_threads_than_cores_are_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.build.granted_cores", lambda: 2)
    [note] = LLM(str(folder), threads=3, exact=True).report.notes
    assert note.startswith("threads is 3, but cores are 2")
    assert LLM(str(folder), threads=2, exact=True).report.notes == ()


def test_threads_that_would_never_end_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.build.granted_cores", lambda: 2)
    with pytest.raises(ConfigError, match=r"threads is 1000, .* at most 32"):
        LLM(str(folder), threads=1000)


def test_a_pool_below_max_model_len_is_noted(folder: Path) -> None:
    llm = load_llm(folder, num_gpu_blocks_override=2)
    [note] = llm.report.notes
    assert note.startswith("the KV blocks hold 32 tokens")
    output = answer(llm, ids(5), greedy(max_tokens=100, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (31, "length")


def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    sampling = {"temperature": 0.25, "top_k": 3, "max_new_tokens": 5}
    markov(tmp_path, uniform26(), generation_config=sampling)
    llm = load_llm(tmp_path)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 3, 5)
    assert any("temperature 0.25" in note for note in llm.report.notes)
    [output] = llm.generate("a")
    assert len(output.outputs[0].token_ids) == 5
    own = load_llm(tmp_path, generation_config="vllm")
    assert own.get_default_sampling_params() == SamplingParams()
    assert own.report.notes == ()


# ---- prompts and parameters


def test_forms_of_prompts(llm: LLM) -> None:
    params = greedy(max_tokens=4)
    forms: list[Any] = ["hi", {"prompt": "hi"}, ids(BOS, *b"hi")]
    alone = [answer(llm, form, params) for form in forms]
    together = llm.generate(forms, params)
    as_tuple = llm.generate(tuple(forms), [params] * 3)
    for output in (*alone, *together, *as_tuple):
        assert output.prompt_token_ids == [BOS, *b"hi"]
        assert output.outputs == alone[0].outputs
    assert [output.prompt for output in together] == ["hi", "hi", None]
    assert llm.generate([], params) == []


def test_outputs_come_in_the_prompts_order(alphabet: LLM) -> None:
    prompts = list("HAGBFCED") * 3
    outputs = alphabet.generate(prompts, greedy(max_tokens=20))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.prompt is not None
        assert output.outputs[0].text == "ABCDEFGH".partition(output.prompt)[2]
    request_ids = [output.request_id for output in outputs]
    assert len(set(request_ids)) == len(prompts)


def test_parameters_one_for_each(alphabet: LLM) -> None:
    params = [greedy(max_tokens=n) for n in (1, 3, 2)]
    outputs = alphabet.generate(["A", "A", "B"], params)
    assert [output.outputs[0].text for output in outputs] == ["B", "BCD", "CD"]
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 3 prompts") as refusal:
        alphabet.generate(["A", "A", "B"], params[:2])
    assert refusal.value.param == "sampling_params"


def test_priorities(folder: Path) -> None:
    llm = load_llm(folder, max_num_seqs=1, max_num_batched_tokens=16)
    priority = [2, 0, 1, 0]
    outputs = llm.generate(["a", "b", "c", "d"], greedy(max_tokens=2), priority=priority)
    begun = [output.metrics.first_scheduled_time or 0.0 for output in outputs]
    assert sorted(range(4), key=lambda i: begun[i]) == [1, 3, 2, 0]
    with pytest.raises(InvalidRequestError, match="1 priorities for 2 prompts") as refusal:
        llm.generate(["a", "b"], priority=[1])
    assert refusal.value.param == "priority"


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("x" * 3000, ContextLengthError),
        ({"prompt_token_ids": [9999]}, InvalidRequestError),
        ({"prompt_token_ids": []}, InvalidRequestError),
        (5, InvalidRequestError),
    ],
    ids=["long", "vocabulary", "empty", "form"],
)
def test_one_bad_prompt_and_nothing_runs(llm: LLM, bad: Any, error: type[Exception]) -> None:
    before = stats(llm)
    for prompts in (["good", bad], [bad, "good"]):
        with pytest.raises(error):
            llm.generate(prompts, greedy(max_tokens=2))
    assert stats(llm) == before
    assert answer(llm, "good", greedy(max_tokens=2)).finished


@pytest.mark.parametrize("wrong", [{"max_tokens": 2}, "greedy", [{"max_tokens": 2}], 5])
def test_parameters_of_another_type(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling_params are .*; give SamplingParams"):
        llm.generate(["a"], wrong)
    with pytest.raises(InvalidRequestError, match="give SamplingParams"):
        llm.stream("a", wrong)
    assert is_idle(llm)


@pytest.mark.parametrize("wrong", [None, 5])
def test_prompts_of_another_type(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"prompts are {wrong}"):
        llm.generate(wrong)


@pytest.mark.parametrize("wrong", ["Hi", {"role": "user", "content": "Hi"}, None, 5])
def test_messages_of_another_type(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages are .*; give a list of messages"):
        llm.chat(wrong)


def test_the_caller_s_lists_are_left_alone(llm: LLM) -> None:
    prompt = ids(1, 2, 3)
    output = answer(llm, prompt, greedy(max_tokens=3))
    output.prompt_token_ids.append(7)
    assert prompt == ids(1, 2, 3)


# ---- chat


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_one_conversation_or_several(llm: LLM) -> None:
    params = greedy(max_tokens=4)
    alone = [llm.chat(say(text), params)[0] for text in ("hi", "ho")]
    assert llm.chat([say("hi")], params)[0].outputs == alone[0].outputs
    together = llm.chat([say("hi"), say("ho")], [params, params])
    assert [one.outputs for one in together] == [one.outputs for one in alone]
    for one in llm.stream_chat(say("ho"), params):
        streamed = one
    assert streamed.outputs == alone[1].outputs
    assert streamed.prompt == alone[1].prompt == together[1].prompt
    assert streamed.prompt is not None
    assert streamed.prompt.endswith("<|im_start|>assistant\n")


def test_options_of_the_template(llm: LLM) -> None:
    template = "{{ mood }} {{ tools[0].name if tools else '' }} {{ messages[0].content }}"
    options: dict[str, Any] = {
        "chat_template": template,
        "chat_template_kwargs": {"mood": "glad"},
        "tools": [{"name": "sum"}],
    }
    [output] = llm.chat(say("hi"), greedy(max_tokens=1), **options)
    assert output.prompt == "glad sum hi"
    streamed = next(llm.stream_chat(say("hi"), greedy(max_tokens=1), **options))
    assert streamed.prompt == output.prompt
    with pytest.raises(TypeError, match="add_generation_promt"):
        llm.chat(say("hi"), add_generation_promt=False)


def test_one_bad_conversation_and_nothing_runs(llm: LLM) -> None:
    before = stats(llm)
    for bad in ([], [{"content": "no role"}], [{"role": "user", "content": 5}]):
        with pytest.raises(InvalidRequestError):
            llm.chat([say("hi"), bad])
    assert stats(llm) == before


def test_a_template_in_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages[0].content }}>")
    llm = load_llm(folder, chat_template=str(file))
    assert llm.chat(say("hi"), greedy(max_tokens=1))[0].prompt == "<hi>"


# ---- ids in, ids out


def test_without_a_tokenizer(folder: Path, llm: LLM) -> None:
    bare = load_llm(folder, skip_tokenizer_init=True)
    params = greedy(max_tokens=6, logprobs=1)
    output, named = (answer(one, ids(BOS, 65), params) for one in (bare, llm))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == named.outputs[0].token_ids
    for entry, other in zip(
        output.outputs[0].logprobs or [], named.outputs[0].logprobs or [], strict=True
    ):
        assert entry == {
            token: dataclasses.replace(one, decoded_token=None) for token, one in other.items()
        }
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        bare.generate("text")
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        bare.generate(ids(1), SamplingParams(stop="x"))
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        bare.get_tokenizer()
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        bare.chat(say("hi"))


def test_without_detokenizing(alphabet: LLM) -> None:
    [output] = both_ways(alphabet, "A", greedy(detokenize=False)).outputs
    assert (output.text, output.finish_reason) == ("", "stop")
    assert bytes(output.token_ids[:-1]) == b"BCDEFGH"


def test_random_weights(folder: Path) -> None:
    (first,), (second,) = (
        load_llm(folder, load_format="dummy").generate("hi", greedy(max_tokens=8, ignore_eos=True))
        for _ in range(2)
    )
    assert len(first.outputs[0].token_ids) == 8
    assert first.outputs == second.outputs


def test_random_weights_for_a_config_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    llm = load_llm(tmp_path, load_format="dummy")
    assert f"{tmp_path} has no tokenizer.json: token ids in, token ids out" in llm.report.notes
    [output] = llm.generate(ids(1, 2), greedy(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(CheckpointError, match=r"holds no weights.* load_format dummy"):
        load_llm(tmp_path)
    with_text = load_llm(tmp_path, load_format="dummy", tokenizer=str(folder))
    assert with_text.generate("hi", greedy(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids


# ---- several answers


def test_several_answers(letters: LLM) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=12)
    several = both_ways(letters, "a", params)
    texts = [one.text for one in several.outputs]
    assert [one.index for one in several.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    # The first is what the seed alone gives, and fewer are the first of more.
    alone = answer(letters, "a", dataclasses.replace(params, n=1))
    assert alone.outputs[0].text == texts[0]
    two = answer(letters, "a", dataclasses.replace(params, n=2))
    assert [one.text for one in two.outputs] == texts[:2]
    greedily = answer(letters, "a", greedy(n=2, max_tokens=3))
    assert greedily.outputs[0].text == greedily.outputs[1].text


def test_answers_end_apart_and_share_the_prompt_s_scores(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=1, max_tokens=30, prompt_logprobs=1, stop_token_ids=[*range(64)]
    )
    output = both_ways(llm, "score me", params)
    assert len(output.prompt_logprobs or []) == len(output.prompt_token_ids)
    assert all(one.finish_reason in ("stop", "length") for one in output.outputs)
    assert len({len(one.token_ids) for one in output.outputs}) > 1


# ---- the stream


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"seed": 3, "logprobs": 2},
        {"seed": 3, "n": 2, "stop": ["a", "q"]},
        {"temperature": 0.0, "prompt_logprobs": 1, "ignore_eos": True},
        {"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": 1},
    ],
    ids=str,
)
def test_a_stream_ends_as_generate_does(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 20, **options})
    streamed = both_ways(llm, "Once upon", params)
    whole = answer(llm, "Once upon", params)
    assert streamed.prompt_logprobs == whole.prompt_logprobs
    assert streamed.finished


@pytest.mark.parametrize("ahead_seconds", [0.0, 10.0])
def test_a_stream_yields_every_step(
    alphabet: LLM, monkeypatch: pytest.MonkeyPatch, ahead_seconds: float
) -> None:
    """One by one; several steps in one call are one value."""
    monkeypatch.setattr("octavo.runtime.cpu.AHEAD_SECONDS", ahead_seconds)
    texts = [output.outputs[0].text for output in alphabet.stream("A", greedy())]
    every = ["B", "BC", "BCD", "BCDE", "BCDEF", "BCDEFG", "BCDEFGH", "BCDEFGH"]
    several = [*every[:2], every[-1]]  # a run begins behind its first step
    assert texts == every or (ahead_seconds > 0 and texts == several)


@pytest.mark.parametrize("n", [1, 3])
def test_closing_a_stream_frees_everything(llm: LLM, n: int) -> None:
    before = stats(llm)
    params = greedy(max_tokens=1000, ignore_eos=True, n=n)
    stream = llm.stream("hello", params)
    output = next(stream)
    assert not output.finished
    assert stats(llm).num_running == n
    stream.close()
    assert output.finished
    assert [one.finish_reason for one in output.outputs] == ["abort"] * n
    assert is_idle(llm)
    assert not llm._engine.has_work
    assert stats(llm).finished["abort"] == before.finished.get("abort", 0) + n
    for _ in llm.stream("hello", params):  # and so does leaving the loop
        break
    gc.collect()
    assert is_idle(llm)


def test_a_stream_that_is_never_read_costs_nothing(llm: LLM) -> None:
    before = stats(llm)
    stream = llm.stream("hello", greedy())
    with pytest.raises(InvalidRequestError):
        llm.stream("", greedy(stop_token_ids=[9999]))  # refused at once, before it is read
    assert stats(llm) == before
    stream.close()


def test_streams_and_batches_side_by_side(alphabet: LLM) -> None:
    """Whoever asks drives all; none waits for another, and none misses anything."""
    slow = alphabet.stream("A", greedy(ignore_eos=True, max_tokens=200))
    fast = alphabet.stream("A", greedy())
    next(slow)
    assert next(fast).outputs[0].text == "B"
    [output] = alphabet.generate("A", greedy())
    assert output.outputs[0].text == "BCDEFGH"
    assert stats(alphabet).num_running == 1  # fast has ended meanwhile, unread; slow goes on
    rest = list(fast)
    assert len(rest) == 1
    assert (rest[0].outputs[0].text, rest[0].finished) == ("BCDEFGH", True)
    *_, last = slow
    assert len(last.outputs[0].token_ids) == 200
    assert is_idle(alphabet)


def test_several_threads_ask_at_once(llm: LLM) -> None:
    """Each gets the answer that it would get alone, whoever made the steps, long beside short."""
    prompts = [f"{'a b c d e f g h'[: 2 * n + 1]}" for n in range(8)]
    lengths = [3, 40, 1, 17, 5, 60, 2, 9]
    asked = [(text, greedy(max_tokens=n)) for text, n in zip(prompts, lengths, strict=True)]
    alone = [answer(llm, *one).outputs for one in asked]

    def ask(number: int) -> tuple[Any, Any]:
        *_, streamed = llm.stream(*asked[number])
        return answer(llm, *asked[number]).outputs, streamed.outputs

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ask, range(8), timeout=60))
    assert together == [(outputs, outputs) for outputs in alone]
    assert is_idle(llm)


def test_a_thread_that_asks_need_not_wait_for_one_that_loops(folder: Path) -> None:
    llm = load_llm(folder)
    order: list[str] = []

    def ask(name: str, count: int) -> None:
        answer(llm, "a b", greedy(max_tokens=count, ignore_eos=True))
        order.append(name)

    long = threading.Thread(target=ask, args=("long", 1500))
    long.start()
    while not llm.stats().num_running:
        time.sleep(0.001)
    ask("short", 2)
    long.join(60)
    assert order == ["short", "long"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_so(llm: LLM) -> None:
    child = os.fork()
    if child == 0:
        try:
            llm.generate("a", greedy(max_tokens=1))
        except OctavoError as error:
            os._exit(7 if "was loaded in process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: requests are dropped, and the engine answers again."""
    expected = answer(llm, "after", greedy(max_tokens=5)).outputs
    runtime, launches = llm._engine._runtime, iter(range(100))

    def interrupted(launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def launch_or_raise(batch: Any) -> Any:
            if next(launches) == 1:
                raise KeyboardInterrupt
            return launch(batch)

        return launch_or_raise

    with monkeypatch.context() as patch:
        for name in ("forward", "decode_ahead"):
            if hasattr(runtime, name):
                patch.setattr(runtime, name, interrupted(getattr(runtime, name)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "bb", "ccc"], greedy(max_tokens=50, ignore_eos=True))
    assert is_idle(llm)
    assert answer(llm, "after", greedy(max_tokens=5)).outputs == expected


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    """The request is told so; its neighbours, and whoever gets its blocks, go on."""
    folder = markov(tmp_path, chain("A", "B", "C", EOS))
    tensors = dict(load_file(folder / "model.safetensors"))
    tensors["model.embed_tokens.weight"][ord("x")] = np.nan
    write_safetensors(folder / "model.safetensors", tensors)
    llm = load_llm(folder, num_gpu_blocks_override=4)
    good, bad, other = llm.generate(["A", "xA", "B"], greedy(max_tokens=5))
    assert bad.error is not None
    assert "not finite" in bad.error
    assert (bad.outputs[0].finish_reason, bad.finished) == ("abort", True)
    assert (good.error, good.outputs[0].text) == (None, "BC")
    assert (other.error, other.outputs[0].text) == (None, "C")
    assert is_idle(llm)
    assert [one.outputs[0].text for one in llm.generate(["A"] * 4, greedy())] == ["BC"] * 4


# ---- the shape of vLLM's outputs


def test_the_shape_of_outputs(llm: LLM) -> None:
    output = answer(llm, "hi", greedy(max_tokens=3, logprobs=1, ignore_eos=True))
    assert isinstance(output, octavo.RequestOutput)
    for name in (
        "request_id",
        "prompt",
        "prompt_token_ids",
        "prompt_logprobs",
        "outputs",
        "finished",
        "metrics",
        "num_cached_tokens",
    ):
        assert hasattr(output, name)
    [completion] = output.outputs
    assert isinstance(completion, octavo.CompletionOutput)
    for name in (
        "index",
        "text",
        "token_ids",
        "cumulative_logprob",
        "logprobs",
        "finish_reason",
        "stop_reason",
    ):
        assert hasattr(completion, name)
    assert len(completion.logprobs or []) == 3
    for entry in completion.logprobs or []:
        for one in entry.values():
            assert isinstance(one, octavo.Logprob)
            assert one.rank is not None
            assert one.decoded_token is not None
    metrics = output.metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert all(times)
    assert times == sorted(times)  # type: ignore[type-var]


def test_progress_is_silent_unless_a_terminal_watches(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(["a", "b"], greedy(max_tokens=2))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate(["a", "b"], greedy(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], greedy(max_tokens=2))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "answering" in shown.err
