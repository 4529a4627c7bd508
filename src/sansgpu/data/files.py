"""Streams documents from files in small pieces, so that a large document does not have to fit into memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.data.conll import as_text, conll_rows
from sansgpu.data.documents.formats import format_of
from sansgpu.data.formats.columnar import COLUMNAR, read_columnar
from sansgpu.data.formats.dialects import FileFormat, describe_table, recognize_table
from sansgpu.data.formats.encodings import AUTO, UTF8, resolve_encoding
from sansgpu.data.formats.names import TABLES, TEXT_SUFFIXES, file_form
from sansgpu.data.formats.opening import BLOCK
from sansgpu.data.lines import binary_file, open_text, read_lines, reading_file, require_length
from sansgpu.data.rows import ROW_REMEDY, ClassNames, Column, SourceRow, parquet_class_names, text_of, with_names
from sansgpu.data.tables import Header, read_table
from sansgpu.files.reading import require_regular_file

if TYPE_CHECKING:
    from sansgpu.data.documents.document import Document

PIECE_CHARS = BLOCK
# Limits that keep the memory for one row below about one gigabyte, whatever the file contains.
MAX_JSON = 256 << 20  # characters of a .json file, which is parsed in one piece
MAX_VALUES = 8_000_000  # maximum values in one JSON text; Python needs up to 100 bytes for each
MAX_DEPTH = 100  # levels of nesting in one row
USUAL = FileFormat()
_TURN_KEYS = {"role", "from"}  # one of them is in each turn of a chat


class Piece(NamedTuple):
    """A part of a document. Concatenating the pieces of a document gives exactly its text."""

    text: str
    ends_document: bool


def pieces(text: str) -> Iterator[Piece]:
    """Splits a document at line ends, so that no word is cut."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
        stop = cut if cut > start else start + PIECE_CHARS
        yield Piece(text[start:stop], False)
        start = stop
    if start < len(text):
        yield Piece(text[start:], True)


def read_documents(
    path: Path,
    column: Column | None,
    skip_undecodable: bool = False,
    header: bool = True,
    configured: FileFormat = USUAL,
) -> Iterator[Piece]:
    """Yields the documents of one file in pieces: a text file is one document, others have one per row.

    Raises ConfigError if the content does not match the suffix. `skip_undecodable` skips files that are not UTF-8.
    """
    encoding = UTF8 if skip_undecodable else configured.encoding
    with reading_file(path, skip_undecodable, encoding):
        if format_of(path) is not None:
            for text in _document(path).texts():
                yield from pieces(text)
        elif file_form(path) in TEXT_SUFFIXES:
            yield from _read_text(path, encoding)
        else:
            is_conll = file_form(path) == ".conll"
            for row in _rows(path, header, configured):
                yield from pieces(text_of(as_text(row) if is_conll else row, column))


def read_rows(
    path: Path, header: Header = True, tag_column: int | None = None, configured: FileFormat = USUAL
) -> Iterator[SourceRow]:
    """Yields the rows of one file; an unreadable line of a .jsonl file or a table is a row with a `problem`.

    `header` applies to tables: if it is False, the column names are numbers from 0; if it is a sequence,
    it gives the names. With a `tag_column` the file is read as CoNLL, whatever its suffix. Raises ConfigError if the
    file is plain text or its content does not match the suffix.
    """
    if tag_column is None and file_form(path) in TEXT_SUFFIXES:
        require_regular_file(path)
        kind = "plain text" if format_of(path) is None else "a document"
        raise ConfigError(f"{path} is {kind} and has no rows; use a .jsonl, .json, .csv, .tsv or .parquet file.")
    with reading_file(path, encoding=configured.encoding):
        if tag_column is None:
            yield from _rows(path, header, configured)
        else:
            yield from conll_rows(path, tag_column, configured.encoding)


def text_file_rows(path: Path, label: str | None, column: str | int, encoding: str = AUTO) -> Iterator[SourceRow]:
    """Yields one row with the text of a file in `column` and its label.

    If `label` is None, each line is a row, or each paragraph of a document, with its file and page.

    A file or line that cannot be decoded is a row with a `problem`.
    """
    if label is None and format_of(path) is not None:
        document = _document(path)
        for part in document.parts:
            place = {"file": str(path), document.unit: part.number}
            for text in part.paragraphs():
                yield SourceRow(f"{path}, {document.unit} {part.number}", {column: text, **place})
        return
    if label is None:
        for line in read_lines(path, encoding=encoding):
            yield line if line.problem else line._replace(value={column: line.value.rstrip("\r\n")})
        return
    text = ""
    try:
        for piece in read_documents(path, None, configured=FileFormat(encoding=encoding)):
            text += piece.text
            require_length(len(text), str(path))
    except ConfigError as error:
        yield SourceRow(str(path), None, str(error))
    else:
        yield SourceRow(str(path), {column: text, "label": label})


def _document(path: Path) -> Document:
    from sansgpu.data.documents.reading import read_document  # most runs read no documents

    return read_document(path)


def describe_file(path: Path, configured: FileFormat = USUAL) -> str | None:
    """Returns how a file is written in a few words, or None if it is UTF-8 with the separator of its suffix.

    A file that cannot be read has no form; whoever reads it reports that.
    """
    form = file_form(path)
    if form in COLUMNAR or format_of(path) is not None:
        return None
    try:
        with reading_file(path, encoding=configured.encoding):
            if form in TABLES:
                return describe_table(path, recognize_table(path, configured))
            encoding = resolve_encoding(path, configured.encoding)
            return None if encoding == UTF8 else f"text in the encoding {encoding}"
    except ConfigError:
        return None


