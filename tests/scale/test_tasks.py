"""Every task learns the same with several processes as with one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sansgpu.cli import run as cli
from tests.processes import options, use_cache, write_corpus, write_rows
from tests.scale.launch import finish_forks
from tests.scale.test_runs import losses
from tests.tasks.folders import chat_rows, conll, labeled_rows, model_folder, preference_rows, prompt_rows, squad
from tests.tasks.graph.graphs import rows
from tests.tasks.texts import text_rows

STEPS = 4
# Micro-batches of one example, so that a weight may be used in one micro-batch of a step and in no other.
TUNED = {
    "training.batch_size": 1, "training.gradient_accumulation_steps": 6, "training.max_steps": STEPS,
    "training.learning_rate": 0.002, "training.warmup_steps": 2, "training.logging_steps": 1, "training.eval_steps": 2,
    "training.optimizer": "adamw", "training.precision": "fp32", "training.compile": "off", "training.threads": 1,
    "training.report_to": "none", "device": "cpu",
}  # fmt: skip
SMALL = {
    "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 2, "model.d_ff": 64, "model.max_seq_len": 32,
    "model.dropout": 0, "data.vocab_size": 480,
}  # fmt: skip
GRAPH = {
    "model.attention_dropout": 0, "model.relation_dropout": 0, "data.validation_split": 0.2,
    "data.leaf_mask_ratio": 0.5, "data.min_leaf_groups": 1, "training.sbo_weight": 0.5,
}  # fmt: skip
GRPO = {
    "training.grpo.reward": "tests.tasks.grpo.rewards:low_ids", "training.grpo.group_size": 3,
    "training.grpo.max_completion_length": 8,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EVERY_THIRD = 3  # one in three graph rows has triples


def overrides_by_task(home: Path) -> dict[str, dict[str, object]]:
    """Returns overrides for a short run of each task without dropout."""
    graph_rows = [row if number % EVERY_THIRD == 0 else {**row, "triples": []} for number, row in enumerate(rows(24))]
    text, chat = write_corpus(home / "corpus.jsonl"), chat_rows(home / "chat.jsonl")
    sft = {"data.dataset_name": chat, "data.max_length": 96, "model.name_or_path": model_folder("qwen2")}
    bert = {"data.max_length": 64, "model.name_or_path": model_folder("bert", **NO_DROPOUT)}
    return {
        "pretrain": {**SMALL, "data.dataset_name": text, "data.max_length": 32},
        "graph": {**SMALL, **GRAPH, "data.dataset_name": write_rows(home / "rows.jsonl", graph_rows)},
        "masked": {"task": "graph", **bert, "data.dataset_name": text, "data.validation_split": 0.1},
        "sft": sft,
        "lora": {"task": "sft", **sft, "model.adapter": "lora"},
        "tokens": {**bert, "data.dataset_name": conll(home / "tags.conll"), "data.validation_split": 0.2},
        "classify": {**bert, "data.dataset_name": labeled_rows(home / "labeled.jsonl")},
        "few_shot": {
            "task": "classify", **bert, "data.dataset_name": home / "labeled.jsonl", "training.few_shot": "true",
        },
        "preference": {**sft, "data.dataset_name": preference_rows(home / "pairs.jsonl")},
        "kto": {
            "task": "preference", **sft, "data.dataset_name": home / "pairs.jsonl", "training.preference.loss": "kto",
        },
        "grpo": {**sft, **GRPO, "data.dataset_name": prompt_rows(home / "prompts.jsonl")},
        "qa": {**bert, "data.dataset_name": squad(home / "squad.json", impossible=True), "data.doc_stride": 16},
        "embed": {**bert, "data.dataset_name": text_rows(home / "texts.jsonl", "triplets", 24)},
        "static": {"data.dataset_name": home / "texts.jsonl", "data.max_length": 64, "data.vocab_size": 300},
    }  # fmt: skip


def runs(home: Path, ranks: int, names: Collection[str]) -> dict[str, list[str]]:
    """Returns the command of each task's run."""
    return {
        name: ["train", *options({"task": name}, TUNED, own), "--output-dir", str(home / f"{name}-{ranks}")]
        for name, own in overrides_by_task(home).items()
        if name in names
    }


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("graph", "grpo", "embed")),
        *(pytest.param(ranks, None, marks=pytest.mark.long) for ranks in (2, 3)),
    ],
)
def test_every_task_learns_the_same_over_processes(
    tmp_path: Path, ranks: int, names: Collection[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    names = names or overrides_by_task(tmp_path).keys()
    for command in runs(tmp_path, 1, names).values():
        assert cli(command) == 0
    for name, command in runs(tmp_path, ranks, names).items():
        code, out = finish_forks(ranks, command, tmp_path / "cache")
        assert code == 0, out
        one, other = tmp_path / f"{name}-1", tmp_path / f"{name}-{ranks}"
        assert len(losses(one)) == STEPS + 2
        assert losses(other) == pytest.approx(losses(one), abs=1e-5), name
        expected, found = (load_file(run / f"snapshots/step-{STEPS:06d}/model.safetensors") for run in (one, other))
        # Biases are not compared: the exact gradient of some is zero, and AdamW turns rounding errors into full steps.
        for key, weight in expected.items():
            assert weight.ndim < 2 or (found[key] - weight).abs().max() < 1e-5, (name, key)
