"""Commands that take RUN never execute code from the run's folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.machine.private_folder import NotPrivateError, private_in
from tests import processes
from tests.hostile.folders_with_code import MODULE, bomb, copied, with_code, write_module
from tests.processes import Captured, environment, options, write_corpus, write_rows
from tests.tasks.folders import chat_rows, labeled_rows, model_folder, squad
from tests.tasks.graph.graphs import rows
from tests.tasks.graph.test_graph_runs import TINY as GRAPH

pytestmark = pytest.mark.usefixtures("home")

OBJECTIVE = f"{MODULE}:Pretrain"
FEW = {
    "training.batch_size": 2, "training.gradient_accumulation_steps": 1, "training.max_steps": 2,
    "training.save_steps": 1, "training.eval_steps": 2, "training.warmup_steps": 1, "training.precision": "fp32",
    "training.compile": "off", "training.report_to": "none", "training.threads": 1, "device": "cpu",
}  # fmt: skip
QUESTION = ("--question", "Who?", "--context", "The red fox.")

# Runs each command as if no kernels were loaded yet, and records its exit code and whether it created the canary.
SCRIPT = """
import json, os, sys
from pathlib import Path
from sansgpu.cli import run
from sansgpu.kernels import library
from sansgpu import Run
canary, commands, found = Path(sys.argv[1]), json.loads(sys.argv[2]), []
for command in commands:
    library._loaded = False
    sys.stderr.write(f"$ {' '.join(command)}\\n")
    if command[0] == "api":
        code = 0 if isinstance(Run(command[1]).generate("the", 3), str) else 1
    else:
        code = run(command)
    sys.stdout.flush()
    found.append([code, canary.exists()])
    canary.unlink(missing_ok=True)
Path(sys.argv[3]).write_text(json.dumps(found))
"""


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl")
    chat_rows(home / "chat.jsonl")
    squad(home / "squad.json")
    labeled_rows(home / "labeled.jsonl")
    write_rows(home / "graph.jsonl", rows())


def made(home: Path, task: str) -> Path:
    """Trains a run of the task for two steps unless it already exists, and returns its folder."""
    run, model = home / f"innocent-{task}", home / f"model-{task}"
    if run.exists():
        return run
    if task == "pretrain":
        values: dict[str, object] = {**processes.TINY, **FEW, "data.dataset_name": home / "corpus.jsonl"}
    elif task == "graph":
        values = {**GRAPH, **FEW, "data.dataset_name": home / "graph.jsonl"}
    else:
        shutil.copytree(model_folder("qwen2" if task == "sft" else "bert"), model)
        data = home / {"sft": "chat.jsonl", "qa": "squad.json", "classify": "labeled.jsonl"}[task]
        values = {**FEW, "task": task, "model.name_or_path": model, "data.dataset_name": data, "data.max_length": 96}
        values |= {"data.doc_stride": 16} if task == "qa" else {}
    assert cli(["train", *options(values), "--output-dir", str(run)]) == 0
    return run


def after(home: Path, canary: Path, commands: list[list[str]]) -> list[tuple[int, bool]]:
    """Runs the commands in a new process; returns each one's exit code and whether the hostile code ran."""
    own = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(home / "modules")])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(canary), json.dumps(commands), str(home / "found.json")],
        env={**environment(home / "cache"), **own, "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": "1"},
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    print(done.stderr)
    return [(code, ran) for code, ran in json.loads((home / "found.json").read_text())]


