"""A classifier that is taught further keeps the ids of its labels and their rows of the head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sansgpu.config import ConfigError
from sansgpu.tasks.classify.objective import ClassifyObjective
from sansgpu.tasks.classify.task import Classify
from sansgpu.tasks.configuration import load_config
from tests.processes import overrides, write_rows
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import model_folder

KNOWN = ("weather", "alarm", "music")  # in an order that sorting would change


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a classifier with three labels, as transformers saves it."""
    folder, base = tmp_path_factory.mktemp("classifier"), model_folder("bert")
    torch.manual_seed(0)
    named: dict[str, Any] = {"id2label": dict(enumerate(KNOWN)), "label2id": {n: i for i, n in enumerate(KNOWN)}}
    AutoModelForSequenceClassification.from_pretrained(base, **named).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def taught(tmp_path: Path, folder: Path, labels: list[Any], **changes: object) -> tuple[Any, list[str], Any]:
    """Returns the labels of a model that is trained further, the messages and the weights of its head."""
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"text {n}", "label": v} for n, v in enumerate(labels)])
    chosen = {"task": "classify", "model.name_or_path": folder, "data.dataset_name": path, "data.validation_name": path}
    config, _ = load_config(None, overrides(TINY, chosen, changes))
    config, corpus = Classify.prepare(config, tmp_path, lambda *_: None)
    return config.data.labels, corpus.notes, ClassifyObjective(config).model.classifier


def rows(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder).classifier.weight


def test_the_same_labels_and_some_of_them_keep_their_ids(tmp_path: Path, classifier: Path) -> None:
    for labels, absent in (([*KNOWN], ""), (["alarm", "music"], "; in no row: weather")):
        names, notes, head = taught(tmp_path, classifier, labels)
        assert names == [*KNOWN]
        assert f"{classifier}: its 3 labels keep their ids{absent} (data.labels)." in notes
        assert torch.equal(head.weight, rows(classifier))


def test_new_labels_are_added_at_the_end(tmp_path: Path, classifier: Path) -> None:
    names, notes, head = taught(tmp_path, classifier, ["timer", "alarm", "music", "calls"])
    assert names == [*KNOWN, "calls", "timer"]
    assert any("its 3 labels keep their ids; added: calls, timer; in no row: weather" in note for note in notes)
    assert torch.equal(head.weight[:3], rows(classifier))
    assert head.weight.shape == (5, rows(classifier).shape[1])
    assert not torch.equal(head.weight[3], head.weight[4])


def test_configured_labels_keep_the_rows_of_their_names(tmp_path: Path, classifier: Path) -> None:
    names, _, head = taught(tmp_path, classifier, [*KNOWN], data__labels=["music", "alarm", "weather"])
    assert names == ["music", "alarm", "weather"]
    assert torch.equal(head.weight, rows(classifier)[[2, 1, 0]])


def test_several_labels_and_columns_keep_their_ids_too(tmp_path: Path, classifier: Path) -> None:
    names, _, head = taught(tmp_path, classifier, [["music", "alarm"], [], ["timer"]])
    assert names == [*KNOWN, "timer"]
    assert torch.equal(head.weight[:3], rows(classifier))


def test_other_labels_are_learned_as_before(tmp_path: Path, classifier: Path) -> None:
    names, notes, _ = taught(tmp_path, classifier, ["no", "yes"])
    assert names == ["no", "yes"]
    assert not any("keep their ids" in note for note in notes)


def test_an_adapter_keeps_its_labels_and_gets_no_new_ones(tmp_path: Path, classifier: Path) -> None:
    from sansgpu.cli import run as cli  # imports no torch until it trains
    from tests.processes import options

    path = write_rows(tmp_path / "first.jsonl", [{"text": f"a {n}", "label": v} for n, v in enumerate("cba" * 3)])
    chosen = {"task": "classify", "model.name_or_path": model_folder("bert"), "data.dataset_name": path,
              "data.validation_name": path, "data.labels": ["c", "b", "a"], "model.adapter": "lora",
              "model.merge_adapter": False, "training.max_steps": 1}  # fmt: skip
    assert cli(["train", *options(TINY, chosen), "--output-dir", str(tmp_path / "run")]) == 0
    adapter = tmp_path / "run/final"
    for change in ("continue", "none"):
        assert taught(tmp_path, adapter, ["a", "b"], model__adapter=change)[0] == ["c", "b", "a"]
    with pytest.raises(ConfigError, match=r"is an adapter with the labels c, b, a, and cannot get new ones \(d\)"):
        taught(tmp_path, adapter, ["a", "d"], model__adapter="continue")


def test_a_reranker_that_compares_two_logits_gets_a_new_head_with_a_note(tmp_path: Path) -> None:
    folder = tmp_path / "reranker"
    shutil.copytree(model_folder("qwen3"), folder)
    modules = [
        {"type": f"sentence_transformers.cross_encoder.modules.{kind}"} for kind in ("Transformer", "LogitScore")
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "text_pair": f"b {n}", "label": n / 9} for n in range(9)])
    chosen = {"task": "classify", "model.name_or_path": folder, "data.dataset_name": rows}
    _, corpus = Classify.prepare(load_config(None, overrides(TINY, chosen))[0], tmp_path, lambda *_: None)
    assert (
        f"{folder} scores pairs of texts by the logits of two tokens; these scores and its prompts are not used, and a "
        "new head is trained."
    ) in corpus.notes
