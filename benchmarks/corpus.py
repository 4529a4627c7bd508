"""Token ids of sansgpu's training data as one array, so that other trainers can be compared on the same tokens.

`python -m benchmarks.corpus` runs in a separate process, because the measuring process must need little memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from benchmarks.contest import Event, NoResultError, spawn

PYTHON_STDLIB = "python-stdlib"


def prepare(data: str, vocab_size: int, folder: Path, valid: Path | None = None, cache: Path | None = None) -> Event:
    """Writes folder/train.npy (and valid.npy); returns token counts, seconds and the bytes of `valid`.

    Raises NoResultError if that fails.
    """
    arguments = ["--data", data, "--vocab-size", str(vocab_size), "--output", str(folder)]
    arguments += ["--valid", str(valid)] if valid else []
    environment = {"SANSGPU_CACHE": str(cache)} if cache else {}
    outcome = spawn([sys.executable, "-m", "benchmarks.corpus", *arguments], environment=environment)
    if outcome.code or not outcome.events:
        raise NoResultError(f"the data cannot be prepared: {outcome.errors.strip().splitlines()[-1:]}")
    return {**outcome.events[-1][1], "seconds": outcome.wall_seconds}


class Reader:
    """Windows of T + 1 tokens in a seeded order, each once per epoch."""

    def __init__(self, file: Path, window: int, seed: int = 0) -> None:
        self._tokens, self._window = np.load(file, mmap_mode="r"), window
        self._count = (len(self._tokens) - 1) // window
        if self._count < 1:
            raise ValueError(f"{file} holds less than one window of {window} tokens")
        self._order = np.random.default_rng(seed).permutation(self._count)

    def __len__(self) -> int:
        return self._count

    def windows(self, start: int, count: int) -> np.ndarray:
        """Returns windows [start, start + count) of the infinite stream, (count, T + 1) int64."""
        return np.stack([self._window_at(int(self._order[i % self._count])) for i in range(start, start + count)])

    def in_order(self, start: int, count: int) -> np.ndarray:
        """Returns windows [start, start + count) in text order, fewer at the end of the text; (.., T + 1) int64."""
        return np.stack([self._window_at(i) for i in range(start, min(start + count, self._count))])

    @property
    def targets(self) -> int:
        """The number of predicted tokens, i.e. all except the first."""
        return len(self._tokens) - 1

    def _window_at(self, index: int) -> np.ndarray:
        first = index * self._window
        return np.asarray(self._tokens[first : first + self._window + 1], dtype=np.int64)


def bits_per_byte(nats: float, size_bytes: int) -> float:
    """Converts the total loss of a text in nats to bits per byte."""
    return nats / math.log(2) / size_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--valid")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    from sansgpu.config import DataConfig
    from sansgpu.data.shards import build_store, build_tokenizer
    from sansgpu.data.sources import open_single, open_sources
    from sansgpu.machine.cache_folder import cache_dir

    data, cache = DataConfig(dataset_name=args.data, vocab_size=args.vocab_size), cache_dir(None)
    source = open_sources(data).train
    tokenizer = build_tokenizer(data, source, cache, lambda *_: None)
    tokens = build_store(source, tokenizer, cache, lambda *_: None).tokens
    args.output.mkdir(parents=True, exist_ok=True)
    np.save(args.output / "train.npy", tokens)
    facts: Event = {"tokens": len(tokens), "vocab_size": tokenizer.vocab_size}
    if args.valid:
        held_out = build_store(open_single(args.valid, data), tokenizer, cache, lambda *_: None).tokens
        ended = np.append(held_out, np.array([tokenizer.end_id], held_out.dtype))  # the end of text is predicted too
        np.save(args.output / "valid.npy", ended)
        facts["valid_tokens"] = len(held_out)
        facts["valid_bytes"] = int(tokenizer.token_bytes()[held_out].sum())
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
