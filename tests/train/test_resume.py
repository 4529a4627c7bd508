"""A killed and resumed run equals an uninterrupted one byte for byte, with real processes and signals."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import (
    digests,
    events_of,
    finish,
    finish_apart,
    kill_when,
    record,
    settings,
    start,
    start_apart,
    write_corpus,
)

STEPS = 24
# A little larger than TINY, so that tests have time to kill the run. Evaluations are short, not to take half of it.
SHAPE = {
    "model__d_model": 64, "model__n_layers": 4, "training__max_steps": STEPS, "training__sample_tokens": 4,
    "training__eval_batches": 2,
}  # fmt: skip


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=400)


def arguments(home: Path, run: str, **changes: object) -> list[str]:
    chosen = {**SHAPE, "data__dataset_name": home / "corpus.jsonl", **changes}
    return ["train", *settings(**chosen), "--output-dir", str(home / run)]


def completed(home: Path, run: str, *more: str, cache: str = "cache", apart: bool = False, **changes: object) -> Path:
    run_it = finish_apart if apart else finish
    code, _, error = run_it([*arguments(home, run, **changes), *more], home / cache)
    assert code == 0, error
    return home / run


def outcome(run: Path) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Returns the digests of the last snapshot and final/, and all events without times."""
    last = f"snapshots/step-{STEPS:06d}"
    return {k: v for k, v in digests(run).items() if k.startswith((last, "final"))}, record(run)


@pytest.fixture(scope="module")
def straight(home: Path) -> Path:
    return completed(home, "straight")


def after_first_snapshot(run: Path, delay: float) -> Callable[[], bool]:
    seen: list[float] = []

    def ready() -> bool:
        if not seen and list((run / "snapshots").glob("step-*")):
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() >= seen[0] + delay

    return ready


@pytest.mark.parametrize("trial", [0, *(pytest.param(t, marks=pytest.mark.long) for t in (1, 2))])
def test_sigkill_at_a_random_moment(home: Path, straight: Path, trial: int) -> None:
    run = home / f"killed-{trial}"
    delay = random.Random(trial).uniform(0, 0.5)
    assert kill_when(start(arguments(home, run.name), home / "cache"), after_first_snapshot(run, delay)) == -9
    completed(home, run.name, "--resume", apart=trial > 0)
    assert outcome(run) == outcome(straight)


@pytest.mark.parametrize("earlier", [0, pytest.param(2, marks=pytest.mark.long)])
def test_sigkill_while_a_snapshot_is_written(home: Path, straight: Path, earlier: int) -> None:
    run = home / f"killed-saving-{earlier}"
    process = start(arguments(home, run.name), home / "cache")

    def writing() -> bool:
        names = [path.name for path in (run / "snapshots").glob("*step-*")]
        return len([n for n in names if n[0] != "."]) >= earlier and any(n.endswith(".partial") for n in names)

    assert kill_when(process, writing) == -9
    completed(home, run.name, "--resume", "latest")
    assert outcome(run) == outcome(straight)
    assert not list((run / "snapshots").glob(".step-*"))


def test_sigkill_while_tokenizing(home: Path, straight: Path) -> None:
    run, cache = home / "killed-tokenizing", home / "fresh-cache"
    process = start(arguments(home, run.name), cache)
    assert kill_when(process, lambda: any(path.is_dir() for path in cache.rglob(".sansgpu-*"))) == -9
    completed(home, run.name, "--resume", cache="fresh-cache")
    assert outcome(run) == outcome(straight)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        *(pytest.param(n, c, marks=pytest.mark.long) for n, c in ((signal.SIGINT, 130), (signal.SIGHUP, 129))),
    ],
)
def test_a_signal_saves_and_ends(home: Path, straight: Path, number: int, code: int) -> None:
    run = home / f"signal-{code}"
    process = start(arguments(home, run.name), home / "cache")
    assert kill_when(process, after_first_snapshot(run, 0.1), number) == code
    end = record(run)[-1]
    assert (end["event"], end["reason"]) == ("end", "interrupted")
    assert (run / "snapshots" / str(end["snapshot"]) / "MANIFEST.json").exists()
    completed(home, run.name, "--resume")
    assert outcome(run) == outcome(straight)


def test_a_second_signal_ends_the_process_at_once(home: Path) -> None:
    run = home / "twice"
    process = start(arguments(home, run.name, training__max_steps=100_000), home / "cache")
    ready = after_first_snapshot(run, 0.0)
    while not ready():
        time.sleep(0.002)
    for _ in range(200):
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_two_processes_do_not_train_into_one_folder(home: Path, straight: Path) -> None:
    run = home / "contended"
    process = start(arguments(home, run.name, training__max_steps=100_000), home / "cache")
    ready = after_first_snapshot(run, 0.0)
    while not ready():
        time.sleep(0.01)
    code, _, error = finish([*arguments(home, run.name), "--resume"], home / "cache")
    assert code == 2
    assert "another process" in error
    assert process.poll() is None
    process.kill()
    process.communicate()


