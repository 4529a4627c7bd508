"""Word, PowerPoint, OpenDocument, EPUB, HTML, e-mail and notebooks."""

from __future__ import annotations

import json
from email.message import EmailMessage
from pathlib import Path

import pytest

from sansgpu.config import ConfigError
from sansgpu.data.documents.html import decoded, html_text
from sansgpu.data.documents.reading import read_document
from tests.data.documents.written import DRAWING, RELATIONS, archive, odt_file, paragraph, parts_of, text_of, word_file


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
