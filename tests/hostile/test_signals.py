"""Ctrl-C at any moment or a closed terminal ends a command with one sentence and an exit code, and loses nothing."""

import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from sansgpu.machine.interrupt import STOPPING as ACKNOWLEDGED
from sansgpu.train.loop import FORWARD_SECONDS
from tests.processes import Process, environment, record, settings, start, write_corpus

ROOT = Path(__file__).parents[2]
MOMENTS = (0.02, 0.1, 0.4, 1.0)


def hold_interrupts() -> None:
    """Blocks SIGINT until the command handles it, because Python would show a traceback while it starts.

    Also restores the default action of SIGINT: these tests may run as a shell's background job, which ignores it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def ignore_hangups() -> None:
    """Ignores SIGHUP, like nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


STARTED: list[subprocess.Popen[str]] = []


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=400)


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    for process in STARTED:  # without its signal, a run would continue for days
        process.kill()


def training(home: Path, run: str, *more: str, **changes: object) -> list[str]:
    chosen = {"data__dataset_name": home / "corpus.jsonl", "training__max_steps": 100_000, **changes}
    return ["train", *settings(**chosen), "--output-dir", str(home / run), *more]


def started(home: Path, arguments: list[str], **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sansgpu", *arguments]
    chosen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(home / "cache"), **more}
    STARTED.append(subprocess.Popen(command, text=True, **chosen))  # type: ignore[call-overload]
    return STARTED[-1]


def has_snapshot(run: Path, process: Process) -> None:
    limit = time.monotonic() + 90
    while not list((run / "snapshots").glob("step-*")):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(command, marks=pytest.mark.long) for command in ("doctor", "bench"))]
)
def test_ctrl_c_in_the_first_second_is_one_sentence(home: Path, command: str) -> None:
    arguments = training(home, "early") if command == "train" else [command]
    processes = []
    for moment in MOMENTS:
        process = started(home, arguments, preexec_fn=hold_interrupts, cwd=home)
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        processes.append(process)
    for process in processes:
        _, error = process.communicate(timeout=60)
        said = [line for line in error.splitlines() if line.startswith("sansgpu: ")]
        assert process.returncode == 130, error
        assert len(said) == 1, error
        assert "interrupted" in said[0]
        assert "Traceback" not in error
        assert "Exception ignored" not in error


def test_ctrl_c_during_an_import_is_one_sentence(home: Path) -> None:
    """Printing the sentence must not import anything: importing this `yaml` again would send a second Ctrl-C."""
    modules = home / "modules"
    modules.mkdir()
    (modules / "yaml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    variables = {**environment(home / "cache"), "PYTHONPATH": str(modules)}
    process = started(home, training(home, "import"), preexec_fn=hold_interrupts, env=variables)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "sansgpu: interrupted; everything saved so far is kept.\n")


def hanging(home: Path, name: str) -> dict[str, str]:
    """Returns the environment of a command that prints "hangs" and hangs in a library when it imports `yaml`."""
    modules = home / f"hanging-{name}"
    modules.mkdir()
    lines = "import sys", f"sys.path.append({str(ROOT)!r})", "from tests.hanging import hang_in_c"
    (modules / "yaml.py").write_text("\n".join([*lines, "print('hangs', flush=True)", "hang_in_c()"]))
    return {**environment(home / "cache"), "PYTHONPATH": str(modules)}


def test_ctrl_c_is_acknowledged_while_a_library_computes(home: Path) -> None:
    variables = hanging(home, "Ctrl-C")
    process = started(home, training(home, "hangs"), preexec_fn=hold_interrupts, env=variables)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "hangs\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    until(process.stderr, "stopping after the current computation; press Ctrl-C again to stop now")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "sansgpu: interrupted; everything saved so far is kept.\n")


def test_a_signal_of_a_cluster_before_the_first_step_acts_like_sigterm(home: Path) -> None:
    """The script of a Slurm job queues it again after the code of SIGTERM; that of SIGUSR1 looks like a failure."""
    process = started(home, training(home, "before"), env=hanging(home, "before"))
    assert process.stdout is not None
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (-signal.SIGTERM, "")


def test_signals_of_clusters_and_limits_save_like_sigterm(home: Path) -> None:
    """Slurm's `--signal=USR1@60`, submitit's SIGUSR2, and a limit of CPU time, whose signal the kernel repeats."""
    names = "SIGUSR1", "SIGUSR2", "SIGXCPU"
    processes = {name: start(training(home, name), home / "cache") for name in names}
    for name, process in processes.items():
        has_snapshot(home / name, process)
        if name == "SIGXCPU":
            used = psutil.Process(process.pid).cpu_times()
            limit = int(used.user + used.system) + 1
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit, limit + 60))
        else:
            process.send_signal(getattr(signal, name))
    for name, process in processes.items():
        _, error = process.communicate(timeout=100)
        assert (process.returncode, "Traceback" in error) == (143, False), error
        assert f"{ACKNOWLEDGED}\n" in error
        end = record(home / name)[-1]
        assert end["reason"] == "interrupted"
        assert (home / name / "snapshots" / str(end["snapshot"]) / "MANIFEST.json").exists()


