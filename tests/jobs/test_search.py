"""`sansgpu search`: splitting files into passages, the index, and the command."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.events.progress import ignore_progress
from sansgpu.jobs.embed import open_encoder, search
from sansgpu.tasks.embed.index import PassageIndex
from sansgpu.tasks.embed.passages import PassageRules, Spans
from sansgpu.train.loading import ModelRequest
from tests.processes import Captured, messages
from tests.tasks.fine_tuned import sentence
from tests.tasks.folders import model_folder

pytestmark = pytest.mark.usefixtures("home")

FOX = "The quick brown fox that lives in a den jumps over the lazy dog every single morning."
BREAD = "Bread is made of flour and water and salt,\nand bakers rise early to put it into ovens."
SEA = "Ships sail the seven seas in storm and calm, with a captain who never sleeps at night."


def words(texts: list[str]) -> list[Spans]:
    return [[match.span() for match in re.finditer(r"\w+", text)] for text in texts]


class HashedWords:
    """Encodes texts as vectors of hashed word counts, and records the texts it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(
        self, texts: Sequence[str], encoded: Callable[[int], None] = lambda done: None
    ) -> np.ndarray[Any, Any]:
        self.texts += texts
        vectors = np.zeros((len(texts), 64), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                vector[hashlib.sha256(word.encode()).digest()[0] % 64] += 1
        return vectors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "inner").mkdir(parents=True)
    (root / "animals.md").write_text(f"# Animals\n\n{FOX}\n\n{SEA}\n", encoding="utf-8")
    (root / "inner/food.txt").write_text(f"\n\n{BREAD}\n", encoding="utf-8")
    (root / "rows.jsonl").write_text(f"\n{json.dumps({'text': SEA + ' Sails are white.'})}\n", encoding="utf-8")
    return root


