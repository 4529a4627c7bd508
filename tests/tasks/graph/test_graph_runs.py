"""`task: graph` by the command line: runs are reproducible, evaluated, used and exported; errors are one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from sansgpu.cli import run as cli
from sansgpu.config import Config
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from tests.processes import (
    Captured,
    digests,
    events_of,
    finish,
    json_of,
    kill_when,
    options,
    record,
    refused,
    start,
    train_once,
    write_rows,
)
from tests.tasks.folders import model_folder
from tests.tasks.graph.graphs import rows

pytestmark = pytest.mark.usefixtures("home")

TINY = {
    "task": "graph", "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 2, "model.d_ff": 64,
    "model.max_seq_len": 32, "data.vocab_size": 480, "data.validation_split": 0.2, "data.leaf_mask_ratio": 0.5,
    "data.min_leaf_groups": 1,
    "training.batch_size": 2, "training.gradient_accumulation_steps": 2, "training.learning_rate": 0.003,
    "training.warmup_steps": 2, "training.max_steps": 4, "training.logging_steps": 1, "training.save_steps": 2,
    "training.eval_steps": 2, "training.precision": "fp32", "training.compile": "off", "training.report_to": "none",
    "training.threads": 1, "device": "cpu",
}  # fmt: skip
BERT = {
    "model__leaves": 0,
    "data__leaf_mask_ratio": 0.15,
    "data__min_leaf_groups": 0,
    "model__decay": "none",
    "model__position": "learned",
    "model__embedding_norm": "true",
}
NOT_OF_MASKED = dict.fromkeys(
    ("model.d_model", "model.n_heads", "model.n_layers", "model.d_ff", "model.max_seq_len", "data.vocab_size",
     "data.leaf_mask_ratio", "data.min_leaf_groups"), "",
)  # fmt: skip


def fill(home: Path) -> None:
    write_rows(home / "rows.jsonl", rows())


def settings(home: Path, **changes: object) -> list[str]:
    own = {"data.dataset_name": home / "rows.jsonl"}
    return options(TINY, own, NOT_OF_MASKED if "model__name_or_path" in changes else {}, changes)


def made(home: Path, name: str, **changes: object) -> Path:
    """Trains a run in this process unless one with this name exists, and returns its folder."""
    return train_once(home / name, settings(home, **changes))


ALL_HEADS = {"training__sbo_weight": 0.5, "model__position": "learned"}
RARE_LEAVES = {"data__leaf_mask_ratio": 0.1, "data__min_leaf_groups": 0}


@pytest.mark.parametrize("changes", [{**ALL_HEADS, **RARE_LEAVES}], ids=["all heads"])
def test_a_run_that_was_killed_continues_without_one_bit_of_difference(home: Path, changes: dict[str, object]) -> None:
    long = {"training__max_steps": 10, "training__gradient_accumulation_steps": 4, **changes}
    whole, killed = home / "whole", home / "killed"
    line = ["train", *settings(home, **long), "--output-dir"]
    code, _, error = finish([*line, str(whole)], home / "cache")
    assert code == 0, error
    process = start([*line, str(killed)], home / "cache")
    assert kill_when(process, (killed / "snapshots/step-000004/MANIFEST.json").exists) == -9
    assert not (killed / "final").exists()
    code, _, error = finish([*line, str(killed), "--resume"], home / "cache")
    assert code == 0, error
    kept = [
        {k: v for k, v in digests(run).items() if k.startswith(("snapshots/step-000010", "final"))}
        for run in (whole, killed)
    ]
    assert len(kept[0]) == 3
    assert kept[0] == kept[1]
    assert record(whole) == record(killed)


def test_events_report_metrics_of_tokens_and_leaves(home: Path) -> None:
    run = made(home, "graph")
    step, evaluated = events_of(run, "step")[0], events_of(run, "eval")[-1]
    assert {"mlm_loss", "mlm_acc", "mlm_count"} <= step.keys()
    wanted = {f"{kind}_{key}" for kind in ("mlm", "mnm") for key in ("loss", "acc", "count", "majority_acc")}
    assert wanted | {"tail_acc", "tail_count", "loss"} <= evaluated.keys()
    assert evaluated["loss"] == pytest.approx(evaluated["mlm_loss"] + evaluated["mnm_loss"])


def test_losses_of_steps_with_and_without_masked_leaves_are_comparable(home: Path) -> None:
    run = made(home, "rare", training__max_steps=8, **RARE_LEAVES)
    (start,), events = events_of(run, "start"), events_of(run, "step")
    last = math.log(start["vocab_size"])  # the loss of a uniform prediction, for steps before any leaf is masked
    for event in events:
        last = event.get("mnm_loss", last)
        assert event["loss"] == pytest.approx(event["mlm_loss"] + last)
    assert 0 < sum("mnm_loss" in event for event in events) < len(events)
    losses = [event["loss"] for event in events]
    assert max(losses) < 1.2 * min(losses)


def test_eval_gives_what_the_run_found_with_intervals(home: Path, capsys: Captured) -> None:
    run = made(home, "graph")
    found, then = json_of(capsys, "eval", str(run)), events_of(run, "eval")[-1]
    assert found.pop("event") == then.pop("event")
    del then["seconds"], then["epoch"]  # how long it took and where the run was in its data
    assert {key: found[key] for key in then} == pytest.approx(then, rel=1e-5)
    low, high = found["mlm_interval"]
    assert 0 <= low <= found["mlm_acc"] <= high <= 1
    other = json_of(capsys, "eval", str(run), "--data", str(home / "rows.jsonl"))
    assert other["mlm_count"] > found["mlm_count"]
    folder = json_of(capsys, "eval", str(run / "final"), "--data", str(home / "rows.jsonl"))
    assert folder["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_entities_are_ranked_and_triples_read(home: Path, capsys: Captured) -> None:
    run = made(home, "graph")
    ranked = json_of(capsys, "eval", str(run), "--link-prediction", "--limit", "3")
    assert ranked["tail"]["queries"] == 3
    assert 0 < ranked["tail"]["mrr"] <= 1
    assert cli(["eval", str(run), "--link-prediction"]) == 0
    assert "baseline MRR" in capsys.readouterr().out
    assert cli(["extract", str(run), "--text", "aspirin acid was given", "--head", "aspirin acid"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["relation"] for line in lines} == {"treats", "acts on"}
    assert all(line.keys() == {"doc", "head", "relation", "tail", "score"} for line in lines)
    output = home / "triples.jsonl"
    agreed = json_of(
        capsys, "extract", str(run / "final"), "--data", str(home / "rows.jsonl"), "--relation", "treats",
        "--output", str(output), "--json",
    )  # fmt: skip
    assert agreed["documents"] == 10
    assert agreed["triples"] == len(output.read_text().splitlines())
    assert 0 <= agreed["f1"] <= agreed["best_f1"] <= 1


def test_nothing_is_evaluated_unless_every_weight_is_there(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run = made(home, "graph")
    folder = tmp_path / "half"
    assert cli(["export", str(run), "--output", str(folder)]) == 0
    weights = load_file(folder / "model.safetensors")
    del weights["fusion.matrix.weight"]
    save_file(weights, folder / "model.safetensors")
    said = refused(capsys, "eval", str(folder), "--data", str(home / "rows.jsonl"))
    assert "the weights do not match config.json" in said
    assert "fusion.matrix.weight" in said


def test_an_evaluation_that_cannot_work_is_refused(home: Path, capsys: Captured) -> None:
    run = made(home, "graph")
    assert "is not a run" in refused(capsys, "eval", str(run / "final"))
    assert "--window is only for decoders" in refused(capsys, "eval", str(run), "--window", "9")
    assert "--limit requires --link-prediction" in refused(capsys, "eval", str(run), "--limit", "9")


def test_an_extraction_that_cannot_work_is_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run, text = made(home, "graph"), str(home / "rows.jsonl")
    assert "either --text or --data" in refused(capsys, "extract", str(run))
    assert "--json requires --output" in refused(capsys, "extract", str(run), "--data", text, "--json")
    assert "--relation eats is unknown" in refused(capsys, "extract", str(run), "--text", "a", "--relation", "eats")
    assert "neither a run of task graph" in refused(capsys, "extract", str(tmp_path), "--text", "a")


def test_writing_and_exports_that_cannot_work_are_refused(home: Path, capsys: Captured) -> None:
    run = made(home, "graph")
    assert "cannot generate text" in refused(capsys, "generate", str(run), "--prompt", "a")
    assert "has no adapter; remove --merge" in refused(capsys, "export", str(run), "--merge")
    assert "pass a run" in refused(capsys, "export", str(run / "final"))


def refused_settings(home: Path, capsys: Captured, **changes: object) -> str:
    return refused(capsys, "train", "--dry-run", *settings(home, **changes))


def test_settings_that_cannot_work_are_refused(home: Path, capsys: Captured) -> None:
    assert "n_relations is 1, but the data has 2" in refused_settings(home, capsys, model__n_relations=1)
    assert "has no mask token" in refused_settings(home, capsys, data__tokenizer="char")
    said = refused_settings(home, capsys, data__mask_ratio=0, training__mnm_weight=0)
    assert "there is nothing to predict" in said
    assert "has no effect because model.leaves is 0" in refused_settings(home, capsys, model__leaves=0)


def test_data_that_cannot_be_learned_is_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    short = write_rows(tmp_path / "short.jsonl", [{"text": f"a b {n}"} for n in range(9)])
    assert "would be masked" in refused_settings(home, capsys, **BERT, data__dataset_name=short)
    single = write_rows(tmp_path / "one.jsonl", rows(1))
    assert "validation split" in refused_settings(home, capsys, data__dataset_name=single)


def test_a_bad_row_is_refused_or_skipped(home: Path, tmp_path: Path, capsys: Captured) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [*rows(4), {"text": "a", "triples": [{"head": "a", "tail": "b"}]}])
    assert "line 5" in refused_settings(home, capsys, data__dataset_name=bad)
    assert cli(["train", "--dry-run", *settings(home, data__dataset_name=bad, data__on_bad_row="skip")]) == 0
    assert "⟦" in capsys.readouterr().out


def test_a_plan_knows_what_an_encoder_costs(home: Path, capsys: Captured) -> None:
    plan = json_of(capsys, "plan", *settings(home))
    weights = load_file(made(home, "graph") / "final/model.safetensors")
    assert plan["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert plan["memory_bytes"]["total"] > 4e8


# Masked language models: texts without triples, and transformers' encoders


def test_text_alone_becomes_bert_and_continues_as_one(home: Path, capsys: Captured) -> None:
    run = made(home, "bert", **BERT)
    _, info = AutoModelForMaskedLM.from_pretrained(run / "final", output_loading_info=True)
    assert not info["missing_keys"]
    more = made(home, "more", model__name_or_path=run / "final", data__max_length=32)
    found, then = json_of(capsys, "eval", str(more)), events_of(more, "eval")[-1]
    assert found["loss"] == pytest.approx(then["loss"], rel=1e-5)
    before = json_of(capsys, "eval", str(run / "final"), "--data", str(home / "rows.jsonl"))
    after = json_of(capsys, "eval", str(more / "final"), "--data", str(home / "rows.jsonl"))
    assert after["mlm_loss"] < before["mlm_loss"]
    assert AutoModelForMaskedLM.from_pretrained(more / "final").config.model_type == "bert"
    said = refused_settings(home, capsys, model__name_or_path=run / "final", data__max_length=64)
    assert "exceeds the maximum of 32 tokens" in said


@pytest.mark.parametrize(
    "architecture",
    ["bert", *(pytest.param(a, marks=pytest.mark.long) for a in ("roberta", "distilbert", "modernbert"))],
)
def test_gaps_are_filled_as_transformers_fills_them(architecture: str, tmp_path: Path) -> None:
    """Our logits at the masked tokens of two packed texts equal those of transformers for each text alone."""
    folder = tmp_path / architecture
    plain: Any = AutoModelForMaskedLM.from_pretrained(model_folder(architecture)).eval()
    plain.save_pretrained(folder)
    given = {"task": "graph", "model": {"name_or_path": str(folder)}, "data": {"dataset_name": "-"}}
    ours = load_pretrained(Config.model_validate(given).model, Head("masked"), seed=0).eval()
    patch_model(ours)
    lengths = torch.tensor([9, 14])
    tokens = torch.arange(23) * 31 % 1000 + 5
    gaps = torch.arange(23) % 3 == 1
    with torch.no_grad():
        found = UnpaddedModel(ours, pack=True).masked_lm_logits(tokens, lengths, gaps)
        apart = [plain(input_ids=part[None]).logits[0] for part in tokens.split(lengths.tolist())]
    torch.testing.assert_close(found, torch.cat(apart)[gaps], rtol=1e-3, atol=1e-4)


def test_an_encoder_without_a_mask_token_is_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    said = refused_settings(home, capsys, model__name_or_path=model_folder("qwen2"))
    assert "no mask token" in said