@pytest.mark.parametrize(
    "task", ["sft", *(pytest.param(t, marks=pytest.mark.long) for t in ("pretrain", "graph", "qa", "classify"))]
)
def test_no_command_executes_code_from_the_folder_of_a_run(home: Path, tmp_path: Path, task: str) -> None:
    canary = tmp_path / "canary"
    write_module(home / "modules", canary)
    innocent = made(home, task)
    changes: dict[str, object] = {}
    if task in ("sft", "qa", "classify"):
        model = shutil.copytree(home / f"model-{task}", tmp_path / "model")
        with_code(model, canary)
        changes |= {"model__name_or_path": str(model), "model__trust_remote_code": True}
    resumed = str(copied(innocent, tmp_path / "resumed", canary, **changes))
    run = str(copied(innocent, tmp_path / "run", canary, objective=OBJECTIVE, **changes))
    snapshot, out = (["snapshots", name, run] for name in ("list", "show")), str(tmp_path / "out")
    expected: list[tuple[list[str], int]] = [
        (["report", run], 0),
        (["runs", str(tmp_path)], 0),
        *((command, 0) for command in snapshot),
        (["snapshots", "verify", run], 0),
        (["snapshots", "fork", run, "--output-dir", f"{out}-fork"], 0),
        (["snapshots", "prune", run], 0),
        (["train", "--resume", "--output-dir", run, "--max-steps", "3"], 2),
        (["export", run, "--output", f"{out}-hf"], 0),
    ]
    own_eval = 0 if task == "graph" else 2  # 2: preparing the run's own data would execute its objective
    corpus = {
        "pretrain": "corpus.jsonl", "sft": "chat.jsonl", "qa": "squad.json", "graph": "graph.jsonl",
        "classify": "labeled.jsonl",
    }[task]  # fmt: skip
    expected += [(["eval", run], own_eval), (["eval", run, "--data", str(home / corpus)], 0)]
    resume_code = 2 if task in ("sft", "qa", "classify") else 0
    expected.append((["train", "--resume", "--output-dir", resumed, "--max-steps", "3"], resume_code))
    if task in ("pretrain", "sft"):
        expected.append((["generate", run, "--prompt", "the", "--max-new-tokens", "3"], 0))
        expected.append((["export", run, "--format", "gguf", "--output", f"{out}.gguf"], 0))
        expected.append((["api", run], 0))
    if task == "pretrain":
        expected.append((["tokenizer", "encode", f"{run}/tokenizer", "--text", "x"], 0))
    if task == "sft":
        expected.append((["chat", run, "--prompt", "red", "--max-new-tokens", "3"], 0))
    if task == "qa":
        expected.append((["predict", run, *QUESTION], 0))
    if task == "classify":
        expected.append((["predict", run, "--text", "red"], 0))
    if task == "graph":
        expected.append((["eval", run, "--link-prediction", "--limit", "1"], 0))
        expected.append((["extract", run, "--text", "Metformin lowers glucose.", "--head", "Metformin"], 0))
    commands = [command for command, _ in expected]
    found = after(home, canary, commands)
    assert [(command, code, False) for command, code in expected] == [
        (command, code, ran) for command, (code, ran) in zip(commands, found, strict=True)
    ]


