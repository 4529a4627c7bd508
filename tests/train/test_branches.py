"""Resuming from an earlier step keeps the later snapshots as a branch that is listed and resumable."""

import json
import shutil
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.train.snapshots import snapshots
from tests.processes import (
    digests,
    ended,
    environment,
    events_of,
    fork_server,
    json_lines,
    json_of,
    record,
    settings,
    start_apart,
)

pytestmark = pytest.mark.usefixtures("home")

# Regular snapshots at steps 4, 8 and 12; evaluations at 3, 6, 9 and 12, with a snapshot if the loss is the best.
SHAPE = {"training__max_steps": 12, "training__keep_last": 9, "training__save_steps": 4}
FIRST = "abandoned-from-step-000004"


def arguments(home: Path, run: Path, *more: str, **changes: object) -> list[str]:
    chosen = {**SHAPE, "data__dataset_name": home / "corpus.jsonl", **changes}
    return ["train", *settings(**chosen), "--output-dir", str(run), *more]


def train(home: Path, run: Path, *more: str, **changes: object) -> None:
    assert cli(arguments(home, run, *more, **changes)) == 0


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    train(home, home / "trained")
    assert names(home / "trained") == ["step-000003", "step-000004", "step-000006", "step-000008", "step-000009",
                                       "step-000012"]  # fmt: skip
    return home / "trained"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def names(run: Path, *parts: str) -> list[str]:
    return [s.folder.name for s in snapshots(run.joinpath("snapshots", *parts))]


