"""Embeds texts into a file of vectors, and searches for passages by meaning."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.data import DataConfig
from sansgpu.config.paths import local_path
from sansgpu.config.training import TrainingConfig
from sansgpu.config.wording import first_line
from sansgpu.data.formats.names import CONVERT, file_form
from sansgpu.data.formats.opening import is_archive
from sansgpu.data.rows import BadRowError, SourceRow, text_of
from sansgpu.data.sources import dataset_files, open_single
from sansgpu.events.progress import ReportProgress, Warn, counting
from sansgpu.files.atomic import atomic_write, write_failures_as
from sansgpu.files.ownership import require_file
from sansgpu.files.reading import require_regular_file
from sansgpu.kernels import library
from sansgpu.kernels.roofline import int8_if_faster, resolve_precision
from sansgpu.machine.cache_folder import private_cache
from sansgpu.machine.private_folder import make_private
from sansgpu.machine.probe import has_bf16_tensors
from sansgpu.models.formats.folders import retrieval_adapters
from sansgpu.models.formats.weights import weights_sha256
from sansgpu.models.modules import narrow_matrices, set_matmul_precision
from sansgpu.tasks.embed.index import METRICS, FoundPassage, PassageIndex, require_usearch
from sansgpu.tasks.embed.passages import PassageRules, Spans
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest, open_model

CHUNK = 4096  # maximum rows in memory
# Precision auto compares int8 on a sample of the texts, which takes as long as LEAST_TEXTS texts may save.
LEAST_TEXTS, SAMPLE_TEXTS = 512, 64
LEAST_COSINE = 0.995  # auto chooses int8 only if the mean cosine similarity to the vectors of fp32 is at least this
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


@dataclass(frozen=True)
class Int8Agreement:
    """Mean cosine similarity of the vectors of a sample of texts in int8 and in the precision `other`."""

    cosine: float
    other: str


@dataclass(frozen=True)
class Embedded:
    """The number of rows, the precision of matrix products, and how int8 agrees with another one, if compared."""

    rows: int
    precision: str
    agreement: Int8Agreement | None

    def __str__(self) -> str:
        if self.agreement is None:
            return f"{self.rows:,} vectors"
        cosine = f"mean cosine similarity of int8 and {self.agreement.other} {self.agreement.cosine:.4f}"
        return f"{self.rows:,} vectors, computed in {self.precision} ({cosine})"


def embed(request: EmbedRequest, warn: Warn, progress: ReportProgress) -> Embedded:
    """Writes the vector of each row's text to a .npy or .parquet file, in order.

    Raises ConfigError if there is no such prompt, the file has a different suffix, the model cannot embed text, or a
    row has no text.
    """
    data, output, prompt = request.data, request.output, request.prompt
    require_vector_file(output)
    loaded = open_encoder(request.model, warn, progress)
    layout = loaded.objective.layout
    if prompt is not None and prompt not in layout.prompts:
        names = " ".join(layout.prompts) or "none"
        raise ConfigError(f"{request.model.target} has no prompt {prompt}; its prompts are {names}.")
    words = layout.prompt() if prompt is None else layout.prompts[prompt]
    column = loaded.config.data.text_column if request.text_column is None else request.text_column
    source = open_single(data, DataConfig(dataset_name=data, text_column=column), True, progress)
    for note in source.notes:
        warn(f"{data}: {note}")
    rows, done = iter(source.rows()), 0
    agreement: Int8Agreement | None = None
    with write_failures_as(SansGPUError, output), atomic_write(output) as partial:
        with open_vector_file(partial, output.suffix, loaded.objective.width) as write:
            while chunk := list(islice(rows, CHUNK)):
                texts = [_text_of(row, column) for row in chunk]
                if not done:
                    loaded, agreement = _fastest(loaded, texts, words)
                counted = counting(progress, "embedding", done, 0, "text")
                write(chunk, loaded.task_class.encode_texts(loaded, texts, counted, words))
                done += len(chunk)
        if not done:
            raise ConfigError(f"{data} has no rows; pass a file with at least one.")
    return Embedded(done, loaded.precision, agreement)


def _fastest(loaded: TrainedModel, texts: Sequence[str], prompt: str) -> tuple[TrainedModel, Int8Agreement | None]:
    """Returns the model in int8 if precision is auto, int8 is faster, and the vectors of a sample of texts agree."""
    other, encode_texts = loaded.precision, loaded.task_class.encode_texts
    few = loaded.is_precision_chosen or len(texts) < LEAST_TEXTS
    if few or not _multiplies(loaded) or int8_if_faster(other) != "int8":
        return loaded, None
    sample = texts[:: len(texts) // SAMPLE_TEXTS][:SAMPLE_TEXTS]
    expected, faster = encode_texts(loaded, sample, prompt=prompt), _in_precision(loaded, "int8")
    found = encode_texts(faster, sample, prompt=prompt)
    cosines = F.cosine_similarity(torch.from_numpy(expected), torch.from_numpy(found))
    agreement = Int8Agreement(float(cosines.mean()), other)
    return (faster if agreement.cosine >= LEAST_COSINE else _in_precision(loaded, other)), agreement


def _in_precision(loaded: TrainedModel, precision: str) -> TrainedModel:
    """Sets the precision of a model's matrix products."""
    set_matmul_precision(loaded.objective.model, precision)
    return replace(loaded, precision=precision)


