"""Selection: order, switches, layouts shared by a pair, and a reason for every verdict."""

import subprocess
import sys

import pytest
from helpers.attention import make_spec

from octavo.attention import KVLayout, Support, candidates
from octavo.attention.candidates import open_pair, select
from octavo.errors import ConfigError

PREFILL, DECODE = make_spec("prefill"), make_spec("decode")


def verdict(selection, phase, name):
    """``(state, reason)`` of one candidate."""
    (found,) = (v for v in selection.verdicts[phase] if v.candidate == name)
    return found.state, found.reason


def test_cpu_serves_both_phases():
    selection = select(PREFILL, DECODE)
    assert (selection.prefill, selection.decode) == ("cpu", "cpu")
    assert [v.candidate for v in selection.verdicts["decode"]] == list(candidates.ORDER["decode"])
    assert verdict(selection, "decode", "triton") == ("refused", "runs on CUDA GPUs, not on cpu")
    assert verdict(selection, "decode", "cpu") == ("chosen", "the first that can serve")
    assert verdict(selection, "decode", "reference") == ("possible", "cpu comes first")
    assert selection.kv_layout(5).k_shape == (5, 2, 1, 64, 16, 1)


def test_what_the_spec_needs_is_refused_with_a_reason():
    selection = select(make_spec("prefill", block_size=7), make_spec(block_size=7))
    assert (selection.prefill, selection.decode) == ("reference", "reference")
    refusal = ("refused", "block_size 7 isn't a multiple of 16")
    assert verdict(selection, "decode", "cpu") == refusal
    assert selection.kv_layout(5).k_shape == (5, 7, 2, 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "npu"}, "runs on the CPU, not on npu"),
        ({"kv_dtype": "float8_e4m3fn"}, "stores no float8_e4m3fn keys and values"),
        ({"head_dim": 100}, "head_dim 100 isn't a multiple of 8"),
        ({"v_head_dim": 12}, "v_head_dim 12 isn't a multiple of 8"),
    ],
)
def test_cpu_refuses(changes, reason):
    selection = select(make_spec("prefill", **changes), make_spec(**changes))
    assert verdict(selection, "decode", "cpu") == ("refused", reason)


def test_switched_off():
    selection = select(PREFILL, DECODE, disabled=["cpu"])
    assert selection.decode == "reference"
    assert verdict(selection, "decode", "cpu") == ("off", "--disable-attention-backend cpu")


def test_forced():
    assert select(PREFILL, DECODE, backend="cpu").decode == "cpu"
    selection = select(PREFILL, DECODE, backend="reference")
    assert verdict(selection, "decode", "cpu") == ("off", "--attention-backend reference")
    assert verdict(selection, "decode", "reference")[0] == "chosen"
    with pytest.raises(ConfigError, match="can't serve prefill: block_size 7"):
        select(make_spec("prefill", block_size=7), make_spec(block_size=7), backend="cpu")


def test_unknown_and_contradictory_names():
    with pytest.raises(ConfigError, match=r"'nope' is unknown; the known ones are .*reference"):
        select(PREFILL, DECODE, backend="nope")
    with pytest.raises(ConfigError, match="'nope' is unknown"):
        select(PREFILL, DECODE, disabled=["nope"])
    with pytest.raises(ConfigError, match="last resort"):
        select(PREFILL, DECODE, disabled=["reference"])
    with pytest.raises(ConfigError, match="both asked for and disabled"):
        select(PREFILL, DECODE, backend="cpu", disabled=["cpu"])


def test_nobody_can_serve():
    with pytest.raises(ConfigError, match="reference: loops over the rows on the host"):
        select(make_spec("prefill", graph=True), make_spec(graph=True))


