"""Reading documents: PDF, Word, PowerPoint, OpenDocument, EPUB, HTML, e-mail and notebooks."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Sequence
from email.message import EmailMessage
from pathlib import Path

import pytest

from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.config.errors import is_installed
from sansgpu.data.documents import collection, reading
from sansgpu.data.documents.document import Document, DocumentPart
from sansgpu.data.documents.edges import without_repeated_edges
from sansgpu.data.documents.html import decoded, html_text
from sansgpu.data.documents.layout import HYPHEN, PageLine, join_lines, with_whole_words
from sansgpu.data.documents.reading import read_document
from sansgpu.data.sources import Source, open_single
from sansgpu.machine.untrusted.sandbox import Sandbox

needs_pdfium = pytest.mark.skipif(not is_installed("pypdfium2"), reason="needs pypdfium2")
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
MILL = "The mill grinds rye and wheat."


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANSGPU_CACHE", str(tmp_path / "cache"))


def archive(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def word_file(path: Path, body: str, **more: str) -> Path:
    document = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    return archive(path, {"word/document.xml": document, **more})


def paragraph(text: str, properties: str = "") -> str:
    return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"


def odt_file(path: Path, body: str, attributes: str = "", styles: str = "") -> Path:
    names = ("office", "style", "text", "table", "fo", "draw")
    spaces = " ".join(f'xmlns:{name}="urn:{name}"' for name in names)
    text = f"<office:body><office:text {attributes}>{body}</office:text></office:body>"
    return archive(path, {"content.xml": f"<office:document-content {spaces}>{styles}{text}</office:document-content>"})


Placed = tuple[float, float, str]  # left and height in points, and a text


def pdf_file(path: Path, pages: Sequence[Sequence[Placed]]) -> Path:
    """Writes a PDF file with lines of text in Helvetica. A page without lines has a rectangle."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for lines in pages:
        shown = [f"BT /F1 10 Tf {left} {height} Td ({text}) Tj ET" for left, height, text in lines]
        content = "\n".join(shown or ["100 100 300 300 re f"])
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {len(objects) + 2} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    text, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(text))
        text += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    trailer = f"trailer << /Size {size} /Root 1 0 R >>\nstartxref\n{len(text)}\n%%EOF\n"
    path.write_text(f"{text}xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}", encoding="latin-1")
    return path


def handbook_page(number: int, count: int) -> list[Placed]:
    body = [f"Page number {number} of the handbook explains the wheel of the mill and its docu-"]
    body += ["mentation, which every miller should read before the winter comes and the water", "freezes."]
    lines = [(60.0, 700.0 - 12 * place, text) for place, text in enumerate(body)]
    return [(60.0, 800.0, "The Miller's Handbook"), *lines, (280.0, 30.0, f"{number} / {count}"), (60, 45, "Draft")]


def parts_of(path: Path) -> list[tuple[int, str]]:
    return [(part.number, part.text) for part in read_document(path).parts]


def text_of(path: Path) -> str:
    return "\n\n".join(read_document(path).texts())


def source_of(path: Path, text_rows: bool = False) -> Source:
    return open_single(str(path), DataConfig(dataset_name=str(path)), text_rows)


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


def test_word_files(tmp_path: Path) -> None:
    items = "".join(paragraph(text, "<w:pPr><w:numPr/></w:pPr>") for text in ("one", "two"))
    cells = [f"<w:tc>{paragraph(text)}</w:tc>" for text in ("Grain", "Tons", "Rye", "1,200")]
    table = f"<w:tbl><w:tr>{''.join(cells[:2])}</w:tr><w:tr>{''.join(cells[2:])}</w:tr></w:tbl>"
    deleted = "<w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:ins><w:r><w:t>new</w:t></w:r></w:ins></w:p>"
    path = word_file(tmp_path / "a.DOCX", paragraph("Küche 日本") + items + table + deleted)
    assert parts_of(path) == [(1, "Küche 日本"), (2, "- one\n- two"), (3, "Grain\tTons\nRye\t1,200"), (4, "new")]


