"""Compares an encoder with static embeddings: texts per second, and Spearman correlation on the STS Benchmark.

    python -m benchmarks.serving.static_embeddings --model FOLDER --stsb FOLDER [--epochs 10] [--texts 1000]
        [--rounds 3] [--json FILE]

The folder of the benchmark has sts-train.csv and sts-test.csv. The contestants are the encoder in the engine of
`sansgpu embed`, the static embeddings that sansgpu and model2vec distill from it, and sansgpu's after training on the
scored pairs of sts-train.csv. Texts are the sentences of sts-test.csv; the encoder embeds the first `--texts` of them.
Seconds include tokenization but not loading. All contestants run in this process, in alternating order, and the median
round counts.
`of the encoder` is the ratio of a correlation to the encoder's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torchmetrics.functional import spearman_corrcoef

from benchmarks.contest import Row, print_table, say, write_json
from benchmarks.ours import overrides
from sansgpu.cli import run as cli
from sansgpu.config import SansGPUError
from sansgpu.jobs.embed import open_encoder
from sansgpu.train.loading import ModelRequest

Encode = Callable[[Sequence[str]], np.ndarray]
SCORE, FIRST, SECOND = 4, 5, 6  # columns of the benchmark's files
ENCODER, DISTILLED, TRAINED, PEER = "encoder", "static, distilled", "static, trained", "model2vec, distilled"
COLUMNS = {
    "": ("name", "s"),
    "texts/s": ("texts_per_second", ",.0f"),
    "times the encoder": ("speed", ",.0f"),
    "Spearman": ("spearman", ".4f"),
    "of the encoder": ("ratio", ".1%"),
    "distilled in s": ("distillation_seconds", ".0f"),
}


def pairs(file: Path) -> tuple[list[str], list[str], torch.Tensor]:
    """Returns the first and second texts of pairs, and their scores."""
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]
    scores = torch.tensor([float(row[SCORE]) for row in rows], dtype=torch.float64)
    return [row[FIRST] for row in rows], [row[SECOND] for row in rows], scores


def sansgpu(*arguments: object) -> float:
    """Runs a command; returns the seconds it took."""
    start = time.perf_counter()
    if cli([str(argument) for argument in arguments]) != 0:
        raise SansGPUError(f"sansgpu {arguments[0]} failed.")
    return time.perf_counter() - start


def our_encoder(model: object) -> Encode:
    loaded = open_encoder(ModelRequest(str(model)), say, lambda *_: None)
    encode: Callable[..., np.ndarray] = loaded.task_class.encode_texts
    return lambda texts: encode(loaded, texts)


def their_static(model: Path) -> tuple[Encode, float]:
    """Returns the static model that model2vec distills with its defaults, but in fp32, and the seconds it took."""
    from model2vec.distill import distill

    start = time.perf_counter()
    found = distill(str(model), quantize_to="float32", device="cpu")
    return found.encode, time.perf_counter() - start


def contestants(args: argparse.Namespace, folder: Path) -> dict[str, tuple[Encode, float | None]]:
    """Distills and trains all models; returns functions that embed texts, and the seconds of their distillation."""
    distilled, run, stsb = folder / "distilled", folder / "run", Path(args.stsb)
    seconds = sansgpu("export", args.model, "--format", "static", "--output", distilled)
    chosen = {
        "task": "static", "model.name_or_path": distilled, "data.dataset_name": stsb / "sts-train.csv",
        "data.text_column": FIRST, "data.text_pair_column": SECOND, "data.label_column": SCORE,
        "training.num_epochs": args.epochs, "training.batch_size": 128, "training.eval_steps": 0,
        "training.report_to": "none",
    }  # fmt: skip
    sansgpu("train", *overrides(chosen), "--output-dir", run)
    theirs, their_seconds = their_static(Path(args.model))
    return {
        ENCODER: (our_encoder(args.model), None),
        DISTILLED: (our_encoder(distilled), seconds),
        TRAINED: (our_encoder(run / "final"), None),
        PEER: (theirs, their_seconds),
    }


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    known = contestants(args, folder)
    first, second, scores = pairs(Path(args.stsb) / "sts-test.csv")
    seconds: dict[str, list[float]] = {name: [] for name in known}
    for _ in range(1 + args.rounds):
        for name, (encode, _) in known.items():
            texts = [*first, *second][: args.texts if name == ENCODER else None]
            start = time.perf_counter()
            encode(texts)
            seconds[name].append((time.perf_counter() - start) / len(texts))
    rows = []
    for name, (encode, distillation) in known.items():
        ours, others = (torch.from_numpy(np.asarray(encode(texts), np.float64)) for texts in (first, second))
        correlation = float(spearman_corrcoef(torch.cosine_similarity(ours, others), scores))
        speed = 1 / median(seconds[name][1:])  # the first round is a warm-up
        row: Row = {"name": name, "texts_per_second": speed, "spearman": correlation}
        rows.append(row | {"distillation_seconds": distillation})
    for row in rows:
        row["speed"] = row["texts_per_second"] / rows[0]["texts_per_second"]
        row["ratio"] = row["spearman"] / rows[0]["spearman"]
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stsb", required=True)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, Path(folder))
    print_table("static embeddings", COLUMNS, rows)
    write_json(args.json, "static_embeddings", vars(args), rows)


if __name__ == "__main__":
    main()
