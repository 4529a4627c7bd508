"""Documents of files, folders and datasets are read without changing a character."""

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
            content = path.read_bytes()
        case _:
            content = texts[0]
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.txt.gz", "a.md.gz", "a.py.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, TEXTS)
    assert read(tmp_path / name) == TEXTS[:1]


ROWS = ("a.jsonl", "a.json", "nested.json", "a.csv", "a.parquet")


@pytest.mark.parametrize("name", [*ROWS, *(f"{name}.gz" for name in ROWS)])
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


@pytest.mark.parametrize("more", [-1, 0, 1, files.PIECE_CHARS - 1, files.PIECE_CHARS, files.PIECE_CHARS + 1])
@pytest.mark.parametrize("unit", ["é", "a line of text\r\n"])
def test_a_document_of_several_pieces_stays_one(tmp_path: Path, more: int, unit: str) -> None:
    size = files.PIECE_CHARS + more
    text = (unit * size)[:size]
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "next"}) + "\n")
    assert read(tmp_path) == [text, text, "next"]


def test_a_document_is_cut_at_line_ends_where_it_has_any() -> None:
    text = "words of a line\n" * (files.PIECE_CHARS // 8)
    cut = list(files.pieces(text))
    assert len(cut) > 1
    assert all(piece.text.endswith("\n") for piece in cut)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbftext\r\ntwo\r\n")
    assert read(tmp_path) == ["one", "two"]


@pytest.mark.parametrize(("name", "content"), [("a.json", '["one", "two"]'), ("a.jsonl", '"one"\n\n"two"\n')])
def test_rows_may_be_bare_strings(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read(tmp_path / name) == ["one", "two"]


def test_the_only_column_of_strings_is_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"number": 3, "body": "one"}\n{"content": "two", "title": "x"}\n')
    assert read(tmp_path / "a.jsonl") == ["one", "two"]


def test_empty_rows_are_no_documents(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["", "one", ""])
    assert read(tmp_path / "a.jsonl") == ["one"]
    (tmp_path / "b.jsonl").write_text('{"text": null}\n\n{"text": "two"}\n')
    assert read(tmp_path / "b.jsonl") == ["two"]
    (tmp_path / "c.csv").write_text("id,text\n1\n2,three\n")
    assert read(tmp_path / "c.csv") == ["three"]


TRUNCATED = gzip.compress(b"some text" * 99)[:-9]
CORRUPTED = TRUNCATED[:10] + b"\xff" * 40


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"\xff\xfe rubbish", "not UTF-8"),
        ("a.txt", b"nul \0 byte", "binary"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"a": "x", "b": "y"}\n', "columns a, b"),
        ("a.jsonl", b'{"text": 3}\n', "contains a value of type int"),
        ("a.jsonl", b"3\n", "instead of an object"),
        ("a.json", b"[", "is not valid JSON"),
        pytest.param("a.json", b"[" * 100_000, "cannot be read as JSON", id="deep"),
        ("a.json", b'[["text"]]', "row 1 is of type list instead of an object"),
        ("a.csv", b'text\n"never closed\n', "not valid CSV"),
        ("a.csv", b"a,b\nx,y\n", "row 1 has the columns a, b"),
        ("a.parquet", b"rubbish", "not a valid Parquet"),
        ("a.txt.gz", b"rubbish", "cannot be read"),
        pytest.param("a.txt.gz", TRUNCATED, "cannot be read", id="truncated"),
        pytest.param("a.txt.gz", CORRUPTED, "cannot be read", id="corrupted"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as error:
        read(tmp_path / name)
    assert name in str(error.value)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a whole pair: \\ud83c\\udf89"}\n')
    assert read(tmp_path / "a.jsonl") == ["a whole pair: 🎉"]
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "half a pair: \\ud83c"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, (row|line) 2"):
        read(tmp_path / "a.jsonl")


def test_the_text_column_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "x", "b": "y"}\n')
    assert read(tmp_path / "a.jsonl", text_column="b") == ["y"]
    for name in ROWS:
        write(tmp_path / name, TEXTS)
        assert read(tmp_path / name, text_column="id") == ["0", "1", "2"]
        with pytest.raises(ConfigError, match=r"no column c, only text, id; set data\.text_column") as error:
            read(tmp_path / name, text_column="c")
        assert name in str(error.value)


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.md", "deep/test_x.py", ".hidden.txt", ".git/c.txt", "image.png", "valid.txt"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.md", "b.txt", "deep/test_x.py", "valid.txt"]
    assert open_sources(DataConfig(dataset_name=str(tmp_path))).validation is None


def test_a_folder_without_a_known_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match="has no file with a supported suffix"):
        read(tmp_path)


def test_names_decide_the_part_where_some_are_named_train(tmp_path: Path) -> None:
    for name in ("train.txt", "train-2.txt", "Valid.txt", "test.txt", "other.txt", "dev_1.txt", "validity.txt"):
        (tmp_path / name).write_text(name)
    sources = open_sources(DataConfig(dataset_name=str(tmp_path)))
    assert sources.validation is not None
    assert sorted(documents(sources.train)) == ["other.txt", "train-2.txt", "train.txt", "validity.txt"]
    assert sorted(documents(sources.validation)) == ["Valid.txt", "dev_1.txt"]
    assert sources.train.fingerprint != sources.validation.fingerprint


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
    assert open_sources(DataConfig(dataset_name=str(tmp_path / "saved"))).train.fingerprint == sources.train.fingerprint
    assert [documents(s) for s in [sources.validation] if s] == ([["held out"]] if with_validation else [])


@pytest.mark.parametrize("name", ["missing.txt", "./missing", "a.bin"])
def test_missing_data_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"does not exist|has an unknown suffix"):
        open_sources(DataConfig(dataset_name=name))


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return open_sources(DataConfig(dataset_name=str(tmp_path))).train.fingerprint

    (tmp_path / "a.txt").write_text("one")
    first = fingerprint()
    assert fingerprint() == first
    (tmp_path / "a.txt").write_text("two")
    second = fingerprint()
    (tmp_path / "b.txt").write_text("three")
    third = fingerprint()
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    named = open_sources(DataConfig(dataset_name=str(tmp_path), text_column="body")).train.fingerprint
    assert len({first, second, third, fingerprint(), named}) == 5


def test_the_standard_library_is_there_on_every_machine() -> None:
    source = open_sources(DataConfig()).train
    texts = documents(source)
    assert any("class ArgumentParser" in text for text in texts)
    assert sum(map(len, texts)) > 5_000_000
    assert open_sources(DataConfig()).train.fingerprint == source.fingerprint
