"""Tiny models of many architectures are trained, resumed and exported, with and without padding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tools.tiny_model import is_encoder
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering

from sansgpu.cli import run as cli
from sansgpu.events.event import Event, EventBuffer
from sansgpu.jobs.snapshots import fork_snapshot
from sansgpu.jobs.train import TrainRequest, train
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import TASKS
from sansgpu.train.loading import ModelRequest, open_model
from tests.processes import digests, overrides, record
from tests.tasks.folders import chat_rows, model_folder, squad

# True if several examples are packed into a row.
PACKS = {
    "llama": True, "qwen2": True, "qwen3": True, "gemma": True, "gemma2": True, "gemma3_text": True,
    "mistral": True, "phi": True, "phi3": True, "gpt2": True, "mixtral": True, "qwen2_moe": True, "mamba": True,
    "gpt_neo": True, "recurrent_gemma": False,
    "bert": True, "roberta": True, "distilbert": True, "modernbert": True, "mpnet": True, "deberta-v2": True,
}  # fmt: skip
# Trained with adapters on all kinds of layers: separate and fused projections, with and without bias, Conv1D, new
# heads, layers next to experts, and mixers of a state space model.
ADAPTED = ("llama", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "mixtral", "qwen2_moe", "mamba", "roberta",
           "distilbert", "modernbert", "mpnet", "deberta-v2")  # fmt: skip
RUNS = [(name, "none") for name in PACKS] + [(name, "lora") for name in ADAPTED]
# Resumed even without long tests: dropout in the model, in adapters or nowhere; fused layers; packing and padding.
RESUMED = {("gpt2", "none"), ("mamba", "none"), ("phi3", "lora")}
# Runs in bf16, which compute with rounded frozen weights.
NARROW = [(name, "lora") for name in ADAPTED] + [("qwen2", "none"), ("qwen2", "dora"), ("gpt2", "dora")]
OFTEN_NARROW = (("qwen2", "none"), ("gemma2", "lora"))
NARROW_RUNS = [pytest.param(*run, marks=[] if run in OFTEN_NARROW else pytest.mark.long) for run in NARROW]
ROWS = 8


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")
    squad(home / "squad.json")


def head_of(architecture: str) -> Head:
    return Head("qa" if is_encoder(architecture) else "causal")


def settings(home: Path, architecture: str, model: Path, **changes: object) -> tuple[str, ...]:
    asking = head_of(architecture).type == "qa"
    chosen = {
        "task": "qa" if asking else "sft", "model.name_or_path": model,
        "data.dataset_name": home / ("squad.json" if asking else "chat.jsonl"), "data.max_length": 96,
        "training.batch_size": 2, "training.gradient_accumulation_steps": 1, "training.max_steps": 4,
        "training.learning_rate": 0.002, "training.warmup_steps": 1, "training.logging_steps": 1,
        "training.save_steps": 2, "training.eval_steps": 2, "training.precision": "fp32", "training.compile": "off",
        "training.report_to": "none", "training.threads": 1, "device": "cpu",
        **({"data.doc_stride": 16} if asking else {}),
    }  # fmt: skip
    return tuple(overrides(chosen, changes))


def run_job(folder: Path, overrides: tuple[str, ...], resume: str | None = None) -> list[Event]:
    sink = EventBuffer()
    train(TrainRequest(None, overrides, folder, resume), [sink], lambda *_: None)
    return sink.events


@cache
def trained(home: Path, architecture: str, adapter: str, precision: str) -> tuple[Path, list[Event]]:
    """Returns the folder and the events of a run of four steps, which is trained once for all tests."""
    run = home / f"{architecture}-{adapter}-{precision}"
    chosen = {"model__adapter": adapter, "training__precision": precision}
    if adapter != "none":
        chosen |= {"model__lora_dropout": 0.1}
    return run, run_job(run, settings(home, architecture, model_folder(architecture), **chosen))


def warnings_of(events: list[Event], words: str) -> list[str]:
    return [e["message"] for e in events if e["event"] == "warning" and words in e["message"]]


@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [pytest.param(*run, marks=[] if run in RESUMED else pytest.mark.long) for run in RUNS],
)
def test_a_resumed_run_equals_an_uninterrupted_one(home: Path, architecture: str, adapter: str) -> None:
    """gpt2, the encoders and the adapters use dropout."""
    straight, _ = trained(home, architecture, adapter, "fp32")
    resumed = fork_snapshot(straight, "2", home / f"{architecture}-{adapter}-resumed", pytest.fail)
    run_job(resumed, (), resume="latest")
    last = [{k: v for k, v in digests(run).items() if "step-000002" not in k} for run in (straight, resumed)]
    assert last[0] == last[1]
    assert {name.split("/")[0] for name in last[0]} == {"snapshots", "final"}
    steps = [[e for e in record(run) if e["event"] in ("step", "eval")] for run in (straight, resumed)]
    assert steps[0] == steps[1]
    assert [e["step"] for e in steps[0] if e["event"] == "step"] == [1, 2, 3, 4]


def outputs(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) * 23 % 1000
    with torch.no_grad():
        out = model.eval()(tokens)
    return out.logits if "logits" in out else torch.stack((out.start_logits, out.end_logits))


@pytest.mark.parametrize(
    ("architecture", "adapter", "precision"),
    [
        *(pytest.param(*run, "fp32", marks=[] if run in RESUMED else pytest.mark.long) for run in RUNS),
        *(pytest.param(*run, "bf16", marks=[] if run in OFTEN_NARROW else pytest.mark.long) for run in NARROW),
    ],
)
def test_exported_models_have_equal_logits(home: Path, architecture: str, adapter: str, precision: str) -> None:
    run, _ = trained(home, architecture, adapter, precision)
    ours = open_model(ModelRequest(str(run)), "evaluate", pytest.fail)
    kind = AutoModelForQuestionAnswering if is_encoder(architecture) else AutoModelForCausalLM
    theirs, info = kind.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values()), info
    assert is_encoder(architecture) or theirs.config.use_cache
    torch.testing.assert_close(outputs(theirs), outputs(ours.objective.model), rtol=1e-4, atol=1e-4)
    before = load_pretrained(ours.config.model, head_of(architecture), ours.config.training.seed)
    assert (outputs(theirs) - outputs(before)).abs().max() > 1e-2, "nothing was trained"


@pytest.mark.parametrize(("architecture", "adapter"), NARROW_RUNS)
def test_the_last_snapshot_exports_to_the_bytes_of_final(
    home: Path, tmp_path: Path, architecture: str, adapter: str
) -> None:
    """Frozen weights equal the base model's bit by bit, although bf16 steps use rounded ones."""
    run, _ = trained(home, architecture, adapter, "bf16")
    torch.set_num_threads(2)  # the bytes do not depend on the number of threads
    assert cli(["export", str(run), "--output", str(tmp_path / "export")]) == 0
    names = {path.name for path in (run / "final").iterdir()}
    assert names == {path.name for path in (tmp_path / "export").iterdir()} >= {"model.safetensors", "config.json"}
    for name in names - {"README.md"}:
        assert (run / "final" / name).read_bytes() == (tmp_path / "export" / name).read_bytes(), name
    final, base = (load_file(f / "model.safetensors") for f in (run / "final", model_folder(architecture)))
    places = {name: next((n for n in final if n == name or n.endswith(f".{name}")), None) for name in base}
    base = {name: value for name, value in base.items() if places[name]}  # final/ of an encoder has no pooler
    kept = {name for name in base if torch.equal(base[name], final[str(places[name])])}
    assert kept != base.keys(), "nothing was trained"
    assert adapter == "none" or {name for name in base if "embed" in name or "norm" in name.lower()} <= kept


