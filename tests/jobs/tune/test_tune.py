"""`tune`: its trials in real processes, interruptions and results."""

import csv
import json
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.files.ownership import lock_run
from sansgpu.tasks.configuration import load_config
from tests.jobs.tune.searches import written
from tests.processes import digests, events_of, finish, kill_when, messages, settings, start, use_cache, write_corpus

SPACE = {"learning_rate": {"log": ["1e-3", 1e-1]}, "gradient_accumulation_steps": [1, 2, 4]}


@pytest.fixture(autouse=True)
def _in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    write_corpus(tmp_path / "corpus.jsonl")
    written(SPACE)


def arguments(*more: str, **changes: object) -> list[str]:
    """Returns arguments that tune the tiny configuration in the folder `search`."""
    chosen = {"data__dataset_name": "corpus.jsonl", "training__max_steps": 16, "training__sample_tokens": 4, **changes}
    return ["tune", "--space", "space.yaml", "--output-dir", "search", *settings(**chosen), *more]


def search(*more: str, **changes: object) -> tuple[dict[str, Any], str]:
    """Runs a search; returns its JSON result and its messages."""
    code, out, error = finish(arguments("--json", *more, **changes), Path("cache").absolute())
    assert code == 0, error
    assert len(out.splitlines()) == 1
    return json.loads(out), error


def begun(trial: int, ready: str = "snapshots/step-*") -> bool:
    return any(Path(f"search/trials/{trial:04d}").glob(ready))


