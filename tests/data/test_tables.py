"""Columns of a table are selected by name or, if the table has no header, by number."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.forms.labels import LABELED
from sansgpu.data.forms.pairs import read_text_rows
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow, row_value
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.tables import Columns
from sansgpu.tasks.graph.sources import open_graphs

STS = b'news\t1\t4.500\tA "plane" takes off.\tIt\'s off, now.\r\nforum\t2\t0.000\t"One\tTwo"\tsource\tlicense\n\n'


def opened(path: Path, **settings: Any) -> Source:
    return open_sources(DataConfig.model_validate({"dataset_name": str(path), **settings})).train


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.csv", "a.csv.gz"])
def test_a_table_separated_by_tabs_has_no_quotes(tmp_path: Path, name: str) -> None:
    """A .csv file whose first line contains a tab is read like a .tsv file: quotes are ordinary characters."""
    content = '\ufeffsentence\tlabel\r\n"Open, she said\t1\r\n\r\n\x85\u2028 two\t0\t\n'
    path = written(tmp_path / name, content.encode())
    assert list(opened(path).rows()) == [
        SourceRow(f"{path}, line 2", {"sentence": '"Open, she said', "label": "1"}),
        SourceRow(f"{path}, line 4", {"sentence": "\x85\u2028 two", "label": "0"}),
    ]
    read = opened(path, text_column="sentence").read()
    assert [piece.text for piece in read] == ['"Open, she said', "\x85\u2028 two"]


def test_a_line_with_fewer_columns_than_the_header_is_a_bad_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", b"text\tlabel\nfirst\nsecond\t1\n")
    first, second = opened(path).rows()
    assert first.problem == f"{path}, line 2 has 1 columns, but the header has 2; fix or remove the line."
    assert second == SourceRow(f"{path}, line 3", {"text": "second", "label": "1"})
    with pytest.raises(ConfigError, match="line 2 has 1 columns"):
        list(opened(path).read())


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.csv.gz"])
def test_columns_by_number_mean_that_there_is_no_header(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, STS)
    rows = [row.value for row in opened(path, text_column=3).rows()]
    assert rows[0] == {0: "news", 1: "1", 2: "4.500", 3: 'A "plane" takes off.', 4: "It's off, now."}
    assert rows[1] == {0: "forum", 1: "2", 2: "0.000", 3: '"One', 4: 'Two"', 5: "source", 6: "license"}
    assert [row_value(rows[0], column, "data.text_column", "") for column in (2, -1)] == ["4.500", "It's off, now."]
    assert [piece.text for piece in opened(path, text_column=3).read()] == ['A "plane" takes off.', '"One']
    with pytest.raises(ConfigError, match=r"line 1 has no column 5, only 0, 1, 2, 3, 4; set data\.text_column"):
        list(opened(path, text_column=5).read())
    with pytest.raises(ConfigError, match=r"line 1 has no column -6"):
        list(opened(path, text_column=-6).read())


def test_a_table_separated_by_commas_may_have_no_header(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b'1,"one, and\ntwo"\n\n0,three\n')
    assert [row.value for row in opened(path, text_column=0).rows()] == [
        {0: "1", 1: "one, and\ntwo"},
        {0: "0", 1: "three"},
    ]
    assert [piece.text for piece in opened(path, text_column=-1).read()] == ["one, and\ntwo", "three"]


def test_a_number_in_quotes_is_a_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", b"4\t5\none\ttwo\n")
    assert [piece.text for piece in opened(path, text_column="5").read()] == ["two"]
    assert opened(path, text_column="1").fingerprint != opened(path, text_column=1).fingerprint
    with pytest.raises(ValueError, match="text_column"):
        DataConfig.model_validate({"text_column": True})


def test_texts_of_graphs_may_be_in_a_table_without_a_header(tmp_path: Path) -> None:
    data = DataConfig(dataset_name=str(written(tmp_path / "a.tsv", STS)), text_column=0)
    assert [document.text for document in open_graphs(data, print).train.documents()] == ["news", "forum"]


def test_pairs_and_labels_may_be_in_columns_from_the_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", STS)
    chosen, bad_rows = Columns(text=-2, pair=-1, label=1), RowReport("fail")
    first, _ = read_text_rows(opened(path, text_column=-2).rows(), chosen, bad_rows)
    assert (first.texts, first.score) == (('A "plane" takes off.', "It's off, now."), 1.0)
    labeled, _ = LABELED.read_all(opened(path, text_column=-2).rows(), bad_rows, chosen)
    assert (labeled.text, labeled.pair, labeled.label) == ('A "plane" takes off.', "It's off, now.", "1")


def columns() -> list[str]:
    fields = DataConfig.model_fields.items()
    return [key for key, field in fields if key.endswith("_column") and field.default is None and key != "tag_column"]


@pytest.mark.parametrize("key", columns())
def test_every_key_for_a_column_may_be_a_number(tmp_path: Path, key: str) -> None:
    path = written(tmp_path / "a.tsv", b"one\t1\n")
    assert [row.value for row in opened(path, **{key: 0}).rows()] == [{0: "one", 1: "1"}]
    assert list(opened(path, **{key: "one"}).rows()) == []
    assert opened(path, **{key: 0}).fingerprint != opened(path).fingerprint


@pytest.mark.parametrize(
    ("name", "content", "column", "sentence"),
    [
        (
            "a.tsv",
            b"text\nb\n\0\n",
            "text",
            "a.tsv, line 3 is not text (it contains a NUL byte)",
        ),
        ("a.csv", b"text\nb\n\0\n", "text", "a.csv is a binary file (it contains NUL bytes); remove it"),
        (
            "a.tsv",
            b"text\nb\n\xff\n",
            "text",
            "a.tsv, line 3 is not UTF-8 text (byte 0xff); fix or remove the row, or set data.encoding",
        ),
        (
            "a.tsv",
            b"\xff\nb\n",
            "text",
            "a.tsv, line 1 is not UTF-8 text (byte 0xff); fix or remove the row, or set data.encoding",
        ),
        (
            "a.tsv",
            b"te\0xt\nb\n",
            "text",
            "a.tsv, line 1 is not text (it contains a NUL byte); fix or remove the row, or set data.encoding",
        ),
        (
            "a.tsv",
            b"\t" * (33 << 20) + b"a\n",
            0,
            "a.tsv, line 1 has more than 1,000,000 columns; remove unneeded ones",
        ),
        ("a.jsonl", b'{"messages": []}', None, "a.jsonl, line 1 has the columns messages; these are conversations"),
        ("a.jsonl", b'{"one": "a"}', 0, "a.jsonl, line 1 has no column 0, only one; set data.text_column."),
    ],
    ids=range(8),
)
def test_a_table_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, column: str | int | None, sentence: str
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(ConfigError) as error:
        list(opened(path, text_column=column).read())
    assert str(error.value).startswith(f"{tmp_path}/{sentence}")


@pytest.mark.parametrize("content", [b"", b"text\tlabel\n", b"text\tlabel\n\n\t\n"])
def test_a_table_without_lines_has_no_rows(tmp_path: Path, content: bytes) -> None:
    assert list(opened(written(tmp_path / "a.tsv", content)).rows()) == []
