"""Files, folders and datasets -> documents, to the character."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data import files
from sansgpu.data.sources import Source, open_sources

TEXTS = ["first\r\nsecond\n\n\nthird ", "日本語 ünï\tcode", 'quotes " and, commas']


def documents(source: Source) -> list[str]:
    found, text = [], ""
    for piece in source.read():
        text += piece.text
        if piece.ends_document:
            found.append(text)
            text = ""
    assert text == ""
    return found


def read(path: Path, **settings: object) -> list[str]:
    return documents(open_sources(DataConfig.model_validate({"dataset_name": str(path), **settings})).train)


def write(path: Path, texts: list[str]) -> None:
    rows = [{"text": text, "id": str(number)} for number, text in enumerate(texts)]
    match path.suffixes[0]:
        case ".jsonl":
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        case ".json":
            content = json.dumps({"data": rows} if "nested" in path.name else rows)
        case ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ["text", "id"])
                writer.writeheader()
                writer.writerows(rows)
            content = path.read_bytes().decode()
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            return
        case _:
            content = texts[0]
    raw = content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.txt.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, TEXTS)
    assert read(tmp_path / name) == TEXTS[:1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "nested.json", "a.csv", "a.csv.gz", "a.parquet"])
def test_each_row_is_a_document(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, TEXTS)
    assert read(tmp_path / name) == TEXTS


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 25, 40])
@pytest.mark.parametrize("unit", ["x", "ab\n", "é\r\n"])
def test_pieces_joined_are_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, unit: str) -> None:
    monkeypatch.setattr(files, "PIECE_CHARS", 10)
    text = (unit * size)[:size] if size else ""
    assert "".join(piece.text for piece in files.pieces(text)) == text
    assert all(len(piece.text) <= 10 for piece in files.pieces(text))
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == ([text] if text else [])


def test_empty_rows_are_no_documents(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["", "one", ""])
    assert read(tmp_path / "a.jsonl") == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"\xff\xfe rubbish", "not UTF-8"),
        ("a.txt", b"nul \0 byte", "binary"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "line 2 is no JSON"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', "columns a, b"),
        ("a.jsonl", b'{"text": 3}\n', "holds a int"),
        ("a.jsonl", b"3\n", "not an object"),
        ("a.json", b"[", "is no JSON"),
        ("a.parquet", b"rubbish", "no Parquet"),
        ("a.txt.gz", b"rubbish", "cannot be read"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as error:
        read(tmp_path / name)
    assert name in str(error.value)


def test_the_text_column_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "x", "b": "y"}\n')
    assert read(tmp_path / "a.jsonl", text_column="b") == ["y"]
    with pytest.raises(ConfigError, match="no column c"):
        read(tmp_path / "a.jsonl", text_column="c")


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.md", "deep/test_x.py", ".hidden.txt", "image.png"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.md", "b.txt", "deep/test_x.py"]


def test_names_decide_the_part_where_some_are_named_train(tmp_path: Path) -> None:
    for name in ("train.txt", "train-2.txt", "valid.txt", "test.txt", "other.txt"):
        (tmp_path / name).write_text(name)
    sources = open_sources(DataConfig(dataset_name=str(tmp_path)))
    assert sources.validation is not None
    assert sorted(documents(sources.train)) == ["other.txt", "train-2.txt", "train.txt"]
    assert documents(sources.validation) == ["valid.txt"]


def test_a_validation_source_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    data = DataConfig(dataset_name=str(tmp_path / "a.txt"), validation_name=str(tmp_path / "b.txt"))
    sources = open_sources(data)
    assert sources.validation is not None
    assert (documents(sources.train), documents(sources.validation)) == (["a"], ["b"])


@pytest.mark.parametrize("with_validation", [True, False])
def test_a_saved_dataset_is_loaded_from_its_folder(tmp_path: Path, with_validation: bool) -> None:
    train = datasets.Dataset.from_dict({"text": TEXTS})
    held = datasets.Dataset.from_dict({"text": ["held out"]})
    saved = datasets.DatasetDict({"train": train, "validation": held}) if with_validation else train
    saved.save_to_disk(tmp_path / "saved")
    sources = open_sources(DataConfig(dataset_name=str(tmp_path / "saved")))
    assert documents(sources.train) == TEXTS
    assert [documents(s) for s in [sources.validation] if s] == ([["held out"]] if with_validation else [])


@pytest.mark.parametrize("name", ["missing.txt", "./missing", "a.bin"])
def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"does not exist|no known form"):
        open_sources(DataConfig(dataset_name=name))


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return open_sources(DataConfig(dataset_name=str(tmp_path))).train.fingerprint

    (tmp_path / "a.txt").write_text("one")
    first = fingerprint()
    assert fingerprint() == first
    (tmp_path / "a.txt").write_text("two")
    assert fingerprint() != first


def test_the_standard_library_is_there_on_every_machine() -> None:
    source = open_sources(DataConfig()).train
    texts = documents(source)
    assert any("class ArgumentParser" in text for text in texts)
    assert sum(map(len, texts)) > 5_000_000
