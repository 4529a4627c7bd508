"""The Hub accepts the model cards of every task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from sansgpu.cli import run as cli
from sansgpu.views.model_card import model_card
from sansgpu.views.record import RunRecord
from tests.processes import options, train_once, write_corpus, write_rows
from tests.tasks.folders import chat_rows, labeled_rows, model_folder, squad
from tests.tasks.graph.graphs import rows
from tests.views.runs import train

SMALL = {
    "training.max_steps": 2, "training.eval_steps": 1, "training.save_steps": 1, "training.batch_size": 2,
    "training.gradient_accumulation_steps": 1, "training.precision": "fp32", "training.compile": "off",
    "training.report_to": "none", "training.threads": 1, "device": "cpu", "data.max_length": 96,
}  # fmt: skip
GRAPH = {
    "task": "graph", "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 1, "model.d_ff": 32,
    "model.max_seq_len": 32, "data.max_length": 32, "data.vocab_size": 480, "data.validation_split": 0.2,
}  # fmt: skip
BERT = {
    "model.leaves": 0, "model.decay": "none", "model.position_embedding": "learned", "model.embedding_norm": "true",
}  # fmt: skip


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")
    squad(home / "squad.json")
    labeled_rows(home / "labeled.jsonl")
    write_rows(home / "graph.jsonl", rows())
    write_corpus(home / "texts.jsonl", 20)


def own_settings(home: Path, kind: str) -> dict[str, object]:
    own: dict[str, dict[str, object]] = {
        "sft": {"task": "sft", "model.name_or_path": model_folder("qwen2"), "data.dataset_name": home / "chat.jsonl"},
        "qa": {
            "task": "qa", "model.name_or_path": model_folder("bert"), "data.dataset_name": home / "squad.json",
            "data.doc_stride": 16,
        },
        "classify": {
            "task": "classify", "model.name_or_path": model_folder("bert"), "data.dataset_name": home / "labeled.jsonl",
        },
        "masked": {
            "task": "graph", "model.name_or_path": model_folder("bert"), "data.dataset_name": home / "texts.jsonl",
            "data.max_length": 32,
        },
        "graph": {
            **GRAPH, "data.dataset_name": home / "graph.jsonl", "data.leaf_mask_ratio": 0.5, "data.min_leaf_groups": 1,
        },
        "bert": {**GRAPH, **BERT, "data.dataset_name": home / "texts.jsonl"},
    }  # fmt: skip
    own["adapter"] = {**own["sft"], "model.adapter": "lora", "model.merge_adapter": "false"}
    return own[kind]


@pytest.mark.parametrize(
    ("kind", "library", "pipeline", "words", "load"),
    [
        ("sft", "transformers", "text-generation", "fine-tuned on conversations", AutoModelForCausalLM),
        ("adapter", "peft", "text-generation", "AutoPeftModelForCausalLM", None),
        ("qa", "transformers", "question-answering", "exact match (%)", AutoModelForQuestionAnswering),
        ("classify", "transformers", "text-classification", "macro F1 (%)", AutoModelForSequenceClassification),
        ("masked", "transformers", "fill-mask", "masked token accuracy (%)", AutoModelForMaskedLM),
        ("graph", "sansgpu", "feature-extraction", "masked leaf accuracy (%)", None),
        ("bert", "transformers", "fill-mask", "| layout | BERT |", AutoModelForMaskedLM),
    ],
)
def test_every_task_leaves_a_card_that_is_true_and_parsed(
    kind: str, library: str, pipeline: str, words: str, load: Callable[..., object] | None, home: Path,
) -> None:  # fmt: skip
    run = train_once(home / kind, options(SMALL, own_settings(home, kind)))
    card = ModelCard.load(run / "final/README.md")
    data, record = card.data, RunRecord.open(run)
    assert (data.library_name, data.pipeline_tag, data.license) == (library, pipeline, None)
    measured = {result.metric_type: result.metric_value for result in data.eval_results}
    assert measured["loss"] == pytest.approx(record.evaluations[-1]["loss"], abs=1e-5)
    assert words in card.text
    assert "/tmp" not in card.content
    assert str(home) not in card.content
    if kind != "graph":
        assert "from_pretrained" in card.text
    if load is not None:
        load.from_pretrained(run / "final")  # type: ignore[attr-defined]


def test_a_card_of_a_snapshot_tells_of_that_step(home: Path) -> None:
    run, folder = train(home, "text", training__keep_last=9), home / "exported"
    assert cli(["export", str(run), "--snapshot", "3", "--output", str(folder)]) == 0
    card, record = ModelCard.load(folder / "README.md"), RunRecord.open(run)
    loss = next(event["loss"] for event in record.evaluations if event["step"] == 3)
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["loss"] == pytest.approx(loss, abs=1e-5)
    assert "| steps | 3 |" in card.text
    assert "`corpus.jsonl`" in card.text
    assert card.data.datasets is None
    assert "was not evaluated" in model_card(record, step=4)


def test_a_card_of_a_task_outside_the_package_claims_only_what_is_known(home: Path) -> None:
    record = RunRecord.open(train(home, "outside", training__max_steps=2))
    record.config["task"] = "somewhere.tasks:Order"
    card = ModelCard(model_card(record))
    assert "This is a model trained with the task `somewhere.tasks:Order`." in card.text
    assert "transformers" not in card.text.split("## Versions")[0]
    assert (card.data.library_name, card.data.pipeline_tag, card.data.eval_results) == ("sansgpu", None, None)
    assert "| loss |" in card.text


@pytest.mark.parametrize(
    ("name", "datasets"),
    [
        ("roneneldan/TinyStories", ["roneneldan/TinyStories"]),
        ("wikitext", ["wikitext"]),
        ("/home/ada/secret/texts", None),
        ("~/texts", None),
        ("../notes", None),
        ("texts/notes.txt", None),
        ("texts/rows.tsv", None),
        ("words.conll.gz", None),
        ("python-stdlib", None),
    ],
)
def test_a_card_names_data_of_the_hub_and_no_path(name: str, datasets: list[str] | None, home: Path) -> None:
    record = RunRecord.open(train(home, "named", training__max_steps=2))
    record.config["data"]["dataset_name"] = name
    card = ModelCard(model_card(record))
    assert card.data.datasets == datasets
    assert "secret" not in card.content
    assert "~" not in card.content
    assert ".." not in card.content


def test_a_card_shows_markup_in_names_instead_of_rendering_it(home: Path) -> None:
    record = RunRecord.open(train(home, "<img src=run>", training__max_steps=2))
    record.config["data"] |= {"dataset_name": "<img src=data>`<img src=quoted>", "dataset_config": "<img src=part>"}
    record.environment["isa"] = "[cpu](https://example.com) <img src=cpu>"
    page = MarkdownIt().render(ModelCard(model_card(record)).text)
    for name in ("run", "data", "quoted", "part", "cpu"):
        assert f"&lt;img src={name}&gt;" in page
    assert "<img" not in page
    assert "<a " not in page


def test_a_card_names_the_validation_data_of_its_results(home: Path) -> None:
    record = RunRecord.open(train(home, "named", training__max_steps=2))
    for held, name in ((None, "(validation split)"), ("/home/ada/secret/dev.jsonl", "dev.jsonl")):
        record.config["data"]["validation_name"] = held
        card = ModelCard(model_card(record))
        assert all(result.dataset_name.endswith(name) for result in card.data.eval_results or ())
        assert card.data.eval_results
        assert "secret" not in card.content
