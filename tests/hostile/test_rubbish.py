"""Invalid arguments, names, folders and files cause a one-sentence error that says what to change."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tools.tiny_model import make_folder

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.data.tokenizer import BPETokenizer
from tests.hostile.bounded import assert_refused, outcome
from tests.hostile.fuzz.odd_folders import delete_deep, make_deep, with_hashes
from tests.hostile.fuzz.values import NOT_UTF8
from tests.processes import finish, options, settings, train
from tests.tasks.folders import chat_rows

NOBODY = "~nosuchuser/x"


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    """Trains a run of six steps; the tests change copies of it."""
    assert train(home, home / "run", training__max_steps=6, training__kernels="torch") == 0
    return home / "run"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "runs/copy"))


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Returns a function that creates deeply nested folders; they are deleted after the test."""

    def make(folder: Path, levels: int = 1500) -> Path:
        return make_deep(folder, levels)

    yield make
    delete_deep(tmp_path)


def tiny(home: Path, **changes: object) -> list[str]:
    return ["train", *settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=2, **changes)]


def test_a_path_in_the_home_of_nobody_is_refused(home: Path, run: Path) -> None:
    sentence = f"{NOBODY} does not exist, because ~nosuchuser is not the home folder of a user of this machine"
    for key in ("data__validation_name", "data__tokenizer", "data__cache_dir", "training__checkpoint_dir"):
        assert_refused(sentence, *tiny(home, **{key: NOBODY}), "--dry-run")
    assert_refused(sentence, "train", *settings(data__dataset_name=NOBODY), "--dry-run")
    assert_refused(sentence, *tiny(home), "--output-dir", NOBODY)
    for command in (["eval", NOBODY], ["eval", run, "--data", NOBODY], ["tokenizer", "encode", NOBODY, "--text", "a"]):
        assert_refused(sentence, *command)


def test_a_file_whose_name_begins_with_a_tilde_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~notes.txt").write_text("red and blue words\n" * 300)
    command = ["tokenizer", "train", "~notes.txt", "--output", "t", "--vocab-size", "300"]
    assert finish(command, tmp_path / "cache")[0] == 0


def test_a_run_with_an_impossible_folder_does_not_hide_the_others(copy: Path) -> None:
    other = Path(shutil.copytree(copy, copy.with_name("other")))
    file = other / "config.yaml"
    values = yaml.safe_load(file.read_text())
    values["training"]["checkpoint_dir"] = NOBODY
    file.write_text(yaml.safe_dump(values))
    code, said = outcome("runs", copy.parent, "--json")
    assert code == 0, said


@pytest.mark.parametrize("number", ["1000000", "9" * 5000, "0"])
def test_a_number_of_processes_that_no_machine_runs_is_refused(home: Path, number: str) -> None:
    assert_refused("but must be a number from 1 to ", *tiny(home), "--dry-run", f"--processes={number}")


def test_a_vocabulary_that_memory_cannot_hold_is_refused(home: Path, tmp_path: Path) -> None:
    corpus, output = home / "corpus.jsonl", tmp_path / "t"
    for size in ("4294967296", "1000000000"):
        assert_refused("is too large", "tokenizer", "train", corpus, "--vocab-size", size, "--output", output)
    assert_refused("data.vocab_size is 4294967296", *tiny(home, data__vocab_size=1 << 32), "--dry-run")
    with pytest.raises(ConfigError, match="vocab_size 4294967296 is too large"):
        BPETokenizer.train(["a"], 1 << 32)


@pytest.mark.parametrize("value", ["nan", "-inf", *(pytest.param(v, marks=pytest.mark.long) for v in ("inf", "abc"))])
def test_every_option_that_takes_a_number_refuses_what_is_none(run: Path, value: str) -> None:
    for command, option in (
        (("generate", run), "--temperature"), (("chat", run, "--prompt", "a"), "--top-p"), (("plan",), "--hours"),
        (("tune", "tiny", "--trials", "1", "--dry-run"), "--hours"), (("bench", "tiny"), "--gpu-tflops"),
        (("plan", "tiny", "--nodes", "2"), "--price"), (("extract", run, "--text", "a"), "--min-score"),
    ):  # fmt: skip
        assert_refused(f"{value} is not a finite number", *command, f"{option}={value}")


