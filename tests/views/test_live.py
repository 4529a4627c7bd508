"""The live view fits every terminal, its keys control a real run, and it restores the terminal."""

import contextlib
import fcntl
import json
import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from sansgpu.views.live_screen import ScreenState, screen
from tests.processes import environment, settings, write_corpus


def shown(steps: int, cores: int = 2, news: int = 0, sample: str = "", keys: bool = True) -> ScreenState:
    """Returns the state of the live view after a number of step events."""
    known = ScreenState(start={"step": 0, "output_dir": "runs/a-name", "total_steps": 5000}, keys=keys)
    known.stepped = time.monotonic()
    known.training = [(10 * i, 3 + 4 / i) for i in range(1, steps + 1)]
    known.validation = [(100 * i, 3.1 + 4 / i) for i in range(1, steps // 10 + 1)]
    known.news = [(f"step {i}: something happened that takes many words to say " * 2, "yellow") for i in range(news)]
    known.system = {
        "core_percent": [50.0] * cores, "other_percent": 30.0, "memory_limit_bytes": 8e9, "rss_bytes": 5e9,
        "memory_available_bytes": 1e8, "temperature_celsius": 70.0, "frequency_hz": 2e9, "watts": None,
        "disk_read_bytes_per_second": None, "disk_write_bytes_per_second": 5e6, "disk_free_bytes": 1e9,
        "major_faults_per_second": None, "swap_bytes": 10**9,
    }  # fmt: skip
    if steps:
        known.step = {
            "step": 10 * steps, "total_steps": 5000, "eta_seconds": 3600.0, "tokens_per_second": 1e4, "mfu": 0.4,
            "step_seconds": 0.3, "lr": 0.001, "grad_norm": 1.0, "tokens": 10**6, "loss": 3.0,
            "phase_seconds": {"data": 0.0, "forward": 0.1, "backward": 0.2, "reduce": 0.0, "update": 0.01},
        }  # fmt: skip
        known.evaluation = {"step": 10, "loss": 3.0, "bits_per_byte": 1.5, "sample": sample}
    return known


@given(
    width=st.integers(30, 240),
    height=st.integers(8, 80),
    steps=st.sampled_from([0, 1, 2, 25, 3000]),
    cores=st.sampled_from([1, 2, 96]),
    news=st.integers(0, 6),
    sample=st.sampled_from(["", "a word", "深層学習 \x1b[31m\n\t" * 60]),
    keys=st.booleans(),
)
def test_the_screen_fits_every_terminal(
    width: int, height: int, steps: int, cores: int, news: int, sample: str, keys: bool
) -> None:
    console = Console(width=width, height=height, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(screen(shown(steps, cores, news, sample, keys), width, height))
    assert "\x1b" not in captured.get()
    lines = captured.get().splitlines()
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 40)])
def test_the_screen_shows_the_most_important_values(width: int, height: int) -> None:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(shown(300), width, height))
    text = captured.get()
    for told in (
        "step 3,000 of 5,000",
        "min left, done",
        "training 3.01",
        "validation 3.2",
        "10,000 tokens/s, 40%",
        "0.30 s, 3.33 it/s",
        "50 50%",
        "others 30%",
        "5.0 GB, 0.1 of 8 left",
        "70 °C",
        "2.0 GHz",
        "0.001",
        "q",
    ):
        assert told in text, told  # fmt: skip
    assert any("⠁" <= letter <= "⣿" for letter in text)  # a curve


class Terminal:
    """Runs a command in a new pseudo-terminal."""

    def __init__(self, arguments: list[str], cache: Path, shell: str = "{}") -> None:
        self._main, self.other = pty.openpty()
        self.resize(100, 30)
        self.modes = termios.tcgetattr(self.other)
        self.text = b""
        self.process = subprocess.Popen(
            ["bash", "--norc", "-ic", shell.format(shlex.join([sys.executable, "-m", "sansgpu", *arguments]))],
            stdin=self.other, stdout=self.other, stderr=self.other, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**environment(cache), "TERM": "xterm-256color"},
        )  # fmt: skip

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: str) -> None:
        os.write(self._main, key.encode())

    def until(self, ready: Callable[[], Any], seconds: float = 120) -> None:
        """Reads the output until `ready` returns True."""
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, self.text[-3000:].decode(errors="replace")
            if select.select([self._main], [], [], 0.02)[0]:
                self.text += os.read(self._main, 65536)

    def ended(self) -> int:
        """Waits until the command ends and returns its exit code."""
        self.until(lambda: self.process.poll() is not None)
        while select.select([self._main], [], [], 0.2)[0]:
            self.text += os.read(self._main, 65536)
        return self.process.returncode