def test_pages_of_word_files_that_word_has_saved(tmp_path: Path) -> None:
    rendered = "<w:p><w:r><w:lastRenderedPageBreak/><w:t>second</w:t></w:r></w:p>"
    within = "<w:p><w:r><w:t>of two </w:t><w:lastRenderedPageBreak/><w:t>pages</w:t></w:r></w:p>"
    path = word_file(tmp_path / "a.docx", paragraph("first") + rendered + within + paragraph("third"))
    assert read_document(path).unit == "page"
    assert parts_of(path) == [(1, "first"), (2, "second\n\nof two pages"), (3, "third")]


def test_slides_have_their_order_tables_and_notes(tmp_path: Path) -> None:
    def slide(text: str, more: str = "") -> str:
        shape = f"<p:sp><p:txBody><a:p><a:r><a:t>{text}</a:t></a:r></a:p></p:txBody></p:sp>"
        number = '<p:sp><p:nvSpPr><p:nvPr><p:ph type="sldNum"/></p:nvPr></p:nvSpPr><p:txBody><a:p><a:r><a:t>7</a:t>'
        number += "</a:r></a:p></p:txBody></p:sp>"
        return f'<p:sld xmlns:p="urn:p" xmlns:a="{DRAWING}">{shape}{more}{number}</p:sld>'

    def relations(*targets: tuple[str, str]) -> str:
        found = "".join(f'<R Id="r{n}" Type="x/{kind}" Target="{name}"/>' for n, (kind, name) in enumerate(targets))
        return f"<Rs>{found}</Rs>"

    cell = "<a:tc><a:txBody><a:p><a:r><a:t>{}</a:t></a:r></a:p></a:txBody></a:tc>"
    table = f"<a:tbl><a:tr>{cell.format('A')}{cell.format('B')}</a:tr></a:tbl>"
    listed = '<p:sldIdLst><p:sldId id="9" r:id="r1"/><p:sldId id="8" r:id="r0"/></p:sldIdLst>'
    path = archive(
        tmp_path / "a.pptx",
        {
            "ppt/presentation.xml": f'<p:x xmlns:p="urn:p" xmlns:r="{RELATIONS}">{listed}</p:x>',
            "ppt/_rels/presentation.xml.rels": relations(("slide", "slides/s1.xml"), ("slide", "slides/s2.xml")),
            "ppt/slides/s1.xml": slide("last", table),
            "ppt/slides/s2.xml": slide("first"),
            "ppt/slides/_rels/s2.xml.rels": relations(("notesSlide", "../notes/n.xml")),
            "ppt/notes/n.xml": slide("say it"),
        },
    )
    assert read_document(path).unit == "slide"
    assert parts_of(path) == [(1, "first\n\nsay it"), (2, "last\n\nA\tB")]


def test_opendocument_texts(tmp_path: Path) -> None:
    items = "<text:list><text:list-item><text:p>one</text:p></text:list-item></text:list>"
    row = "<table:table-row><table:table-cell><text:p>Rye</text:p></table:table-cell>"
    row += "<table:table-cell><text:p>1,200</text:p></table:table-cell></table:table-row>"
    spaced = '<text:p>a<text:s text:c="2"/>b<text:tab/>c<text:note><text:note-citation>1</text:note-citation>'
    spaced += "<text:note-body><text:p>a note</text:p></text:note-body></text:note></text:p>"
    path = odt_file(tmp_path / "a.odt", f"<text:h>Title</text:h>{spaced}{items}<table:table>{row}</table:table>")
    assert parts_of(path) == [(1, "Title"), (2, "a  b\tc"), (3, "a note"), (4, "- one"), (5, "Rye\t1,200")]


def test_pages_of_opendocument_texts(tmp_path: Path) -> None:
    style = '<office:automatic-styles><style:style style:name="P1"><style:p fo:break-before="page"/></style:style>'
    style += "</office:automatic-styles>"
    body = '<text:p>one</text:p><text:soft-page-break/><text:p>two</text:p><text:p text:style-name="P1">three</text:p>'
    path = odt_file(tmp_path / "a.odt", body, 'text:use-soft-page-breaks="true"', style)
    assert parts_of(path) == [(1, "one"), (2, "two"), (3, "three")]