def _rows(path: Path, header: Header, configured: FileFormat) -> Iterator[SourceRow]:
    form, encoding = file_form(path), configured.encoding
    if form in TABLES:
        yield from read_table(path, header, configured)
    elif form in COLUMNAR:
        prefix = f"{path}, row "
        names: ClassNames | None = None
        for number, (metadata, row) in enumerate(read_columnar(path, str(form)), 1):
            names = parquet_class_names(metadata) if names is None else names
            yield SourceRow(f"{prefix}{number}", with_names(row, names))
    elif form == ".conll":
        yield from conll_rows(path, None, encoding)
    elif form == ".jsonl" or (form == ".json" and _has_value_per_line(path, encoding)):
        yield from _jsonl_rows(path, encoding)
    elif form == ".json":
        yield from _json_rows(path, encoding)


def _read_text(path: Path, encoding: str) -> Iterator[Piece]:
    """Yields the pieces of one document, each one late, because the last one must be marked."""
    rest = ""
    with open_text(path, encoding) as file:
        while block := file.read(PIECE_CHARS):
            if "\0" in block:
                raise binary_file(path)
            *complete, last = pieces(rest + block)
            yield from complete
            rest = last.text
    if rest:
        yield Piece(rest, True)


def _jsonl_rows(path: Path, encoding: str) -> Iterator[SourceRow]:
    if (values := _whole_array(path, encoding)) is not None:
        yield from _numbered(path, values)
        return
    for line in read_lines(path, encoding=encoding):
        if line.problem:
            yield line
            continue
        try:
            yield SourceRow(line.where, _parse_json(line.value, line.where))
        except ConfigError as error:
            yield SourceRow(line.where, None, str(error))


def _whole_array(path: Path, encoding: str) -> list[Any] | None:
    """Returns the objects of a .jsonl file that is one JSON array, as a .json file is; None for any other file.

    An array of turns on one line is a row, not a file.
    """
    first, *others = [*islice(read_lines(path, encoding=encoding), 2), None]
    if first is None or first.problem or not first.value.lstrip().startswith("["):
        return None
    with open_text(path, encoding) as file:
        text = file.read(MAX_JSON + 1)
    try:
        values = _parse_json(text, str(path)) if len(text) <= MAX_JSON else None
    except ConfigError:  # the lines are read one by one, which names the damaged one
        return None
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        return None
    is_row = others == [None] and all(not _TURN_KEYS.isdisjoint(value) for value in values)
    return None if is_row else values


def _has_value_per_line(path: Path, encoding: str) -> bool:
    """Returns whether each line of a .json file is an object, as in the files of Spark and of many data sets."""
    lines = [str(line.value).lstrip() for line in islice(read_lines(path, encoding=encoding), 2)]
    if len(lines) < 2 or not all(line.startswith("{") for line in lines):
        return False
    try:
        _parse_json(lines[0], str(path))
    except ConfigError:
        return False
    return True


def _json_rows(path: Path, encoding: str) -> Iterator[SourceRow]:
    with open_text(path, encoding) as file:
        text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise ConfigError(
            f"{path} is too large for a single JSON value; convert it to .jsonl with one object per line."
        )
    value = _parse_json(text, str(path))
    yield from _numbered(path, _rows_of_json(value))


def _rows_of_json(value: Any) -> list[Any]:
    """Returns the rows of a .json file: a list of them, as `data` of an object, or a table as pandas writes it."""
    match value:
        case list():
            return value
        case {"columns": list(names), "data": list(rows)} if all(isinstance(row, list) for row in rows):
            return [dict(zip(names, row, strict=False)) for row in rows]
        case {"data": list(rows)}:
            return rows
        case dict() if value and _has_numbered_cells(value):
            cells = zip(*(column.values() for column in value.values()), strict=True)
            return [dict(zip(value, row, strict=True)) for row in cells]
    return [value]


def _has_numbered_cells(columns: dict[str, Any]) -> bool:
    """Returns whether each column is an object with the same row numbers, as in {"text": {"0": "a", "1": "b"}}."""
    first = next(iter(columns.values()))
    numbers = [*first] if isinstance(first, dict) else []
    return bool(numbers) and all(
        isinstance(column, dict) and [*column] == numbers and all(number.isdecimal() for number in numbers)
        for column in columns.values()
    )


def _numbered(path: Path, values: Iterable[Any]) -> Iterator[SourceRow]:
    prefix = f"{path}, row "
    for number, value in enumerate(values, 1):
        yield SourceRow(f"{prefix}{number}", value)


def _parse_json(text: str, where: str) -> Any:
    nested = text.count("[") + text.count("{")
    if len(text) > MAX_VALUES and nested + text.count(",") > MAX_VALUES:
        raise ConfigError(f"{where} may have more than {MAX_VALUES:,} values; split it into several rows or files.")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not valid JSON: {error.msg} at character {error.pos}{ROW_REMEDY}") from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        raise ConfigError(f"{where} cannot be read as JSON: {error}{ROW_REMEDY}") from None
    if nested > MAX_DEPTH and _is_deep(value):
        raise ConfigError(
            f"{where} cannot be read as JSON: its values are nested more than {MAX_DEPTH} levels deep{ROW_REMEDY}"
        )
    return value


def _is_deep(value: Any) -> bool:
    """Returns whether a JSON value has more than `MAX_DEPTH` levels, which could make printing or copying it fail."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True
