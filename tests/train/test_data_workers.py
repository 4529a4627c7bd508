"""A data worker that hangs or fails ends the run with a sentence that names it."""

from pathlib import Path

import pytest

from tests.processes import finish, settings, train, use_cache, write_corpus

TASK = "tests.train.faulty_data:"
RESUME = "then continue with --resume latest."


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        (1, "data worker 1 of 1 did not finish the batch of step 4 within 1 s"),
        (0, "the batch of step 4 was not ready within 1 s"),
    ],
)
def test_a_batch_that_hangs_ends_the_run(
    workers: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    chosen = settings(
        data__dataset_name=write_corpus(tmp_path / "corpus.jsonl"), training__max_steps=8, data__timeout_seconds=1,
        training__dataloader_num_workers=workers, task=f"{TASK}Hanging",
    )  # fmt: skip
    code, out, error = finish(["train", *chosen, "--output-dir", str(tmp_path / "run")], tmp_path / "cache")
    advice = "check that the data's disk responds, or raise data.timeout_seconds"
    assert (code, error.splitlines()[-1]) == (1, f"sansgpu: {problem}; {advice}, {RESUME}"), out + error


@pytest.mark.parametrize(
    ("task", "reason"), [("Failing", "OSError: [Errno 5] Input/output error"), ("Exiting", "SystemExit: 3")]
)
def test_a_worker_that_fails_is_named(
    task: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    write_corpus(tmp_path / "corpus.jsonl")
    more = {"task": f"{TASK}{task}", "training__dataloader_num_workers": 1}
    assert train(tmp_path, tmp_path / "run", training__max_steps=8, **more) == 1
    said = (
        f"sansgpu: data worker 1 of 1 failed to prepare the batch of step 4 ({reason}); check the data and its disk, "
    )
    assert capsys.readouterr().err.splitlines()[-1] == said + RESUME
