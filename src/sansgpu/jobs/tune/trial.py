"""A trial of a search: its configuration and its training process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sansgpu.config import change_config, save_config
from sansgpu.config.schema import Config
from sansgpu.events.jsonl import read_events
from sansgpu.files.atomic import atomic_write, make_folder
from sansgpu.files.ownership import OutputFolder, require_no_links
from sansgpu.machine.memory import effective_batch
from sansgpu.train.run_folders import with_absolute_paths
from sansgpu.train.snapshots import snapshots
from sansgpu.views.record import seconds_of

SAVING_SECONDS = 600  # time to save after SIGTERM

# Keys on which the number of a trial's steps or of its warmup steps depends.
LENGTH_KEYS = (
    "training.warmup_steps", "training.batch_size", "training.gradient_accumulation_steps", "training.num_epochs",
    "model.max_seq_len", "data.max_length",
)  # fmt: skip

Values = dict[str, Any]
Event = dict[str, Any]
# Requests SIGKILL when the parent dies (1: PR_SET_PDEATHSIG). The request survives the exec of the command.
_EXEC_WITH_DEATH_SIGNAL = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Length(BaseModel):
    """Training length of every trial: the unchanged configuration's steps, or its tokens if the batch size differs."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)
    steps: int
    tokens: int | None  # tokens in those steps; None unless the configuration sets max_steps
    evaluations: int  # number in each trial, evenly spaced
    seconds: float | None  # estimated duration of a trial


def chosen_config(config: Config, values: Values, length: Length) -> Config:
    """Returns `config` with `values`. If the batch size changes, keeps the tokens and the share of warm-up steps.

    Raises ConfigError if the values contradict each other.
    """
    changed = change_config(config, tuple(values.items()))
    batch, before = _step_tokens(changed), _step_tokens(config)
    if batch == before:
        return changed
    settings: list[tuple[str, Any]] = []
    if length.tokens is not None:
        settings += [("training.max_tokens", length.tokens), ("training.max_steps", None)]
    if "training.warmup_steps" not in values and config.training.warmup_ratio is None:
        settings.append(("training.warmup_steps", round(config.training.warmup_steps * before / batch)))
    return change_config(changed, settings)


def trial_steps(config: Config, chosen: Config, length: Length) -> float:
    """Returns the number of steps of a trial with the configuration `chosen`."""
    steps = length.steps * _step_tokens(config) / _step_tokens(chosen)
    if config.training.num_epochs and chosen.training.num_epochs:
        steps *= chosen.training.num_epochs / config.training.num_epochs
    return steps


def trial_config(config: Config, values: Values, length: Length) -> Config:
    """Returns the configuration of a trial's run, with evaluations at the same fractions as in all other trials."""
    chosen = chosen_config(config, values, length)
    settings = {
        "eval_steps": max(1, round(trial_steps(config, chosen, length) / length.evaluations)),
        "eval_on_start": False,
        "save_steps": 0,  # the best evaluation so far is saved anyway
        "keep_last": 1,
        "early_stopping_patience": None,
        "load_best_model_at_end": False,
        "report_to": "none",
        "logging_dir": None,
        "checkpoint_dir": None,
        "sample_tokens": 0,
    }
    return change_config(chosen, [(f"training.{key}", value) for key, value in settings.items()])


def _step_tokens(config: Config) -> int:
    return effective_batch(config.training) * config.window


@dataclass(frozen=True)
class Outcome:
    """How a trial's run ended: `state` is done, pruned, failed or stopped. Only a stopped trial can be resumed."""

    state: str
    measured: Values  # last eval event
    seconds: float
    why: str | None = None


class TrialRun:
    """A trial's run in a child process that ends with this process."""

    def __init__(self, folder: Path, config: Config) -> None:
        """Raises OSError if the folder cannot be written, and ConfigError if it is a link."""
        self.folder = folder
        make_folder(folder)
        self._file = folder / "trial.yaml"
        require_no_links([folder, folder / "log.txt"])
        OutputFolder(folder, "run").record()
        with atomic_write(self._file) as partial:
            save_config(with_absolute_paths(config), partial)
        self._process: subprocess.Popen[str] | None = None
        self._end = threading.Lock()
        self._stop_state: str | None = None

    def step(self) -> int:
        """Returns the step of the newest snapshot, or 0."""
        return max((snapshot.step for snapshot in snapshots(self.folder / "snapshots")), default=0)

    def train(self, resumed: bool, on_event: Callable[[Event], None]) -> Outcome:
        """Trains or resumes until the run ends, and calls `on_event` with every event."""
        command = [sys.executable, "-m", "sansgpu", "train", str(self._file), "--headless"]
        command += ["--output-dir", str(self.folder), *(["--resume", "latest"] if resumed else [])]
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            # A new session, so that a terminal's Ctrl-C reaches only this process: a second signal would end the run
            # without saving.
            process = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                start_new_session=True,
            )
            with self._end:
                self._process = process
                if self._stop_state:
                    process.terminate()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    on_event(json.loads(line))
                process.wait()
            finally:
                self._ensure_ended(process)
        return self._outcome(process.returncode)

    def stop(self, state: str) -> None:
        """Makes the run save and end. `state` becomes the outcome: pruned or stopped."""
        with self._end:
            if self._stop_state is None:
                self._stop_state = state
                if self._process is not None:
                    self._process.terminate()

    def _ensure_ended(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            self.stop("stopped")
            try:
                process.wait(SAVING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _outcome(self, code: int) -> Outcome:
        events = read_events(self.folder / "metrics.jsonl")
        measured = next((event for event in reversed(events) if event["event"] == "eval"), {})
        seconds = seconds_of(events)
        if code == 0 and measured.get("loss") is not None:
            return Outcome("done", measured, seconds)
        if code == 0 and measured:
            return Outcome("failed", measured, seconds, "its last validation loss is not finite.")
        if self._stop_state is not None:
            return Outcome(self._stop_state, measured, seconds)
        return Outcome("failed", measured, seconds, self._failure(code))

    def _failure(self, code: int) -> str:
        """Returns the run's last error message, or else its exit code."""
        if code == -9:
            return "it was killed, most likely because memory ran out."
        lines = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        own = [line.removeprefix("sansgpu: ") for line in lines if line.startswith("sansgpu: ")]
        return [f"its process exited with code {code}.", *filter(None, own or lines)][-1]


def dying_with_parent(command: list[str]) -> list[str]:
    """Returns `command` wrapped so that the kernel kills it when the thread that starts it ends.

    Returns it unchanged on systems other than Linux, whose kernels lack this feature.
    """
    if not sys.platform.startswith("linux"):
        return command
    return [sys.executable, "-I", "-S", "-c", _EXEC_WITH_DEATH_SIGNAL, str(os.getpid()), *command]
