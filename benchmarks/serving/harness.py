"""Evaluates a model with `sansgpu eval --harness` and with lm-evaluation-harness's own `hf` models, on the same tasks.

    python -m benchmarks.serving.harness --model FILE.gguf --reviews dev.tsv --questions squad.json
        --documents docs.jsonl
        [--precisions fp32 bf16 int8] [--batch 16] [--limit 32] [--fewshot N] [--rounds 1] [--threads N] [--json FILE]

The tasks are made from local files: `reviews` (a table with sentence and label) becomes a choice between two words,
`questions` (in SQuAD's format) a choice between four answers after a paragraph and the generation of the answer, and
`documents` (JSON lines with a text) the perplexity of the texts. --model is a Hugging Face folder, or a GGUF file, from
which one is made first. Seconds are those of `lm_eval.evaluate`: everything except loading the model and the data.
`speed` is the time of `hf` in fp32 divided by ours. Beside other programs, CPU seconds and their ratio are more
reliable. The largest difference is that of any metric from `hf`'s, relative to it. All run in this process, one after
the other.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contest import Row, print_table, say, write_json

OURS, THEIRS = "sansgpu", "hf"
MAX_CHARACTERS = 4000  # longer documents are cut off here
COLUMNS = {
    "task": ("task", "s"),
    "": ("name", "s"),
    "s": ("seconds", ".1f"),
    "speed": ("ratio", ".2f"),
    "CPU s": ("cpu_seconds", ".1f"),
    "CPU speed": ("cpu_ratio", ".2f"),
    "largest difference": ("difference", ".1e"),
    "metrics": ("metrics", "s"),
}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_target": "label",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
TASKS: dict[str, dict[str, Any]] = {
    "reviews": {**CHOICE, "doc_to_text": "{{sentence}}\nIs this review positive or negative? Answer:"},
    "answers": {**CHOICE, "doc_to_text": "{{context}}\nQuestion: {{question}}\nAnswer:"},
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}\nQuestion: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32, "do_sample": False},
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "metric_list": [{"metric": "chrf"}],
    },
}


def reviews(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        {"sentence": row["sentence"], "label": int(row["label"]), "choices": ["negative", "positive"]} for row in rows
    ]


def answers(path: Path) -> list[Row]:
    """Returns questions with the right answer and three of other questions."""
    rows: list[Row] = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            asked = [(one["question"], one["answers"][0]["text"]) for one in paragraph["qas"]]
            rows += [{"context": paragraph["context"], "question": q, "answer": a} for q, a in asked]
    draw, known = random.Random(0), sorted({row["answer"] for row in rows})
    draw.shuffle(rows)
    for row in rows:
        row["choices"] = [row["answer"], *draw.sample([one for one in known if one != row["answer"]], 3)]
        draw.shuffle(row["choices"])
        row["label"] = row["choices"].index(row["answer"])
    return rows


def documents(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        return [{"text": json.loads(line)["text"][:MAX_CHARACTERS]} for line in lines]


def write_task(folder: Path, name: str, rows: Iterable[Row]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}, "test_split": "test"}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"task": name, **data, **TASKS[name]}), encoding="utf-8")  # JSON is YAML, too
    return path


def hugging_face_folder(model: Path, folder: Path) -> Path:
    """Returns a model as a Hugging Face folder, with the weights of a GGUF file in fp32."""
    if model.is_dir():
        return model
    from sansgpu.config import ModelConfig
    from sansgpu.models.huggingface.adapters import load_model
    from sansgpu.models.huggingface.pretrained import Head, save_pretrained
    from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of

    config = ModelConfig(name_or_path=str(model))
    save_pretrained(load_model(config, Head("causal"), seed=0), load_tokenizer_of(config), folder, config)
    return folder


def measure(model: Any, task: Path, limit: int, fewshot: int | None) -> Row:
    """Returns the seconds and the metrics of a task."""
    import lm_eval

    from sansgpu.jobs.harness import contained
    from sansgpu.jobs.harness.tasks import load_tasks

    with contained(trusts=False):
        loaded = load_tasks([str(task)], fewshot if task.stem == "generation" else None, trusts=False)
        begun, cpu = time.perf_counter(), time.process_time()
        found: Any = lm_eval.evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=False)
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    values = found["results"][task.stem]
    metrics = {key: values[key] for key in values if key.endswith(",none")}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "values": metrics}


def open_models(folder: Path, precisions: list[str], batch: int) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    from sansgpu.jobs.generate import open_generator
    from sansgpu.jobs.harness.model import HarnessModel
    from sansgpu.train.loading import ModelRequest

    models: dict[str, Any] = {THEIRS: HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=batch)}
    request = ModelRequest(str(folder))
    for precision in precisions:
        loaded = open_generator(replace(request, precision=precision), say)  # type: ignore[arg-type]
        models[f"{OURS}, {precision}"] = HarnessModel(loaded, say, lambda *progress: None)
    return models


def summary(task: str, name: str, passes: list[Row], theirs: list[Row]) -> Row:
    found, expected = passes[0]["values"], theirs[0]["values"]
    numbers = {key: value for key, value in found.items() if isinstance(value, (int, float))}
    differences = [abs(value - expected[key]) / max(abs(expected[key]), 1e-12) for key, value in numbers.items()]
    ours, other = (
        {key: median(row[key] for row in rows) for key in ("seconds", "cpu_seconds")} for rows in (passes, theirs)
    )
    return {
        "task": task,
        "name": name,
        **ours,
        "ratio": other["seconds"] / ours["seconds"],
        "cpu_ratio": other["cpu_seconds"] / ours["cpu_seconds"],
        "difference": max(differences),
        "metrics": ", ".join(f"{key.removesuffix(',none')} {value:.5g}" for key, value in numbers.items()),
        "values": numbers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--reviews", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--documents", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["fp32"])
    parser.add_argument("--batch", type=int, default=16, help="batch size of hf")
    parser.add_argument("--limit", type=int, default=32, help="examples per task")
    parser.add_argument("--fewshot", type=int, help="solved examples before each question of the task generation")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        tasks = [write_task(folder, "reviews", reviews(args.reviews))] if args.reviews else []
        if args.questions:
            tasks += [write_task(folder, name, answers(args.questions)) for name in ("answers", "generation")]
        if args.documents:
            tasks.append(write_task(folder, "perplexity", documents(args.documents)))
        models = open_models(hugging_face_folder(args.model, folder / "model"), args.precisions, args.batch)
        if args.threads:
            import torch

            torch.set_num_threads(args.threads)
        for task in tasks:
            passes: dict[str, list[Row]] = {name: [] for name in models}
            for number in range(args.rounds):
                for name, model in models.items():
                    say(f"{task.stem}, {name}, round {number + 1} of {args.rounds}")
                    passes[name].append(measure(model, task, args.limit, args.fewshot))
            rows += [summary(task.stem, name, found, passes[THEIRS]) for name, found in passes.items()]
    print_table(f"{args.model.name}, {args.limit} examples per task", COLUMNS, rows)
    write_json(args.json, "harness", vars(args), rows)


if __name__ == "__main__":
    main()
