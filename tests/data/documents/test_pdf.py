"""Text of PDF files: lines, words broken at line ends, headers and footers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sansgpu.config import ConfigError
from sansgpu.data.documents.document import Document, DocumentPart
from sansgpu.data.documents.edges import without_repeated_edges
from sansgpu.data.documents.layout import HYPHEN, PageLine, join_lines, with_whole_words
from sansgpu.data.documents.reading import read_document
from tests.data.documents.written import MILL, Placed, needs_pdfium, parts_of, pdf_file, source_of, text_of


def handbook_page(number: int, count: int) -> list[Placed]:
    body = [f"Page number {number} of the handbook explains the wheel of the mill and its docu-"]
    body += ["mentation, which every miller should read before the winter comes and the water", "freezes."]
    lines = [(60.0, 700.0 - 12 * place, text) for place, text in enumerate(body)]
    return [(60.0, 800.0, "The Miller's Handbook"), *lines, (280.0, 30.0, f"{number} / {count}"), (60, 45, "Draft")]


@needs_pdfium
def test_pages_of_a_pdf_file_lose_headers_footers_and_broken_words(tmp_path: Path) -> None:
    path = pdf_file(tmp_path / "book.pdf", [handbook_page(number, 4) for number in range(1, 5)])
    document = read_document(path)
    assert (document.unit, document.pages, document.blank) == ("page", 4, 0)
    assert document.parts[2] == DocumentPart(
        3,
        "Page number 3 of the handbook explains the wheel of the mill and its documentation, which every miller should "
        "read before the winter comes and the water freezes.",
    )


@needs_pdfium
def test_scanned_pages_are_counted(tmp_path: Path) -> None:
    pdf_file(tmp_path / "a.pdf", [[(60, 700, MILL)], [], [], [(60, 700, "The end.")]])
    found = source_of(tmp_path)
    assert [piece.text for piece in found.read()] == [f"{MILL}\n\nThe end."]
    assert found.notes == [
        "2 of 4 pages have no text; they are scanned images (a.pdf); recognize their text first, e.g. with ocrmypdf"
    ]
    scan = pdf_file(tmp_path / "scan.pdf", [[], []])
    with pytest.raises(ConfigError, match=r"scan\.pdf has no text on 2 pages of scanned images; recognize it first"):
        source_of(scan)


@needs_pdfium
def test_paragraphs_of_a_pdf_file_are_apart_and_tables_keep_their_rows(tmp_path: Path) -> None:
    rows = [(60, 700, "Grain"), (300, 700, "Tons"), (60, 688, "Rye"), (300, 688, "1,200"), (60, 640, MILL)]
    path = pdf_file(tmp_path / "a.pdf", [[(left, height, text) for left, height, text in rows]])
    assert parts_of(path) == [(1, f"Grain\tTons\nRye\t1,200\n\n{MILL}")] or text_of(path).splitlines() == [
        "Grain Tons",
        "Rye 1,200",
        "",
        MILL,
    ]


@needs_pdfium
def test_damaged_and_compressed_pdf_files(tmp_path: Path) -> None:
    path = pdf_file(tmp_path / "a.pdf", [[(60, 700, MILL)]])
    packed = tmp_path / "b.pdf.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert parts_of(packed) == [(1, MILL)]
    path.write_bytes(b"%PDF-1.4\n garbage")
    with pytest.raises(ConfigError, match=r"a\.pdf is not a valid PDF file; download or export it again\."):
        read_document(path)


def lines(*texts: str, width: float = 5.0) -> list[PageLine]:
    heights = [700.0 - 12 * number for number in range(len(texts))]
    return [
        PageLine(text, 60, 60 + width * len(text), height, height) for text, height in zip(texts, heights, strict=True)
    ]


def test_lines_are_joined_only_if_the_next_word_did_not_fit() -> None:
    prose = lines("the mill grinds rye and wheat for the", "bakers of the whole valley, who sell", "bread.")
    assert join_lines(prose) == "the mill grinds rye and wheat for the bakers of the whole valley, who sell bread."
    assert join_lines(lines("Title", "the mill grinds rye and wheat for")) == "Title\nthe mill grinds rye and wheat for"
    listed = lines("- grinds rye and wheat for the bakers", "- turns a wheel of old oak, and water")
    assert join_lines(listed).count("\n") == 1
    code = lines("def grind(grain): return mill(grain);", "print(grind(grain) for grain in rye);")
    assert join_lines(code).count("\n") == 1
    assert join_lines([]) == ""


def test_a_word_broken_at_a_line_end_keeps_its_hyphen_only_if_the_text_has_it_elsewhere() -> None:
    pages = [f"a well{HYPHEN}known docu{HYPHEN}mentation", "the well-known documentation", f"an un{HYPHEN}seen word"]
    assert with_whole_words(pages) == [
        "a well-known documentation",
        "the well-known documentation",
        "an unseen word",
    ]


@pytest.mark.parametrize(
    ("broken", "elsewhere", "expected"),
    [
        ("state-of-the-|art", "A State-of-the-art mill.", "state-of-the-art"),
        ("state-|of-the-art", "state-of-the-art", "state-of-the-art"),
        ("state-of-the-|art", "the art of it", "state-of-the-art"),
        ("well-docu-|mented", "it is documented well", "well-documented"),
        ("well-docu-|mented", "", "well-documented"),
        ("well-|known", "well known", "wellknown"),  # as in "in-formation", nothing says that the hyphen is real
        ("co-|operate", "co-operate, or cooperate: cooperate", "cooperate"),
        ("docu-|mentation", "", "documentation"),
    ],
)
def test_a_hyphen_at_a_line_end_is_kept_where_the_document_has_it(broken: str, elsewhere: str, expected: str) -> None:
    page = f"the {broken.replace('|', HYPHEN)} mill"
    assert with_whole_words([page, elsewhere])[0] == f"the {expected} mill"


def page(*placed: tuple[float, str]) -> list[PageLine]:
    return [PageLine(text, 60, 60 + 5 * len(text), height, height) for height, text in placed]


def left_of(pages: list[list[PageLine]]) -> list[list[str]]:
    return [[line.text for line in lines] for lines in without_repeated_edges(pages, [842.0] * len(pages))]


def test_headers_that_alternate_or_change_with_the_chapter_are_removed() -> None:
    heads = ["Handbook", "Chapter 1", "Handbook", "Chapter 1", "Handbook", "Chapter 2", "Handbook", "Chapter 2"]
    pages = [page((800, head), (400, f"text {head}"), (30, f"- {n} -")) for n, head in enumerate(heads, 7)]
    assert left_of(pages) == [[f"text {head}"] for head in heads]


def test_roman_page_numbers_are_removed_and_equal_lines_of_the_text_kept() -> None:
    body = [["one", "Rye"], ["two", "Oats"], ["three", "Rye"], ["four", "Rye"]]
    numbers = ["i", "ii", "iii", "iv"]
    pages = [page((780 - 20 * n, a), (600, b), (20, numbers[n])) for n, (a, b) in enumerate(body)]
    assert left_of(pages) == body


def test_sentences_with_the_number_of_their_page_are_kept() -> None:
    pages = [page((800, f"This is the text of page {n}."), (780, "A second line"), (20, str(n))) for n in (1, 2, 3)]
    assert left_of(pages) == [[f"This is the text of page {n}."] for n in (1, 2, 3)]
    short = [page((800, f"Page {n}"), (20, str(n))) for n in (1, 2, 3)]
    assert left_of(short) == [["Page 1"], ["Page 2"], ["Page 3"]]


def test_a_single_page_keeps_everything() -> None:
    assert left_of([page((800, "Title"), (400, "text"), (20, "1"))]) == [["Title", "text", "1"]]


def test_numbers_that_do_not_count_pages_are_kept() -> None:
    pages = [page((400, "text"), (30, value)) for value in ("1,200", "17", "1,200", "3")]
    assert [found[-1] for found in left_of(pages)] == ["1,200", "17", "1,200", "3"]


def test_pages_join_within_a_sentence() -> None:
    pages = [DocumentPart(1, "It grinds"), DocumentPart(2, "rye."), DocumentPart(3, "and more")]
    assert Document("page", pages).texts() == ["It grinds rye.\n\nand more"]
    assert Document("cell", pages[:2]).texts() == ["It grinds\n\nrye."]
