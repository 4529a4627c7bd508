"""Search for passages by their meaning."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.data.files import SUFFIXES, file_form
from sansgpu.data.shards import ReportProgress
from sansgpu.data.sources import dataset_files
from sansgpu.files.reading import require_regular_file
from sansgpu.jobs.embed import open_encoder
from sansgpu.machine.compiled import compiled_cache, compiled_in, make_private
from sansgpu.models.formats.weights import weights_sha256
from sansgpu.tasks.embed.index import FoundPassage, PassageIndex, PassageRules, Spans, require_usearch
from sansgpu.tasks.embed.objective import encode_texts
from sansgpu.tasks.task import TrainedModel
from sansgpu.train.loading import ModelRequest

# Names of the prompts for queries and passages, as in encode_query and encode_document of Sentence Transformers.
QUERY_PROMPT, PASSAGE_PROMPTS = "query", ("document", "passage", "corpus")


def search(
    model: ModelRequest,
    folder: Path,
    query: str,
    top_k: int,
    text_column: str | int | None,
    warn: Callable[[str], None],
    progress: ReportProgress,
) -> list[FoundPassage]:
    """Returns the passages of the files in a folder, or of one file, that are nearest in meaning to a query.

    Keeps an index in the user's cache. Raises ConfigError if the query is empty or there is nothing to search.
    """
    require_usearch()
    if not query.strip():
        raise ConfigError("the words to search for must not be empty.")
    files = _files_of(folder)
    loaded = open_encoder(model, warn, progress)
    tokenizer, layout = loaded.tokenizer, loaded.objective.layout
    of_query, of_passage = layout.prompt(QUERY_PROMPT), layout.prompt(*PASSAGE_PROMPTS)
    room = loaded.config.window - tokenizer.num_special_tokens_to_add() - len(_token_spans(tokenizer, [of_passage])[0])
    if room < 1:
        raise ConfigError(
            f"the prompt of {model.target} for passages leaves no room for a passage; raise its max_seq_length."
        )
    rules = PassageRules(partial(_token_spans, tokenizer), room, text_column)
    root = compiled_in(compiled_cache(warn)) / "search"  # private, because a native library parses the index
    make_private(root)
    key = hashlib.sha256(os.fsencode(f"{_fingerprint(loaded)}\0{folder.resolve()}")).hexdigest()[:32]
    index = PassageIndex(
        root / key,
        rules,
        partial(encode_texts, loaded, prompt=of_passage),
        partial(encode_texts, loaded, prompt=of_query),
    )
    index.open(files, warn, progress)
    progress("searching", 0, 0)
    return index.search(query, top_k)


def _files_of(folder: Path) -> list[Path]:
    if folder.is_dir():
        return dataset_files(folder)
    require_regular_file(folder)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist; give a folder of texts, or a file.")
    if file_form(folder) is None:
        raise ConfigError(f"{folder} has an unknown suffix; supported are {' '.join(SUFFIXES)}, each also with .gz.")
    return [folder]


def _token_spans(tokenizer: Any, texts: list[str]) -> list[Spans]:
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False)
    spans: list[Spans] = encoded["offset_mapping"]
    return spans


def _fingerprint(loaded: TrainedModel) -> str:
    """Returns a hash of everything that the vectors of a model depend on."""
    settings = loaded.objective.layout, loaded.precision, loaded.config.window
    parts = repr(settings), loaded.tokenizer.backend_tokenizer.to_str(), weights_sha256(loaded.objective.model)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
