"""A run's config.yaml that is damaged, or for a different model or data order, is refused with a one-sentence error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.train.run_folders import open_run
from tests.processes import TINY, sentence, settings, use_cache, write_corpus


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl")
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=4, training__seed=7)
    assert cli(["train", *chosen, "--output-dir", str(home / "run")]) == 0


@pytest.fixture(params=["with its mark", "copied without the mark"])
def run(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Path:
    shutil.copytree(home / "run", tmp_path / "run")
    if request.param != "with its mark":
        (tmp_path / "run/.sansgpu.json").unlink()
    return tmp_path / "run"


def test_a_cut_off_configuration_is_refused_or_means_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "config.yaml"
    text, known = file.read_text(), open_run(run)[0]
    ends = [len("".join(text.splitlines(keepends=True)[:number])) for number in range(len(text.splitlines()))]
    refused = 0
    for end in sorted({*ends[::3], *(end + 7 for end in ends[::3]), *range(len(text) - 40, len(text))}):
        file.write_text(text[:end])
        try:
            assert open_run(run)[0] == known, f"cut at {end}, it loads as a different configuration"
        except ConfigError:
            refused += 1
    assert refused > len(ends[::3])
    for end in (0, ends[len(ends) // 2], ends[-1]):
        file.write_text(text[:end])
        for arguments in (
            ["train", "--resume", "--output-dir", str(run)], ["eval", str(run)], ["generate", str(run)],
            ["snapshots", "list", str(run)], ["export", str(run)],
            ["train", str(file), "--resume", "--output-dir", str(run)],
        ):  # fmt: skip
            assert cli(arguments) == 2
            assert "config.yaml" in sentence(capsys)
    assert not (run / "export").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.seed", 8), ("model.dropout", 0.2), ("model.n_heads", 4), ("model.rope_theta", 500.0),
        ("data.max_length", 16), ("data.dataset_name", "python-stdlib"), ("training.batch_size", 3),
        ("data.validation_split", 0.1), ("training.window_warmup_ratio", 0.0),
    ],
)  # fmt: skip
def test_another_model_or_data_order_is_refused_unless_it_is_asked_for(
    key: str, value: object, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alter(run, **{key: value})
    for arguments in (["train", "--resume", "--output-dir", str(run)], ["snapshots", "list", str(run)]):
        assert cli(arguments) == 2
        said = sentence(capsys)
        assert f"{key.split('.')[1]}" in said
        assert "is not the configuration that its run" in said


def test_settings_that_change_neither_model_nor_data_may_be_altered(run: Path) -> None:
    alter(run, **{"training.learning_rate": "1e-3", "training.keep_last": 1, "training.max_steps": 6,
                  "training.batch_size": 4, "training.gradient_accumulation_steps": 1})  # fmt: skip
    assert cli(["eval", str(run)]) == 0
    assert cli(["train", "--resume", "--output-dir", str(run)]) == 0
    assert (run / "snapshots/step-000006").is_dir()


def test_a_run_resumed_with_another_value_continues_before_its_first_snapshot(run: Path) -> None:
    """If a run is killed before its first snapshot, only .sansgpu.json records the new value."""
    arguments = ["train", "--resume", "--output-dir", str(run), "--max-steps", "6"]
    before = {path: path.read_bytes() for path in (run / "metrics.jsonl", run / "environment.json")}
    assert cli([*arguments, "--set", "model.dropout=0.2"]) == 0
    shutil.rmtree(run / "snapshots/step-000006")
    shutil.rmtree(run / "final")
    for path, content in before.items():
        path.write_bytes(content)
    assert cli(["snapshots", "list", str(run)]) == 0
    assert cli(arguments) == 0


def alter(run: Path, **changes: object) -> None:
    file = run / "config.yaml"
    values = yaml.safe_load(file.read_text())
    for key, value in changes.items():
        section, _, name = key.partition(".")
        assert name in values[section]
        values[section][name] = value
    file.write_text(yaml.safe_dump(values))


def test_reports_and_lists_refuse_it_too(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:40]))
    page = (tmp_path / "run/report.html").read_bytes()
    assert cli(["report", str(tmp_path / "run")]) == 2
    assert "config.yaml is not the configuration that its run" in sentence(capsys)
    assert (tmp_path / "run/report.html").read_bytes() == page
    assert cli(["runs", str(tmp_path)]) == 0
    assert "broken" in capsys.readouterr().out


def test_new_folders_and_the_configuration_are_on_the_disk_before_a_snapshot_is(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = [], os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    run, deep = tmp_path / "new/run", tmp_path / "deep/new/checkpoints"
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=4)
    assert cli(["train", *chosen, "--output-dir", str(run), "--set", f"training.checkpoint_dir={deep}"]) == 0
    for made in (run.parent, run, deep.parent.parent, deep.parent, deep, deep / "step-000004"):
        assert made.parent in synced, f"a crash may lose the entry of {made}"
    assert run in synced  # it has the entries of config.yaml and metrics.jsonl


def test_a_run_means_the_same_files_in_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    written, first, second = (tmp_path / name for name in ("written", "first", "second"))
    for seed, folder in enumerate((written, first, second)):
        (folder / "texts").mkdir(parents=True)
        write_corpus(folder / "texts/corpus.jsonl", seed=seed)
    values = {**{"data.dataset_name": "texts"}, **TINY, "training.max_steps": 4}
    nested: dict[str, dict[str, object]] = {"training": {"device": "cpu"}, "model": {}, "data": {}}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        nested[section or "training"][name] = value
    (written / "own.yaml").write_text(yaml.safe_dump(nested))

    def works(folder: Path, *arguments: str) -> str:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert cli(list(arguments)) == 0
        captured = capsys.readouterr()
        return captured.out + captured.err

    def recorded(run: Path) -> str:
        return str(yaml.safe_load((run / "config.yaml").read_text())["data"]["dataset_name"])

    command = ["train", str(written / "own.yaml"), "--output-dir", "run"]
    assert "exists in the working directory and as" in works(first, *command)
    assert recorded(first / "run") == str(first / "texts")
    own = works(first, "eval", "run", "--json")
    assert works(second, "eval", str(first / "run"), "--json") == own
    resumed = works(second, "train", "--resume", "4", "--output-dir", str(first / "run"))
    assert "was written with" not in resumed
    assert works(second, "snapshots", "verify", str(first / "run"))
    third = tmp_path / "third"
    third.mkdir()
    assert "exists in the working directory" not in works(third, *command)
    assert recorded(third / "run") == str(written / "texts")
    assert "was written with" not in works(tmp_path, *command[:2], "--resume", "--output-dir", str(third / "run"))
    assert recorded(third / "run") == str(written / "texts")