def files_in(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def opened(tmp_path: Path, root: Path, max_tokens: int = 100) -> tuple[PassageIndex, HashedWords, list[str]]:
    encode, warnings = HashedWords(), list[str]()
    index = PassageIndex(tmp_path / "index", PassageRules(words, max_tokens), encode, encode)
    index.open(files_in(root), warnings.append, ignore_progress)
    return index, encode, warnings


def test_passages_of_documents_have_their_page(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    cells = [{"cell_type": "markdown", "source": text} for text in (FOX, BREAD, SEA)]
    (root / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    (root / "b.html").write_text(f"<p>{FOX}</p><h2>Bakers</h2><p>{BREAD} Rye, too.</p>", encoding="utf-8")
    (root / "c.docx").write_text("not a ZIP archive", encoding="utf-8")
    index, _, warnings = opened(tmp_path, root)
    bread, *_ = index.search(BREAD, 1)
    assert bread.place == f"{root}/a.ipynb, cell 2"
    assert bread.as_json() | {"score": 1} == {"file": f"{root}/a.ipynb", "cell": 2, "score": 1, "text": BREAD}
    rye, *_ = index.search(f"Bakers {BREAD} Rye, too.", 1)
    assert (rye.place, rye.passage.text.split("\n")[0]) == (f"{root}/b.html, paragraph 2", "Bakers")
    assert len(warnings) == 1
    assert warnings[0].startswith(f"1 of 3 documents left out: {root}/c.docx is not a Word file")
    (root / "a.ipynb").unlink()
    (root / "b.html").unlink()
    with pytest.raises(ConfigError, match=r"c\.docx is not a Word file"):
        opened(tmp_path, root)


def test_passages_have_their_file_and_line(tmp_path: Path, folder: Path) -> None:
    index, encode, _ = opened(tmp_path, folder)
    assert sorted(encode.texts) == sorted([f"# Animals\n\n{FOX}", SEA, BREAD, SEA + " Sails are white."])
    best = index.search("what do bakers make of flour and salt", 2)[0]
    assert (best.place, best.passage.text) == (f"{folder}/inner/food.txt:3", BREAD)
    fox, *_ = index.search("the lazy dog and the quick fox", 1)
    assert fox.place == f"{folder}/animals.md:1"
    assert {found.place for found in index.search(SEA, 2)} == {f"{folder}/animals.md:5", f"{folder}/rows.jsonl:2"}
    assert len(index.search(SEA, 50)) == 4


def test_long_paragraphs_are_cut_at_tokens(tmp_path: Path) -> None:
    root = tmp_path / "long"
    root.mkdir()
    lines = [f"line{number} says something of its own" for number in range(40)]
    (root / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    index, encode, _ = opened(tmp_path, root, max_tokens=12)
    assert [len(words([text])[0]) for text in encode.texts] == [12] * 20
    assert " ".join(encode.texts).split() == " ".join(lines).split()
    assert index.search("line30 says something", 1)[0].place == f"{root}/a.txt:31"


def test_only_changed_files_are_embedded_again(tmp_path: Path, folder: Path) -> None:
    opened(tmp_path, folder)
    _, encode, _ = opened(tmp_path, folder)
    assert encode.texts == []
    (folder / "inner/food.txt").write_text(BREAD.replace("Bread", "Cake"), encoding="utf-8")
    (folder / "rows.jsonl").rename(folder / "renamed.jsonl")
    index, encode, _ = opened(tmp_path, folder)
    assert encode.texts == [BREAD.replace("Bread", "Cake")]
    assert index.search("cake of flour", 1)[0].place == f"{folder}/inner/food.txt:1"
    assert {found.file.name for found in index.search(SEA, 9)} == {"animals.md", "food.txt", "renamed.jsonl"}
    (folder / "animals.md").unlink()
    index, encode, _ = opened(tmp_path, folder)
    assert encode.texts == []
    assert [found.file.name for found in index.search("fox", 9)].count("animals.md") == 0
    stored = files_in(tmp_path / "index")
    assert sorted(path.suffix for path in stored) == ["", ".jsonl", ".jsonl", ".npy", ".npy", ".usearch"]
    assert stat.S_IMODE((tmp_path / "index").stat().st_mode) == 0o700


def test_the_index_finds_what_comparing_all_vectors_finds(tmp_path: Path) -> None:
    root, draw = tmp_path / "many", np.random.default_rng(0)
    root.mkdir()
    texts = [" ".join(f"word{n}" for n in draw.integers(0, 300, 20)) for _ in range(600)]
    for part in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[part * 200 : part * 200 + 200]]
        (root / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    index, encode, _ = opened(tmp_path, root)
    vectors = encode(texts)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for query in texts[::60]:
        found = index.search(query, 5)
        wanted = np.sort(vectors @ vectors[texts.index(query)])[::-1][:5]
        assert [hit.score for hit in found] == pytest.approx(wanted.tolist(), abs=1e-5)
        assert found[0].passage.text == query


def test_files_that_cannot_be_read_are_left_out_with_a_warning(tmp_path: Path, folder: Path) -> None:
    (folder / "binary.txt").write_bytes(b"a\0b")
    (folder / "latin.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "broken.jsonl").write_text("{", encoding="utf-8")
    (folder / "empty.txt").write_text("", encoding="utf-8")
    (folder / "many.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    index, _, warnings = opened(tmp_path, folder)
    assert len(index.search(SEA, 50)) == 4
    assert [text.split(": ", 1)[1].split(",")[0].split(" is ")[0] for text in warnings] == [
        f"{folder}/{name}" for name in ("binary.txt", "broken.jsonl", "latin.txt", "many.csv")
    ]
    assert "set --text-column" in warnings[-1]


def test_the_command_prints_passages_or_one_json_object(folder: Path, capsys: Captured) -> None:
    command = ["search", str(model_folder("bert")), str(folder), BREAD, "--top-k", "2"]
    assert cli(command) == 0
    first = capsys.readouterr()
    assert re.match(rf"{folder}/inner/food.txt:3  score (1.000|0.99\d)\n    Bread is", first.out)
    assert first.out.count("score") == 2
    assert cli([*command, "--json"]) == 0
    second = capsys.readouterr()
    assert "embedding" not in "\n".join(messages(second.err))
    found = json.loads(second.out)
    assert found["query"] == BREAD
    assert [*found["passages"][0]] == ["file", "line", "score", "text"]
    assert found["passages"][0]["text"] == BREAD


@pytest.mark.parametrize(
    ("inside", "query", "expected"),
    [
        ("nothing", "words", "does not exist; pass a folder of documents, or a file."),
        ("empty", "words", "has no file with a supported suffix"),
        ("blank.txt", "words", "contains no text to search;"),
        ("inner", "  ", "the query is empty; pass a question or a phrase."),
        ("picture.png", "words", "has an unknown suffix"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    folder: Path, capsys: Captured, inside: str, query: str, expected: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "blank.txt").write_text("\n\n", encoding="utf-8")
    (folder / "picture.png").write_bytes(b"1")
    assert cli(["search", str(model_folder("bert")), str(folder / inside), query]) == 2
    assert expected in sentence(capsys)


def test_every_pass_of_the_model_is_progress(folder: Path) -> None:
    found: list[tuple[str, int, int]] = []

    def progress(doing: str, done: int, total: int, unit: str = "byte", /) -> None:
        found.append((unit, done, total))

    search(ModelRequest(str(model_folder("bert"))), folder, "flour", 1, None, ignore_progress, progress)
    assert ("passage", 4, 4) in found


def test_adapters_for_queries_and_for_passages_are_used_together(tmp_path: Path, folder: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_folder("bert"), base)
    for seed, kind in enumerate(("query", "passage")):
        torch.manual_seed(seed)
        config = LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
        get_peft_model(AutoModel.from_pretrained(base), config).save_pretrained(base / f"retrieval.{kind}")

    def vectors(kind: str, texts: list[str]) -> Any:
        loaded = open_encoder(ModelRequest(str(base / f"retrieval.{kind}")), ignore_progress, ignore_progress)
        return loaded.task_class.encode_texts(loaded, texts)

    found = search(ModelRequest(str(base)), folder, BREAD, 3, None, ignore_progress, ignore_progress)
    passages = vectors("passage", [one.passage.text for one in found])
    for kind, is_used in (("query", True), ("passage", False)):
        scores = passages @ vectors(kind, [BREAD])[0]
        assert np.allclose([one.score for one in found], scores, atol=1e-3) == is_used
