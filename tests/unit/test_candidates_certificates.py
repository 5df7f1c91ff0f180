"""Who is on by default: only what a certificate covers on this kind of hardware."""

from __future__ import annotations

import json

import pytest
from helpers.attention import make_spec

from octavo import __version__
from octavo.attention import candidates, certificates
from octavo.attention.candidates import select
from octavo.attention.certificates import PROJECT_FOLDER, hardware_of, is_certified, versions

PREFILL, DECODE = make_spec("prefill"), make_spec("decode")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Both empty: the project's and the user's."""
    project, user = tmp_path / "project", tmp_path / "user"
    for folder in (project, user):
        folder.mkdir()
    monkeypatch.setattr(certificates, "PROJECT_FOLDER", project)
    monkeypatch.setattr(certificates, "user_folder", lambda: user)
    monkeypatch.setattr(certificates, "hardware_of", lambda device: f"a {device}")
    return project, user


def certificate(folder, **changes):
    content = {
        "candidate": "cpu",
        "hardware": "a cpu",
        "passed": True,
        "versions": versions("cpu"),
    }
    (folder / "one.json").write_text(json.dumps(content | changes))


def test_uncovered_is_off_and_says_how_to_turn_it_on(folders):
    selection = select(PREFILL, DECODE)
    assert selection.decode == "reference"
    (verdict,) = (v for v in selection.verdicts["decode"] if v.candidate == "cpu")
    assert verdict.state == "off"
    assert verdict.reason == "no certificate covers it; --attention-backend cpu turns it on"
    assert select(PREFILL, DECODE, backend="cpu").decode == "cpu"


@pytest.mark.parametrize("whose", [0, 1])
def test_covered_is_on(folders, whose):
    certificate(folders[whose])
    assert select(PREFILL, DECODE).decode == "cpu"


@pytest.mark.parametrize(
    "changes", [{"passed": False}, {"hardware": "another cpu"}, {"candidate": "triton"}], ids=str
)
@pytest.mark.parametrize("whose", [0, 1])
def test_a_certificate_for_something_else(folders, whose, changes):
    certificate(folders[whose], **changes)
    assert not is_certified("cpu", "cpu")


def test_a_users_certificate_holds_for_its_versions(folders):
    project, user = folders
    old = {"octavo": __version__, "numba": "0.1"}
    certificate(user, versions=old)
    assert not is_certified("cpu", "cpu")
    certificate(project, versions=old)  # it comes with the code that it is about
    assert is_certified("cpu", "cpu")


@pytest.mark.parametrize("content", ["", "[]", "{", "\xff"])
def test_what_is_no_certificate_covers_nothing(folders, content):
    (folders[1] / "broken.json").write_bytes(content.encode("latin-1"))
    assert not is_certified("cpu", "cpu")


def test_the_reference_needs_none(folders):
    assert is_certified("reference", "cuda")


def test_every_candidate_has_its_package():
    assert certificates.KERNEL_PACKAGES.keys() == candidates.CLASSES.keys()


def test_this_hardware_has_a_name():
    assert hardware_of("cpu")
    assert hardware_of("npu:1") == "npu"
    assert hardware_of("cuda").startswith(("sm_", "unknown"))


@pytest.mark.parametrize(
    ("flags", "name"),
    [(["avx2", "fma", "avx512f"], "avx512"), (["avx2", "fma"], "avx2"), (["avx2"], "elder")],
)
def test_cpus_are_told_apart_by_their_vectors(flags, name, monkeypatch):
    monkeypatch.setattr(certificates, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(certificates.platform, "machine", lambda: "elder")
    assert hardware_of.__wrapped__("cpu") == name


def test_a_cpu_that_numba_is_told_to_compile_for(monkeypatch):
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2,-avx512f,+fma")
    assert hardware_of.__wrapped__("cpu") == "avx2"


def test_the_projects_own_certificates_are_whole():
    """Each is the report of a run, every figure in it."""
    found = [json.loads(path.read_text()) for path in PROJECT_FOLDER.glob("*.json")]
    covered = {(one["candidate"], one["hardware"]) for one in found}
    assert covered >= {("cpu", "avx512"), ("cpu", "avx2"), ("torch", "sm_90")}
    for one in found:
        assert one["passed"]
        assert False not in [check["passed"] for check in one["checks"]]
        assert len(one["checks"]) > 10
        assert one["versions"]["octavo"] == __version__
        assert "verify" in one["command"]
        assert "--plant" not in one["command"]
        assert "--quick" not in one["command"]
