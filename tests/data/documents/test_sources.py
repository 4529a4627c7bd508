"""Documents as datasets: folders, missing packages, attacks, limits and rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from sansgpu.config import ConfigError
from sansgpu.data.documents import collection, reading
from sansgpu.data.documents.reading import read_document
from sansgpu.machine.untrusted.sandbox import Sandbox
from tests.data.documents.written import MILL, archive, paragraph, pdf_file, source_of, text_of, word_file


def test_a_folder_names_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "b.docx").write_text("not a zip", encoding="utf-8")
    (tmp_path / "c.docx").write_bytes(bytes.fromhex("d0cf11e0a1b11ae1") + b"\0" * 100)
    word_file(tmp_path / "d.docx", paragraph(MILL) + "<w:p><w:r><w:drawing/></w:r></w:p>")
    found = source_of(tmp_path)
    assert [piece.text for piece in found.read()] == ["plain", MILL]
    assert list(found.files) == ["a.txt", "d.docx"]
    assert found.size_bytes == len("plain") + len(MILL)
    left, images = found.notes
    assert left.startswith("2 of 3 documents left out: ")
    assert "b.docx is not a Word file (.docx), or damaged" in left
    assert "c.docx is encrypted, or in a format older than" in left
    assert images == "not read in documents: 1 image"


def test_a_folder_without_a_readable_file_is_refused(tmp_path: Path) -> None:
    for name in ("a.docx", "b.odt", "c.epub", "d.pptx"):
        (tmp_path / name).write_text("broken", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"4 of 4 documents left out: .*a\.docx is not a Word file.*and 1 more\."):
        source_of(tmp_path)


def test_without_its_package_a_format_is_left_out_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "is_installed", lambda package: False)
    pdf_file(tmp_path / "a.pdf", [[(60, 700, MILL)]])
    with pytest.raises(ConfigError, match=r'PDF needs pypdfium2.*run `pip install "sansgpu\[documents\]"`\.'):
        source_of(tmp_path)
    (tmp_path / "b.txt").write_text("plain", encoding="utf-8")
    found = source_of(tmp_path)
    assert list(found.files) == ["b.txt"]
    assert found.notes == [
        "1 of 1 document left out (a.pdf): reading PDF needs pypdfium2, which is not installed; run `pip install "
        '"sansgpu[documents]"`.'
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("entities.docx", '<!DOCTYPE x [<!ENTITY a "b">]><w:d>&a;</w:d>', "declares XML entities"),
        ("file.docx", '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><w:d>&a;</w:d>', "declares XML entities"),
        (
            "late.docx",
            f"<!--{'x' * 5000}--><!DOCTYPE x [<!ENTITY a SYSTEM 'file:///x'>]><d>&a;</d>",
            "undefined entity",
        ),
        ("deep.docx", "<p>" * 50_000 + "</p>" * 50_000, "recursion"),
    ],
)
def test_attacks_by_xml_are_named(tmp_path: Path, name: str, content: str, problem: str) -> None:
    path = archive(tmp_path / name, {"word/document.xml": content})
    with pytest.raises(ConfigError, match=problem):
        read_document(path)


def test_a_decompression_bomb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sansgpu.data.documents.archive.MAX_TEXT_BYTES", 1 << 20)
    reading._READER.close()  # so that the next child has the changed limit
    path = word_file(tmp_path / "a.docx", paragraph("a" * (4 << 20)))
    with pytest.raises(ConfigError, match="like a decompression bomb"):
        read_document(path)
    reading._READER.close()


def test_a_file_that_takes_too_long_is_named_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(request: bytes) -> bytes:
        while True:
            pass

    path = word_file(tmp_path / "a.docx", paragraph(MILL))
    child = Sandbox(hang, 1)
    monkeypatch.setattr(reading, "_READER", child)
    with pytest.raises(ConfigError, match=r"a\.docx takes more than 1 seconds; remove it or split it\."):
        read_document(path)
    monkeypatch.setattr(reading, "_READER", None)
    with pytest.raises(ConfigError, match="takes more than 1 seconds"):
        read_document(path)


def test_the_text_is_read_once_and_again_by_another_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = word_file(tmp_path / "a.docx", paragraph(MILL))
    before = source_of(path).fingerprint
    calls = []
    real = reading._READER
    monkeypatch.setattr(
        reading, "_READER", type("Counted", (), {"call": lambda _, r: calls.append(r) or real.call(r)})()
    )
    assert (text_of(path), calls) == (MILL, [])
    monkeypatch.setattr("sansgpu.data.documents.formats.READER", 0)
    assert source_of(path).fingerprint != before
    assert len(calls) == 1


def test_rows_of_documents(tmp_path: Path) -> None:
    path = word_file(tmp_path / "a.docx", paragraph("one") + paragraph("two"))
    rows = list(source_of(path, text_rows=True).rows())
    assert rows[1].where == f"{path}, paragraph 2"
    assert rows[1].value == {"text": "two", "file": str(path), "paragraph": 2}
    with pytest.raises(ConfigError, match="is a document and has no rows"):
        list(source_of(path).rows())


def test_documents_beside_rows_are_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word_file(tmp_path / "about.docx", paragraph(MILL))
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n', encoding="utf-8")
    found = source_of(tmp_path)
    assert [row.value for row in found.rows()] == [{"text": "a row"}]
    assert [piece.text for piece in found.read()] == [MILL, "a row"]
    assert "1 document beside files with rows left out (about.docx)" in capsys.readouterr().err


def test_folders_of_labels_hold_documents(tmp_path: Path) -> None:
    for label in ("good", "bad"):
        (tmp_path / label).mkdir()
        word_file(tmp_path / label / "1.docx", paragraph(label) + paragraph("text"))
    rows = [row.value for row in source_of(tmp_path, text_rows=True).rows()]
    assert rows == [{"text": f"{label}\n\ntext", "label": label} for label in ("bad", "good")]