def by_number(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a search's trials sorted by number, without their durations."""
    rows = sorted(result["trials"], key=lambda row: row["trial"])
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def still_trained(folder: Path) -> bool:
    try:
        with lock_run(folder):
            return False
    except ConfigError:
        return True


@pytest.fixture(scope="module")
def continued(home: Path) -> tuple[dict[str, Any], str]:
    """Kills a search in its second trial and continues it; returns its result and messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        written(SPACE)
        process = start(arguments("--trials", "2"), home / "cache")
        assert kill_when(process, lambda: begun(1)) == -signal.SIGKILL
        deadline = time.monotonic() + 5  # the kernel kills the trial's process when its parent dies
        while time.monotonic() < deadline and still_trained(Path("search/trials/0001")):
            time.sleep(0.01)
        assert not still_trained(Path("search/trials/0001"))
        return search("--trials", "2")


@pytest.fixture
def result(continued: tuple[dict[str, Any], str], home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Changes to the folder of the continued search and returns its result."""
    monkeypatch.chdir(home)
    return continued[0]


def test_a_killed_search_continues_and_counts_each_trial_once(continued: tuple[dict[str, Any], str]) -> None:
    result, said = continued
    assert "continuing search: 1 of 2 trials done" in said
    assert "trial 1 resumes from step " in said
    assert [row["trial"] for row in by_number(result)] == [0, 1]
    assert {row["state"] for row in result["trials"]} == {"done"}


@pytest.mark.long
def test_a_resumed_trial_ends_with_the_loss_of_an_uninterrupted_run(result: dict[str, Any]) -> None:
    straight_from = ["train", "search/trials/0001/trial.yaml", "--output-dir", "straight", "--headless"]
    assert finish(straight_from, Path("cache").absolute())[0] == 0
    whole = [event["loss"] for event in events_of(Path("straight"), "eval")]
    assert by_number(result)[1]["loss"] == whole[-1]


@pytest.mark.long
def test_the_best_trial_is_compared_with_the_default(result: dict[str, Any]) -> None:
    best, default = result["best"], result["default"]
    assert default["trial"] == 0
    assert default["parameters"] == {"training.learning_rate": 0.004, "training.gradient_accumulation_steps": 2}
    assert best["loss"] == min(row["loss"] for row in result["trials"])
    assert result["gain"] == pytest.approx(1 - best["loss"] / default["loss"])


@pytest.mark.long
def test_the_best_configuration_has_the_best_parameters_and_else_what_was_given(result: dict[str, Any]) -> None:
    config, _ = load_config(Path("search/best.yaml"))
    assert config.training.learning_rate == result["best"]["parameters"]["training.learning_rate"]
    assert config.training.eval_steps == 3  # from the configuration; trials use a different value
    assert config.training.sample_tokens == 4
    assert Path(config.data.dataset_name).is_absolute()


@pytest.mark.long
def test_a_search_leaves_its_best_model_a_table_and_a_report(result: dict[str, Any]) -> None:
    best = result["best"]
    assert [path.parent.name for path in Path("search/trials").glob("*/final")] == [f"{best['trial']:04d}"]
    with Path("search/trials.csv").open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [row["loss"] for row in result["trials"]]
    page = Path("search/report.html").read_text()
    assert "Plotly.newPlot" in page
    assert "<script src" not in page
    assert f"{best['loss']:.4f}" in page


@pytest.mark.long
@pytest.mark.usefixtures("result")
def test_a_search_continues_only_with_its_own_configuration_and_space(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("search/study.db").read_bytes()
    assert cli(arguments("--trials", "3", training__weight_decay=0.3)) == 2
    assert (
        "a search with a different configuration: training.weight_decay was 0.1 and is now 0.3"
        in capsys.readouterr().err
    )
    written({**SPACE, "weight_decay": [0.0, 0.1]})
    assert cli(arguments("--trials", "3")) == 2
    assert "a search with a different space: training.weight_decay" in capsys.readouterr().err
    assert Path("search/study.db").read_bytes() == before


def test_a_folder_with_other_files_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("search").mkdir()
    Path("search/notes.txt").write_text("mine")
    assert cli(arguments("--trials", "2")) == 2
    assert "search contains files that sansgpu did not write, such as notes.txt" in capsys.readouterr().err
    assert [path.name for path in Path("search").iterdir()] == ["notes.txt"]


def test_a_dry_run_shows_the_space_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli(arguments("--trials", "4", "--dry-run", "--json")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [key.rpartition(".")[2] for key in shown["space"]] == list(SPACE)
    assert shown["seconds"] == pytest.approx(4 * shown["trial_seconds"])
    assert not Path("search").exists()


@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        ((), {}, "--trials N, --hours H or both"),
        (("--hours", "-1"), {}, "--hours is -1"),
        (("--trials", "2"), {"training__until": "07:00"}, "set training.max_hours instead"),
        (("--trials", "2"), {"training__eval_batches": 3}, "evaluated on different examples"),
        (("--trials", "2", "--workers", "4096"), {"training__threads": 2}, "only 2 threads can run"),
    ],
)
def test_an_invalid_search_is_refused(
    more: tuple[str, ...], changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(arguments(*more, **changes)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.long
def test_a_search_is_the_same_however_often_it_is_killed() -> None:
    whole, _ = search("--trials", "7")
    Path("search").rename("whole")
    for trial in (0, 2, 6):
        kill_when(start(arguments("--trials", "7"), Path("cache").absolute()), lambda number=trial: begun(number))
    killed, _ = search("--trials", "7")
    assert by_number(killed) == by_number(whole)


@pytest.mark.long
def test_an_interrupt_is_saved_and_workers_may_join() -> None:
    cache = Path("cache").absolute()
    process = start(arguments("--trials", "6"), cache)
    assert kill_when(process, lambda: begun(1), signal.SIGTERM) == 143
    assert not still_trained(Path("search/trials/0001"))
    joined = [start(arguments("--trials", "6", "--json", training__threads=1), cache) for _ in range(2)]
    for worker in joined:
        out, error = worker.communicate(timeout=240)
        assert worker.returncode == 0, error
    assert [row["trial"] for row in by_number(json.loads(out))] == [0, 1, 2, 3, 4, 5]
    more, _ = search("--trials", "8", "--workers", "2", training__threads=2)
    assert len(more["trials"]) == 8
    threads = [json.loads(p.read_text())["threads"] for p in Path("search/trials").glob("000[67]/environment.json")]
    assert threads == [1, 1]


@pytest.mark.long
def test_failed_trials_are_reported_and_a_hopeless_search_ends() -> None:
    written({"d_model": [36, 32], "n_heads": [8, 2]})  # each value is valid alone, but 8 does not divide 36
    result, said = search("--trials", "2")
    assert "trial   1  failed" in said
    assert [row["state"] for row in by_number(result)] == ["done", "failed"]
    assert "not divisible" in by_number(result)[1]["why"]
    Path("search").rename("other")
    written({"learning_rate": {"log": [1e28, 1e30]}})
    code, _, error = finish(
        arguments("--trials", "9", training__learning_rate=1e29, training__max_grad_norm=0), Path("cache").absolute()
    )
    assert code == 1
    assert "the first 3 trials have all failed: step" in error


@pytest.mark.long
def test_a_trial_that_promises_little_is_pruned_and_leaves_no_weights() -> None:
    written({"learning_rate": [1e-7, 0.004]})  # trials 0 to 3 use 0.004, 1e-7, 0.004, 1e-7
    result, said = search("--trials", "4", training__max_steps=24)
    ends = [line for line in said.splitlines() if line.startswith("trial   ")]
    assert ["left, done" in line for line in ends] == [True, True, True, False]
    pruned = [row for row in result["trials"] if row["state"] == "pruned"]
    assert [row["trial"] for row in pruned] == [3]
    for row in pruned:
        folder = Path(f"search/trials/{row['trial']:04d}")
        assert row["step"] < 24
        assert not (folder / "snapshots").exists()
        assert (folder / "metrics.jsonl").exists()


@pytest.mark.long
def test_links_in_place_of_a_trial_are_not_followed() -> None:
    result, _ = search("--trials", "2")
    worse = max(result["trials"], key=lambda row: row["loss"])["trial"]
    best = Path(f"search/trials/{1 - worse:04d}")
    theirs = Path(shutil.copytree(best, "theirs"))
    before = digests(theirs)
    assert any(name.startswith("snapshots/") for name in before)
    shutil.rmtree(f"search/trials/{worse:04d}")
    Path(f"search/trials/{worse:04d}").symlink_to(theirs.absolute())
    search("--trials", "3")
    assert digests(theirs) == before


@pytest.mark.long
def test_hours_end_a_search_whose_trial_continues_later() -> None:
    code, _, error = finish(arguments("--hours", "0.001", training__max_steps=300), Path("cache").absolute())
    assert code == 1
    assert "no trial was completed: the time budget was too short" in error
    result, said = search("--trials", "1", training__max_steps=300)
    assert "trial 0 " in said
    assert [row["state"] for row in result["trials"]] == ["done"]


def test_trials_that_would_end_within_their_warm_up_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(arguments("--trials", "2", training__warmup_steps=500)) == 2
    (sentence,) = messages(capsys.readouterr().err)
    assert sentence.startswith("sansgpu: all trials would end during the warmup")
    assert not Path("search/trials").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"warmup_steps": {"int": [1, 200]}},
            "training.gradient_accumulation_steps 1 would end after 32 steps, during their warmup",
        ),
        ({"warmup_steps": [1, 7], "gradient_accumulation_steps": [1, 8]}, "training.gradient_accumulation_steps 8"),
        ({"num_epochs": {"float": [0.001, 4]}}, "training.num_epochs 0.001 would end after 1 step, during their"),
    ],
)
def test_a_space_with_a_warmup_that_is_longer_than_a_trial_is_refused(
    more: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written({**SPACE, **more})
    changes = {"training__max_steps": "", "training__num_epochs": 1} if "num_epochs" in more else {}
    assert cli(arguments("--trials", "2", **changes)) == 2
    (sentence,) = messages(capsys.readouterr().err)
    assert words in sentence
    assert "lower training.warmup_steps in the search space" in sentence
    assert not Path("search/trials").exists()


@pytest.mark.parametrize("damage", ["garbage", "cut", "odd values"])
def test_a_damaged_database_is_named(
    damage: str, home: Path, continued: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home / "search", "search")
    shutil.copy(home / "corpus.jsonl", "corpus.jsonl")
    database = Path("search/study.db")
    if damage == "garbage":
        database.write_bytes(b"not a database" * 999)
    elif damage == "cut":
        database.write_bytes(database.read_bytes()[:5000])
    else:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("update trial_params set distribution_json = '{'")
            connection.commit()
    assert cli(arguments("--trials", "3")) == 2
    (sentence,) = messages(capsys.readouterr().err)
    assert "search/study.db cannot be read: " in sentence
