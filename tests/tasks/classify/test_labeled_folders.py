"""Text files have rows: one per file in a folder that is named after its label, or one per line."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.sources import Sources, open_single, open_sources

FILES = ["neg/b.txt", "neg/a.md", "pos/more/c.txt"]


def made(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\nend\n")
    return root


def opened(path: Path, text_rows: bool = True, **settings: Any) -> Sources:
    return open_sources(DataConfig(dataset_name=str(path), **settings), text_rows)


def labels(rows: Any) -> list[tuple[str, str]]:
    return [(row.value["text"].splitlines()[0], row.value["label"]) for row in rows]


def test_a_file_is_a_row_with_the_label_that_its_folder_names(tmp_path: Path) -> None:
    sources = opened(made(tmp_path, *FILES))
    assert sources.validation is None
    first, *rest = sources.train.rows()
    assert first == SourceRow(f"{tmp_path}/neg/a.md", {"text": "neg/a.md\nend\n", "label": "neg"})
    assert labels(rest) == [("neg/b.txt", "neg"), ("pos/more/c.txt", "pos")]
    assert next(iter(opened(tmp_path, text_column="body").train.rows())).value.keys() == {"body", "label"}


def test_folders_of_labels_may_be_in_folders_of_splits(tmp_path: Path) -> None:
    root = made(tmp_path, "Train/neg/a.txt", "Train/pos/a.txt", "dev/pos/b.txt", "test/neg/c.txt", "readme.md")
    sources = opened(root)
    assert sources.validation is not None
    assert sources.test is not None
    *train, name, end = sources.train.rows()
    assert labels(train) == [("Train/neg/a.txt", "neg"), ("Train/pos/a.txt", "pos")]
    assert (name, end.value) == (SourceRow(f"{root}/readme.md, line 1", {"text": "readme.md"}), {"text": "end"})
    assert labels(sources.validation.rows()) == [("dev/pos/b.txt", "pos")]
    assert labels(sources.test.rows()) == [("test/neg/c.txt", "neg")]
    assert labels(open_single(f"{root}/test", DataConfig(), text_rows=True).rows()) == [("test/neg/c.txt", "neg")]


def test_labels_may_be_called_like_splits(tmp_path: Path) -> None:
    sources = opened(made(tmp_path, "plane/a.txt", "train/b.txt"))
    assert sources.validation is None
    assert labels(sources.train.rows()) == [("plane/a.txt", "plane"), ("train/b.txt", "train")]


def test_documents_do_not_depend_on_folders_of_labels(tmp_path: Path) -> None:
    root = made(tmp_path, "train/neg/a.txt", "test/pos/b.txt", "train.txt/c.md")
    sources = opened(root, text_rows=False)
    assert (sources.validation, sources.test) == (None, None)
    assert len(list(sources.train.read())) == 3
    with pytest.raises(ConfigError, match=r"b\.txt is plain text and has no rows"):
        list(sources.train.rows())


def test_each_line_of_a_text_file_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone \r\n \n\xff\ntwo\x85\n\0")
    one, bad, two, binary = opened(tmp_path / "a.txt").train.rows()
    assert one == SourceRow(f"{tmp_path}/a.txt, line 1", {"text": "one "})
    assert [row.problem for row in (bad, two, binary)] == [
        f"{tmp_path}/a.txt, line {problem}; fix or remove the row, or set data.encoding to the encoding of the file."
        for problem in (
            "3 is not UTF-8 text (byte 0xff)",
            "4 is not UTF-8 text (byte 0x85)",
            "5 is not text (it contains a NUL byte)",
        )
    ]


def test_a_file_of_a_label_that_cannot_be_read_is_a_bad_row(tmp_path: Path) -> None:
    made(tmp_path, *FILES)
    (tmp_path / "neg/a.md").write_bytes(b"a\n\xff\n")
    (tmp_path / "neg/b.txt").write_bytes(b"\0")
    (tmp_path / "neg/c.txt.gz").write_bytes(b"no gzip")
    (tmp_path / "neg/d.txt").write_bytes(b"a" * (65 << 20))
    bad_rows = RowReport("skip")
    assert labels(bad_rows.parsed(opened(tmp_path).train.rows(), parsed)) == [("pos/more/c.txt", "pos")]
    assert bad_rows.skipped == 4
    first, second, third, fourth = (str(row.problem) for row in opened(tmp_path).train.rows() if row.problem)
    assert first.startswith(f"{tmp_path}/neg/a.md, line 2 is not UTF-8 text")
    assert second.startswith(f"{tmp_path}/neg/b.txt is a binary file")
    assert third.startswith(f"{tmp_path}/neg/c.txt.gz cannot be read")
    assert fourth.startswith(f"{tmp_path}/neg/d.txt is longer than 64 MB")
    with pytest.raises(BadRowError, match=r"a\.md, line 2 is not UTF-8 .*, or set data\.on_bad_row to skip"):
        list(RowReport("fail").parsed(opened(tmp_path).train.rows(), parsed))


def parsed(row: SourceRow) -> SourceRow:
    row.readable_value()
    return row


@pytest.mark.parametrize("form", ["splits", "one", "parquet"])
def test_labels_of_a_saved_dataset_have_their_names(tmp_path: Path, form: str) -> None:
    label = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": label,
            "tags": datasets.List(label),
            "ids": datasets.List(datasets.Value("int64")),
        }
    )
    content = {"text": ["a", "b", "c"], "label": [1, 0, -1], "tags": [[0, 1], [], None], "ids": [[1], [0], []]}
    dataset = datasets.Dataset.from_dict(content, features)
    if form == "parquet":
        (tmp_path / "saved").mkdir()
        dataset.to_parquet(tmp_path / "saved/train.parquet")
    else:
        saved = datasets.DatasetDict({"train": dataset, "test": dataset}) if form == "splits" else dataset
        saved.save_to_disk(tmp_path / "saved")
    assert [row.value for row in opened(tmp_path / "saved").train.rows()] == [
        {"text": "a", "label": "pos", "tags": ["neg", "pos"], "ids": [1]},
        {"text": "b", "label": "neg", "tags": [], "ids": [0]},
        {"text": "c", "label": None, "tags": None, "ids": []},
    ]
