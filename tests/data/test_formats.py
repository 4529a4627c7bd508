"""Files are read whatever their suffix, compression or archive, and a folder never loses one without a word."""

import bz2
import gzip
import json
import lzma
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.formats import opening
from sansgpu.data.formats.names import folder_split, split_of
from sansgpu.data.forms.files import file_notes
from sansgpu.data.sources import Sources, open_sources

ROWS = [{"text": "good, really", "label": "pos"}, {"text": "bad", "label": "neg"}]
CSV = b'text,label\n"good, really",pos\nbad,neg\n'
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def opened(path: Path, **settings: Any) -> Sources:
    return open_sources(DataConfig.model_validate({"dataset_name": str(path), **settings}))


def read(path: Path, **settings: Any) -> list[Any]:
    return [row.readable_value() for row in opened(path, **settings).train.rows()]


def written(path: Path, content: bytes = CSV) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


NAMES = {"Train.CSV": CSV, "a.Csv": CSV, "a.TSV": CSV.replace(b",", b"\t").replace(b'"good\t really"', b"good, really")}
NAMES |= {f"a.{suffix}": JSONL for suffix in ("jsonl", "JSONL", "ndjson", "jsonlines", "json", "NDJSON")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz", ".GZ", ".zst"])
def test_suffixes_are_known_in_any_case_and_compression(tmp_path: Path, name: str, packed: str) -> None:
    content = NAMES[name]
    match packed.lower():
        case ".gz":
            content = gzip.compress(content)
        case ".bz2":
            content = bz2.compress(content)
        case ".xz":
            content = lzma.compress(content)
        case ".zst":
            content = pytest.importorskip("zstandard").compress(content)
    assert read(written(tmp_path / f"{name}{packed}", content)) == ROWS


def test_arrow_files_are_read(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.feather.write_feather(table, tmp_path / "a.feather")
    with pyarrow.ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=1)
    with pyarrow.ipc.new_stream(tmp_path / "c.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "d.arrow.gz").write_bytes(gzip.compress((tmp_path / "c.arrow").read_bytes()))
    for name in ("a.feather", "b.arrow", "c.arrow", "d.arrow.gz"):
        assert read(tmp_path / name) == ROWS
    with pytest.raises(ConfigError, match=r"e\.arrow is not a valid Arrow file"):
        read(written(tmp_path / "e.arrow", b"ARROW1" + b"x" * 40))


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_archives_are_read_like_folders(tmp_path: Path) -> None:
    assert read(zipped(tmp_path / "one.zip", {"reviews.csv": CSV, "__MACOSX/._reviews.csv": b"x"})) == ROWS
    parts = {"data/train.csv": CSV, "data/test.jsonl.gz": gzip.compress(JSONL), "data/.hidden.csv": b"x"}
    sources = opened(zipped(tmp_path / "Several.ZIP", parts))
    assert sources.test is not None
    assert [[row.value for row in source.rows()] for source in (sources.train, sources.test)] == [ROWS, ROWS]
    assert next(row.where for row in sources.test.rows()) == f"{tmp_path}/Several.ZIP/data/test.jsonl.gz, line 1"
    table = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    assert read(zipped(tmp_path / "c.zip", {"a.parquet": table.getvalue().to_pybytes()})) == ROWS
    prints = {opened(tmp_path / name).train.fingerprint for name in ("one.zip", "Several.ZIP", "c.zip")}
    assert len(prints) == 3


def test_archives_in_a_folder_are_splits(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    zipped(tmp_path / "d/train.zip", {"data.csv": CSV})
    zipped(tmp_path / "d/test.zip", {"data.csv": CSV})
    sources = opened(tmp_path / "d")
    assert sources.test is not None
    assert [*sources.train.files] == ["train.zip/data.csv"]


def test_an_archive_with_files_of_labels_has_rows(tmp_path: Path) -> None:
    path = zipped(
        tmp_path / "a.zip", {"train/pos/1.txt": b"good", "train/neg/1.txt": b"bad", "test/pos/1.txt": b"fine"}
    )
    sources = open_sources(DataConfig(dataset_name=str(path)), text_rows=True)
    assert [row.value for row in sources.train.rows()] == [
        {"text": "bad", "label": "neg"},
        {"text": "good", "label": "pos"},
    ]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../../a.csv": CSV}, "a file outside its own folder"),
        ({"/etc/a.csv": CSV}, "a file outside its own folder"),
        ({"a.csv": b"text\n" + b"a" * (1 << 20)}, "more than 200 times its size"),
        ({"a.png": b"x"}, "no file with a supported suffix"),
        (dict.fromkeys(map("{}.csv".format, range(1001)), CSV), "more than 1,000 files"),
    ],
    ids=range(5),
)
def test_archives_that_are_no_data_are_refused(
    tmp_path: Path, files: dict[str, bytes], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "FREE_EXPANSION", 1 << 16)
    path = zipped(tmp_path / "a.zip", files)
    with pytest.raises(ConfigError, match=said):
        read(path)


@pytest.mark.parametrize("damage", [b"rubbish", b"PK\3\4" + b"\0" * 60, b""])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: bytes) -> None:
    with pytest.raises(ConfigError, match=r"a\.zip cannot be read as a \.zip archive"):
        read(written(tmp_path / "a.zip", damage))


