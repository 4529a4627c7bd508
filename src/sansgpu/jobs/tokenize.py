"""`sansgpu tokenizer`: train one, or encode with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, as_config
from sansgpu.data.shards import Progress, build_tokenizer
from sansgpu.data.sources import open_sources
from sansgpu.data.tokenizer import load_tokenizer
from sansgpu.machine.probe import available_cores, cache_dir, limit_tokenizer_threads


def train_tokenizer(source: str, vocab_size: int, sample_mb: int, output: Path, progress: Progress) -> dict[str, Any]:
    """Train byte-level BPE on a source and write it to a folder that AutoTokenizer loads."""
    if vocab_size < 257:
        raise ConfigError(f"--vocab-size {vocab_size} is too small: the 256 bytes and the end of text need 257.")
    if output.exists() and not (output / "tokenizer.json").is_file() and any(output.iterdir()):
        raise ConfigError(f"{output} exists and is no tokenizer; choose another --output.")
    limit_tokenizer_threads(available_cores())
    settings = {"dataset_name": source, "vocab_size": vocab_size, "tokenizer_sample_mb": sample_mb}
    data = as_config({"data": settings}, "the request").data
    tokenizer = build_tokenizer(data, open_sources(data).train, cache_dir(None), progress)
    tokenizer.save(output)
    return {"output": str(output), "vocab_size": tokenizer.vocab_size}


def encode_text(tokenizer: str, text: str) -> dict[str, Any]:
    """Token ids of a text, and the tokens they stand for."""
    loaded = load_tokenizer(tokenizer)
    ids = loaded.encode(text)
    return {"ids": ids, "tokens": [loaded.backend.id_to_token(index) for index in ids], "bytes": len(text.encode())}
