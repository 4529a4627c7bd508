"""Reads Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.wording import first_line
from sansgpu.data.formats.opening import open_seekable

ARROW = (".arrow", ".feather")
COLUMNAR = (".parquet", *ARROW)
BATCH = 256  # rows that are made Python objects at a time


class ColumnarRows(NamedTuple):
    """The metadata of a file's columns, and its rows."""

    metadata: Mapping[bytes, bytes] | None
    rows: Iterator[dict[str, Any]]


def read_columnar(path: Path, suffix: str) -> Iterator[tuple[Mapping[bytes, bytes] | None, dict[str, Any]]]:
    """Yields the rows of a file, each with the metadata of its columns. Raises ConfigError if it is damaged."""
    name = "Parquet" if suffix == ".parquet" else "Arrow"
    require(f"{path}: reading {name}", "pyarrow")
    import pyarrow

    try:
        with open_seekable(path) as file:
            metadata, rows = _parquet(file) if suffix == ".parquet" else _arrow(file)
            for row in rows:
                yield metadata, row
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: invalid text or dates
        raise ConfigError(
            f"{path} is not a valid {name} file: {first_line(error)}; download or export it again."
        ) from None


def _parquet(file: IO[bytes]) -> ColumnarRows:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    batches = table.iter_batches(batch_size=BATCH)
    return ColumnarRows(table.schema_arrow.metadata, (row for batch in batches for row in batch.to_pylist()))


def _arrow(file: IO[bytes]) -> ColumnarRows:
    """Reads the format with random access, which Feather files have, or the stream that `datasets` writes."""
    import pyarrow.ipc

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    opened = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)

    def batches() -> Iterator[Any]:
        if is_file:
            yield from map(opened.get_batch, range(opened.num_record_batches))
        else:
            yield from opened

    def rows() -> Iterator[dict[str, Any]]:
        for batch in batches():
            batch.validate(full=True)  # offsets of a damaged file may point anywhere
            for start in range(0, batch.num_rows, BATCH):
                yield from batch.slice(start, BATCH).to_pylist()

    return ColumnarRows(opened.schema.metadata, rows())
