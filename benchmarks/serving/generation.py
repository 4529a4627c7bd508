"""Completes many prompts greedily, compared with transformers' generate and llama.cpp.

    python -m benchmarks.serving.generation --model FOLDER --data DOCUMENTS.jsonl [--prompts 64] [--tokens 128]
        [--rounds 2] [--batches 64 1] [--precision bf16 int8] [--peer-precision fp32]
        [--gguf FILE --llama-python PYTHON] [--threads N] [--json FILE]

sansgpu and transformers compute in bf16, unless --precision and --peer-precision say otherwise. llama.cpp reads FILE,
e.g. in Q8_0, with the llama-cpp-python of another virtual environment. All get the same prompts of 16 to 128 tokens and
generate the same number of tokens, even past the end of a text. Seconds do not include loading. With batch size 1,
transformers completes only an eighth of the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import cycle
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from benchmarks.contest import Event, NoResultError, Row, add_ratios, print_table, run_worker, say, write_json

LENGTHS = (16, 24, 32, 48, 64, 96, 128)  # lengths of the prompts in tokens, used cyclically
COLUMNS = {
    "": ("name", "s"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "speed": ("ratio", ".2f"),
    "CPU ms/token": ("cpu_ms", ".2f"),
    "CPU speed": ("cpu_ratio", ".2f"),
    "peak GB": ("peak_gb", ".2f"),
    "equal starts": ("agreement", ".0%"),
}


def prompts_of(model: Path, documents: Path, count: int) -> list[list[int]]:
    """Returns `count` prompts: the first tokens of documents, in the lengths of LENGTHS."""
    tokenizer, prompts = Tokenizer.from_file(str(model / "tokenizer.json")), list[list[int]]()
    with documents.open(encoding="utf-8") as lines:
        for line, length in zip(lines, cycle(LENGTHS), strict=False):
            ids = tokenizer.encode(json.loads(line)["text"][: 20 * length], add_special_tokens=False).ids[:length]
            prompts += [ids] if len(ids) == length else []
            if len(prompts) == count:
                return prompts
    sys.exit(f"{documents} has {len(prompts)} documents that are long enough, but {count} are needed.")


def measure(job: Row, python: str, folder: Path) -> Event:
    """Runs a worker. Raises NoResultError if it fails."""
    outcome = run_worker(job, folder, "benchmarks.serving.generation_worker", event="pass", python=python)
    return {**outcome.named("pass")[0][1], "peak_rss_bytes": outcome.peak_rss_bytes}


def row(name: str, passes: list[Event], reference: list[list[int]]) -> Row:
    starts = [(ids[:8], expected[:8]) for ids, expected in zip(passes[0].pop("ids"), reference, strict=False)]
    return {
        "name": name,
        "status": "measured",
        "tokens_per_second": median(one["tokens"] / one["seconds"] for one in passes),
        "cpu_ms": median(one["cpu_seconds"] / one["tokens"] for one in passes) * 1000,
        "peak_gb": max(one["peak_rss_bytes"] for one in passes) / 1e9,
        "agreement": sum(one == other for one, other in starts) / len(starts),
        "passes": passes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="documents: JSON lines, each with a `text`")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="number of new tokens per prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 1], help="batch sizes of transformers")
    parser.add_argument("--precision", nargs="+", default=["bf16"], help="precisions of sansgpu")
    parser.add_argument("--peer-precision", choices=["bf16", "fp32"], default="bf16", help="of transformers")
    parser.add_argument("--gguf", type=Path, help="GGUF file of the model for llama.cpp; default: omit llama.cpp")
    parser.add_argument("--llama-python", default=sys.executable, help="Python of an environment with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = prompts_of(args.model, args.data, args.prompts)
    common = {"model": str(args.model.absolute()), "tokens": args.tokens, "threads": args.threads, "prompts": prompts}
    jobs = {
        f"transformers, {args.peer_precision}, batch {n}": (
            {**common, "contestant": "transformers", "batch": n, "precision": args.peer_precision},
            sys.executable,
        )
        for n in args.batches
    }
    if args.gguf:
        llama = {**common, "contestant": "llama.cpp", "model": str(args.gguf.absolute())}
        jobs[f"llama.cpp, {args.gguf.name}"] = (llama, args.llama_python)
    for precision in args.precision:
        job = {**common, "contestant": "sansgpu", "precision": precision}
        jobs[f"sansgpu, {precision}"] = (job, sys.executable)
    passes: dict[str, list[Event]] = {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-generation-") as name:
        for turn in range(args.rounds):
            for contestant, (job, python) in jobs.items():
                say(f"round {turn + 1} of {args.rounds}: {contestant}")
                try:
                    passes.setdefault(contestant, []).append(measure(job, python, Path(name)))
                except NoResultError as failure:
                    sys.exit(f"{contestant}: {failure}")
    first, reference = next(iter(jobs)), next(iter(passes.values()))[0]["ids"]
    rows = [row(contestant, found, reference) for contestant, found in passes.items()]
    add_ratios(rows, "tokens_per_second", first)
    for one in rows:
        one["cpu_ratio"] = rows[0]["cpu_ms"] / one["cpu_ms"]
    title = f"{args.prompts} prompts, {args.tokens} new tokens each, {args.threads} threads; speed against {first}"
    print_table(title, COLUMNS, rows)
    write_json(args.json, "generation", vars(args), rows)


if __name__ == "__main__":
    main()