@pytest.mark.parametrize(
    ("architecture", "packs"),
    [pytest.param(*one, marks=() if (one[0], "none") in RESUMED else pytest.mark.long) for one in PACKS.items()],
)
def test_models_that_cannot_be_packed_are_padded_with_one_warning(home: Path, architecture: str, packs: bool) -> None:
    _, events = trained(home, architecture, "none", "fp32")
    assert len(warnings_of(events, "does not support packing")) == (0 if packs else 1)


def test_requested_padding_gives_no_warning(home: Path) -> None:
    chosen = settings(home, "modernbert", model_folder("modernbert"), data__pack_sequences=False)
    events = run_job(home / "asked-for", (*chosen, "training.max_steps=1"))
    assert not warnings_of(events, "does not support packing")


def task_of(home: Path, overrides: tuple[str, ...]) -> Any:
    """Returns a task with its model in evaluation mode, i.e. without dropout."""
    config, _ = load_config(None, overrides)
    kind: Any = TASKS[config.kind]
    config, corpus = kind.prepare(config, home / "cache", lambda *_: None)
    task = kind(config, corpus, ROWS)
    task.model.eval()
    return task


def losses(home: Path, architecture: str, pack: bool, micro_batches: list[int]) -> list[float]:
    """Returns the mean loss of the first batch for each micro-batch size."""
    task = task_of(home, settings(home, architecture, model_folder(architecture), data__pack_sequences=pack))
    assert task.objective.unpadded.packs == (pack and PACKS[architecture])
    batch = task.batch(0)
    with torch.no_grad():
        sums = [sum(float(task.loss(piece)) for piece in batch.micro_batches(size)) for size in micro_batches]
    return [total / batch.target_count() for total in sums]


@pytest.mark.parametrize(
    "architecture", [pytest.param(n, marks=() if (n, "none") in RESUMED else pytest.mark.long) for n in PACKS]
)
def test_neither_packing_nor_micro_batches_change_the_loss(home: Path, architecture: str) -> None:
    """Examples are longer than the sliding windows of some of these models."""
    packed = losses(home, architecture, True, [1, 3, ROWS])
    padded = losses(home, architecture, False, [1, 3, ROWS])
    assert packed == pytest.approx([padded[0]] * 3, rel=2e-5)  # padded[0]: one example per micro-batch, no padding
    assert padded == pytest.approx([padded[0]] * 3, rel=2e-5)
