"""`sansgpu slurm` writes a script that bash and Slurm accept, and that survives preemption."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sansgpu.cli import run as cli
from tests.jobs.slurm.cluster import cluster, missing, srun, state, submit, wait_until
from tests.processes import TINY, Captured, digests, messages, use_cache, write_corpus


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    write_corpus(tmp_path / "corpus.jsonl", documents=200)
    values: dict[str, dict[str, object] | str] = {"device": "cpu", "data": {"dataset_name": "corpus.jsonl"}}
    for key, value in TINY.items():
        section, _, name = key.partition(".")
        if name:
            values.setdefault(section, {})[name] = value  # type: ignore[index, union-attr]
    Path("notes.yaml").write_text(yaml.safe_dump(values))


def _script(capsys: Captured, *more: str) -> str:
    assert cli(["slurm", "notes.yaml", *more, "--json"]) == 0
    return Path(json.loads(capsys.readouterr().out)["file"]).read_text()


def _options(script: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE)
    return dict(lines)


def test_the_script_asks_for_what_the_options_say(capsys: Captured) -> None:
    script = _script(
        capsys, "--nodes", "2", "--processes-per-node", "2", "--cpus", "8", "--memory", "16G", "--time", "2-00:00:00",
        "--partition", "cpu,long", "--account", "lab.one", "--name", "trial", "--set", "training.seed=5",
    )  # fmt: skip
    options = _options(script)
    asked = {
        "job-name": "trial", "nodes": "2", "ntasks-per-node": "2", "cpus-per-task": "4", "mem": "16G",
        "time": "2-00:00:00", "partition": "cpu,long", "account": "lab.one", "output": "runs/trial/slurm-%j.log",
        "open-mode": "append", "requeue": "",
    }  # fmt: skip
    assert {key: options.get(key) for key in asked} == asked
    assert re.fullmatch(r"TERM@\d+", options["signal"])
    assert f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={options['signal'].removeprefix('TERM@')} " in script
    assert "exclusive" not in options
    assert "--set training.seed=5 --output-dir runs/trial --resume latest" in script


def test_a_signal_that_slurm_cannot_send_so_early_is_refused(capsys: Captured) -> None:
    long_steps = ["--nodes", "1", "--cpus", "1", "--set", "training.gradient_accumulation_steps=200000000"]
    assert cli(["slurm", "notes.yaml", *long_steps]) == 2
    assert "Slurm signals at most 65,535 s before the time limit" in capsys.readouterr().err


def test_without_cpus_whole_nodes_are_asked_for(capsys: Captured) -> None:
    options = _options(_script(capsys, "--nodes", "1"))
    assert options["exclusive"] == ""
    assert options["mem"] == "0"
    assert "cpus-per-task" not in options


@pytest.mark.parametrize("setting", ["training.seed=5", "data.text_column=a'b $(touch x) `touch x` \"c"])
def test_shells_accept_the_script(setting: str, capsys: Captured) -> None:
    _script(capsys, "--nodes", "1", "--set", setting)
    checks = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        checks.append(["shellcheck", "--severity=warning"])
    for check in checks:
        done = subprocess.run([*check, "runs/notes/job.sbatch"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_script_passes_settings_on_as_they_are(tmp_path: Path, capsys: Captured) -> None:
    """Shell functions replace the cluster's commands; srun prints the command that it would start."""
    setting = "data.text_column=a'b $(touch x) `touch x` \"c"
    script = _script(capsys, "--nodes", "1", "--set", setting)
    stubs = 'srun() { printf "%s\\n" "$MASTER_ADDR" "$@"; }; scontrol() { echo first; echo second; }\n'
    stubs += "SLURM_JOB_NODELIST=x\n"
    done = subprocess.run(["bash", "-c", stubs + script], capture_output=True, text=True)
    first, *arguments = done.stdout.splitlines()
    assert first == "first"
    assert setting in arguments
    assert arguments[arguments.index("train") + 1] == "notes.yaml"
    assert not Path("x").exists()


@pytest.mark.parametrize(("code", "queued"), [(143, True), (1, False), (0, False)])
def test_only_a_saved_run_is_queued_again(code: int, queued: bool, capsys: Captured) -> None:
    script = _script(capsys, "--nodes", "1")
    stubs = f'srun() {{ return {code}; }}; scontrol() {{ echo "$@" >> calls; }}; SLURM_JOB_NODELIST=x SLURM_JOB_ID=7\n'
    assert subprocess.run(["bash", "-c", stubs + script]).returncode == code
    assert ("requeue 7" in Path("calls").read_text()) == queued


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "9"], "a step has 4 examples"),
        (["--nodes", "1", "--cpus", "2", "--processes-per-node", "3"], "3 processes share 2 CPUs"),
        (["--nodes", "1", "--time", "soon"], "is not a time limit"),
        (["--nodes", "1", "--time", "0:30"], "raise it"),
        (["--nodes", "1", "--partition", "a b"], "--partition 'a b' is not valid"),
        (["--nodes", "1", "--account", "x\n#SBATCH --uid=0"], "--account"),
        (["--nodes", "1", "--memory", "lots"], "--memory 'lots' is not valid"),
        (["--nodes", "1", "--name", "-x"], "--name"),
        (["--nodes", "1", "--output-dir", "a b"], "contains spaces"),
        (["--nodes", "1", "--set", "training.treads=4"], "did you mean training.threads"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: list[str], words: str, capsys: Captured) -> None:
    assert cli(["slurm", "notes.yaml", *arguments]) == 2
    [line] = messages(capsys.readouterr().err)
    assert words in line
    assert not Path("runs").exists()


def test_another_run_stays_and_the_script_is_replaced(capsys: Captured) -> None:
    _script(capsys, "--nodes", "1")
    assert "--nodes=2" in _script(capsys, "--nodes", "2")
    Path("runs/notes/job.sbatch").write_text("mine")
    assert cli(["slurm", "notes.yaml", "--nodes", "1"]) == 2
    assert Path("runs/notes/job.sbatch").read_text() == "mine"


@pytest.fixture
def _on_a_cluster(tmp_path: Path) -> Iterator[None]:
    if reason := missing():
        pytest.skip(reason)
    with cluster(tmp_path / "slurm"):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("_on_a_cluster")
def test_a_preempted_job_is_queued_again_and_ends_with_equal_weights(capsys: Captured) -> None:
    length = ["--set", "training.max_steps=400", "--set", "training.num_epochs=null"]
    srun([sys.executable, "-m", "sansgpu", "train", "notes.yaml", *length, "--output-dir", "runs/whole"])
    for name, signal in (("stopped", "scancel --signal=TERM"), ("preempted", "scontrol requeue")):
        run, snapshots = Path("runs") / name, Path("runs") / name / "snapshots"
        assert cli(["slurm", "notes.yaml", "--nodes", "2", "--cpus", "1", "--name", name, *length]) == 0
        job = submit(run / "job.sbatch")
        wait_until(lambda: snapshots.is_dir() and any(snapshots.glob("step-*")), 120)  # noqa: B023  called at once
        assert not (run / "final").exists()
        subprocess.run([*signal.split(), job], check=True)
        wait_until(lambda: state(job) in ("COMPLETED", "FAILED", "CANCELLED"), 240)  # noqa: B023
        [log] = run.glob("slurm-*.log")
        assert state(job) == "COMPLETED", log.read_text()
        assert "resumed from step-" in log.read_text()
        assert digests(run / "final") == digests(Path("runs/whole/final"))
