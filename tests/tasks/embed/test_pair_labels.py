"""Labels of pairs of texts: similarities, duplicates, and entailment and contradiction (NLI)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sansgpu.config import ConfigError
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.embed.data import EmbeddingCorpus
from sansgpu.tasks.embed.task import TextEmbedding
from tests.processes import overrides, write_rows
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import model_folder

BASE = {"task": "embed", "model.name_or_path": model_folder("bert")}
LABELS = ("entailment", "neutral", "contradiction")


def prepared(path: Path, held: Path | None = None, **changes: object) -> tuple[Any, EmbeddingCorpus]:
    chosen = {"data.dataset_name": path, "data.validation_name": held or path}
    config, _ = load_config(None, overrides(TINY, BASE, chosen, changes))
    return TextEmbedding.prepare(config, path.parent, lambda *_: None)


def pairs(path: Path, labels: list[Any], column: str = "label") -> Path:
    rows = [{"sentence1": f"door {n}", "sentence2": f"gate {n}", column: label} for n, label in enumerate(labels)]
    return write_rows(path, rows)


def scores(corpus: EmbeddingCorpus) -> list[float]:
    assert corpus.train.scores is not None
    return corpus.train.scores.tolist()


def texts(corpus: EmbeddingCorpus, part: str = "train") -> list[list[str]]:
    groups = getattr(corpus, part)
    read = corpus.tokenizer.decode
    return [[read(groups.texts[t], skip_special_tokens=True).strip() for t in one] for one in groups.members]


def inference(path: Path, written: Any, count: int = 3) -> Path:
    """Writes three hypotheses for each premise; `written` turns the number of a label into the value of the column."""
    rows = [
        {"premise": f"door {n} is open", "hypothesis": f"{word} {n}", "label": written(label)}
        for n in range(count)
        for label, word in ((2, "shut"), (0, "not shut"), (1, "red"))
    ]
    return write_rows(path, rows)


@pytest.mark.parametrize(
    "written", [int, str, float, lambda n: LABELS[n], lambda n: LABELS[n].upper(), lambda n: "enc"[n]], ids=range(6)
)
def test_inference_becomes_triplets(tmp_path: Path, written: Any) -> None:
    _, corpus = prepared(inference(tmp_path / "nli.jsonl", written))
    assert texts(corpus) == [[f"door {n} is open", f"not shut {n}", f"shut {n}"] for n in range(3)]
    assert texts(corpus, "validation") == texts(corpus)
    (note, _) = [note for note in corpus.notes if "natural language inference" in note]
    assert "3 triplets of a premise, an entailed and a contradicting text, 0 pairs without a contradiction" in note
    assert "left out: 0 contradictions of premises without an entailed text, 3 neutral, 0 without a label (-1)" in note


def test_inference_without_counterparts_is_counted(tmp_path: Path) -> None:
    rows: list[tuple[str, str, Any]] = [
        ("a", "a1", 0), ("a", "a2", 0), ("a", "a3", 2), ("a", "a4", 2), ("a", "a5", 2), ("b", "b1", 0), ("c", "c1", 2),
        ("d", "d1", 1), ("d", "d2", -1),
    ]  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", [{"text1": a, "text2": b, "label": label} for a, b, label in rows])
    _, corpus = prepared(path)
    assert texts(corpus) == [["a", "a1", "a3", "a5"], ["a", "a2", "a4"], ["b", "b1"]]
    assert "2 triplets of" in corpus.notes[0]
    assert "1 pair without a contradiction; left out: 1 contradiction of premises" in corpus.notes[0]
    assert "1 neutral, 1 without a label (-1)" in corpus.notes[0]
    held = write_rows(tmp_path / "held.jsonl", [{"text1": "a", "text2": "b", "label": 0}])
    _, corpus = prepared(path, held)  # the labels mean the same in a smaller validation set
    assert texts(corpus, "validation") == [["a", "b"]]
    assert not any("also in the training data" in note for note in corpus.notes)
    assert any("also in the training data: 3 of 3 validation rows" in note for note in prepared(path)[1].notes)
    rows = [("a", "b", 7)]
    held = write_rows(tmp_path / "held.jsonl", [{"text1": a, "text2": b, "label": label} for a, b, label in rows])
    with pytest.raises(ConfigError, match=r"held\.jsonl, line 1: its label is '7' instead of entailment"):
        prepared(path, held)


@pytest.mark.parametrize(
    ("labels", "expected", "said"),
    [
        ([0, 1, 1], [0, 1, 1], "the labels 0, 1 of pairs are read as similarities: 1 for texts that mean the same"),
        (["0", "1", "0"], [0, 1, 0], "If 0 does, as for entailment in RTE and QNLI, swap them"),
        ([True, False], [1, 0], "the labels 0, 1 of pairs are read as similarities"),
        ([-1, 1], [-1, 1], "the labels -1, 1 of pairs are read as similarities"),
        (["not_duplicate", "duplicate"], [0, 1], "labels of pairs are read as similarities: duplicate = 1, not_dup"),
        (["entailment", "not_entailment"], [1, 0], "entailment = 1, not_entailment = 0"),
        (["Paraphrase", "non-paraphrase"], [1, 0], "Paraphrase = 1, non-paraphrase = 0"),
        (["same", "unrelated"], [1, 0], "same = 1, unrelated = 0"),
        ([0.5, 1.0, 0.0], [0.5, 1, 0], ""),
        ([4.8, 2.4, 0], [0.96, 0.48, 0], "scores from 0 to 4.8 are divided by 5 (data.score_scale)"),
        (["3.800", "5.000"], [0.76, 1], "scores from 3.8 to 5 are divided by 5"),
        (["5.0", "4.0", "1.0"], [1, 0.8, 0.2], "scores from 1 to 5 are divided by 5"),
    ],
)
def test_labels_that_mean_similarities(tmp_path: Path, labels: list[Any], expected: list[float], said: str) -> None:
    _, corpus = prepared(pairs(tmp_path / "a.jsonl", labels))
    assert scores(corpus) == pytest.approx(expected)
    assert said in "\n".join(corpus.notes)


@pytest.mark.parametrize("labels", [[1, 2, 3], [0, 5, 3], [1, 2], [0, 1, 2, 3], [10, 20]])
def test_whole_numbers_that_may_be_classes_need_a_choice(tmp_path: Path, labels: list[int]) -> None:
    path = pairs(tmp_path / "a.jsonl", labels)
    with pytest.raises(ConfigError, match=r"may be scores or classes; set data\.pair_labels to similarity, and "):
        prepared(path)
    highest = max(labels)
    _, corpus = prepared(path, data__pair_labels="similarity")
    assert scores(corpus) == pytest.approx([label / highest for label in labels])
    _, corpus = prepared(path, data__score_scale=20)
    assert scores(corpus) == pytest.approx([label / 20 for label in labels])
    assert scores(prepared(pairs(path, labels, "similarity_score"))[1]) == pytest.approx([n / highest for n in labels])


def test_a_choice_is_kept(tmp_path: Path) -> None:
    path = inference(tmp_path / "a.jsonl", int)
    _, corpus = prepared(path, data__pair_labels="similarity")
    assert scores(corpus)[:3] == [1, 0, 0.5]
    with pytest.raises(ConfigError, match="no row has the label entailment"):
        prepared(pairs(path, [1, 2]), data__pair_labels="nli")
    with pytest.raises(ConfigError, match="line 1: its label is 'sport' instead of a similarity"):
        prepared(pairs(path, ["sport", "news"]))


OUT_OF_RANGE: list[tuple[list[Any], Any, str]] = [
    ([0.5, 1.0], 3.0, "its score 3 is not between 0 and data.score_scale 1"),
    ([0.5, 1.0], -0.5, "its score -0.5 is not between 0 and data.score_scale 1"),
    ([4.5, 0.5], -1.0, "its score -1 is not between 0 and data.score_scale 5"),
    ([4.5, 0.5], 7, "its score 7 is not between 0 and data.score_scale 5"),
    ([0, 1], -1, "its label is -1, which means that it has no label"),
    ([-0.5, 1.0], -1.5, "its score -1.5 is not between -1 and data.score_scale 1"),
]


@pytest.mark.parametrize(("given", "bad", "said"), OUT_OF_RANGE)
def test_scores_outside_the_range_of_training_are_bad_rows(
    tmp_path: Path, given: list[Any], bad: Any, said: str
) -> None:
    path, held = pairs(tmp_path / "a.jsonl", given), pairs(tmp_path / "held.jsonl", [*given, bad])
    with pytest.raises(ConfigError, match=rf"held\.jsonl, line 3: {said}"):
        prepared(path, held)
    _, corpus = prepared(path, held, data__on_bad_row="skip")
    assert len(corpus.validation) == 2
    assert any("bad rows skipped: 1 of 3" in note for note in corpus.notes)


def test_a_missing_score_among_training_rows_is_a_bad_row(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", [0, 1, -1, 0])
    with pytest.raises(ConfigError, match="line 3: its label is -1, which means that it has no label"):
        prepared(path)
    assert scores(prepared(path, data__on_bad_row="skip")[1]) == [0, 1, 0]
    path = pairs(tmp_path / "a.jsonl", [4.5, 2, -1.0, 0], "score")
    with pytest.raises(ConfigError, match=r"line 3: its score -1 is not between 0 and data\.score_scale 5"):
        prepared(path)


def test_names_in_the_form_of_public_data(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"gold_label": label, "sentence1": "a door", "sentence2": f"a {label}", "pairID": f"1{label}"}
        for label in (*LABELS, "-")
    ]
    _, corpus = prepared(write_rows(tmp_path / "snli.jsonl", rows))
    assert texts(corpus) == [["a door", "a entailment", "a contradiction"]]
    assert "1 without a label (-1)" in corpus.notes[0]
    rows = [{"question1": f"a {n}", "question2": f"b {n}", "is_duplicate": n % 2} for n in range(4)]
    assert scores(prepared(write_rows(tmp_path / "qqp.jsonl", rows))[1]) == [0, 1, 0, 1]
    assert json.loads((tmp_path / "qqp.jsonl").read_text().splitlines()[0])["is_duplicate"] == 0