class Fake:
    """A candidate with a layout of its own, for both phases."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def supports(self, spec):
        return Support(True)

    def kv_layout(self, spec, num_blocks):
        return KVLayout((num_blocks,), (num_blocks,), self.order, self.order, spec.kv_dtype)

    def open(self, spec):
        return (self.name, spec.phase)


@pytest.fixture
def fakes(monkeypatch):
    """Two more candidates, ``a`` and ``b``, in front of the others; they store differently."""
    found = {"a": Fake("a", "NHD"), "b": Fake("b", "HND")}
    real = candidates.candidate
    monkeypatch.setattr(candidates, "CLASSES", candidates.CLASSES | dict.fromkeys(found, "Fake"))
    monkeypatch.setattr(candidates, "candidate", lambda name: found.get(name) or real(name))
    monkeypatch.setattr(candidates, "is_certified", lambda name, device: True)
    monkeypatch.setattr(
        candidates, "ORDER", {"prefill": ("a", "b", "reference"), "decode": ("b", "a", "reference")}
    )
    return found


def test_a_pair_shares_a_layout_and_decode_chooses_first(fakes):
    selection = select(PREFILL, DECODE)
    assert (selection.prefill, selection.decode) == ("b", "b")
    passed_over = ("possible", "its KV layout isn't the other phase's")
    assert verdict(selection, "prefill", "a") == passed_over
    assert open_pair(selection) == (("b", "prefill"), ("b", "decode"))


def test_two_candidates_with_equal_layouts_make_a_pair(fakes):
    fakes["b"].order = "NHD"
    selection = select(PREFILL, DECODE)
    assert (selection.prefill, selection.decode) == ("a", "b")
    assert open_pair(selection) == (("a", "prefill"), ("b", "decode"))


def test_the_reference_decodes_over_the_layout_of_a_prefill_candidate(fakes):
    selection = select(PREFILL, DECODE, disabled=["b"], backend=None)
    assert selection.decode == "a"
    fakes["a"].supports = lambda spec: Support(spec.phase == "prefill", "prefill only")
    selection = select(PREFILL, DECODE, disabled=["b"])
    assert (selection.prefill, selection.decode) == ("a", "reference")
    prefill, decode = open_pair(selection)
    assert decode.owner is prefill
    assert selection.kv_layout(3).k_order == "NHD"


@pytest.fixture
def few(fakes, monkeypatch):
    """A third, ``f``, for steps of up to 4 rows, in front of the others."""
    fakes["f"] = Fake("f", "HND")
    monkeypatch.setattr(candidates, "CLASSES", candidates.CLASSES | {"f": "Fake"})
    monkeypatch.setattr(candidates, "ROW_LIMITS", {"f": 4})
    order = candidates.ORDER
    monkeypatch.setattr(candidates, "ORDER", order | {"decode": ("f", *order["decode"])})
    return fakes


def test_small_steps_may_have_a_candidate_of_their_own(few):
    selection = select(PREFILL, DECODE)
    assert (selection.few_rows, selection.decode) == ("f", "b")
    small_steps = "steps of few rows, 4 at most, all of them decoding"
    assert verdict(selection, "decode", "f") == ("chosen", small_steps)
    assert verdict(selection, "decode", "b") == ("chosen", "all other steps")
    assert verdict(selection, "decode", "a") == ("possible", "b comes first")
    assert open_pair(selection) == (("b", "prefill"), ("b", "decode"))


def test_forced_it_takes_the_small_steps_and_no_others(few, monkeypatch):
    monkeypatch.setattr(candidates, "is_certified", lambda name, device: name != "f")
    selection = select(PREFILL, DECODE)
    assert selection.few_rows is None
    uncertified = "no certificate covers it; --attention-backend f turns it on"
    assert verdict(selection, "decode", "f") == ("off", uncertified)
    selection = select(PREFILL, DECODE, backend="f")
    assert (selection.few_rows, selection.decode, selection.prefill) == ("f", "b", "b")


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ({"disabled": ["f"]}, ("off", "--disable-attention-backend f")),
        ({"backend": "b"}, ("off", "--attention-backend b")),
        ({"uncallable": {"f": "isn't for this runtime"}}, ("refused", "isn't for this runtime")),
        ({"disabled": ["b"]}, ("possible", "its KV layout isn't the other phase's")),
    ],
)
def test_what_keeps_it_from_small_steps(few, how, found):
    selection = select(PREFILL, DECODE, **how)
    assert selection.few_rows is None
    assert verdict(selection, "decode", "f") == found
    assert verdict(selection, "decode", selection.decode)[1] == "the first that can serve"


def test_forced_where_it_cannot_serve_it_says_why(few):
    with pytest.raises(ConfigError, match="can't read the KV layout of 'a'"):
        select(PREFILL, DECODE, backend="f", disabled=["b"])
    with pytest.raises(ConfigError, match="it can't serve decode: isn't for this runtime"):
        select(PREFILL, DECODE, backend="f", uncallable={"f": "isn't for this runtime"})


def test_choosing_imports_neither_torch_nor_numba():
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from helpers.attention import make_spec\n"
        "from octavo.attention.candidates import select\n"
        "select(make_spec('prefill'), make_spec())\n"
        "assert not {'torch', 'numba'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
