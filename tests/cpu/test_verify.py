"""``octavo verify`` from the command to the certificate: what is right passes, and every planted
fault is found."""

from __future__ import annotations

import json
import math
from itertools import cycle
from typing import get_args

import pytest
import torch
from helpers.attention import make_spec
from helpers.checkpoints import tiny

from octavo.attention import Support, certificates
from octavo.attention.backends.cpu import CpuCandidate
from octavo.attention.candidates import candidate, select
from octavo.cli import main
from octavo.cli.verify import FaultName
from octavo.errors import ConfigError
from octavo.verify import run as verify_run
from octavo.verify import speed
from octavo.verify.checks import (
    CHECKS,
    MAX_ERROR,
    Check,
    NotOffered,
    Subject,
    errors,
    round_trip,
    run_checks,
)
from octavo.verify.faults import Fault
from octavo.verify.problems import exact, hide_needles, make_problem
from octavo.verify.report import Report, fuller_certificate, write_certificate
from octavo.verify.run import candidates_for, verify
from octavo.verify.soak import soak
from octavo.verify.speed import split_against_unsplit

torch.set_num_threads(1)

FAULTS = get_args(Fault)


@pytest.fixture(autouse=True)
def one_small_shape(monkeypatch):
    """One KV head of the default model's shape."""
    monkeypatch.setattr(verify_run, "QUICK_CPU_SHAPES", ((3, 1, 64),))


def quick(*arguments: str) -> int:
    return main(["verify", "--quick", "--device", "cpu", *arguments])


def test_a_clean_run_certifies(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certificates, "PROJECT_FOLDER", tmp_path / "none")
    monkeypatch.setattr(certificates, "user_folder", lambda: tmp_path)
    times = cycle([[2.0], [1.0]])  # as on a machine that does nothing else
    monkeypatch.setattr(speed, "sample_us", lambda *_: next(times))
    specs = make_spec("prefill"), make_spec()
    assert select(*specs).decode == "reference"
    assert quick() == 0
    assert select(*specs).decode == "cpu"
    (path,) = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    assert written["passed"] is True
    assert written["versions"]["octavo"]
    assert written["machine"]["cpu"]
    names = [check["name"].partition(" ·")[0] for check in written["checks"]]
    assert names[: len(CHECKS)] == list(CHECKS)
    not_offered = [check["name"] for check in written["checks"] if check["passed"] is not True]
    assert not_offered == ["numbers of splits · prefill 3/1 x 64 float32"]
    accuracy = written["checks"][1]
    assert accuracy["figures"]["cosine"] > 0.999999
    assert 0 < accuracy["figures"]["error"] < 1e-5
    page = path.with_suffix(".md").read_text()
    shown = capsys.readouterr().out
    for name in names:
        assert name in page
        assert name in shown
    assert str(path) in shown


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_every_fault_is_found(name, fault, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certificates, "user_folder", lambda: tmp_path)
    assert quick("--candidate", name, "--plant", fault) == 1
    captured = capsys.readouterr()
    assert f"{name} failed (with {fault} planted)" in captured.err
    assert "FAILED" in captured.out
    assert list(tmp_path.iterdir()) == []  # nothing is certified


def test_the_command_knows_every_fault():
    assert get_args(FaultName) == FAULTS


def test_a_failed_run_leaves_a_report_that_covers_nothing(tmp_path):
    assert quick("--plant", "drop-newest", "--output", str(tmp_path)) == 1
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["passed"] is False
    assert "**FAILED**" in path.with_suffix(".md").read_text()


def test_cosine_alone_would_miss_a_dropped_key():
    """Which is why it never stands alone (from 4K tokens on)."""
    spec = make_spec(num_heads=1, num_kv_heads=1, head_dim=128)
    whole = make_problem(spec, [8192])
    out, lse = exact(whole)
    short = make_problem(spec, [8192])
    short.keys[0], short.values[0] = short.keys[0][:-1], short.values[0][:-1]
    found = errors(*exact(short), out, lse)
    assert found["cosine"] > 0.999
    assert found["error"] > 10 * MAX_ERROR["float32"]


