"""Computes vectors or labels of texts of mixed lengths, compared with other libraries.

    python -m benchmarks.serving.inference --task encode|predict --model FOLDER --data DOCUMENTS.jsonl
        [--precision bf16 int8] [--peers sentence-transformers:fp32 onnxruntime:int8 openvino:int8]
        [--texts 400] [--batches 32 8 128] [--rounds 2] [--threads N] [--json FILE]

Task encode compares the engine of `sansgpu embed` with SentenceTransformer.encode, or with onnxruntime and OpenVINO
running an ONNX file of the model; task predict that of `sansgpu predict` with the pipeline of transformers for text
classification. Each contestant is a library and a precision. onnxruntime's int8 quantizes activations while it runs;
OpenVINO's has fixed ranges of activations, found with some of the texts.

Half of the texts are sentences, and half are pieces of documents that fill the model's context. Seconds include
tokenization but not loading, and are measured after a warm-up pass; CPU seconds cover the measured passes. Peers try
each batch size; sansgpu chooses its batches itself. `agreement` is the mean cosine similarity of a text's vector with
that of the first peer, or the share of equal labels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median

from benchmarks.contest import Event, NoResultError, Row, add_ratios, print_table, run_worker, say, write_json

OURS = "sansgpu"
PEERS = {"encode": ("sentence-transformers", "onnxruntime", "openvino"), "predict": ("pipeline",)}  # by task
PASSES = 2  # measured passes per process
PIECE = 2000  # characters of a piece of a document, more than fit in a context of 256 tokens
COLUMNS = {
    "": ("name", "s"),
    "texts/s": ("texts_per_second", ",.0f"),
    "speed": ("ratio", ".2f"),
    "CPU ms/text": ("cpu_ms", ".2f"),
    "CPU speed": ("cpu_ratio", ".2f"),
    "tokenizing, texts/s": ("tokenized_per_second", ",.0f"),
    "peak GB": ("peak_gb", ".2f"),
    "agreement": ("agreement", ".4f"),
}


def mixed_texts(documents: Path) -> Iterator[str]:
    """Yields pieces of documents, each followed by a sentence of it."""
    with documents.open(encoding="utf-8") as lines:
        for line in lines:
            text = " ".join(json.loads(line)["text"].split())
            for start in range(0, len(text) - PIECE, PIECE):
                piece = text[start : start + PIECE]
                yield piece
                yield next((part for part in piece.split(". ")[1:] if part.strip()), piece[:100])


def measure(job: Row, folder: Path) -> list[Event]:
    """Runs a worker and returns its passes. Raises NoResultError if it fails."""
    outcome = run_worker(job, folder, "benchmarks.serving.inference_worker", event="pass")
    return [{**event, "peak_rss_bytes": outcome.peak_rss_bytes} for _, event in outcome.named("pass")]


def row(name: str, passes: list[Event], texts: int) -> Row:
    tokenizing = passes[0]["tokenizing_seconds"]
    return {
        "name": name,
        "status": "measured",
        "texts_per_second": texts / median(one["seconds"] for one in passes),
        "cpu_ms": median(one["cpu_seconds"] for one in passes) / texts * 1000,
        "tokenized_per_second": tokenizing and texts / tokenizing,
        "peak_gb": max(one["peak_rss_bytes"] for one in passes) / 1e9,
        "agreement": passes[0].get("agreement"),
        "passes": passes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=PEERS, required=True)
    parser.add_argument("--model", type=Path, required=True, help="Sentence Transformers folder or trained classifier")
    parser.add_argument("--data", type=Path, required=True, help="documents: JSON lines, each with a `text`")
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32", "int16", "int8"], default=["bf16"])
    parser.add_argument("--peers", nargs="+", help="LIBRARY:PRECISION; default: the usual library in fp32 and bf16")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 8, 128], help="batch sizes of the peer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    peers = args.peers or [f"{PEERS[args.task][0]}:{precision}" for precision in ("fp32", "bf16")]
    if unknown := [peer for peer in peers if peer.partition(":")[0] not in PEERS[args.task]]:
        parser.error(f"--peers {unknown[0]}: the libraries are {' '.join(PEERS[args.task])}")
    passes: dict[str, list[Event]] = {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-inference-") as name:
        folder = Path(name)
        texts = list(islice(mixed_texts(args.data), args.texts))
        (folder / "texts.json").write_text(json.dumps(texts))
        common = {"task": args.task, "model": str(args.model.absolute()), "passes": PASSES, "threads": args.threads}
        common |= {"folder": str(folder), "batches": args.batches}
        for turn in range(args.rounds):
            for contestant in (*peers, *(f"{OURS}:{precision}" for precision in args.precision)):
                library, _, precision = contestant.partition(":")
                say(f"round {turn + 1} of {args.rounds}: {library} {precision}")
                job = {**common, "peer": library if library != OURS else None, "precision": precision}
                try:
                    found = measure(job, folder)
                except NoResultError as failure:
                    sys.exit(str(failure))
                for one in found:
                    batches = "" if library == OURS else f", batch {one['batch']}"
                    passes.setdefault(f"{library} {precision}{batches}", []).append(one)
    rows = [row(label, found, len(texts)) for label, found in passes.items()]
    theirs = [one for one in rows if not one["name"].startswith(OURS)]
    best = max(theirs, key=lambda row: row["texts_per_second"])["name"]
    add_ratios(rows, "texts_per_second", best)
    for one in rows:
        one["cpu_ratio"] = min(other["cpu_ms"] for other in theirs) / one["cpu_ms"]
    print_table(f"{len(texts)} texts, {args.threads} threads; speed against {best}", COLUMNS, rows)
    write_json(args.json, "inference", vars(args), rows)


if __name__ == "__main__":
    main()
