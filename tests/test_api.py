"""Training from Python gives the same run as the command, obeys callbacks and works in a notebook."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import sansgpu
from sansgpu.config import ConfigError
from sansgpu.events.controls import Controls
from sansgpu.machine.launch import has_random_hashes
from tests.processes import TINY, digests, environment, finish, record, settings, use_cache, write_corpus
from tests.scale.steered import Steers
from tests.tasks.folders import chat_rows, model_folder


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path_factory.getbasetemp() / "api-cache")


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    return [*(f"{key}={value}" for key, value in TINY.items()), f"data.dataset_name={corpus}", "training.max_steps=12"]


class Seen(sansgpu.Callback):
    """Records its events."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def on_step(self, event: dict[str, Any], run: Controls) -> None:
        self.told.append(("step", event["step"]))

    def on_eval(self, event: dict[str, Any], run: Controls) -> None:
        self.told.append(("eval", event["step"]))

    def on_snapshot(self, event: dict[str, Any], run: Controls) -> None:
        assert event["path"] == f"step-{event['step']:06d}"
        self.told.append(("snapshot", event["step"]))

    def on_end(self, event: dict[str, Any], run: Controls) -> None:
        self.told.append((event["reason"], event["step"]))


def test_a_run_from_python_is_that_of_the_command(tmp_path: Path, overrides: list[str]) -> None:
    seen = Seen()
    as_built_in = {"training": {"sample_tokens": 64}}
    run = sansgpu.fit(as_built_in, tmp_path / "python", overrides=overrides, callbacks=[seen], quiet=True)
    corpus = settings(data__dataset_name=tmp_path / "corpus.jsonl", training__max_steps=12)
    code, _, error = finish(["train", *corpus, "--output-dir", str(tmp_path / "command")], tmp_path / "cache")
    assert code == 0, error
    assert digests(run.folder) == digests(tmp_path / "command")
    assert record(run.folder) == record(tmp_path / "command")
    told = [(kind, event["step"]) for kind in ("step", "eval", "snapshot") for event in run.events(kind)]
    assert sorted(seen.told) == sorted([*told, ("done", 12)])
    assert len(run.events("step")) == 6
    assert "state done, steps 12 of 12, training loss" in repr(run)
    assert "<td>12 of 12</td>" in run._repr_html_()
    assert run.generate("the", max_new_tokens=5, seed=1) == run.generate("the", max_new_tokens=5, seed=1)


class Careless(sansgpu.Callback):
    """Moves to another folder, and then exits."""

    def on_step(self, event: dict[str, Any], run: Controls) -> None:
        os.chdir("/")
        torch.set_grad_enabled(False)
        if event["step"] == 4:
            sys.exit(0)