@pytest.mark.parametrize("key", ["training.num_epochs", "training.max_hours", "training.timeout_seconds",
                                 "data.timeout_seconds"])  # fmt: skip
def test_a_duration_beyond_every_clock_is_refused(home: Path, key: str) -> None:
    assert_refused(f"{key} is", *tiny(home), "--set", f"{key}=1e308", "--dry-run")


def test_hours_and_memory_beyond_every_machine_are_refused(home: Path) -> None:
    assert_refused("--hours is 1e+308", "plan", "--hours", "1e308")
    assert_refused("more than any machine has", "plan", "--memory", "9" * 400, "small")


def test_a_tiny_temperature_gives_the_most_likely_token(run: Path) -> None:
    found = [outcome("generate", run, "--max-new-tokens", "3", "--temperature", t) for t in ("0", "1e-320")]
    assert [code for code, _ in found] == [0, 0], found


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.long)])
def test_a_model_that_predicts_no_numbers_is_named(copy: Path, value: float) -> None:
    for file in copy.rglob("model.safetensors"):
        weights = load_file(file)
        for tensor in weights.values():
            tensor.view(-1)[0] = value
        save_file(weights, file, {"format": "pt"})
    for temperature in ("0", "0.8"):
        code, said = outcome("generate", copy / "final", "--prompt", "the", "--temperature", temperature)
        assert (code, said.count("the model's logits are NaN or infinite")) == (1, 1), said
    with_hashes(copy / "snapshots/step-000006")
    for kind in ("q8_0", "f16", "f32"):
        assert_refused("contains NaN or infinite values", "export", copy, "--format", "gguf", "--type", kind)


@pytest.mark.parametrize("how", ["short", "float8", "unknown"])
def test_moments_of_another_kind_shape_or_type_are_refused(copy: Path, how: str) -> None:
    file = copy / "snapshots/step-000006/optimizer.safetensors"
    moments = load_file(file)
    name = min(moments)
    if how == "unknown":
        moments["other." + name] = moments.pop(name)
    else:
        moments[name] = moments[name][:1].clone() if how == "short" else moments[name].to(torch.float8_e4m3fn)
    save_file(moments, file)
    with_hashes(file.parent)
    resume = ("train", "--resume", "latest", "--output-dir", copy, "--max-steps", "7")
    assert_refused("was written with a different optimizer", *resume)


def test_weights_in_a_format_that_cannot_compute_are_refused(copy: Path) -> None:
    file = copy / "snapshots/step-000006/model.safetensors"
    weights = load_file(file)
    weights[min(weights)] = weights[min(weights)].to(torch.float8_e4m3fn)
    save_file(weights, file)
    with_hashes(file.parent)
    assert_refused("in float8_e4m3fn, which cannot be computed with", "eval", copy)


def test_weights_of_another_model_are_refused(copy: Path) -> None:
    file = copy / "snapshots/step-000006/model.safetensors"
    weights = load_file(file)
    weights["other.weight"] = weights.pop(max(weights))
    save_file(weights, file)
    with_hashes(file.parent)
    for command in (("generate", copy), ("export", copy)):
        assert_refused("does not match the model", *command)


@pytest.mark.long
def test_a_folder_of_any_depth_is_read(home: Path, copy: Path, tmp_path: Path, deep: Callable[..., Path]) -> None:
    data = deep(tmp_path / "data")
    for command in (
        ("train", *settings(data__dataset_name=data, training__max_steps=2), "--dry-run"),
        ("tokenizer", "train", data, "--vocab-size", "300", "--output", tmp_path / "t"),
        ("init", tmp_path / "a.yaml", "--text", data, "--yes"),
        ("runs", data),
    ):
        code, said = outcome(*command)
        assert code == 0, said
    for place in (copy / "snapshots", copy / "snapshots/step-000006", copy / "final"):
        deep(place / "inside")
    resume = ("train", "--resume", "latest", "--output-dir", copy, "--max-steps", "7")
    forked = copy.with_name("forked")
    for command in (("runs", copy.parent), ("snapshots", "fork", copy, "--output-dir", forked), resume):
        code, said = outcome(*command)
        assert (code, "recursion" in said) == (0, False), said


