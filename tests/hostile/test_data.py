"""Malicious data files are rejected with a one-sentence error, within time and memory limits."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.files import read_documents, read_rows
from sansgpu.tasks.graph.sources import open_graphs
from tests.hostile.bounded import assert_refused, outcome
from tests.processes import settings, use_cache, write_corpus


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path / "cache")


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def packed(path: Path, begin: bytes = b"") -> Path:
    """Writes a line of 300 MB, compressed to about 300 kB."""
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(begin)
        for _ in range(300):
            file.write(b"a" * (1 << 20))
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


# Their files take seconds to write. One of each kind is always read.
LARGE = (
    "bomb of JSON",
    "bomb of TSV",
    "bomb as Parquet",
    "long CSV line",
    "long TSV line",
    "many columns",
    "many objects",
)
SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "pipe": (lambda f: pipe(f / "a.jsonl"), "a.jsonl is a pipe, a device or a socket"),
    "pipe without suffix": (lambda f: pipe(f / "a"), "a is a pipe, a device or a socket"),
    "device": (lambda f: device(f / "a.txt"), "a.txt is a pipe, a device or a socket"),
    "bomb of one line": (lambda f: packed(f / "a.jsonl.gz", b'{"text": "'), "more than 200 times its size"),
    "bomb of JSON": (lambda f: packed(f / "a.json.gz", b'"'), "more than 200 times its size"),
    "bomb of CSV": (lambda f: packed(f / "a.csv.gz", b"text\n"), "more than 200 times its size"),
    "bomb as Parquet": (lambda f: packed(f / "a.parquet.gz"), "more than 200 times its size"),
    "long line": (lambda f: written(f / "a.jsonl", b'{"text": "' + b"a" * (65 << 20)), "line 1 is longer than 64 MB"),
    "long CSV line": (lambda f: written(f / "a.csv", b"text\n" + b"a" * (65 << 20)), "line 2 is longer than 64 MB"),
    "long TSV line": (lambda f: written(f / "a.tsv", b"text\n" + b"a" * (65 << 20)), "line 2 is longer than 64 MB"),
    "bomb of TSV": (lambda f: packed(f / "a.tsv.gz", b"text\n"), "more than 200 times its size"),
    "many columns": (
        lambda f: written(f / "a.tsv", b"\t" * (60 << 20) + b"a\nb\n"),
        "line 1 has more than 1,000,000 c",
    ),
    "open quote": (
        lambda f: written(f / "a.csv", b'text\n"' + (b"a b c d " * 16 + b"\n") * (9 << 16)),
        "larger than field limit",
    ),
    "many values": (lambda f: written(f / "a.jsonl", b"[" + b"[]," * 9_000_000 + b"0]"), "8,000,000 values"),
    "many objects": (lambda f: written(f / "a.json", b"[" + b"{}," * 9_000_000 + b"0]"), "8,000,000 values"),
    "deep": (lambda f: written(f / "a.jsonl", b"1\n" + b"[" * 900 + b"]" * 900), "a.jsonl, line 1 is of type int"),
    "deeper": (lambda f: written(f / "a.jsonl", b"[" * 900 + b"]" * 900), "line 1 cannot be read as JSON: its values"),
    "no UTF-8": (lambda f: written(f / "a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'), "line 2 is not UTF-8"),
    "no UTF-8 text": (lambda f: written(f / "a.md", b"a\nb\n\xff\n"), "a.md, line 3 is not UTF-8"),
    "no UTF-8 CSV": (lambda f: written(f / "a.csv", b"text\nb\n\xff\n"), "a.csv, line 3 is not UTF-8"),
    "no CSV": (lambda f: written(f / "a.csv", b'text\nb\n"a"b\n'), "a.csv, line 3 is not valid CSV"),
    "long name": (lambda f: Path("a" * 5000), "too long for the file system"),
    "long path": (lambda f: f / ("a" * 300 + ".jsonl"), "too long for the file system"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in LARGE else ()) for n in SOURCES])
def test_a_source_that_cannot_be_read_costs_neither_time_nor_memory(name: str, tmp_path: Path) -> None:
    make, sentence = SOURCES[name]
    assert_refused(sentence, "tokenizer", "train", make(tmp_path), "--vocab-size", 300, "--output", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_bomb_of_text_is_refused_once_it_has_grown(tmp_path: Path) -> None:
    pieces = read_documents(packed(tmp_path / "a.txt.gz"), None)
    with pytest.raises(ConfigError, match=r"a\.txt\.gz decompresses to more than 200 times its size"):
        assert sum(len(piece.text) for piece in pieces) < 100 << 20


def test_a_tokenizer_is_trained_on_words_of_megabytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * (3 << 20) + "." * (1 << 20) + " " * (1 << 20))
    code, said = outcome("tokenizer", "train", tmp_path / "a.txt", "--vocab-size", 300, "--output", tmp_path / "made")
    assert code == 0, said


@pytest.mark.parametrize("part", ["train.tsv", "entity2text.txt"])
def test_a_line_of_a_graph_is_bounded_and_named(tmp_path: Path, part: str) -> None:
    (tmp_path / "graph").mkdir()
    header = b"head\trelation\ttail\n"
    (tmp_path / "graph/train.tsv").write_bytes(header + b"01\thas\t02\n" * 3)
    start = ["train", "--dry-run", "--output-dir", tmp_path / "run", *settings(task="graph")]
    start += ["--set", f"data.dataset_name={tmp_path / 'graph'}"]
    (tmp_path / "graph" / part).write_bytes(header * (part == "train.tsv") + b"\xff\n")
    assert_refused(f"{part}, line {1 + (part == 'train.tsv')} is not UTF-8", *start)
    (tmp_path / "graph" / part).write_bytes(b"x\t" * (33 << 20))
    assert_refused(f"{part}, line 1 is longer than 64 MB", *start)


def test_bad_lines_are_skipped_and_counted_on_request(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes(b"01\thas\t02\n\xff\thas\t02\n")
    notes: list[str] = []
    data = DataConfig(dataset_name=str(tmp_path), on_bad_row="skip")
    assert len(list(open_graphs(data, notes.append).train.documents())) == 1
    first = f"{tmp_path}/train.tsv, line 2 is not UTF-8 text (byte 0xff); fix or remove the row, or set data.encoding"
    assert notes == [f"{tmp_path}: bad rows skipped: 1 of 2; the first: {first} to the encoding of the file."]


def test_what_is_within_the_bounds_is_read_to_the_character(tmp_path: Path) -> None:
    """A line of 50 MB, a .gz file with the compression ratio of real logs, and lines with carriage returns are read."""
    text = "naïve \u2028 text\r\n" * 50_000
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(("\ufeff" + (json.dumps({"text": text}) + "\r\n") * 3).encode())
    assert [row.value for row in read_rows(tmp_path / "a.jsonl.gz")] == [{"text": text}] * 3
    long = "word " * 10_000_000
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": long}), encoding="utf-8")
    assert "".join(piece.text for piece in read_documents(tmp_path / "b.jsonl", None)) == long
    pyarrow.parquet.write_table(pyarrow.table({"text": [text, "b"]}), tmp_path / "c.parquet")
    (tmp_path / "c.parquet.gz").write_bytes(gzip.compress((tmp_path / "c.parquet").read_bytes()))
    assert [row.value["text"] for row in read_rows(tmp_path / "c.parquet.gz")] == [text, "b"]


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words"] * 50}), whole)
    content = whole.read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2] + content[-8:])
    assert_refused("a.parquet", "tokenizer", "train", tmp_path / "a.parquet", "--output", tmp_path / "made")
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"\xff"]}), tmp_path / "b.parquet")
    assert_refused("b.parquet", "tokenizer", "train", tmp_path / "b.parquet", "--output", tmp_path / "made")


LONG = "n" * 5000
DOORS: dict[str, list[str]] = {
    "eval": ["eval", LONG],
    "generate": ["generate", LONG],
    "chat": ["chat", LONG, "--prompt", "a"],
    "predict": ["predict", LONG, "--question", "a", "--context", "b"],
    "export": ["export", LONG],
    "extract": ["extract", LONG, "--text", "a"],
    "tokenizer": ["tokenizer", "encode", LONG, "--text", "a"],
    "snapshots": ["snapshots", "list", LONG],
    "model": ["train", "--dry-run", "--set", "task=sft", "--set", f"model.name_or_path={LONG}",
              "--set", "data.dataset_name=python-stdlib-chat"],
    "output": ["train", "--output-dir", LONG],
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_a_name_too_long_for_the_file_system_is_refused(door: str) -> None:
    assert_refused("too long", *DOORS[door])


def test_valid_data_is_accepted(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    code, said = outcome("tokenizer", "train", corpus, "--vocab-size", 300, "--output", tmp_path / "made")
    assert code == 0, said


@pytest.mark.parametrize("column", [None, "x" * 5000])
def test_columns_with_long_names_are_refused_in_a_short_sentence(tmp_path: Path, column: str | None) -> None:
    row = {f"column {number}": "words" for number in range(2000)}
    data = written(tmp_path / "data.jsonl", (json.dumps(row) + "\n").encode() * 40)
    changes = settings(data__dataset_name=data, data__text_column=column or "null", training__max_steps=2)
    assert_refused("set data.text_column", "train", *changes, "--dry-run")
