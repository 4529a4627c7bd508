"""Reads the cells of spreadsheets as text, as they would be written to a .csv file."""

from __future__ import annotations

import datetime
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.wording import counted, first_line
from sansgpu.data.formats.opening import BLOCK, FREE_EXPANSION, MAX_EXPANSION, open_seekable

SPREADSHEETS = (".xlsx", ".ods")
MAX_CELLS = 50_000_000


def sheet_rows(path: Path) -> Iterator[list[str]]:
    """Yields the rows of the first sheet that has any. Raises ConfigError if the file cannot be read."""
    name, _ = sheet_names(path)
    rows = [] if name is None else _workbook(path).get_sheet_by_name(name).to_python(skip_empty_area=False)
    for row in rows:
        yield [_text(value) for value in row]


def sheet_names(path: Path) -> tuple[str | None, list[str]]:
    """Returns the name of the sheet that is read, and the names of the others that have rows."""
    book = _workbook(path)
    filled = [name for name in book.sheet_names if book.get_sheet_by_name(name).height]
    return (filled[0], filled[1:]) if filled else (None, [])


def _workbook(path: Path) -> Any:
    require(f"{path}: reading spreadsheets", "python_calamine")
    import python_calamine

    with open_seekable(path) as file:
        _require_bounded(path, file)
        file.seek(0)
        try:
            return python_calamine.CalamineWorkbook.from_filelike(file)
        except BaseException as error:  # its parser may panic, which is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            raise _damaged(path, error) from None


def _require_bounded(path: Path, file: Any) -> None:
    """Raises ConfigError if the content of a spreadsheet, which is a .zip archive, is far larger than the file."""
    size = file.seek(0, 2)
    left = max(FREE_EXPANSION, MAX_EXPANSION * size)
    try:
        with zipfile.ZipFile(file) as content:
            for member in content.infolist():
                with content.open(member) as part:
                    while block := part.read(BLOCK):
                        left -= len(block)
                        if left < 0:
                            raise ConfigError(
                                f"{path} decompresses to more than {MAX_EXPANSION} times its size, like a "
                                "decompression bomb; save it as .csv if you trust it."
                            )
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise _damaged(path, error) from None


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


def describe_sheets(path: Path) -> str | None:
    """Returns a message about the sheets that are not read, or None if there are none."""
    name, others = sheet_names(path)
    return f"sheet {name} is read, {counted(len(others), 'other sheet')} not" if others else None
