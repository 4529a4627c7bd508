"""Folders of runs that version 0.2.0 wrote, with its own code, can still be used."""

import json
import tarfile
from pathlib import Path

import pytest

from sansgpu import Run
from tests.processes import Captured, cli, json_of, printed

WRITTEN = Path(__file__).with_name("run_of_0_2.tar.xz")  # 6 steps of `sansgpu train` on the corpus beside the run
TOTAL = 9


@pytest.fixture
def run(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_it_is_evaluated_as_at_its_end(run: Path, capsys: Captured) -> None:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next(event for event in reversed(events) if event["event"] == "eval")
    assert json_of(capsys, "eval", run)["loss"] == pytest.approx(last["loss"], rel=1e-5)
    [row] = json_of(capsys, "runs", run.parent)["runs"]
    assert (row["state"], row["step"], row["final_step"]) == ("done", 6, 6)


def test_its_model_writes_text_and_is_exported(run: Path, capsys: Captured) -> None:
    pytest.importorskip("gguf")
    text = printed(capsys, "generate", run, "--prompt", "The fox", "--max-new-tokens", "8", "--temperature", "0")
    assert text == "The fox" + Run(run).generate("The fox", max_new_tokens=8, temperature=0) + "\n"
    assert cli(["export", str(run), "--format", "gguf"]) == 0
    assert cli(["export", str(run), "--format", "hf", "--output", str(run.parent / "folder")]) == 0


def test_it_goes_on(run: Path, capsys: Captured) -> None:
    before = printed(capsys, "eval", run)
    more = ["--max-steps", str(TOTAL), "--set", "data.dataset_name=corpus.jsonl"]
    assert cli(["train", "--resume", "latest", "--output-dir", str(run), *more]) == 0
    assert "done after step 9" in capsys.readouterr().out
    [row] = json_of(capsys, "runs", run.parent)["runs"]
    assert (row["state"], row["step"]) == ("done", TOTAL)
    assert printed(capsys, "eval", run) != before