def test_a_second_ctrl_c_ends_the_command_at_once(home: Path) -> None:
    process = started(home, training(home, "second"), preexec_fn=hold_interrupts)
    for _ in range(200):
        process.send_signal(signal.SIGINT)
        time.sleep(0.005)
        if process.poll() is not None:
            break
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error


def stuck(home: Path, run: str, *more: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a run whose fifth step hangs in C, and returns its process after the snapshot of the fourth."""
    (home / "stuck").touch()
    arguments = training(home, run, *more, task="tests.train.faulty_data:Stuck")
    chosen = {**environment(home / "cache"), "PYTHONPATH": str(ROOT), **variables}
    process = started(home, arguments, env=chosen, start_new_session=True)
    limit = time.monotonic() + 90
    while not (home / run / "snapshots/step-000004").exists():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    return process


def until(stream: IO[str], words: str) -> None:
    """Reads lines until one of them is `words`."""
    for line in stream:
        if line == f"{words}\n":
            return
    raise AssertionError(f"the stream ended without {words!r}")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_step_that_hangs_is_ended_by_a_second_signal(home: Path, processes: int) -> None:
    many = ["--processes", str(processes)] if processes > 1 else []
    process = stuck(home, f"stuck-{processes}", *many)
    assert process.stderr is not None
    process.terminate()
    until(process.stderr, ACKNOWLEDGED)
    time.sleep(FORWARD_SECONDS if many else 0)
    assert process.poll() is None
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, "")


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_outlasts_the_grace_period_is_abandoned(home: Path, processes: int) -> None:
    run, many = f"abandoned-{processes}", ["--processes", str(processes)] if processes > 1 else []
    process = stuck(home, run, *many, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3")
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert error.count(f"{ACKNOWLEDGED}\n") == 1
    assert error.splitlines()[-1] == (
        "sansgpu: the step did not end within the grace period of 3 s, so it was not saved; continue from the newest "
        "snapshot with --resume latest."
    )
    (home / "stuck").unlink()
    resumed = training(home, run, "--resume", "latest", *many, "--max-steps", "6", task="tests.train.faulty_data:Stuck")
    variables = {**environment(home / "cache"), "PYTHONPATH": str(ROOT)}
    _, error = started(home, resumed, env=variables).communicate(timeout=100)
    assert record(home / run)[-1]["reason"] == "done", error


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_under_nohup_continues_when_the_terminal_closes(home: Path, processes: int) -> None:
    run = home / f"nohup-{processes}"
    many = ["--processes", str(processes)] if processes > 1 else []
    arguments = training(home, run.name, *many, training__max_steps=60)
    process = started(home, arguments, preexec_fn=ignore_hangups, start_new_session=True)
    has_snapshot(run, process)
    os.killpg(process.pid, signal.SIGHUP)
    _, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    assert (record(run)[-1]["step"], record(run)[-1]["reason"]) == (60, "done")


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 143), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGUSR2, 143)],
)
def test_several_processes_save_and_end(home: Path, number: signal.Signals, code: int) -> None:
    run = home / f"several-{number}"
    process = started(home, training(home, run.name, "--processes", "2"), start_new_session=True)
    has_snapshot(run, process)
    os.killpg(process.pid, number)  # like a terminal, to the whole process group
    _, error = process.communicate(timeout=100)
    assert process.returncode == code, error
    assert "Traceback" not in error
    end = record(run)[-1]
    assert end["reason"] == "interrupted"
    assert (run / "snapshots" / str(end["snapshot"]) / "MANIFEST.json").exists()


@pytest.mark.long
def test_a_terminal_that_closes_costs_nothing(home: Path) -> None:
    """The terminal closes while the live view writes to it."""
    run, terminal = home / "closed", pty.fork()
    if not terminal[0]:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, ignores it
        variables = {**environment(home / "cache"), "TERM": "xterm"}
        os.execve(sys.executable, [sys.executable, "-m", "sansgpu", *training(home, run.name)], variables)
    child, view = terminal
    limit = time.monotonic() + 90
    while not list((run / "snapshots").glob("step-*")) and time.monotonic() < limit:
        os.read(view, 65536)
    os.close(view)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    [end] = [event for event in record(run) if event["event"] == "end"]
    assert end["reason"] == "interrupted"
    assert (run / "snapshots" / str(end["snapshot"]) / "MANIFEST.json").exists()