def book(path: Path, more: dict[str, str] | None = None) -> Path:
    manifest = "".join(
        f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml" {more}/>'
        for name, more in (("nav", 'properties="nav"'), ("c2", ""), ("c1", ""))
    )
    spine = "".join(f'<itemref idref="{name}"/>' for name in ("nav", "c1", "c2"))
    return archive(
        path,
        {
            "META-INF/container.xml": '<c><rootfiles><rootfile full-path="OEBPS/x.opf"/></rootfiles></c>',
            "OEBPS/x.opf": f"<package><manifest>{manifest}</manifest><spine>{spine}</spine></package>",
            "OEBPS/nav.xhtml": "<nav>Contents</nav>",
            "OEBPS/c1.xhtml": "<!DOCTYPE html><html><head><title>Book</title></head><body><h1>One</h1>&eacute;</body>",
            "OEBPS/c2.xhtml": "<p>Two</p>",
            **(more or {}),
        },
    )


def test_books(tmp_path: Path) -> None:
    path = book(tmp_path / "a.epub")
    assert read_document(path).unit == "chapter"
    assert parts_of(path) == [(1, "One\n\né"), (2, "Two")]
    reference = '<CipherData><CipherReference URI="OEBPS/c1.xhtml"/></CipherData>'
    encrypted = {"META-INF/encryption.xml": f"<e><EncryptedData>{reference}</EncryptedData></e>"}
    with pytest.raises(ConfigError, match=r"b\.epub is protected against copying \(DRM\)"):
        read_document(book(tmp_path / "b.epub", encrypted))


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>one<p>two <b>bold</b>\n text", "one\n\ntwo bold text"),
        ("a<br>b<script>alert(1)</script><style>p{}</style><noscript>no</noscript>", "a\nb"),
        ("<ul><li>one<li><p>two</p></ul>after", "- one\n- two\n\nafter"),
        ("<table><tr><th>Grain<th>Tons<tr><td>Rye</td><td>1,200</td></table>", "Grain\tTons\nRye\t1,200"),
        ("<pre>def f(x):\n    return x</pre>", "def f(x):\n    return x"),
        ("<nav>Home</nav><p>text</p><footer>(c)</footer>", "text"),
        ("<div>menu</div><main><p>the text of the page</p></main>", "the text of the page"),
        ("<div>kept, since main is filled by a script</div><main></main>", "kept, since main is filled by a script"),
        ("<p hidden>a</p><p style='display: none'>b</p><p>c&amp;d&nbsp;e\u00ad</p>", "c&d e"),
        ("</b></i><p>un<i>ordered</p> ends</i>", "unordered\n\nends"),
        ("<nav>only links</nav>", "only links"),
    ],
)
def test_text_of_html(html: str, text: str) -> None:
    assert html_text(html) == text


def test_encodings_of_html() -> None:
    assert decoded("<p>naïve “q”</p>".encode("cp1252")) == "<p>naïve “q”</p>"
    assert decoded("日本".encode("utf-16")) == "日本"
    assert decoded('<meta charset="shift_jis">日本'.encode("shift_jis")).endswith("日本")
    assert decoded("é".encode(), "us-ascii") == "Ã©" or decoded("é".encode(), "utf-8") == "é"
    assert decoded('<meta charset="nosuch">é'.encode()).endswith("é")


