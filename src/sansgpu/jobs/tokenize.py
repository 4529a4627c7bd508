"""Trains a tokenizer, or encodes text with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sansgpu.config import SansGPUError
from sansgpu.data.shards import build_tokenizer, left_out_note
from sansgpu.data.sources import open_sources
from sansgpu.data.tokenizer import load_tokenizer, require_vocabulary_size
from sansgpu.events.progress import ReportProgress
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import OutputFolder
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.probe import available_cores, limit_tokenizer_threads
from sansgpu.tasks.configuration import as_config


def train_tokenizer(
    source: str, vocab_size: int, sample_mb: int, output: Path, progress: ReportProgress
) -> dict[str, Any]:
    """Trains byte-level BPE on a source and writes a folder that AutoTokenizer loads."""
    require_vocabulary_size(vocab_size, "--vocab-size")
    folder = OutputFolder(output, "tokenizer", "--output").require()
    limit_tokenizer_threads(available_cores())
    settings = {"dataset_name": source, "vocab_size": vocab_size, "tokenizer_sample_mb": sample_mb}
    data = as_config({"data": settings}, "the request").data
    tokenizer = build_tokenizer(data, open_sources(data).train, cache_dir(None), progress)
    with write_failures_as(SansGPUError, output, "--output"), folder.replace() as new:
        tokenizer.save(new)
    note = left_out_note(tokenizer)
    return {"output": str(output), "vocab_size": tokenizer.vocab_size, **({"note": note} if note else {})}


def encode_text(tokenizer: str, text: str) -> dict[str, Any]:
    """Returns a text's token ids, its tokens and its number of bytes."""
    loaded = load_tokenizer(tokenizer)
    ids = loaded.encode(text)
    return {"ids": ids, "tokens": [loaded.backend.id_to_token(index) for index in ids], "bytes": len(text.encode())}