def open_encoder(model: ModelRequest, warn: Warn, progress: ReportProgress) -> TrainedModel:
    """Loads a run of task embed, a Sentence Transformers folder or any Hugging Face encoder, for `encode_texts`.

    Precision auto is bf16 or int16 if that is faster on this machine. Raises ConfigError if the model embeds no text.
    """
    loaded = open_model(model, "embed", warn, progress)
    if not loaded.is_precision_chosen and _multiplies(loaded):
        loaded = _in_precision(loaded, resolve_precision(TrainingConfig(), loaded.device, library.available()))
    if has_bf16_tensors(loaded.precision):
        narrow_matrices(loaded.objective.model)
    return loaded


def _multiplies(loaded: TrainedModel) -> bool:
    """Returns whether a model multiplies matrices, so that their precision matters."""
    return "embed" not in loaded.task_class.verbs_without_kernels


def _text_of(row: SourceRow, column: str | int | None) -> str:
    """Returns the text of a row. Raises BadRowError if it has none."""
    try:
        text = text_of(row, column)
    except BadRowError as error:
        raise BadRowError(str(error).replace("data.text_column", "--text-column")) from None
    if not text.strip():
        raise row.error("its text is empty")
    return text


def require_vector_file(path: Path) -> None:
    """Raises ConfigError unless vectors can be written to a new file of this name."""
    if path.suffix not in _FORMS:
        raise ConfigError(
            f"--output {path} has an unsupported format; choose a name that ends in {' or '.join(_FORMS)}."
        )
    require_file(path)


def open_vector_file(path: Path, suffix: str, width: int) -> AbstractContextManager[WriteVectors]:
    """Opens a file for vectors of `width` features in the format of `suffix`."""
    return _FORMS[suffix](path, width)


@contextmanager
def _npy(path: Path, width: int) -> Iterator[WriteVectors]:
    """Writes an array (rows, D). The header is written again at the end, when the number of rows is known.

    Its size stays the same, because numpy reserves space for larger numbers.
    """
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
    """Writes the column `embedding` after the columns of the input, whose types are taken from the first chunk."""
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
                f"the columns of the rows from {rows[0].where} on cannot be stored in a .parquet file "
                f"({first_line(error)}); write a .npy file, which contains only the vectors."
            ) from None
        if writer is None and COLUMN in table.column_names:
            raise ConfigError(f"{rows[0].where} already has a column {COLUMN}; rename it, or write a .npy file.")
        table = table.append_column(COLUMN, pyarrow.FixedSizeListArray.from_arrays(flat, width))
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


_FORMS: dict[str, Callable[[Path, int], AbstractContextManager[WriteVectors]]] = {".npy": _npy, ".parquet": _parquet}


def search(
    model: ModelRequest,
    folder: Path,
    query: str,
    top_k: int,
    text_column: str | int | None,
    warn: Warn,
    progress: ReportProgress,
) -> list[FoundPassage]:
    """Returns the passages of the files in a folder, or of one file, that are nearest in meaning to a query.

    Keeps an index in the user's cache. Raises ConfigError if the query is empty or there is nothing to search. A model
    whose folder has adapters for queries and for passages embeds each with its own.
    """
    require_usearch()
    if not query.strip():
        raise ConfigError("the query is empty; pass a question or a phrase.")
    files = passage_files(folder)
    adapters = retrieval_adapters(local_path(model.target))
    if adapters is None:
        loaded = asking = open_encoder(model, warn, progress)
    else:
        asking, loaded = (open_encoder(replace(model, target=str(path)), warn, progress) for path in adapters)
    tokenizer, layout, encode_texts = loaded.tokenizer, loaded.objective.layout, loaded.task_class.encode_texts
    of_query, of_passage = layout.query_prompt, layout.passage_prompt
    if layout.similarity not in METRICS:
        raise ConfigError(
            f"{model.target} compares vectors by the similarity {layout.similarity}, but search supports "
            f"{', '.join(METRICS)}; set similarity_fn_name in its config_sentence_transformers.json to one of them."
        )
    room = loaded.config.window - tokenizer.num_special_tokens_to_add() - len(token_spans(tokenizer, [of_passage])[0])
    if room < 1:
        raise ConfigError(
            f"the passage prompt of {model.target} fills its whole context, so there is no room for a passage; raise "
            "its max_seq_length."
        )
    rules = PassageRules(partial(token_spans, tokenizer), room, text_column)
    root = private_cache(warn) / "search"  # private, because a native library parses the index
    make_private(root)
    key = hashlib.sha256(os.fsencode(f"{_fingerprint(loaded)}\0{folder.resolve()}")).hexdigest()[:32]
    index = PassageIndex(
        root / key,
        rules,
        partial(encode_texts, loaded, prompt=of_passage),
        partial(encode_texts, asking, prompt=of_query),
        layout.similarity,
    )
    index.open(files, warn, progress)
    progress("searching", 0, 0)
    return index.search(query, top_k)


def passage_files(folder: Path) -> list[Path]:
    """Returns the files in a folder or an archive, or one file. Raises ConfigError if there are none to read."""
    if folder.is_dir() or (folder.is_file() and is_archive(folder)):
        return dataset_files(folder)
    require_regular_file(folder)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist; pass a folder of documents, or a file.")
    if file_form(folder) is None:
        raise ConfigError(f"{folder} has an unknown suffix; {CONVERT}.")
    return [folder]


def token_spans(tokenizer: Any, texts: list[str]) -> list[Spans]:
    """Returns the start and end character of each token of each text, without special tokens."""
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False)
    spans: list[Spans] = encoded["offset_mapping"]
    return spans


def _fingerprint(loaded: TrainedModel) -> str:
    """Returns a hash of everything that a model's vectors depend on."""
    settings = loaded.objective.layout, loaded.precision, loaded.config.window
    parts = repr(settings), loaded.tokenizer.backend_tokenizer.to_str(), weights_sha256(loaded.objective.model)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