def test_a_callback_can_neither_end_a_run_nor_move_it(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = sansgpu.fit(None, "run", overrides=overrides, callbacks=[Careless()], quiet=True)
    assert (tmp_path / "run/final").is_dir()
    assert torch.is_grad_enabled()
    (warning,) = [event for event in run.events("warning") if event.get("cause") == "callback"]
    assert warning["message"] == "Careless failed and was disabled (SystemExit: 0); training continues."


def test_the_log_has_the_names_of_transformers(tmp_path: Path, overrides: list[str]) -> None:
    run = sansgpu.fit(None, tmp_path / "run", overrides=overrides, quiet=True)
    history, steps = run.state.log_history, run.events("step")
    assert run.state.global_step == 12
    logged = [entry for entry in history if "loss" in entry]
    for entry, event in zip(logged, steps, strict=True):
        assert [entry[key] for key in ("step", "train_loss", "learning_rate")] == [
            event[key] for key in ("step", "loss", "lr")
        ]
        assert entry["train_samples_per_second"] == pytest.approx(4 / event["step_seconds"])
    assert [entry["eval_loss"] for entry in history if "eval_loss" in entry] == [e["loss"] for e in run.events("eval")]
    mean = sum(event["loss"] for event in steps) / len(steps)
    assert history[-1]["train_loss"] == pytest.approx(mean)
    assert history[-1]["train_samples_per_second"] * history[-1]["train_runtime"] == pytest.approx(4 * 12)


def test_a_callback_saves_evaluates_and_ends_a_run_that_continues_later(tmp_path: Path, overrides: list[str]) -> None:
    none_due = ["training.save_steps=0", "training.eval_steps=0"]
    chosen = [*overrides, *none_due]
    run = sansgpu.fit(None, tmp_path / "run", overrides=chosen, callbacks=[Steers()], quiet=True)
    assert [event["step"] for event in run.events("eval")] == [2]
    assert [event["step"] for event in run.events("snapshot")] == [2, 6]
    assert run.record.end_reason == "interrupted"
    sansgpu.fit(None, tmp_path / "run", overrides=chosen, resume="latest", quiet=True)
    straight = sansgpu.fit(None, tmp_path / "straight", overrides=chosen, quiet=True)
    assert run.record.end_reason == "done"
    assert digests(run.folder / "final") == digests(straight.folder / "final")


class Fails(sansgpu.Callback):
    """Raises an error at the first step."""

    def on_step(self, event: dict[str, Any], run: Controls) -> None:
        raise ValueError("no such column")


def test_a_callback_that_raises_is_named_and_training_continues(tmp_path: Path, overrides: list[str]) -> None:
    seen = Seen()
    run = sansgpu.fit(None, tmp_path / "run", overrides=overrides, callbacks=[Fails(), seen], quiet=True)
    messages = [event["message"] for event in run.events("warning") if event.get("cause") == "callback"]
    assert messages == ["Fails failed and was disabled (no such column); training continues."]
    assert ("done", 12) in seen.told


def test_bad_requests_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.n_layer .*n_layers"):
        sansgpu.fit({"model": {"n_layer": 3}}, tmp_path / "run")
    with pytest.raises(ConfigError, match="is not a run"):
        sansgpu.Run(tmp_path)
    assert not list(tmp_path.iterdir())


OBJECTIVE = '''
import torch
from sansgpu.tasks.pretrain.task import Pretrain


class Halved(Pretrain):
    """Halves the loss."""

    def loss(self, batch):
        return 0.5 * super().loss(batch)


class Stranger:
    """Is not a task."""
'''


def test_an_objective_of_ones_own_learns_and_resumes(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_objective.py").write_text(OBJECTIVE)
    monkeypatch.syspath_prepend(str(tmp_path))
    usual = sansgpu.fit(None, tmp_path / "usual", overrides=overrides, quiet=True)
    chosen = [*overrides, "objective=own_objective:Halved"]
    run = sansgpu.fit(None, tmp_path / "run", overrides=chosen, callbacks=[Steers()], quiet=True)
    first, other = run.events("step")[0], usual.events("step")[0]
    assert first["loss"] < 0.6 * other["loss"]
    noted = [
        "own_objective:Halved iterates over sets of strings; set PYTHONHASHSEED=0" in e["message"]
        for e in run.events("warning")
    ]
    assert any(noted) is has_random_hashes()
    with pytest.raises(
        ConfigError, match="add --objective own_objective:Halved"
    ):  # a run's folder must not choose code
        sansgpu.fit(None, tmp_path / "run", resume="latest", quiet=True)
    sansgpu.fit(None, tmp_path / "run", overrides=["objective=own_objective:Halved"], resume="latest", quiet=True)
    assert run.record.config["objective"] == "own_objective:Halved"
    assert run.record.step == 12
    for name, why in (("own_objective:Stranger", "not a subclass of"), ("own_objective:None_", "cannot be imported"),
                      ("no_such_module:Loss", "cannot be imported"), ("nonsense", "objective")):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            sansgpu.fit(None, tmp_path / "refused", overrides=[*overrides, f"objective={name}"], quiet=True)


ADAPTER = """
import os, sys
if os.environ["PYTHONHASHSEED"] == "1":
    import torch
import sansgpu

model = {"name_or_path": sys.argv[1], "adapter": "lora", "merge_adapter": False}
training = {"max_steps": 2, "warmup_steps": 0, "threads": 1, "device": "cpu", "report_to": "none"}
data = {"dataset_name": sys.argv[2], "max_length": 256, "validation_split": 0.3}
run = sansgpu.fit({"task": "sft", "model": model, "training": training, "data": data}, sys.argv[3], quiet=True)
print(os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["OMP_DYNAMIC"], run.events("warning"))
"""


@pytest.mark.long
def test_a_run_from_python_depends_neither_on_hashes_nor_on_the_order_of_imports(tmp_path: Path) -> None:
    base, rows = str(model_folder("qwen2")), str(chat_rows(tmp_path / "rows.jsonl"))
    runs = [tmp_path / "first", tmp_path / "second"]
    free = {**environment(tmp_path / "cache"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    del free["CUBLAS_WORKSPACE_CONFIG"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ADAPTER, base, rows, str(run)],
            env={**free, "PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, run in enumerate(runs, 1)
    ]
    for process in processes:
        assert process.communicate(timeout=240)[0].splitlines()[-1] == ":4096:8 FALSE []"
    names = sorted(file.relative_to(runs[0]) for file in (runs[0] / "final").rglob("*.json*"))
    assert "adapter_config.json" in [name.name for name in names]
    for name in names:
        assert name.name == ".sansgpu.json" or (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes(), name
    assert digests(runs[0]) == digests(runs[1])


def test_a_notebook_shows_one_output_that_is_updated(tmp_path: Path, overrides: list[str]) -> None:
    from sansgpu.views.page import NotebookView

    InteractiveShell.instance()
    with capture_output() as captured:
        sink = NotebookView()
        for event in sansgpu.fit(None, tmp_path / "run", overrides=overrides, quiet=True).record.events:
            sink.emit({**event, "sample": "<b>bold</b>"} if event["event"] == "eval" else event)
    assert [output.update for output in captured.outputs] == [False, *[True] * (len(captured.outputs) - 1)]
    last = captured.outputs[-1].data["text/html"]
    assert "step 12 of 12" in last
    assert "&lt;b&gt;bold" in last
    assert 'value="12"' in last
