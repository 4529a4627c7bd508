"""Chaos test: kills runs of every kind at random moments, resumes them, and compares the results byte by byte.

    python -m tools.chaos --kills 300 --json chaos.json
    python -m tools.chaos --signals --kills 60
    python -m tools.chaos --disk --kills 24

Every kind of run is first made once without disturbances, as a reference. Then runs of it are disturbed one to four
times each: one of the processes gets SIGKILL at a random moment, or during the start, a snapshot, tokenization, an
evaluation or the end. With `--signals`, the command gets a signal that asks it to save and end, as from a batch system.
With `--disk`, the run's disk is full from that moment until the run fails, which must print a single error. The run is
then resumed until it is done. Its snapshots, `final/` and events must equal those of the reference; otherwise the exit
code is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from benchmarks.contest import say, write_json

from tools.chaos_kinds import Kind, make_kinds
from tools.outcome import file_digests, record

AIMS = ("any moment", "start", "snapshot", "tokenizing", "evaluation", "end")
MAX_DISTURBANCES = 4  # a run is killed, or meets a full disk, at most this often
END_SECONDS = 120  # a run that should have ended by then counts as hanging
POLL_SECONDS = 0.003
SPREAD_SECONDS = 0.08  # maximum random delay after the intended moment
DISK_ROOM = 3 << 20  # size of the small disk in bytes, in addition to three reference runs
POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
# Files of final/ that may differ: the model card contains times and names, and .sansgpu.json the hash of the card.
UNEQUAL_FILES = ("README.md", ".sansgpu.json")


@dataclass
class Trial:
    """A disturbed run: when it was disturbed, and how its result differs."""

    kind: str
    seed: int
    disturbed: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Chaos:
    """Disturbs runs in `folder`: with `how` "kill", "signal" or "disk" (fills the disk)."""

    def __init__(self, folder: Path, how: str) -> None:
        self._folder, self._how, self._disk = folder, how, how == "disk"
        self._references: dict[str, tuple[Path, float]] = {}

    def undisturbed(self, kind: Kind) -> tuple[Path, float]:
        """Returns the folder of the kind's reference run and its duration; runs it at the first call."""
        if kind.name not in self._references:
            run, began = self._folder / "undisturbed" / _slug(kind), time.monotonic()
            shutil.rmtree(run, ignore_errors=True)
            process = _Process(kind.command(run, resume=False), self._folder / f"cache-{_slug(kind)}")
            code, said = process.end()
            if code:
                raise SystemExit(f"chaos: {kind.name} fails without disturbances: {said}")
            self._references[kind.name] = run, time.monotonic() - began
        return self._references[kind.name]

    def trial(self, kind: Kind, seed: int, most: int) -> Trial:
        """Disturbs one run at most `most` times, resumes it until it is done, and compares it."""
        draw, trial, began = random.Random(seed), Trial(kind.name, seed), time.monotonic()
        (whole, seconds), home = self.undisturbed(kind), self._folder / f"trial-{seed}"
        fresh = draw.random() < 0.3
        cache = home / "cache" if fresh else self._folder / f"cache-{_slug(kind)}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        with _small_disk(home, _size(whole)) if self._disk else _nothing():
            run = home / "run"
            for _ in range(draw.randint(1, min(most, MAX_DISTURBANCES))):
                aim = draw.choice([a for a in AIMS if a != "tokenizing" or fresh])
                process = _Process(kind.command(run, resume=(run / "config.yaml").exists()), cache)
                moment = _Moment(aim, draw, run, cache, seconds)
                self._disturb(process, moment, trial, home)
            for _ in range(2):  # a run disturbed during its start may have nothing to resume from yet
                code, said = _Process(kind.command(run, resume=(run / "config.yaml").exists()), cache).end()
                if not code:
                    break
            if code:
                trial.differences.append(f"exit code {code} when resumed: {said}")
            else:
                trial.differences += differences(whole, run, more_snapshots=self._how == "signal")
        trial.seconds = time.monotonic() - began
        if not trial.differences:
            shutil.rmtree(home, ignore_errors=True)
        return trial

    def _disturb(self, process: _Process, moment: _Moment, trial: Trial, home: Path) -> None:
        while process.running() and not moment.come():
            time.sleep(POLL_SECONDS)
        if not process.running():
            process.end()
            return
        trial.disturbed.append(moment.aim)
        if self._how == "kill":
            process.kill_one(moment.draw)
            process.end()
            return
        if self._how == "signal":
            number = moment.draw.choice(POLITE)
            began = (moment.run / "metrics.jsonl").exists()  # earlier, Python's own default action ends the process
            process.send(number)
            code, said = process.end()
            # -SIGTERM: before the first step, native code may be running, which is not waited for.
            wanted = (0, 130) if number == signal.SIGINT else (0, 143, -signal.SIGTERM)
            if "Traceback" in said or (began and code not in wanted):
                trial.differences.append(f"exit code {code} after {number.name}, saying: {said}")
            return
        with _filled(home, moment.draw.choice([0, 4096, 100_000])):
            code, said = process.end()
        lines = [line for line in said.splitlines() if "sansgpu: " in line]
        if code not in (0, 1, 2) or "Traceback" in said or (code and len(lines) != 1):
            trial.differences.append(f"exit code {code} on a full disk, saying: {said}")