@pytest.mark.long
def test_code_that_the_command_line_allows_is_executed(home: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    write_module(home / "modules", canary)
    run = copied(made(home, "pretrain"), tmp_path / "run", canary, objective=OBJECTIVE)
    model = shutil.copytree(made(home, "sft").parent / "model-sft", tmp_path / "model")
    with_code(model, canary)
    shutil.rmtree(model / "custom_generate")
    tuned = copied(made(home, "sft"), tmp_path / "tuned", canary, model__name_or_path=str(model))
    commands = [
        ["train", "--resume", "--output-dir", str(run), "--max-steps", "3", "--objective", OBJECTIVE],
        ["eval", str(run), "--objective", OBJECTIVE],
        ["generate", str(tuned), "--max-new-tokens", "3", "--trust-remote-code"],
    ]
    assert after(home, canary, commands[:1]) == [(0, True)]
    assert after(home, canary, commands[1:]) == [(0, True), (0, True)]


def test_a_model_with_custom_code_is_refused_in_one_sentence(home: Path, tmp_path: Path, capsys: Captured) -> None:
    canary = tmp_path / "canary"
    model = shutil.copytree(made(home, "sft").parent / "model-sft", tmp_path / "model")
    with_code(model, canary)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
    run = copied(
        made(home, "sft"), tmp_path / "run", canary, model__name_or_path=str(model), model__trust_remote_code=True
    )
    for command in (
        ["generate", str(run)],
        ["chat", str(run), "--prompt", "x"],
        ["eval", str(run)],
        ["export", str(run), "--output", str(tmp_path / "out")],
        ["train", "--resume", "--output-dir", str(run)],
        ["generate", str(model)],
        ["chat", str(model), "--prompt", "x"],
        ["eval", str(model), "--data", str(home / "corpus.jsonl")],
        ["predict", str(model), *QUESTION],
    ):
        capsys.readouterr()
        assert cli(command) == 2, command
        said = capsys.readouterr().err
        assert "--trust-remote-code" in said.splitlines()[-1], (command, said)
        assert not canary.exists(), command


def test_pickles_yaml_tags_templates_and_adapters_execute_no_code(
    home: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    monkeypatch.syspath_prepend(write_module(tmp_path / "modules", canary))
    pickled = shutil.copytree(made(home, "sft").parent / "model-sft", tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    bomb(pickled / "pytorch_model.bin", canary)
    templated = shutil.copytree(home / "model-sft", tmp_path / "templated")
    escape = "{{ cycler.__init__.__globals__.os.mknod('" + str(canary) + "') }}"
    (templated / "chat_template.jinja").write_text(escape)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA", "base_model_name_or_path": str(home / "model-sft"), "r": 2,
                "target_modules": "all-linear",
                "megatron_config": {"tensor_model_parallel_size": 1}, "megatron_core": MODULE,
            }
        )
    )  # fmt: skip
    bomb(adapter / "adapter_model.bin", canary)
    tagged = shutil.copytree(made(home, "pretrain"), tmp_path / "tagged")
    (tagged / "config.yaml").write_text(f"task: !!python/object/apply:os.mknod [{canary}]\n")
    looking = [["list"], ["show"], ["verify"], ["prune"], ["fork", "--output-dir", str(tmp_path / "fork")]]
    for command in (
        ["generate", str(pickled)],
        ["chat", str(templated), "--prompt", "x"],
        ["generate", str(adapter)],
        *([name, str(tagged)] for name in ("generate", "eval", "export", "report", "chat", "extract")),
        ["predict", str(tagged), *QUESTION],
        ["train", "--resume", "--output-dir", str(tagged)],
        *(["snapshots", name, str(tagged), *rest] for name, *rest in looking),
    ):
        command += ["--text", "x"] if command[0] == "extract" else []
        capsys.readouterr()
        assert cli(command) in (1, 2), command
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("sansgpu: "), (command, lines)
        assert "Traceback" not in "".join(lines), (command, lines)
        assert not canary.exists(), command
    assert cli(["runs", str(tmp_path)]) == 0
    assert not canary.exists()


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    assert private_in(mine).stat().st_mode & 0o777 == 0o700
    private_in(mine).chmod(0o770)
    with pytest.raises(NotPrivateError, match="is accessible to other users"):
        private_in(mine)
    (linked := tmp_path / "linked").mkdir()
    (linked / private_in(tmp_path / "other").name).symlink_to(private_in(tmp_path / "other"))
    with pytest.raises(NotPrivateError, match="is a symlink"):
        private_in(linked)
    shared = tmp_path / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(NotPrivateError, match=f"{shared} is writable by other users"):
        private_in(shared / "cache")
    (tmp_path / "way").symlink_to(shared / "cache")  # others could replace its target
    with pytest.raises(NotPrivateError, match="is writable by other users"):
        private_in(tmp_path / "way")
    shared.chmod(0o1777)  # sticky, like /tmp: users cannot rename the files of others
    assert private_in(tmp_path / "way").parent.samefile(shared / "cache")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change a folder's owner")
def test_a_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    foreign = private_in(tmp_path / "cache")
    os.chown(foreign, 12345, 12345)
    with pytest.raises(NotPrivateError, match="belongs to another user"):
        private_in(tmp_path / "cache")
    (tmp_path / "theirs/cache").mkdir(parents=True)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(NotPrivateError, match=f"{tmp_path}/theirs belongs to another user"):
        private_in(tmp_path / "theirs/cache")


def compiled(home: Path) -> list[str]:
    own = {"data.dataset_name": home / "corpus.jsonl", "training.kernels": "torch", "training.compile": "on"}
    return options(processes.TINY, FEW, own)


@pytest.mark.long
def test_a_run_works_if_no_folder_is_private(home: Path, tmp_path: Path) -> None:
    """Simulates a container in which every volume is writable by all users."""
    places = {name: tmp_path / name for name in ("SANSGPU_CACHE", "XDG_CACHE_HOME", "TMPDIR")}
    for place in places.values():
        place.mkdir()
        place.chmod(0o777)
    command = [sys.executable, "-m", "sansgpu", "train", "--dry-run", *compiled(home)]
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    own = {name: str(place) for name, place in places.items()}
    done = subprocess.run(command, env={**inherited, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is writable by other users") == 2
    assert list(places["TMPDIR"].glob("sansgpu-compiled-*")) == []  # deleted at the end of the run


@pytest.mark.long
def test_a_shared_cache_causes_one_warning_and_does_not_stop_the_run(home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    own = {
        "SANSGPU_CACHE": str(shared),
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(shared),
    }
    command = [sys.executable, "-m", "sansgpu", "train", "--dry-run", *compiled(home)]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compile: 'on'" in done.stdout
    refused = [line for line in done.stderr.splitlines() if "is writable by other users" in line]
    assert ["TORCHINDUCTOR_CACHE_DIR" in line for line in refused] == [True, False]