@pytest.mark.parametrize(
    ("controlling", "variables"),
    [pytest.param(False, {}, marks=pytest.mark.long), (True, {"OMPI_COMM_WORLD_SIZE": "1"})],
)
def test_output_that_a_launcher_forwards_has_no_terminal_codes(
    controlling: bool, variables: dict[str, str], tmp_path: Path
) -> None:
    """Open MPI gives each process a pseudo-terminal and forwards its output, possibly to a pipe."""
    chosen = settings(data__dataset_name=write_corpus(tmp_path / "corpus.jsonl"), training__max_steps=2)
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sansgpu", "train", *chosen, "--output-dir", str(tmp_path / "run")],
        stdin=subprocess.DEVNULL, stdout=other, stderr=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0)) if controlling else None,
        env={**environment(tmp_path / "cache"), "TERM": "xterm-256color", **variables},
    )  # fmt: skip
    os.close(other)
    text = b""
    with contextlib.suppress(OSError):  # raised at the end of a pseudo-terminal
        while part := os.read(main, 65536):
            text += part
    assert process.wait() == 0
    assert b"\x1b" not in text
    assert any(line.startswith(b"done after step 2") for line in text.splitlines())


@pytest.fixture
def long_run(tmp_path: Path) -> tuple[list[str], Path]:
    """Returns the arguments and folder of a run that lasts until it is stopped."""
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    chosen = settings(
        data__dataset_name=corpus, training__max_steps=100_000, training__save_steps=0, training__eval_steps=0
    )
    return ["train", *chosen, "--output-dir", str(tmp_path / "run")], tmp_path / "run"


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["event"] == kind]


def test_keys_save_evaluate_pause_and_end_a_run(long_run: tuple[list[str], Path], tmp_path: Path) -> None:
    arguments, run = long_run
    terminal = Terminal(arguments, tmp_path / "cache")
    terminal.until(lambda: events(run, "step"))
    assert termios.tcgetattr(terminal.other)[3] & termios.ICANON == 0  # keys are read one by one
    terminal.press("s")
    terminal.until(lambda: events(run, "snapshot"))
    terminal.press("e")
    terminal.until(lambda: events(run, "eval"))
    terminal.press("p")
    terminal.until(lambda: b"paused" in terminal.text)
    time.sleep(0.5)
    paused = len(events(run, "step"))
    time.sleep(1.0)
    assert len(events(run, "step")) == paused
    terminal.resize(60, 18)
    terminal.press("p")
    terminal.until(lambda: len(events(run, "step")) > paused + 2)
    terminal.press("q")
    assert terminal.ended() == 130
    end = events(run, "end")[0]
    assert (end["reason"], end["snapshot"]) == ("interrupted", f"step-{end['step']:06d}")
    assert termios.tcgetattr(terminal.other) == terminal.modes
    summary = terminal.text.rpartition(b"\x1b[?1049l")[2].decode()  # on the normal screen
    for told in ("parameters", "validation at step", "tokens/s", "snapshot step-", "interrupted and saved after step"):
        assert told in summary, told


@pytest.mark.long
def test_a_second_signal_leaves_the_terminal_as_it_was(long_run: tuple[list[str], Path], tmp_path: Path) -> None:
    arguments, run = long_run
    slow = ["--set", "model.n_layers=64", "--set", "training.gradient_accumulation_steps=1000"]  # many seconds per step
    terminal = Terminal([*arguments, *slow], tmp_path / "cache")
    terminal.until(lambda: b"Waiting for the first steps" in terminal.text)
    time.sleep(1.0)
    terminal.press("\x03")
    terminal.until(lambda: b"stopping after this step; press Ctrl-C again to stop now" in terminal.text)
    terminal.press("\x03")
    assert terminal.ended() == 130
    assert not events(run, "step")
    assert termios.tcgetattr(terminal.other) == terminal.modes
    assert terminal.text.rstrip().endswith(b"\x1b[?1049l\x1b[?25h")


@pytest.mark.long
def test_a_run_that_is_suspended_gives_the_terminal_back(long_run: tuple[list[str], Path], tmp_path: Path) -> None:
    arguments, run = long_run
    terminal = Terminal(arguments, tmp_path / "cache", "{}; echo back-$?; read line; fg")
    terminal.until(lambda: events(run, "step"))
    terminal.press("\x1a")
    terminal.until(lambda: b"back-148" in terminal.text)  # 128 and the signal's number
    assert terminal.text[: terminal.text.index(b"back-148")].rpartition(b"\x1b[?1049l\x1b[?25h")[1]
    assert termios.tcgetattr(terminal.other)[3] & termios.ICANON
    steps = len(events(run, "step"))
    terminal.press("\n")
    terminal.until(lambda: len(events(run, "step")) > steps + 2)
    terminal.press("q")
    assert terminal.ended() == 130
    assert termios.tcgetattr(terminal.other) == terminal.modes


@pytest.mark.long
def test_the_option_plain_prints_lines(long_run: tuple[list[str], Path], tmp_path: Path) -> None:
    arguments, _ = long_run
    terminal = Terminal([*arguments, "--plain", "--max-steps", "2"], tmp_path / "cache")
    assert terminal.ended() == 0
    assert b"step 2/2  loss" in terminal.text
    assert b" it/s  MFU" in terminal.text
    assert b"\x1b[?1049h" not in terminal.text
