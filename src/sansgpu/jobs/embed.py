"""Vectors of texts, in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sansgpu.config import ConfigError, DataConfig, SansGPUError, TrainingConfig
from sansgpu.config.training import Precision
from sansgpu.config.wording import first_line
from sansgpu.data.rows import BadRowError, SourceRow, row_text
from sansgpu.data.shards import ReportProgress, counting
from sansgpu.data.sources import open_single
from sansgpu.files.atomic import atomic_write, write_failures_as
from sansgpu.files.ownership import require_file
from sansgpu.machine.probe import resolve_precision
from sansgpu.models.modules import narrow_matrices
from sansgpu.tasks.embed.objective import encode_texts
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest, open_model

CHUNK = 4096  # rows in memory
COLUMN = "embedding"  # the column of a .parquet file that holds the vectors

WriteVectors = Callable[[Sequence[SourceRow], np.ndarray], None]  # writes a chunk of rows and their vectors (rows, D)


@dataclass(frozen=True)
class EmbedRequest:
    """Arguments of the embed command. `prompt` names a prompt of the model."""

    model: ModelRequest
    data: str
    output: Path
    text_column: str | int | None = None
    prompt: str | None = None
    precision: Precision = "auto"


def embed(request: EmbedRequest, warn: Callable[[str], None], progress: ReportProgress) -> int:
    """Writes the vector of each row's text to a .npy or .parquet file, in order, and returns the number of rows.

    Raises ConfigError if there is no such prompt, the file has another suffix, the model has no vectors, or a row has
    no text.
    """
    data, output, prompt = request.data, request.output, request.prompt
    require_vector_file(output)
    loaded = open_encoder(request.model, warn, progress, request.precision)
    layout = loaded.objective.layout
    if prompt is not None and prompt not in layout.prompts:
        names = " ".join(layout.prompts) or "none"
        raise ConfigError(f"{request.model.target} has no prompt {prompt}; it has {names}.")
    words = layout.prompt() if prompt is None else layout.prompts[prompt]
    column = loaded.config.data.text_column if request.text_column is None else request.text_column
    source = open_single(data, DataConfig(dataset_name=data, text_column=column), text_rows=True)
    rows, done = iter(source.rows()), 0
    with write_failures_as(SansGPUError, output), atomic_write(output) as partial:
        with open_vector_file(partial, output.suffix, loaded.objective.width) as write:
            while chunk := list(islice(rows, CHUNK)):
                count = counting(progress, "embedding", done, 0, "text")
                write(chunk, encode_texts(loaded, [_text_of(row, column) for row in chunk], count, words))
                done += len(chunk)
        if not done:
            raise ConfigError(f"{data} has no rows.")
    return done


def open_encoder(
    model: ModelRequest, warn: Callable[[str], None], progress: ReportProgress, precision: Precision = "auto"
) -> TrainedModel:
    """Loads a run of task embed, a Sentence Transformers folder or any Hugging Face encoder, for `encode_texts`.

    Precision auto is bf16 if that is faster on this machine. Raises ConfigError if the model has no vectors.
    """
    loaded = open_model(model, "embed", warn, progress)
    chosen = resolve_precision(TrainingConfig(precision=precision), loaded.device)
    if chosen == "bf16":
        narrow_matrices(loaded.objective.model)
    return replace(loaded, precision=chosen)


def _text_of(row: SourceRow, column: str | int | None) -> str:
    """Returns the text of a row. Raises BadRowError if it has none."""
    value = row.readable_value()
    if not isinstance(value, (str, dict)):
        raise row.error(f"it is a {type(value).__name__}, not an object with a text")
    try:
        text = value if isinstance(value, str) else row_text(value, column, row.where)
    except BadRowError as error:
        raise BadRowError(str(error).replace("data.text_column", "--text-column")) from None
    if not text.strip():
        raise row.error("its text is empty")
    return row.valid_text(text, "text")


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
