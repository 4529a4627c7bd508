"""Reads the text of HTML pages with the standard library: no script runs, and nothing is loaded."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from sansgpu.data.documents.content import read_content
from sansgpu.data.documents.document import Document, numbered
from sansgpu.data.documents.text import cleaned, collapsed, without_controls

MAX_BYTES = 64 << 20
MAX_DEPTH = 1000  # elements within each other; deeper ones are read as text of these
MAIN_RATIO = 0.2  # a part that is marked as the main one must have at least this share of the text


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_VOID = _tags("area base br col embed hr img input link meta param source track wbr")
# Programs, pictures and the controls of forms, which have no text of the page.
_HIDDEN = _tags("script style template noscript svg iframe object select textarea button datalist canvas audio video")
_AROUND = _tags("nav footer aside")  # around the text of a page
_PARAGRAPHS = _tags(
    "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hgroup main nav ol p pre section summary table title ul"
)
_IMPLIED_ENDS = {
    "p": {"p"},
    "li": {"li", "p"},
    "tr": {"tr", "td", "th", "p"},
    "td": {"td", "th", "p"},
    "dt": {"dt", "dd"},
}
_IMPLIED_ENDS |= {"th": _IMPLIED_ENDS["td"], "dd": _IMPLIED_ENDS["dt"]}
# Marks in the collected text: a new paragraph, a new line, a space that is kept, and a new row of a table.
_PARAGRAPH, _LINE, _SPACE, _ROW = "\x1e", "\x1f", "\x1d", "\x1c"
_CHARSET = re.compile(
    rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]{1,40})|<\?xml[^>]{0,100}?encoding\s*=\s*["']([\w.:-]{1,40})""",
    re.IGNORECASE,
)
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def read_html(path: Path) -> Document:
    """Reads an HTML page. Raises UnreadableError."""
    content = read_content(path, MAX_BYTES, "split it")
    return Document("paragraph", numbered(html_text(decoded(content), with_title=True).split("\n\n")))


def decoded(content: bytes, charset: str | None = None) -> str:
    """Decodes a page as its byte order mark or its own words say, otherwise as UTF-8 or Windows-1252."""
    marked = next((encoding for mark, encoding in _BOMS if content.startswith(mark)), None)
    declared = _CHARSET.search(content[:4096])
    named = (declared[1] or declared[2]).decode() if declared else None
    for encoding in filter(None, (marked, charset, named, "utf-8")):
        latin = encoding.lower() in ("iso-8859-1", "latin-1", "latin1", "us-ascii", "ascii")
        try:
            return content.decode("utf-8" if latin and content.isascii() else "cp1252" if latin else encoding)
        except (LookupError, ValueError):  # an unknown name, or bytes that do not fit it
            continue
    return content.decode("cp1252", errors="replace")


def html_text(html: str, with_title: bool = False) -> str:
    """Returns the text of a page in paragraphs: of its main part, if it marks one, without its navigation."""
    page = _PageText()
    page.feed(html)
    page.close()
    text, title = page.text(), page.title.strip()
    return f"{title}\n\n{text}".strip() if with_title and title not in text[: 2 * len(title) + 100] else text


class _Element(NamedTuple):
    tag: str
    is_hidden: bool
    is_main: bool


class _PieceOfPage(NamedTuple):
    text: str
    in_main: bool
    in_article: bool
    is_around: bool


class _PageText(HTMLParser):
    """Collects text. Ends of elements that are missing or out of order are accepted, as in browsers."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self._open: list[_Element] = []
        self._depths = dict.fromkeys(("hidden", "main", "article", "around", "pre", "title", "body"), 0)
        self._open_tags: Counter[str] = Counter()
        self._texts: list[_PieceOfPage] = []
        self._articles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            if tag in ("br", "hr"):
                self._add(_LINE if tag == "br" else _PARAGRAPH)
            return
        while self._open and self._open[-1].tag in _IMPLIED_ENDS.get(tag, ()):
            self._close()
        if len(self._open) < MAX_DEPTH:
            values = dict(attrs)
            style = (values.get("style") or "").replace(" ", "").lower()
            is_hidden = "hidden" in values or values.get("aria-hidden") == "true" or "display:none" in style
            is_main = tag == "main" or values.get("role") == "main"
            element = _Element(tag, is_hidden or tag in _HIDDEN, is_main)
            self._open.append(element)
            self._count(element, 1)
        self._articles += tag == "article"
        self._begin(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open_tags[tag]:
            while self._close() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._depths["title"] and not self._depths["body"]:
            self.title += collapsed(data)
        elif self._depths["pre"]:
            self._add(without_controls(data).replace(" ", _SPACE))
        else:
            self._add(collapsed(data))

    def text(self) -> str:
        """Returns the text of the page without its title."""
        usual = [part for part in self._texts if not part.is_around] or self._texts
        main = [part for part in usual if part.in_main]
        if not main and self._articles == 1:
            main = [part for part in usual if part.in_article]
        length = sum(len(part.text) for part in usual)
        is_main = main and sum(len(part.text) for part in main) >= MAIN_RATIO * length
        return _laid_out("".join(part.text for part in (main if is_main else usual)))

    def _close(self) -> str:
        """Ends the innermost element and returns its tag."""
        element = self._open.pop()
        if element.tag in _PARAGRAPHS:
            self._add(_PARAGRAPH)
        self._count(element, -1)
        return element.tag

    def _count(self, element: _Element, change: int) -> None:
        depths = self._depths
        self._open_tags[element.tag] += change
        depths["hidden"] += change * element.is_hidden
        depths["main"] += change * element.is_main
        depths["around"] += change * (element.tag in _AROUND)
        if element.tag in ("article", "pre", "title", "body"):
            depths[element.tag] += change

    def _begin(self, tag: str) -> None:
        if tag in _PARAGRAPHS:
            self._add(_PARAGRAPH)
        elif tag == "li":
            self._add(f"{_LINE}- ")
        elif tag in ("tr", "td", "th"):
            self._add(f"{_LINE}{_ROW}" if tag == "tr" else "\t")

    def _add(self, text: str) -> None:
        depths = self._depths
        if not depths["hidden"]:
            self._texts.append(_PieceOfPage(text, depths["main"] > 0, depths["article"] > 0, depths["around"] > 0))


def _laid_out(text: str) -> str:
    """Replaces the marks in the collected text. Each pattern takes time in proportion to the text, whatever it is."""
    either = f"[{_PARAGRAPH}{_LINE}]"
    text = re.sub(r" {2,}", " ", text)
    text = re.sub(f" ?([{_PARAGRAPH}{_LINE}{_ROW}\t\n]) ?", r"\1", text)
    text = re.sub(f"{either}+", lambda match: _PARAGRAPH if _PARAGRAPH in match[0] else _LINE, text)
    text = re.sub(f"{_ROW}\t?{either}?", "", text)  # before the first cell of a row
    text = re.sub(f"{either}?\t{either}?", "\t", text)
    text = re.sub(f"{_LINE}- ?{either}", f"{_LINE}- ", text)  # a paragraph in a list
    text = re.sub(f"[{_PARAGRAPH}{_LINE}\n]+", _line_ends, text)
    return cleaned(text.replace(_SPACE, " "))


def _line_ends(marks: re.Match[str]) -> str:
    if _PARAGRAPH in marks[0]:
        return "\n\n"
    return marks[0].replace(_LINE, "") or "\n"  # line ends of preformatted text stay as they are
