"""A run that loses memory to other programs finishes with the weights of an undisturbed run."""

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sansgpu.cli import run as cli
from sansgpu.train import loop
from tests.processes import environment, events_of, settings, use_cache, write_corpus

GROUPS = Path("/sys/fs/cgroup")
MODEL = {
    "model__d_model": 256, "model__n_heads": 4, "model__n_layers": 6, "model__d_ff": 768, "model__max_seq_len": 256,
    "model__dropout": 0, "data__vocab_size": 2000, "model__vocab_size": 8192, "training__batch_size": 32,
    "training__gradient_accumulation_steps": 1, "training__max_steps": 8, "training__threads": "auto",
    "training__optimizer": "adamw", "training__learning_rate": 0.001, "training__eval_steps": 0,
    "training__save_steps": 4,
}  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final/model.safetensors")


def assert_same_up_to_rounding(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    # Compares the norm over all weights: Adam turns tiny gradients, and so their rounding errors, into full steps.
    apart = sum(float((second[name] - first[name]).double().square().sum()) for name in first) ** 0.5
    assert apart < 1e-4 * sum(float(first[name].double().square().sum()) for name in first) ** 0.5


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_micro_batch_is_cut_on_its_way_and_the_batch_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    data = write_corpus(tmp_path / "corpus.jsonl", documents=200)
    chosen = settings(
        data__dataset_name=data, model__dropout=0, training__batch_size=8, training__max_steps=6,
        training__gradient_accumulation_steps=accumulation, training__logging_steps=1, training__kernels="torch",
    )  # fmt: skip
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "plenty")]) == 0
    looks = iter(range(10**9))
    # Memory is short at three checks, most of them in a forward pass, and sufficient again after each reduction.
    monkeypatch.setattr("sansgpu.machine.pressure.CHECK_SECONDS", 1e-9)
    monkeypatch.setattr(loop, "available_memory", lambda device: 1 << 20 if next(looks) in (9, 30, 60) else 1 << 40)
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "short")]) == 0
    said = [event["message"] for event in events_of(tmp_path / "short", "warning")]
    assert "the micro-batch size is lowered from 8 to" in " ".join(said)
    assert_same_up_to_rounding(tmp_path / "plenty", tmp_path / "short")
    tokens = [[e["tokens"] for e in events_of(tmp_path / run, "step")] for run in ("plenty", "short")]
    assert tokens[0] == tokens[1]


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Creates a cgroup (version 1 or 2) with a memory limit; skips the test if that is not allowed."""
    parent = GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS
    group = parent / f"sansgpu-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        (group / name).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"cannot create a cgroup: {error}")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def train_inside(group: Path, arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs `sansgpu train` in a new process in the cgroup."""
    enter = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.executable, sys.argv[2:])"
    command = [sys.executable, "-m", "sansgpu", "train", *arguments]
    return subprocess.run(
        [sys.executable, "-c", enter, str(group / "cgroup.procs"), *command],
        env=environment(cache), capture_output=True, text=True, timeout=540,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("how", ["forced", "auto"])
def test_a_run_in_sixty_per_cent_of_its_memory_finishes(tmp_path: Path, how: str) -> None:
    data = write_corpus(tmp_path / "corpus.jsonl", documents=4000)
    chosen = settings(data__dataset_name=data, **MODEL)
    plain = subprocess.run(
        [sys.executable, "-m", "sansgpu", "train", *chosen, "--output-dir", str(tmp_path / "plenty")],
        env=environment(tmp_path / "cache"), capture_output=True, text=True,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    peak = max(event["rss_bytes"] for event in events_of(tmp_path / "plenty", "step"))
    more = (
        ["--force"] if how == "forced" else ["--batch-size", "auto", "--set", "training.gradient_accumulation_steps=32"]
    )
    with memory_group(int(0.6 * peak)) as group:
        done = train_inside(group, [*chosen, *more, "--output-dir", str(tmp_path / how)], tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert_same_up_to_rounding(tmp_path / "plenty", tmp_path / how)


EATER = """
import sys, time
open(sys.argv[1], "w").write(str(__import__("os").getpid()))
kept = []
for _ in range(int(sys.argv[2]) // 50):
    kept.append(bytearray(b"x") * (50 << 20))
    time.sleep(0.5)
time.sleep(1000)
"""


@pytest.mark.long
def test_a_run_beside_a_process_that_eats_memory_finishes(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus.jsonl", documents=4000)
    chosen = settings(data__dataset_name=data, **{**MODEL, "training__max_steps": 20})
    with memory_group(3 << 30) as group:
        eater = subprocess.Popen([sys.executable, "-c", EATER, str(group / "cgroup.procs"), "1600"])
        try:
            done = train_inside(group, [*chosen, "--output-dir", str(tmp_path / "r")], tmp_path / "cache")
        finally:
            eater.kill()
            eater.wait()
    assert done.returncode == 0, done.stderr
    assert any("the micro-batch size is lowered" in e["message"] for e in events_of(tmp_path / "r", "warning"))