def test_a_path_too_long_for_the_system_is_refused(tmp_path: Path, deep: Callable[..., Path]) -> None:
    data = deep(tmp_path / "data", 3000)
    assert_refused("too long for the file system", "train", *settings(data__dataset_name=data), "--dry-run")


def test_names_that_are_not_utf8_are_read_in_folders_and_refused_as_arguments(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / f"{NOT_UTF8}.txt").write_text("red and blue words\n" * 300)
    shutil.copytree(run, tmp_path / "runs" / NOT_UTF8)
    here = settings(data__dataset_name=data, training__max_steps=2)
    for command in (("train", *here, "--output-dir", tmp_path / "run"), ("runs", tmp_path / "runs")):
        code, said = outcome(*command)
        assert code == 0, said
    for command in (
        ("train", *settings(data__dataset_name=data / f"{NOT_UTF8}.txt"), "--dry-run"),
        ("tokenizer", "encode", run / "final", "--text", NOT_UTF8),
        ("generate", run, "--prompt", NOT_UTF8),
        ("report", tmp_path / "runs" / NOT_UTF8, "--format", "svg"),
    ):
        assert_refused("is not UTF-8 text", *command)


def test_a_long_value_is_cut_in_every_message(home: Path, run: Path) -> None:
    digits = "9" * 5000
    for command in (
        ["generate", run, "--snapshot", digits], ["report", run, "--format", digits], [digits],
        ["generate", run, "--data", home / "corpus.jsonl", "--output", "o", "--batch-size", digits],
        ["embed", run, "--data", home / "corpus.jsonl", "--output", "o.npy", "--text-column", digits],
        ["bench", "tiny", "--targets", digits], ["export", run, "--format", digits], [*tiny(home), "--until", digits],
    ):  # fmt: skip
        code, said = outcome(*command)
        assert code == 2, said[:1000]
        assert len(max(said.split(), key=len)) <= 403
        assert "(--debug shows where)" not in said


def test_an_empty_chat_template_is_named(home: Path, tmp_path: Path) -> None:
    model, template = make_folder(tmp_path / "model", "llama"), tmp_path / "t.jinja"
    template.write_text(" \n")
    rows = {"task": "sft", "model.name_or_path": model, "data.chat_template": template}
    rows |= {"data.dataset_name": chat_rows(tmp_path / "chats.jsonl"), "training.max_steps": 2}
    assert_refused("t.jinja is empty", "train", *options(rows), "--dry-run")
    (model / "chat_template.jinja").write_text("")
    assert_refused("the chat template produces no text", "chat", model, "--prompt", "hi")


def test_a_gguf_file_with_an_odd_head_size_is_refused(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    code, said = outcome("export", run, "--format", "gguf", "--output", file)
    assert code == 0, said
    content = bytearray(file.read_bytes())
    at = re.search(rb"\.attention\.key_length\x04\0\0\0", content)
    assert at is not None
    content[at.end() : at.end() + 4] = (7).to_bytes(4, "little")
    file.write_bytes(content)
    assert_refused("its metadata do not match its tensors", "generate", file, "--prompt", "the")


def test_advice_to_run_the_code_in_a_pickle_is_never_shown(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", "bert")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(torch.nn.Linear(2, 2), protocol=4))
    code, said = outcome("embed", model, "--data", "a", "--output", tmp_path / "o.npy")
    assert (code, "weights_only" in said, "two options" in said) == (2, False, False), said


def test_a_cache_is_private_whatever_the_umask_is(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache/inside"
    monkeypatch.setenv("SANSGPU_CACHE", str(cache))
    before = os.umask(0)
    try:
        assert cli([*tiny(home), "--dry-run"]) == 0
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, cache / "tokenizers")] == [0o700, 0o700]


def test_export_to_a_read_only_disk_says_so(run: Path) -> None:
    for command in (("export", run, "--output"), ("tokenizer", "train", run.parent / "corpus.jsonl", "--output")):
        code, said = outcome(*command, "/sys/new")  # no user can create folders there
        assert code == 1, said
        assert re.search(
            "/sys/new cannot be written: (Read-only file system|Operation not permitted|Permission denied)", said
        )
