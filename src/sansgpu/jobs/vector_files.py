"""Writes vectors in chunks: .npy files, and .parquet files with the columns of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line
from sansgpu.data.rows import SourceRow
from sansgpu.files.ownership import require_file

COLUMN = "embedding"  # the column of a .parquet file that holds the vectors

WriteVectors = Callable[[Sequence[SourceRow], np.ndarray], None]  # writes a chunk of rows and their vectors (rows, D)


def require_vector_file(path: Path) -> None:
    """Raises ConfigError unless vectors can be written to a new file of this name."""
    if path.suffix not in _FORMS:
        raise ConfigError(f"--output {path} must end in {' or '.join(_FORMS)}; choose one of these formats.")
    require_file(path)


def open_vector_file(path: Path, suffix: str, width: int) -> AbstractContextManager[WriteVectors]:
    """Opens a file for vectors of `width` features in the format of `suffix`."""
    return _FORMS[suffix](path, width)


@contextmanager
def _npy(path: Path, width: int) -> Iterator[WriteVectors]:
    """Writes an array (rows, D). numpy leaves room in the header for any number of rows, so it is written twice."""
    count = 0
    with path.open("wb") as file:

        def header() -> None:
            shape = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
            np.lib.format.write_array_header_1_0(file, shape)

        def write(rows: Sequence[SourceRow], vectors: np.ndarray) -> None:
            nonlocal count
            file.write(vectors.astype("<f4").tobytes())
            count += len(vectors)

        header()
        yield write
        file.seek(0)
        header()


@contextmanager
def _parquet(path: Path, width: int) -> Iterator[WriteVectors]:
    """Writes the columns of the rows, with the types of the first chunk, and the column `embedding`."""
    import pyarrow
    import pyarrow.parquet

    writer: Any = None

    def write(rows: Sequence[SourceRow], vectors: np.ndarray) -> None:
        nonlocal writer
        values = [row.value if isinstance(row.value, dict) else {"text": row.value} for row in rows]
        flat = pyarrow.array(vectors.reshape(-1), pyarrow.float32())
        try:
            schema = writer.schema.remove(writer.schema.get_field_index(COLUMN)) if writer else None
            table = pyarrow.Table.from_pylist([{str(k): v for k, v in value.items()} for value in values], schema)
        except pyarrow.ArrowException as error:
            raise ConfigError(
                f"the rows from {rows[0].where} on cannot be columns of a .parquet file ({first_line(error)}); write a "
                ".npy file, which has the vectors alone."
            ) from None
        if writer is None and COLUMN in table.column_names:
            raise ConfigError(f"{rows[0].where} has a column {COLUMN} already; rename it, or write a .npy file.")
        table = table.append_column(COLUMN, pyarrow.FixedSizeListArray.from_arrays(flat, width))
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


_FORMS: dict[str, Callable[[Path, int], AbstractContextManager[WriteVectors]]] = {".npy": _npy, ".parquet": _parquet}