def test_a_needle_takes_the_weight():
    spec = make_spec(num_heads=6, num_kv_heads=2)
    problem = make_problem(spec, [500, 300], seed=3)
    hide_needles(problem, [499, 7])
    out, _ = exact(problem)
    for row, place in enumerate([499, 7]):
        needle = problem.values[row][place].repeat_interleave(3, 0).double()
        torch.testing.assert_close(out[row], needle, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad):
    want, want_lse = torch.ones(1, 1, 4).double(), torch.zeros(1, 1).double()
    out = want.clone()
    out[0, 0, 0] = bad
    found = errors(out, want_lse, want, want_lse)
    assert found["error"] == math.inf
    assert errors(want, want_lse + bad, want, want_lse)["LSE error"] == math.inf


def test_an_empty_row_must_be_exactly_zero():
    want, want_lse = torch.zeros(1, 1, 4).double(), torch.full((1, 1), -math.inf).double()
    assert errors(want, want_lse, want, want_lse)["error"] == 0
    assert errors(want + 1e-30, want_lse, want, want_lse)["error"] == math.inf
    assert errors(want, -want_lse, want, want_lse)["LSE error"] == math.inf


def test_what_is_not_offered_is_said():
    class NoWindows(CpuCandidate):
        def supports(self, spec):
            if spec.window is not None:
                return Support(False, "has no windows")
            return super().supports(spec)

    subject = Subject(NoWindows(), make_spec(num_heads=3, num_kv_heads=1), quick=True)
    with pytest.raises(NotOffered, match="has no windows"):
        subject.open(window=3)
    found = {check.name.partition(" ·")[0]: check for check in run_checks(subject)}
    assert found["sliding window"].passed is None
    assert found["sliding window"].figures == {"not offered": "has no windows"}
    assert found["accuracy"].passed


def test_int8_is_held_to_half_a_step():
    """Numbers that it holds come back to the bit; others rounded, where truncating is found."""

    class Truncating(CpuCandidate):
        def open(self, spec):
            backend = super().open(spec)
            write = backend.write
            backend.write = lambda k, v, *where: write(truncated(k), truncated(v), *where)
            return backend

    def truncated(x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).trunc() * step

    spec = make_spec(num_heads=3, num_kv_heads=1, kv_dtype="int8")
    right = round_trip(Subject(CpuCandidate(), spec, quick=True))
    assert right.passed
    assert 0.4 < right.figures["rounded by, in steps"] < 0.501
    wrong = round_trip(Subject(Truncating(), spec, quick=True))
    assert wrong.figures["numbers that differ"] == 0
    assert wrong.passed is False


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_queries_in_bfloat16(kv_dtype):
    """Which are multiplied in bfloat16 on some CPUs, by weights of no more bits."""
    spec = make_spec(
        "prefill", num_heads=3, num_kv_heads=1, head_dim=80, dtype="bfloat16", kv_dtype=kv_dtype
    )
    checks = list(run_checks(Subject(CpuCandidate(), spec, quick=True)))
    assert [check.name for check in checks if check.passed is False] == []


@pytest.mark.alone
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_soak_holds_out_and_finds_a_wrong_answer(kv_dtype):
    spec = make_spec(num_heads=3, num_kv_heads=1, kv_dtype=kv_dtype)
    subject = Subject(candidate("cpu"), spec, quick=True)
    said: list[str] = []
    check = soak(subject, 0.02, said.append)
    assert check.passed
    assert check.figures["steps"] > 3
    assert said
    faulty = Subject(
        verify_run.FaultyCandidate(subject.candidate, "stale-plan"), subject.spec, True
    )
    assert not soak(faulty, 0.05, said.append).passed


