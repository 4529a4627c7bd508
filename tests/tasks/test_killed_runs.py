"""A killed and resumed fine-tuning run equals an uninterrupted one byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import digests, events_of, finish, kill_when, options, record, start
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import conll, labeled_rows, model_folder, preference_rows, prompt_rows
from tests.tasks.texts import text_rows

STEPS = 6
KTO = {"training.preference.loss": "kto"}
GRPO = {
    "training.grpo.reward": "tests.tasks.grpo.rewards:low_ids", "training.grpo.group_size": 2,
    "training.grpo.max_completion_length": 8, "training.grpo.beta": 0.1, "training.learning_rate": 0.05,
}  # fmt: skip
LORA = {"model.adapter": "lora", "model.lora_dropout": 0.1}


def fill(home: Path) -> None:
    labeled_rows(home / "classify.jsonl")
    conll(home / "tokens.conll")
    text_rows(home / "embed.jsonl", "triplets")
    preference_rows(home / "preference.jsonl")
    prompt_rows(home / "grpo.jsonl")


def arguments(home: Path, task: str, run: Path, changes: dict[str, object]) -> list[str]:
    data = home / ("tokens.conll" if task == "tokens" else f"{task}.jsonl")
    model = model_folder("qwen2" if task in ("preference", "grpo") else "bert")
    own = {
        "task": task, "model.name_or_path": model, "data.dataset_name": data,
        "data.validation_split": 0.2, "training.max_steps": STEPS, "training.gradient_accumulation_steps": 4,
    }  # fmt: skip
    return ["train", *options(TINY, own, changes), "--output-dir", str(run)]


def outcome(run: Path) -> tuple[dict[str, str], list[dict[str, object]]]:
    """Returns the digests of the last snapshot and final/, and all events without times."""
    kept = {k: v for k, v in digests(run).items() if k.startswith((f"snapshots/step-{STEPS:06d}", "final"))}
    assert len(kept) == 3
    return kept, record(run)


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("grpo", {**GRPO, **LORA}),
        pytest.param("classify", {}, marks=pytest.mark.long),
        pytest.param("preference", KTO, marks=pytest.mark.long),
        *(pytest.param(*c, marks=pytest.mark.long) for c in (("tokens", {}), ("embed", {}), ("embed", LORA))),
    ],
)
def test_a_killed_run_resumes_byte_for_byte(home: Path, tmp_path: Path, task: str, changes: dict[str, object]) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    code, _, error = finish(arguments(home, task, straight, changes), home / "cache")
    assert code == 0, error
    command = arguments(home, task, killed, changes)
    assert kill_when(start(command, home / "cache"), (killed / "snapshots/step-000002/MANIFEST.json").exists) == -9
    assert not (killed / "final").exists()
    code, _, error = finish([*command, "--resume"], home / "cache")
    assert code == 0, error
    assert outcome(killed) == outcome(straight)
    losses = [event["loss"] for event in events_of(straight, "eval")]
    assert losses[-1] != losses[0]
