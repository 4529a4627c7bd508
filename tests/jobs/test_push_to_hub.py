"""`sansgpu export --push-to-hub` uploads a model in one commit, or says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from tests.hub_uploads import TOKEN, UploadHub, serving_uploads
from tests.jobs.test_gguf_commands import ADAPTED
from tests.processes import SURROUNDINGS, finish, messages, options, settings, start_apart, train_once, write_corpus
from tests.tasks.folders import chat_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl")
    chat_rows(home / "chat.jsonl")
    train_once(home / "plain", settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=3))
    tuned = {**ADAPTED, "data.dataset_name": home / "chat.jsonl", "model.name_or_path": model_folder("qwen2")}
    train_once(home / "chat", options(tuned))


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    """Serves an empty Hub to other processes, which upload large files over HTTP instead of in chunks of Xet."""
    served = UploadHub()
    with serving_uploads(served) as address:
        for name in [name for name in SURROUNDINGS if name.startswith(("HF_", "HUGGING"))]:
            monkeypatch.delenv(name)
        for name, value in {
            "HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield served


def export(home: Path, *arguments: object) -> tuple[int, list[str], str]:
    """Returns the exit code, the lines on stdout, and stderr without warnings and progress."""
    code, out, error = finish(["export", *map(str, arguments)], home / "cache")
    return code, out.splitlines(), "\n".join(messages(error))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_model_is_uploaded_whole_in_one_commit(home: Path, hub: UploadHub) -> None:
    code, lines, error = export(home, home / "plain", "--push-to-hub", "me/tiny", "--private")
    assert (code, error) == (0, ""), error
    assert lines == [str(home / "plain/export"), f"{os.environ['HF_ENDPOINT']}/me/tiny"]
    repository = hub.repositories["me/tiny"]
    assert repository.private
    assert repository.files == contents(home / "plain/export")
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= {*repository.files}
    assert repository.commits == ["Upload export with sansgpu"]
    (home / "plain/export/secret.txt").write_text("mine")
    (home / "plain/export/README.md").write_text("---\nlicense: mit\n---\nEdited.\n")
    assert export(home, home / "plain", "--push-to-hub", "me/tiny")[0] == 0
    assert len(repository.commits) == 2
    assert "secret.txt" not in repository.files, "only what sansgpu wrote is uploaded"
    assert repository.files["README.md"].endswith(b"Edited.\n")


@pytest.mark.long
def test_gguf_files_folders_for_ollama_and_adapters_are_uploaded(home: Path, hub: UploadHub, tmp_path: Path) -> None:
    for kind, arguments in [
        ("gguf", ("--format", "gguf", "--output", tmp_path / "chat.gguf")),
        ("ollama", ("--format", "ollama", "--output", tmp_path / "ollama")),
        ("adapter", ("--no-merge", "--output", tmp_path / "adapter")),
    ]:
        code, lines, error = export(home, home / "chat", *arguments, "--push-to-hub", f"me/{kind}")
        assert (code, error) == (0, ""), error
        assert lines[-1].endswith(f"/me/{kind}")
        assert not hub.repositories[f"me/{kind}"].private
    card = hub.repositories["me/gguf"].files.pop("README.md").decode()
    assert hub.repositories["me/gguf"].files == {"chat.gguf": (tmp_path / "chat.gguf").read_bytes()}
    for part in ("library_name: gguf", "llama-cli -m chat.gguf", "ollama run hf.co/MODEL", "sansgpu chat chat.gguf"):
        assert part in card
    hub.repositories["me/gguf"].files["README.md"] = b"Edited."
    arguments = ("--format", "gguf", "--no-merge", "--output", tmp_path / "lora.gguf")
    assert export(home, home / "chat", *arguments, "--push-to-hub", "me/gguf")[0] == 0
    assert hub.repositories["me/gguf"].files["README.md"] == b"Edited."
    assert b"llama-cli -m" in hub.repositories["me/ollama"].files["README.md"]
    assert hub.repositories["me/ollama"].files == contents(tmp_path / "ollama")
    assert hub.repositories["me/adapter"].files == contents(tmp_path / "adapter")
    assert "adapter_model.safetensors" in hub.repositories["me/adapter"].files


@pytest.mark.long
def test_an_interrupted_upload_leaves_no_commit_and_can_be_repeated(home: Path, hub: UploadHub) -> None:
    hub.stalls = True
    process = start_apart(["export", str(home / "plain"), "--push-to-hub", "me/late"], home / "cache")
    assert hub.stalled.wait(120)
    process.kill()
    process.communicate(timeout=60)
    assert hub.repositories["me/late"].files == {}
    hub.stalls = False
    assert export(home, home / "plain", "--push-to-hub", "me/late")[0] == 0
    repository = hub.repositories["me/late"]
    assert len(repository.commits) == 1
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        assert repository.files[name] == (home / "plain/export" / name).read_bytes()


@pytest.mark.parametrize(
    "path",
    # The client repeats these requests for half a minute.
    ["commit", *(pytest.param(path, marks=pytest.mark.long) for path in ("preupload", "large"))],
)
def test_a_failed_upload_is_one_sentence(path: str, home: Path, hub: UploadHub) -> None:
    hub.fails_at = f"/{path}/"
    code, lines, error = export(home, home / "plain", "--push-to-hub", "me/failed")
    assert (code, lines) == (1, [])
    assert error.startswith("sansgpu: the upload to me/failed failed (")
    assert error.endswith(f"the model is in {home / 'plain/export'}; run the command again.")
    assert "\n" not in error
    assert hub.repositories["me/failed"].files == {}


@pytest.mark.parametrize("name", ["tiny", "me/a/b", "me/a b"])
def test_what_is_no_name_on_the_hub_is_refused(home: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["export", str(home / "plain"), "--push-to-hub", name]) == 2
    assert f"--push-to-hub is {name}, but must be OWNER/NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("me/tiny", {"HF_TOKEN": ""}, "--push-to-hub needs a token with write access; run `hf auth login`"),
        ("me/tiny", {"HF_TOKEN": "hf_wrong"}, "the Hub rejects the token"),
        ("you/tiny", {}, "the token may not write to you/tiny"),
        ("me/tiny", {"HF_HUB_OFFLINE": "1"}, "but HF_HUB_OFFLINE is set; unset it."),
        ("me/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub at http://127.0.0.1:9 is unreachable"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    name: str, changes: dict[str, str], sentence: str, home: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in changes.items():
        monkeypatch.setenv(variable, value)
    code, lines, error = export(home, home / "plain", "--push-to-hub", name)
    assert (code, lines) == (2, []), error
    assert error.startswith("sansgpu: ")
    assert sentence in error
    assert "\n" not in error
    assert hub.repositories == {}


def test_private_needs_a_repository(home: Path) -> None:
    code, _, error = export(home, home / "plain", "--private")
    assert code == 2
    assert "--private requires --push-to-hub" in error