def test_splitting_that_does_not_pay_fails(monkeypatch):
    """The same work, slowed down where it is split."""
    times = iter([[100.0], [101.0]] * 6)
    monkeypatch.setattr(speed, "sample_us", lambda *_: next(times))
    monkeypatch.setattr(speed, "num_splits", lambda *_: 2)
    monkeypatch.setattr(speed, "make_workload", lambda *_, **how: None)
    subject = Subject(candidate("cpu"), make_spec(), quick=True)
    check = split_against_unsplit(subject, 1, 32_768, must_gain=True)
    assert check.passed is False
    assert check.figures["attempts"] == speed.ATTEMPTS
    times = iter([[100.0], [101.0]] * 2)
    assert split_against_unsplit(subject, 1, 128, must_gain=False).passed


def test_a_model_is_timed_split_and_unsplit(tmp_path):
    checks = list(verify("cpu", "cpu", quick=True, model=str(tiny(tmp_path))))
    (check,) = (check for check in checks if check.name.startswith("time per output token"))
    assert check.figures["split ms"] > 0
    assert check.figures["unsplit ms"] > 0


def test_who_can_run_here():
    assert candidates_for("cpu") == ["cpu"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("triton", "triton can't be verified on cpu: runs on CUDA GPUs, not on cpu"),
        ("ascend_fia", "ascend_fia can't be verified on cpu: runs on Ascend NPUs, not on cpu"),
    ],
)
def test_a_candidate_that_cannot_run_here(name, reason, capsys):
    assert quick("--candidate", name) == 1
    assert reason in capsys.readouterr().err


def test_a_fault_that_cannot_be_planted(monkeypatch):
    whole = CpuCandidate.supports

    def supports(self, spec):
        return Support(False, "has no windows") if spec.window else whole(self, spec)

    monkeypatch.setattr(CpuCandidate, "supports", supports)
    with pytest.raises(ConfigError, match="takes no window: has no windows"):
        list(verify("cpu", "cpu", quick=True, fault="off-by-one-window"))


def test_an_error_fails_its_check_and_the_others_go_on():
    class Broken(CpuCandidate):
        def open(self, spec):
            if spec.window is not None:
                raise RuntimeError("line one\nthe operator is gone")
            return super().open(spec)

    subject = Subject(Broken(), make_spec(num_heads=3, num_kv_heads=1), quick=True)
    found = {check.name.partition(" ·")[0]: check for check in run_checks(subject)}
    assert found["sliding window"].passed is False
    assert found["sliding window"].figures == {"raised": "RuntimeError: the operator is gone"}
    assert found["soft cap"].passed


def test_what_goes_unnoticed_certifies_nothing_either(tmp_path):
    check = Check("accuracy", {"error": math.inf}, "", True)
    report = Report("cpu", "cpu", "octavo verify", "today", 1.0, [check], planted="drop-newest")
    written = json.loads(write_certificate(report, tmp_path).read_text())
    assert written["passed"] is False
    assert written["checks"][0]["figures"] == {"error": "inf"}  # JSON has no infinity


def test_a_quick_run_replaces_a_full_one_only_where_it_finds_something(tmp_path):
    def report(*, passed: bool, quick: bool) -> Report:
        check = Check("accuracy", {"error": 0.0}, "", passed)
        return Report("cpu", "cpu", "octavo verify", "today", 1.0, [check], quick=quick)

    quick = report(passed=True, quick=True)
    assert fuller_certificate(quick, tmp_path) is None  # nothing there
    write_certificate(quick, tmp_path)
    assert fuller_certificate(quick, tmp_path) is None
    path = write_certificate(report(passed=True, quick=False), tmp_path)
    assert fuller_certificate(quick, tmp_path) == path
    assert fuller_certificate(report(passed=False, quick=True), tmp_path) is None
    assert fuller_certificate(report(passed=True, quick=False), tmp_path) is None
    older = json.loads(path.read_text()) | {"versions": {"octavo": "0.0"}}
    path.write_text(json.dumps(older))
    assert fuller_certificate(quick, tmp_path) is None
