"""Sources are limited in bytes and cleaned of duplicates, document by document, and the choice is cached."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data import cleaning
from sansgpu.data.cleaning import GIGABYTE, chosen_documents, first_bytes, without_duplicates
from sansgpu.data.files import Piece
from sansgpu.data.sources import Source, open_sources
from sansgpu.events.progress import ignore_progress
from sansgpu.tasks.configuration import as_config
from sansgpu.tasks.pretrain.task import Pretrain
from tests.data.test_sources import documents
from tests.processes import write_corpus, write_rows

TEXTS = ["first é", "second 深層学習", "", "third\n", "second 深層学習", "fourth"]
SMALL = {"d_model": 16, "n_heads": 1, "n_layers": 1, "max_seq_len": 16}


def source_of(path: Path, texts: list[str]) -> Source:
    write_rows(path, ({"text": text} for text in texts))
    return open_sources(DataConfig(dataset_name=str(path))).train


def test_the_first_bytes_are_read_and_no_character_is_cut(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", TEXTS)
    texts, fingerprints = [text for text in TEXTS if text], set()
    whole = "".join(texts).encode()
    for limit in range(1, len(whole) + 5):
        limited = first_bytes(source, limit / GIGABYTE)
        found = documents(limited)
        assert "".join(found) == whole[:limit].decode(errors="ignore")
        assert found[:-1] == texts[: len(found) - 1]
        assert all(found)
        fingerprints.add(limited.fingerprint)
        assert limited.size_bytes <= max(limit, 1)
    assert len(fingerprints) == len(whole) + 4


def test_a_limit_inside_a_long_document_ends_it(tmp_path: Path) -> None:
    pieces = [Piece("ab", False), Piece("é", False), Piece("cd", True), Piece("e", True)]
    source = dataclasses.replace(source_of(tmp_path / "a.jsonl", TEXTS), read=lambda: iter(pieces))
    found = [documents(first_bytes(source, limit / GIGABYTE)) for limit in range(1, 9)]
    assert found == [["a"], ["ab"], ["ab"], ["abé"], ["abéc"], ["abécd"], ["abécd", "e"], ["abécd", "e"]]


def test_chosen_documents_keep_their_order(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", ["a", "b", "c", "d"])
    chosen = chosen_documents(source, np.array([False, True, False, True]))
    assert documents(chosen) == ["b", "d"]
    assert chosen.fingerprint != source.fingerprint
    assert chosen_documents(source, np.ones(4, bool)) is source


@pytest.mark.parametrize("kind", ["exact", "near"])
def test_duplicates_are_left_out_once_for_all(kind: str, tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", TEXTS)
    cleaned, note = without_duplicates(source, None, kind, tmp_path / "cache", ignore_progress)  # type: ignore[arg-type]
    assert documents(cleaned) == [TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[5]]
    assert note == f"data.deduplicate {kind}: 1 of 5 documents left out"

    def unreadable() -> Iterator[Piece]:
        raise AssertionError("read again")

    again = dataclasses.replace(source, read=unreadable)
    cached, _ = without_duplicates(again, None, kind, tmp_path / "cache", ignore_progress)  # type: ignore[arg-type]
    assert cached.fingerprint == cleaned.fingerprint
    (file,) = (tmp_path / "cache").rglob(cleaning.ARRAY)
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"documents\.npy is damaged; delete its folder"):
        without_duplicates(again, None, kind, tmp_path / "cache", ignore_progress)  # type: ignore[arg-type]


def test_documents_of_the_validation_data_are_left_out_of_the_training_data(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", ["one", "two", "three", "two"])
    held = source_of(tmp_path / "held.jsonl", ["two", "four", "four"])
    cleaned, note = without_duplicates(source, held, "near", tmp_path / "cache", ignore_progress)
    assert documents(cleaned) == ["one", "three"]
    assert note == "data.deduplicate near: 2 of 4 documents left out"
    with pytest.raises(ConfigError, match=r"leaves out all documents of .*a\.jsonl.*choose another data\.validation"):
        without_duplicates(source, source, "near", tmp_path / "cache", ignore_progress)


def test_a_run_trains_and_evaluates_on_one_of_each_group(tmp_path: Path) -> None:
    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(5000)}" for _ in range(80)) for _ in range(20)]
    copies = write_rows(
        tmp_path / "copies.jsonl", ({"text": f"{text}{end}"} for end in ("", " x", "") for text in texts)
    )
    sizes = {}
    for kind in ("none", "exact", "near"):
        data = {"dataset_name": str(copies), "tokenizer": "char", "validation_split": 0.3, "deduplicate": kind}
        _, corpus = Pretrain.prepare(as_config({"model": SMALL, "data": data}), tmp_path / "cache", ignore_progress)
        sizes[kind] = corpus.train_tokens + corpus.validation_tokens
        left_out = {"none": [], "exact": ["20"], "near": ["40"]}[kind]
        assert corpus.cleaning == [f"data.deduplicate {kind}: {count} of 60 documents left out" for count in left_out]
    once = sum(len(text) + 1 for text in texts)
    assert sizes == {"none": 3 * once + 40, "exact": 2 * once + 40, "near": once}


@pytest.mark.parametrize("limits", [{"max_gb": 2e-6}, {"max_gb": 2e-6, "max_tokens": 200}, {"max_tokens": 200}])
def test_the_smaller_limit_holds(limits: dict[str, float], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl")
    config = as_config({"model": SMALL, "data": {"dataset_name": str(corpus), "tokenizer": "char", **limits}})
    _, prepared = Pretrain.prepare(config, tmp_path / "cache", ignore_progress)
    tokens = prepared.train_tokens + prepared.validation_tokens
    if "max_tokens" in limits:
        assert tokens == 200
    else:  # one token per character, and one at the start of each document
        assert 2000 < tokens < 2000 + 60