@pytest.mark.parametrize("suffix", ["bz2", "xz", "gz"])
@pytest.mark.parametrize("damage", ["truncated", "rubbish", "bomb"])
def test_damaged_compressions_are_refused(
    tmp_path: Path, suffix: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "FREE_EXPANSION", 1 << 16)
    pack = {"bz2": bz2.compress, "xz": lzma.compress, "gz": gzip.compress}[suffix]
    content = pack(b"text\n" + b"words " * 200_000) if damage == "bomb" else pack(CSV * 100)
    if damage != "bomb":
        content = content[: len(content) // 2] if damage == "truncated" else b"rubbish"
    with pytest.raises(ConfigError, match="more than 200 times its size" if damage == "bomb" else "cannot be read"):
        read(written(tmp_path / f"a.csv.{suffix}", content))


def test_parts_that_spark_wrote_are_read(tmp_path: Path) -> None:
    for name in ("_SUCCESS", "_committed_123", ".part-00000.crc"):
        written(tmp_path / name, b"")
    written(tmp_path / "part-00000", JSONL)
    written(tmp_path / "part-00001-5f6c-c000.gz", gzip.compress(JSONL))
    written(tmp_path / "part-00002", CSV)
    written(tmp_path / "part-00003-a.json", JSONL)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "part-00004")
    assert read(tmp_path) == ROWS * 5
    assert file_notes(DataConfig(dataset_name=str(tmp_path)), "labeled texts") == []


