"""The documentation names what is there: flags, commands, files, metrics."""

from __future__ import annotations

import contextlib
import io
import re
from itertools import chain
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BENCHES = ("serve", "throughput", "latency", "startup", "attention", "kernels")
OTHERS = {  # flags of programs that aren't ours
    *("--help", "--dist", "--no-deps", "--strict", "--interrupt_requests"),
}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]+[a-z]")


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """All that any command's help names, and those of the scripts beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        helps = [_help([command]) for command in COMMANDS]
        helps += [_help(["bench", bench]) for bench in BENCHES]
    scripts = [path.read_text() for path in (*ROOT.glob("bench/*.py"), *ROOT.glob("tools/*"))]
    return set(chain.from_iterable(map(_FLAG.findall, [*helps, *scripts])))


def _help(command: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*command, "--help"]) == 0
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path, flags: set[str]) -> None:
    named = set(_FLAG.findall(page.read_text(encoding="utf-8")))
    assert sorted(named - flags - OTHERS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^(?:\.venv/bin/)?|`)octavo ([a-z]+)", text, re.MULTILINE))
    assert named <= set(COMMANDS)
    assert set(re.findall(r"octavo bench ([a-z]+)", text)) <= set(BENCHES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = re.findall(r"`((?:src|tests|bench|tools)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_pages_name_the_metrics_that_there_are() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/octavo/server").glob("*.py"))
    for page in (ROOT / "docs/server.md", ROOT / "docs/grafana.json"):
        for name in set(re.findall(r"octavo:(\w+)", page.read_text(encoding="utf-8"))):
            bare = re.sub(r"_(total|bucket|count|sum)$", "", name)
            assert f'"{bare}' in source or f":{bare}" in source, name