class _Process:
    """A running `sansgpu` command with its child processes, in a session of their own."""

    def __init__(self, arguments: list[str], cache: Path) -> None:
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  read and closed by `end`
        cache.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sansgpu", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env={**os.environ, "SANSGPU_CACHE": str(cache)},
            start_new_session=True,
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process that the user started."""
        self._process.send_signal(number)

    def kill_one(self, draw: random.Random) -> None:
        """Sends SIGKILL to a randomly chosen process of the run."""
        with suppress(psutil.NoSuchProcess):
            everyone = [psutil.Process(self._process.pid)]
            everyone += everyone[0].children(recursive=True)
            draw.choice(sorted(everyone, key=lambda process: process.pid)).kill()

    def end(self) -> tuple[int, str]:
        """Waits for the processes, kills those that do not end, and returns the exit code and the end of stderr."""
        said = ""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code, said = -1, f"it hung for {END_SECONDS} s: "
        limit = time.monotonic() + END_SECONDS
        while (left := _session(self._process.pid)) and not said and time.monotonic() < limit:
            time.sleep(0.05)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._stderr.seek(0)
        said += self._stderr.read()[-2000:].strip()
        self._stderr.close()
        return code, said


class _Moment:
    """Waits for the moment at which a run is to be disturbed, e.g. while it writes a certain snapshot."""

    def __init__(self, aim: str, draw: random.Random, run: Path, cache: Path, seconds: float) -> None:
        self.aim, self.draw = aim, draw
        self.run, self._cache = run, cache
        self._at: float | None = None
        if aim in ("any moment", "start"):
            self._at = time.monotonic() + draw.uniform(0.0, 1.5 if aim == "start" else seconds)
        self._step = draw.randrange(1, 5) * 4  # an evaluation is due after this step
        self._snapshot = draw.randrange(1, 6)

    def come(self) -> bool:
        """Returns True when the moment has come."""
        if self._at is None and self._seen():
            self._at = time.monotonic() + self.draw.uniform(0.0, SPREAD_SECONDS)
        return self._at is not None and time.monotonic() >= self._at

    def _seen(self) -> bool:
        snapshots = self.run / "snapshots"
        match self.aim:
            case "snapshot":
                there = len(list(snapshots.glob("step-*")))
                return there >= self._snapshot - 1 and bool(list(snapshots.glob(".step-*")))
            case "tokenizing":
                return any(self._cache.rglob("*.partial"))
            case "evaluation":
                return f'"event": "step", "step": {self._step},'.encode() in _content(self.run / "metrics.jsonl")
        return bool(list(snapshots.glob("step-000016"))) or (self.run / "final").exists()


def differences(whole: Path, run: Path, more_snapshots: bool = False) -> list[str]:
    """Returns how a run differs from the reference `whole`: in files of snapshots/ and final/, events, or leftovers.

    With `more_snapshots`, the run may have snapshots of other steps, at which it was asked to end.
    """
    found = []
    for part in ("snapshots", "final"):
        expected, actual = (file_digests(folder / part) for folder in (whole, run))
        may_have_more = more_snapshots and part == "snapshots"
        for name in sorted(expected.keys() & actual.keys() if may_have_more else expected.keys() | actual.keys()):
            both = name in expected and name in actual
            if expected.get(name) != actual.get(name) and not (both and name in UNEQUAL_FILES):
                what = "is missing" if name not in actual else "is left over" if name not in expected else "differs"
                found.append(f"{part}/{name} {what}")
    if any(path.name.startswith(".") for path in (run / "snapshots").iterdir()):
        found.append("snapshots/ has leftovers")
    expected_events, events = record(whole), record(run)
    if events != expected_events:
        pairs = zip(expected_events, events, strict=False)
        first = next((f"{a} became {b}" for a, b in pairs if a != b), f"{len(events)} of {len(expected_events)} events")
        found.append(f"metrics.jsonl differs: {first}")
    return found


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _slug(kind: Kind) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in kind.name)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _session(leader: int) -> list[psutil.Process]:
    """Returns the running processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _small_disk(folder: Path, used: int) -> Iterator[None]:
    """Mounts a tmpfs at `folder` with room for three runs. Raises SystemExit if it cannot be mounted."""
    options = f"size={used * 3 + DISK_ROOM}"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        raise SystemExit("chaos: --disk mounts a tmpfs, which requires root; run it as root.")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def _filled(folder: Path, room: int) -> Iterator[None]:
    """Fills the disk of `folder` up to `room` free bytes within the context."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while (free := shutil.disk_usage(folder).free) > room:
            file.write(b"x" * min(1 << 20, max(4096, free - room)))
    try:
        yield
    finally:
        filler.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="total number of disturbances")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--signals", action="store_true", help="ask processes to end instead of killing them")
    how.add_argument("--disk", action="store_true", help="fill the disk instead of killing processes (needs root)")
    parser.add_argument("--kinds", default="", help="comma-separated; run kinds whose name contains one of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder in which to keep reference runs and differing runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="sansgpu-chaos-", ignore_cleanup_errors=True) as scratch:
        folder = (arguments.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [part for part in arguments.kinds.split(",") if part]
        kinds = [k for k in make_kinds(folder) if not wanted or any(part in k.name for part in wanted)]
        disturbance = "disk" if arguments.disk else "signal" if arguments.signals else "kill"
        chaos, trials, left = Chaos(folder, disturbance), list[Trial](), arguments.kills
        while left > 0:
            trial = chaos.trial(kinds[len(trials) % len(kinds)], arguments.seed * 1_000_000 + len(trials), left)
            trials.append(trial)
            left -= len(trial.disturbed)
            say(f"{len(trials)}: {trial.kind}: {', '.join(trial.disturbed) or 'not met'}; {trial.seconds:.0f} s"
                + "".join(f"\n   {difference}" for difference in trial.differences))  # fmt: skip
    _print_table(trials)
    settings = {"how": disturbance, "seed": arguments.seed, "kinds": [kind.name for kind in kinds]}
    write_json(arguments.json, "chaos", settings, [asdict(trial) for trial in trials])
    return int(any(trial.differences for trial in trials))


def _print_table(trials: list[Trial]) -> None:
    print(f"{'kind':32}{'runs':>6}{'disturbed':>11}{'different':>11}")
    for name in [*dict.fromkeys(trial.kind for trial in trials), "all"]:
        mine = [trial for trial in trials if name in (trial.kind, "all")]
        disturbed, different = sum(len(t.disturbed) for t in mine), sum(bool(t.differences) for t in mine)
        print(f"{name:32}{len(mine):>6}{disturbed:>11}{different:>11}")
    aims = [aim for trial in trials for aim in trial.disturbed]
    print("disturbed at: " + ", ".join(f"{aim} {aims.count(aim)}" for aim in AIMS if aim in aims))


if __name__ == "__main__":
    sys.exit(main())