def test_a_json_file_may_have_an_object_on_each_line(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.json", JSONL)) == ROWS
    assert read(written(tmp_path / "b.json", json.dumps(ROWS, indent=1).encode())) == ROWS
    assert read(written(tmp_path / "c.json", json.dumps(ROWS[0], indent=1).encode())) == ROWS[:1]
    assert read(written(tmp_path / "d.json", json.dumps(ROWS[0]).encode())) == ROWS[:1]


@pytest.mark.parametrize(
    "table",
    [
        {"text": {"0": "a", "2": "b"}, "label": {"0": 1, "2": 0}},
        {"columns": ["text", "label"], "index": [0, 2], "data": [["a", 1], ["b", 0]]},
        {"schema": {"fields": []}, "data": [{"text": "a", "label": 1}, {"text": "b", "label": 0}]},
    ],
)
def test_tables_that_pandas_writes_as_json_are_read(table: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", json.dumps(table).encode())
    assert read(path) == [{"text": "a", "label": 1}, {"text": "b", "label": 0}]


SPLITS = {
    "train": ["train.csv", "Train.CSV", "TRAIN.jsonl", "reviews_train.csv", "train-00000-of-00002.parquet",
              "my.train.csv", "reviewsTrain.csv", "data-training.json", "train2.csv", "train.txt.gz"],
    "validation": ["valid.csv", "Validation.csv", "reviews_val.csv", "dev.tsv", "x-DEV.jsonl", "Valid.txt"],
    "test": ["test.csv", "reviews_test.csv", "Test.CSV", "data.test.jsonl", "testing.csv"],
    "none": ["latest.csv", "contest.csv", "trained.csv", "developers.csv", "values.csv", "attest.csv", "restrain.csv",
             "my_test.py", "how-to-test.md", "evaluations.csv"],
}  # fmt: skip


@pytest.mark.parametrize(("split", "name"), [(split, name) for split, names in SPLITS.items() for name in names])
def test_the_split_is_a_whole_word_of_the_name(split: str, name: str) -> None:
    assert (split_of(Path("folder") / name) or "none") == split


def test_the_split_may_be_the_name_of_a_folder(tmp_path: Path) -> None:
    for name in ("Train/a.csv", "Train/b.csv", "test/a.csv"):
        written(tmp_path / name)
    sources = opened(tmp_path)
    assert sources.test is not None
    assert ([*sources.train.files], [*sources.test.files]) == (["Train/a.csv", "Train/b.csv"], ["test/a.csv"])
    assert folder_split(tmp_path / "latest/a.csv", tmp_path) is None


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path: Path) -> None:
    for name in ("Train.CSV", "test.csv", "notes.doc", "more.doc", "a.png"):
        written(tmp_path / name)
    written(tmp_path / "extra.ndjson", JSONL)
    sources = opened(tmp_path)
    assert sources.test is not None
    assert ([*sources.train.files], [*sources.test.files]) == (["Train.CSV", "extra.ndjson"], ["test.csv"])
    (note,) = file_notes(DataConfig(dataset_name=str(tmp_path)), "labeled texts")
    assert note.startswith(f"{tmp_path}: 3 files left out (.doc: 2, .png: 1), e.g. a.png; save the data as one of")


def test_a_file_with_a_suffix_of_its_own_needs_no_notes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.bio", b"Ada B-PER\nlived O\n")
    assert file_notes(DataConfig(dataset_name=str(path)), "tagged texts") == []
    assert file_notes(DataConfig(dataset_name=str(tmp_path / "missing")), "tagged texts") == []


def test_training_on_a_file_named_test_is_said(tmp_path: Path) -> None:
    written(tmp_path / "a.csv")
    written(tmp_path / "reviews_test.csv")
    (note,) = file_notes(DataConfig(dataset_name=str(tmp_path)), "labeled texts")
    assert note.startswith(
        f"{tmp_path}/reviews_test.csv is named after a split, but trained on, because no file is named"
    )


SHEET = """<?xml version="1.0"?><worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>
{}</sheetData></worksheet>"""


def spreadsheet(path: Path, *sheets: list[list[Any]]) -> Path:
    """Writes an .xlsx file with these rows of cells."""
    main = "http://schemas.openxmlformats.org"
    kinds = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    files = {
        "[Content_Types].xml": f'<Types xmlns="{main}/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kinds}.sheet.main+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{main}/package/2006/relationships"><Relationship Id="r1" '
        f'Type="{main}/officeDocument/2006/relationships/officeDocument" Target="xl/workbook.xml"/></Relationships>',
    }
    names = "".join(f'<sheet name="S{n}" sheetId="{n}" r:id="r{n}"/>' for n in range(1, len(sheets) + 1))
    files["xl/workbook.xml"] = (
        f'<workbook xmlns="{main}/spreadsheetml/2006/main" xmlns:r="{main}/officeDocument/2006/relationships">'
        f"<sheets>{names}</sheets></workbook>"
    )
    links = "".join(
        f'<Relationship Id="r{n}" Type="{main}/officeDocument/2006/relationships/worksheet" '
        f'Target="worksheets/sheet{n}.xml"/>'
        for n in range(1, len(sheets) + 1)
    )
    files["xl/_rels/workbook.xml.rels"] = (
        f'<Relationships xmlns="{main}/package/2006/relationships">{links}</Relationships>'
    )
    for number, rows in enumerate(sheets, 1):
        cells = [
            f'<row r="{row}">' + "".join(cell(value, f"{chr(65 + column)}{row}") for column, value in enumerate(values))
            for row, values in enumerate(rows, 1)
        ]
        files[f"xl/worksheets/sheet{number}.xml"] = SHEET.format("".join(f"{line}</row>" for line in cells))
    return zipped(path, {name: content.encode() for name, content in files.items()})


def cell(value: Any, place: str) -> str:
    if isinstance(value, str):
        return f'<c r="{place}" t="inlineStr"><is><t>{value}</t></is></c>' if value else ""
    return f'<c r="{place}"><v>{value}</v></c>'


def test_spreadsheets_are_read(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    table = [["", "text", "label"], [0, "good, really", "pos"], [1, "nan", "neg"], ["", "", ""], [2, "fine", 3]]
    path = spreadsheet(tmp_path / "a.xlsx", table, [["more"]])
    expected = [("good, really", "pos"), (None, "neg"), ("fine", "3")]
    assert [tuple(row.values()) for row in read(path)] == expected
    (note,) = file_notes(DataConfig(dataset_name=str(path)), "labeled texts")
    assert "2 columns (text, label), sheet S1 without 1 other sheet, the index column left out" in note
    wide = spreadsheet(tmp_path / "b.xlsx", [["text", "label"], ["a", "pos", "more"], ["b", "neg"]])
    assert read(wide)[0] == {"text": "a", "label": "pos", "column 2": "more"}
    content = path.read_bytes()
    for damaged in (b"rubbish", content[: len(content) // 2], content.replace(b"sheet1", b"sheet9")):
        with pytest.raises(ConfigError, match=r"c\.xlsx cannot be read as a spreadsheet"):
            read(written(tmp_path / "c.xlsx", damaged))


def test_a_title_of_a_spreadsheet_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    path = spreadsheet(tmp_path / "a.xlsx", [["Reviews of May"], [], ["Text", "Label"], ["fine", "good"]])
    assert read(path) == [{"Text": "fine", "Label": "good"}]
    (note,) = file_notes(DataConfig(dataset_name=str(path)), "labeled texts")
    assert "2 lines above the header left out" in note


def test_a_spreadsheet_with_a_distant_cell_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    path = spreadsheet(tmp_path / "a.xlsx", [["text"]])
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    far = b'</row><row r="1048576"><c r="XFD1048576"><v>1</v></c></row></sheetData>'
    sheet = "xl/worksheets/sheet1.xml"
    files[sheet] = files[sheet].replace(b"</row></sheetData>", far)
    with pytest.raises(ConfigError, match="like a decompression bomb"):
        read(zipped(tmp_path / "b.xlsx", files))


def test_a_spreadsheet_of_libreoffice_is_read(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    office = "urn:oasis:names:tc:opendocument:xmlns"
    cells = "".join(
        "<table:table-row>" + "".join(
            f'<table:table-cell office:value-type="string"><text:p>{value}</text:p></table:table-cell>' for value in row
        ) + '<table:table-cell table:number-columns-repeated="16380"/></table:table-row>'
        for row in (["text", "label"], ["good, really", "pos"], ["bad", "neg"])
    )  # fmt: skip
    content = (
        f'<office:document-content xmlns:office="{office}:office:1.0" xmlns:table="{office}:table:1.0" '
        f'xmlns:text="{office}:text:1.0"><office:body><office:spreadsheet><table:table table:name="S">{cells}'
        '<table:table-row table:number-rows-repeated="1048570"><table:table-cell '
        'table:number-columns-repeated="16384"/></table:table-row>'
        "</table:table></office:spreadsheet></office:body></office:document-content>"
    )
    kind = b"application/vnd.oasis.opendocument.spreadsheet"
    manifest = f'<manifest:manifest xmlns:manifest="{office}:manifest:1.0"/>'.encode()
    files = {"mimetype": kind, "content.xml": content.encode(), "META-INF/manifest.xml": manifest}
    assert read(zipped(tmp_path / "a.ods", files)) == ROWS
    bomb = content.replace("office:value-type", 'table:number-columns-repeated="16000" office:value-type')
    bomb = bomb.replace("<table:table-row>", '<table:table-row table:number-rows-repeated="1000000">')
    with pytest.raises(ConfigError, match="like a decompression bomb"):
        read(zipped(tmp_path / "b.ods", {**files, "content.xml": bomb.encode()}))


@pytest.mark.parametrize(("name", "package"), [("a.xlsx", "python-calamine"), ("a.csv.zst", "zstandard")])
def test_a_missing_package_is_named(tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sansgpu.config.errors.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r'run `pip install "sansgpu\[tables\]"`'):
        read(written(tmp_path / name, b"x"))


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_in_a_jsonl_file_is_its_rows(indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS, indent=indent) + "\n")
    assert read(path) == ROWS
    path.write_text("[1, 2]\n[3]\n")
    assert read(path) == [[1, 2], [3]]
    path.write_text("[\n{},\n")
    with pytest.raises(ConfigError, match="line 1 is not valid JSON"):
        read(path)


def test_a_line_with_an_array_of_turns_is_one_row(tmp_path: Path) -> None:
    path, turns = tmp_path / "rows.jsonl", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps(turns))
    assert read(path) == [turns]
