"""Reads the cells of spreadsheets as text, as they would be written to a .csv file."""

from __future__ import annotations

import datetime
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.wording import first_line
from sansgpu.data.formats.opening import BLOCK, FREE_EXPANSION, MAX_EXPANSION, open_seekable

SPREADSHEETS = (".xlsx", ".ods")
MAX_CELLS = 10_000_000  # largest sheet, from its first cell to its last column and row with a value
# A cell of an .xlsx file with its column and row; a row of an .ods file, or a cell, that stands for several equal ones.
_CELL = re.compile(rb"<(?:\w+:)?c\s[^<>]*?\br=\"([A-Z]{1,3})(\d{1,7})\"")
_REPEATED = re.compile(rb"<[\w-]+:table-(row|cell)\b([^<>]*)>")
_TIMES = re.compile(rb"number-(?:rows|columns)-repeated=\"(\d{1,9})\"")
_MAX_TAG = 1 << 16  # bytes of a tag that is found even if it is read in two blocks


def sheet_rows(path: Path) -> Iterator[list[str]]:
    """Yields the rows of the first sheet that has any. Raises ConfigError if the file cannot be read."""
    with _reading_sheets(path):
        book = _workbook(path)
        name = next(_filled_sheets(book), None)
        rows = [] if name is None else book.get_sheet_by_name(name).to_python(skip_empty_area=False)
    for row in rows:
        yield [_text(value) for value in row]


def sheet_names(path: Path) -> tuple[str | None, list[str]]:
    """Returns the name of the sheet that is read, and the names of the others that have rows."""
    with _reading_sheets(path):
        filled = [*_filled_sheets(_workbook(path))]
    return (filled[0], filled[1:]) if filled else (None, [])


def _filled_sheets(book: Any) -> Iterator[str]:
    return (name for name in book.sheet_names if book.get_sheet_by_name(name).height)


def _workbook(path: Path) -> Any:
    import python_calamine

    with open_seekable(path) as file:
        _require_bounded(path, file)
        file.seek(0)
        return python_calamine.CalamineWorkbook.from_filelike(file)


@contextmanager
def _reading_sheets(path: Path) -> Iterator[None]:
    """Converts the exceptions of damaged spreadsheets to ConfigError."""
    require(f"{path}: reading spreadsheets", "python_calamine")
    try:
        yield
    except (ConfigError, OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the parser may panic, which is no Exception
        raise _damaged(path, error) from None


def _require_bounded(path: Path, file: Any) -> None:
    """Raises ConfigError if the content of a spreadsheet, which is a .zip archive, is far larger than the file."""
    size = file.seek(0, 2)
    left = max(FREE_EXPANSION, MAX_EXPANSION * size)
    try:
        with zipfile.ZipFile(file) as content:
            for member in content.infolist():
                size, rest = _Extent(), b""
                with content.open(member) as part:
                    while block := part.read(BLOCK):
                        left -= len(block)
                        rest = size.add(rest + block) if member.filename.endswith(".xml") else b""
                        if left < 0 or size.cells > MAX_CELLS:
                            raise ConfigError(
                                f"{path} decompresses to more than {MAX_EXPANSION} times its size or "
                                f"{MAX_CELLS:,} cells, like a decompression bomb; save it as .csv if you trust it."
                            )
    except (EOFError, OSError) as error:
        raise _damaged(path, error) from None


class _Extent:
    """Counts the cells of a sheet, in whose XML a few bytes may stand for millions of them."""

    def __init__(self) -> None:
        self._columns = self._rows = 0  # the last ones of an .xlsx sheet
        self._repeated, self._row_times = 0, 1  # the cells with values of an .ods sheet

    @property
    def cells(self) -> int:
        return max(self._columns * self._rows, self._repeated)

    def add(self, xml: bytes) -> bytes:
        """Counts the cells of a part of the XML. Returns its end, with which the next part starts."""
        last = xml.rfind(b"<", len(xml) - _MAX_TAG) if len(xml) > _MAX_TAG else xml.rfind(b"<")
        part, rest = (xml[:last], xml[last:]) if last > 0 else (xml, b"")
        for column, row in _CELL.findall(part):
            number = 0
            for letter in column:
                number = number * 26 + letter - 64
            self._columns, self._rows = max(self._columns, number), max(self._rows, int(row))
        for kind, attributes in _REPEATED.findall(part):
            times = int(found[1]) if (found := _TIMES.search(attributes)) else 1
            if kind == b"row":
                self._row_times = times
            elif b"value" in attributes or times == 1:
                self._repeated += times * self._row_times
        return rest


def _damaged(path: Path, error: BaseException) -> ConfigError:
    return ConfigError(f"{path} cannot be read as a spreadsheet: {first_line(error)}; save it again, or as .csv.")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value)