@pytest.mark.long
def test_the_same_snapshot_resumed_twice_gives_the_same(home: Path) -> None:
    shape = {"training__batch_size": 1, "training__gradient_accumulation_steps": 4}
    completed(home, "parent", training__max_steps=8, **shape)
    runs = []
    for name in ("child-1", "child-2"):
        code, _, error = finish(
            ["snapshots", "fork", str(home / "parent"), "--output-dir", str(home / name)], home / "cache"
        )
        assert code == 0, error
        runs.append(completed(home, name, "--resume", **shape))
    assert outcome(runs[0]) == outcome(runs[1])


@pytest.mark.long
def test_workers_and_prefetch_change_nothing(home: Path, straight: Path) -> None:
    run = completed(home, "no-workers", training__dataloader_num_workers=0)
    more = completed(home, "two-workers", "--prefetch", "5", training__dataloader_num_workers=2)
    assert outcome(run) == outcome(straight) == outcome(more)


@pytest.mark.parametrize("precision", ["auto", *(pytest.param(p, marks=pytest.mark.long) for p in ("int16", "int8"))])
def test_the_number_of_threads_changes_nothing_where_our_kernels_run(home: Path, precision: str) -> None:
    """Micro-batches have at least 256 tokens, for which our matmul kernels are used."""
    large = {"model__max_seq_len": 128, "training__max_steps": 3, "training__precision": precision}
    names = ((n, f"threads-{n}-{precision}") for n in (1, 2))
    runs = [completed(home, name, training__threads=n, **large) for n, name in names]
    assert digests(runs[0]) == digests(runs[1])


@pytest.mark.long
def test_another_seed_gives_another_model(home: Path, straight: Path) -> None:
    other = completed(home, "other-seed", "--seed", "7")
    assert set(outcome(other)[0].values()).isdisjoint(outcome(straight)[0].values())


@pytest.mark.parametrize(
    "changes",
    [
        {"training__optimizer": "adamw"},
        {"data__pack_sequences": "false"},
        {"training__window_warmup_ratio": 0.8, "model__max_seq_len": 128},
        {"training__compile": "on", "training__kernels": "torch"},
        {"training__precision": "bf16"},
        {"training__precision": "int16", "model__max_seq_len": 128},
        {"training__precision": "int8", "model__max_seq_len": 128},
    ],
)
@pytest.mark.long
def test_resuming_is_exact_with_other_settings(home: Path, changes: dict[str, object]) -> None:
    name = "-".join(map(str, changes.values()))
    whole = completed(home, f"whole-{name}", **changes)
    run = home / f"stopped-{name}"
    process = start(arguments(home, run.name, **changes), home / "cache")
    kill_when(process, after_first_snapshot(run, 0.2))
    completed(home, run.name, "--resume", **changes)
    assert outcome(run) == outcome(whole)


@pytest.mark.long
@pytest.mark.parametrize("trial", range(10))
def test_sigkill_many_times_over(home: Path, straight: Path, trial: int) -> None:
    run, draw = home / f"often-{trial}", random.Random(1000 + trial)
    more: list[str] = []
    for _ in range(4):  # any moment: during imports, tokenization or training
        process = start_apart([*arguments(home, run.name), *more], home / f"cache-{trial}")
        deadline = time.monotonic() + draw.uniform(2.0, 7.0)
        kill_when(process, lambda until=deadline: time.monotonic() > until)
        more = ["--resume"]
    completed(home, run.name, "--resume", cache=f"cache-{trial}", apart=True)
    assert outcome(run) == outcome(straight)


@pytest.mark.long
def test_new_processes_compute_the_same_first_step(home: Path) -> None:
    """The model is large enough for several threads to compute sines; these once differed between processes."""
    shape = {"model__d_model": 256, "model__n_heads": 4, "model__n_layers": 2, "model__max_seq_len": 256}
    steps = {"training__max_steps": 1, "training__batch_size": 8, "training__save_steps": 1}
    runs = [completed(home, f"first-{number}", apart=True, **shape, **steps) for number in range(8)]
    weights = [digests(run)["final/model.safetensors"] for run in runs]
    assert len(set(weights)) == 1


@pytest.mark.long
def test_a_run_by_the_clock_that_is_killed_still_ends_in_its_time(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus.jsonl", documents=300)
    hours = {"training__max_hours": 0.01, "training__max_steps": "null", "training__logging_steps": 5}
    arguments = ["train", *settings(data__dataset_name=data, training__save_steps=50, **hours)]
    run, cache = tmp_path / "r", tmp_path / "cache"
    began = time.monotonic()
    process = start_apart([*arguments, "--output-dir", str(run)], cache)
    kill_when(process, lambda: time.monotonic() - began > 15)
    first = time.monotonic() - began
    began = time.monotonic()
    code, _, error = finish_apart([*arguments, "--resume", "--output-dir", str(run)], cache)
    assert code == 0, error
    in_all = first + time.monotonic() - began
    events = events_of(run)
    assert events[-1]["reason"] == "out_of_time"
    assert 0.85 * 36 < events[-1]["seconds"] <= 36
    assert in_all < 36 + 2  # the start of two processes, which is not part of their budget
    rates = [event["lr"] for event in events if event["event"] == "step"]
    assert rates[-1] < 0.05 * max(rates)