def said_steps(path: Path, kind: str) -> list[int]:
    return [event["step"] for event in json_lines(path) if event["event"] == kind]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def content_ids(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {row["name"]: row["content_id"] for row in json_of(capsys, "snapshots", "list", run)["snapshots"]}


def test_going_back_sets_later_snapshots_aside_and_keeps_the_new_ones(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = {name: contents(run / "snapshots" / name) for name in names(run) if name > "step-000004"}
    before = (run / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    train(home, run, "--resume", "4", training__max_steps=7, training__keep_last=1)
    said = capsys.readouterr().out
    assert f"step-000006 to step-000012: moved to {run}/snapshots/{FIRST}" in said
    assert {name: contents(run / "snapshots" / FIRST / name) for name in later} == later
    assert (run / "snapshots" / FIRST / "metrics.jsonl").read_bytes() == before
    announced = said_steps(run / "metrics.jsonl", "snapshot")
    assert announced == [3, 4, 6, 7]
    assert names(run)[-1] == "step-000007"
    best = json.loads((run / "snapshots/step-000007/state.json").read_text())["progress"]["best_step"]
    assert f"step-{best:06d}" in names(run)


@pytest.mark.long
def test_what_is_announced_is_there_when_it_is_announced(home: Path, run: Path) -> None:
    """The newest snapshot is kept, whatever other folders exist."""
    shutil.copytree(run / "snapshots/step-000012", run / "snapshots/step-000999")
    command = arguments(home, run, "--resume", "4", "--headless", training__keep_last=1)
    process = start_apart(command, home / "cache")
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "end":
            assert (run / "snapshots" / event["snapshot"] / "MANIFEST.json").is_file()
    process.communicate()
    assert process.returncode == 0
    assert names(run)[-1] == "step-000012"
    assert names(run, FIRST)[-1] == "step-000999"


def test_the_best_is_resumed_from_by_name(home: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {event["step"]: event["loss"] for event in events_of(run, "eval")}
    best = min(losses, key=lambda step: losses[step])
    capsys.readouterr()
    train(home, run, "--resume", "best", training__max_steps=13)
    assert f"resumed from step-{best:06d}" in capsys.readouterr().out
    assert names(run)[-1] == "step-000013"


def test_a_deleted_best_gives_way_to_the_best_that_is_there(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention deletes the best snapshot once a later one is better."""
    shutil.rmtree(run / "snapshots/step-000003")
    train(home, run, "--resume", "4", training__max_steps=5, training__eval_steps=5)
    progress = json.loads((run / "snapshots/step-000005/state.json").read_text())["progress"]
    assert progress["best_step"] == 5
    assert cli(["snapshots", "show", str(run), "--snapshot", "best"]) == 0
    assert "step-000005" in capsys.readouterr().out


def test_abandoned_snapshots_are_listed_verified_shown_and_pruned(
    home: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(home, run, "--resume", "4", training__max_steps=5)
    name = f"{FIRST}/step-000012"
    assert name in content_ids(run, capsys)
    assert cli(["snapshots", "verify", str(run)]) == 0
    assert f"{name}  ok" in capsys.readouterr().out
    assert cli(["snapshots", "show", str(run), "--snapshot", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 12
    assert cli(["generate", str(run), "--snapshot", name, "--max-new-tokens", "2"]) == 0
    weights = run / "snapshots" / name / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert cli(["snapshots", "verify", str(run)]) == 1
    assert name in capsys.readouterr().out
    kept = names(run)
    assert cli(["snapshots", "prune", str(run), "--abandoned"]) == 0
    assert f"deleted {name}" in capsys.readouterr().out
    assert names(run) == kept
    assert sorted(p.name for p in (run / "snapshots").iterdir()) == kept


def test_going_back_twice_to_one_step_keeps_both_branches(home: Path, run: Path) -> None:
    original = contents(run / "snapshots/step-000008")
    for _ in range(2):
        train(home, run, "--resume", "4", training__max_steps=8)
    assert contents(run / "snapshots" / FIRST / "step-000008") == original
    assert names(run, f"{FIRST}-2")[-1] == names(run)[-1] == "step-000008"


def test_an_abandoned_branch_is_gone_on_with(
    home: Path, run: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The abandoned branch continues from step 8 exactly as if the run had never gone back to step 4."""
    ids = content_ids(trained, capsys)
    train(home, run, "--resume", "4", training__max_steps=6, training__learning_rate=0.1)
    train(home, run, "--resume", f"{FIRST}/step-000008")
    now = content_ids(run, capsys)
    assert {name: now[name] for name in ids} == ids
    assert record(run) == record(trained)
    assert digests(run)["final/model.safetensors"] == digests(trained)["final/model.safetensors"]
    others = sorted({name.partition("/")[0] for name in now if "/" in name})
    assert others == [f"{FIRST}-2", "abandoned-from-step-000008"]
    assert names(run, "abandoned-from-step-000008") == ["step-000009", "step-000012"]


def test_branches_of_an_abandoned_branch_are_renamed_to_where_they_leave_the_run(home: Path, run: Path) -> None:
    train(home, run, "--resume", "8", training__max_steps=10)
    train(home, run, "--resume", "4", training__max_steps=5)
    assert names(run, f"{FIRST}-2") == ["step-000009", "step-000012"], "the run no longer has step 8"
    assert names(run, FIRST)[:3] == ["step-000006", "step-000008", "step-000009"]


def test_a_fork_of_an_abandoned_snapshot_has_its_record(home: Path, run: Path, tmp_path: Path) -> None:
    train(home, run, "--resume", "4", training__max_steps=5)
    fork = tmp_path / "fork"
    chosen = f"{FIRST}/step-000008"
    assert cli(["snapshots", "fork", str(run), "--snapshot", chosen, "--output-dir", str(fork)]) == 0
    assert names(fork) == ["step-000006", "step-000008"], "a fork includes the best snapshot"
    assert said_steps(fork / "metrics.jsonl", "step") == [2, 4, 6, 8]


@pytest.mark.parametrize("more", [["--resume", "4", "--dry-run"], ["--resume", "4", "--set", "model.d_ff=64"]])
def test_a_resume_that_does_not_begin_moves_nothing(home: Path, run: Path, more: list[str]) -> None:
    before = contents(run / "snapshots")
    cli(arguments(home, run, *more))
    assert contents(run / "snapshots") == before


@pytest.mark.parametrize("moved", [4, *(pytest.param(m, marks=pytest.mark.long) for m in (1, 2, 5))])
@pytest.mark.parametrize("goal", [pytest.param("4", marks=pytest.mark.long), f"{FIRST}/step-000008"])
def test_a_kill_while_snapshots_are_set_aside_loses_none(
    home: Path, run: Path, trained: Path, goal: str, moved: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if goal != "4":
        train(home, run, "--resume", "4", training__max_steps=6, training__learning_rate=0.1)
    ids = sorted(content_ids(run, capsys).values())
    command = [str(moved), *arguments(home, run, "--resume", goal)]
    module = "tests.train.killed_while_renaming"
    code, _, error = ended(fork_server().start(command, environment(home / "cache"), module))
    assert code == -9, error
    assert cli(["snapshots", "prune", str(run), "--keep-last", "99"]) == 0
    assert sorted(content_ids(run, capsys).values()) == ids
    train(home, run, "--resume")
    assert record(run) == record(trained)
    assert set(ids) <= set(content_ids(run, capsys).values())
    assert digests(run)["final/model.safetensors"] == digests(trained)["final/model.safetensors"]


def test_a_list_of_moves_outside_the_run_is_refused(
    home: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    moves = {"moves": [["../../mine", "step-000001"]], "texts": {}}
    (run / "snapshots/.moves.json").write_text(json.dumps(moves))
    assert cli(arguments(home, run, "--resume")) == 2
    assert "was not written by sansgpu" in capsys.readouterr().err
    assert (tmp_path / "mine").is_dir()
