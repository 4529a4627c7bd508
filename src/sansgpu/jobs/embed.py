"""Vectors of texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from sansgpu.config import ConfigError, DataConfig, SansGPUError, TrainingConfig
from sansgpu.config.training import Precision
from sansgpu.data.rows import BadRowError, SourceRow, row_text
from sansgpu.data.shards import ReportProgress, counting
from sansgpu.data.sources import open_single
from sansgpu.files.atomic import atomic_write, write_failures_as
from sansgpu.jobs.vector_files import open_vector_file, require_vector_file
from sansgpu.machine.probe import resolve_precision
from sansgpu.models.modules import narrow_matrices
from sansgpu.tasks.embed.objective import encode_texts
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import open_model

CHUNK = 4096  # rows in memory


def embed(
    target: str,
    data: str,
    output: Path,
    text_column: str | int | None,
    prompt: str | None,
    precision: Precision,
    snapshot: str,
    warn: Callable[[str], None],
    progress: ReportProgress,
    remote_code: bool = False,
) -> int:
    """Writes the vector of each row's text to a .npy or .parquet file, in order, and returns the number of rows.

    `prompt` names a prompt of the model. Raises ConfigError if there is none, the file has another suffix, the model
    has no vectors, or a row has no text.
    """
    require_vector_file(output)
    loaded = open_encoder(target, snapshot, warn, progress, precision, remote_code)
    layout = loaded.objective.layout
    if prompt is not None and prompt not in layout.prompts:
        names = " ".join(layout.prompts) or "none"
        raise ConfigError(f"{target} has no prompt {prompt}; it has {names}.")
    words = layout.prompt() if prompt is None else layout.prompts[prompt]
    column = loaded.config.data.text_column if text_column is None else text_column
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
    target: str,
    snapshot: str,
    warn: Callable[[str], None],
    progress: ReportProgress,
    precision: Precision = "auto",
    remote_code: bool = False,
) -> TrainedModel:
    """Loads a run of task embed, a Sentence Transformers folder or any Hugging Face encoder, for `encode_texts`.

    Precision auto is bf16 if that is faster on this machine. Raises ConfigError if the model has no vectors.
    """
    loaded = open_model(target, "embed", snapshot, warn, remote_code, progress=progress)
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