def test_title_of_an_html_page(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("<title>Mills</title><body><p>They grind.</p><p>All day.</p>", encoding="utf-8")
    assert parts_of(path) == [(1, "Mills"), (2, "They grind."), (3, "All day.")]


def mail(subject: str, text: str, html: str | None = None) -> EmailMessage:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, "a@example.org", "b@example.org"
    message.set_content(text)
    if html is not None:
        message.set_content(html, subtype="html")
    return message


def test_messages_and_mailboxes(tmp_path: Path) -> None:
    first, second = mail("Mühle", "From now on\nit grinds."), mail("Web", "", "<p>Only <b>HTML</b></p>")
    first.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="a.pdf")
    (tmp_path / "a.eml").write_bytes(bytes(first))
    document = read_document(tmp_path / "a.eml")
    head = "From: a@example.org\nTo: b@example.org"
    assert document.texts() == [f"Subject: Mühle\n{head}\n\nFrom now on\nit grinds."]
    assert document.left_out == {"attachment": 1}
    bodies = [bytes(message).replace(b"\nFrom now", b"\n>From now") for message in (first, second)]
    (tmp_path / "a.mbox").write_bytes(b"".join(b"From x Mon\n" + body + b"\n" for body in bodies))
    box = read_document(tmp_path / "a.mbox")
    assert box.texts() == [document.texts()[0], f"Subject: Web\n{head}\n\nOnly HTML"]  # a document each
    (tmp_path / "bad.eml").write_bytes(b"Subject: x\nContent-Type: text/plain; charset=nosuch\n\nh\xe9llo")
    assert text_of(tmp_path / "bad.eml") == "Subject: x\n\nhéllo"


def test_forwarded_messages_are_read(tmp_path: Path) -> None:
    outer, inner = mail("Fwd", "See below."), mail("Mill", "It grinds.")
    inner.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="a.pdf")
    outer.add_attachment(inner)
    (tmp_path / "a.eml").write_bytes(bytes(outer))
    head = "From: a@example.org\nTo: b@example.org"
    document = read_document(tmp_path / "a.eml")
    assert document.texts() == [f"Subject: Fwd\n{head}\n\nSee below.\n\nSubject: Mill\n{head}\n\nIt grinds."]
    assert document.left_out == {"attachment": 1}
    part = "Content-Type: message/rfc822\nContent-Transfer-Encoding: base64\n\nU3ViamVjdDogeAoKeAo=\n"
    whole = f'Subject: x\nContent-Type: multipart/mixed; boundary="b"\n\n--b\n\nIt grinds.\n--b\n{part}--b--\n'
    (tmp_path / "b.eml").write_text(whole, encoding="utf-8")
    encoded = read_document(tmp_path / "b.eml")
    assert (encoded.texts(), encoded.left_out) == (["Subject: x\n\nIt grinds."], {"attachment": 1})


@pytest.mark.parametrize("kind", ["mixed", "alternative", "related"])
def test_a_message_whose_boundary_never_occurs_keeps_its_text(tmp_path: Path, kind: str) -> None:
    head = f'Subject: x\nContent-Type: multipart/{kind}; boundary="b"\n\n'
    (tmp_path / "a.eml").write_text(f"{head}It grinds.\n", encoding="utf-8")
    assert text_of(tmp_path / "a.eml") == "Subject: x\n\nIt grinds."
    inner = head.replace('"b"', '"c"')
    outer = 'Subject: x\nContent-Type: multipart/mixed; boundary="b"\n\n'
    (tmp_path / "b.eml").write_text(f"{outer}--b\n{inner}It grinds.\n--b--\n", encoding="utf-8")
    assert text_of(tmp_path / "b.eml") == "Subject: x\n\nIt grinds."


def test_notebooks(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Mill\n", "Text"]},
        {"cell_type": "code", "source": "grind(1)", "outputs": [{"text": "2"}]},
        {"cell_type": "code", "source": ""},
        {"cell_type": "raw", "source": "raw"},
        {"cell_type": "markdown", "source": None},
        {"cell_type": "markdown", "source": [None, "x"]},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {"language_info": {"name": "r"}}}), encoding="utf-8")
    assert parts_of(path) == [(1, "# Mill\nText"), (2, "```r\ngrind(1)\n```"), (4, "raw"), (6, "x")]
    assert read_document(path).left_out == {"notebook output": 1}
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": "old(1)"}]}]}
    path.write_text(json.dumps(old), encoding="utf-8")
    assert parts_of(path) == [(1, "```python\nold(1)\n```")]


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


def test_pages_join_within_a_sentence() -> None:
    pages = [DocumentPart(1, "It grinds"), DocumentPart(2, "rye."), DocumentPart(3, "and more")]
    assert Document("page", pages).texts() == ["It grinds rye.\n\nand more"]
    assert Document("cell", pages[:2]).texts() == ["It grinds\n\nrye."]
