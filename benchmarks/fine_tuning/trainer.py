"""Fine-tunes a model of Qwen2.5-0.5B's exact shape, compared with Hugging Face's Trainer on the same rows in order.

    python -m benchmarks.fine_tuning.trainer --data ROWS.jsonl [--model FOLDER] [--adapters lora] [--steps 5]
        [--json FILE]

Without --model, the weights are random, and the tokenizer is trained on the source of Python's standard library.
Padding does not count as tokens. Both use 4 rows per step and bf16; runs with a quantized base, which save memory,
process one row at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest import (
    WARM_UP,
    Contestant,
    Outcome,
    Sample,
    add_ratios,
    print_table,
    say,
    spawn,
    take_turns,
    write_json,
)
from benchmarks.ours import MEASURED, assignments, at_step, command, sample

# Qwen/Qwen2.5-0.5B's config.json.
SHAPE = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
OURS, HF = "sansgpu", "Hugging Face Trainer"
ADAPTERS = {"none": "whole", "lora": "LoRA"}  # values of model.adapter, with their names in the table
ROWS = 4
COLUMNS = {
    "": ("name", "s"),
    "real tokens/s": ("tokens_per_second", ",.0f"),
    "step": ("median_step_seconds", ".2f"),
    "peak memory, GB": ("peak_gb", ".2f"),
    "speed": ("ratio", ".2f"),
    "last loss": ("loss", ".3f"),
}


def settings(model: Path, data: Path, adapter: str, **more: object) -> dict[str, object]:
    """Returns the settings of both contestants."""
    return {
        "task": "sft",
        **MEASURED,
        "model.name_or_path": model,
        "model.adapter": adapter,
        "data.dataset_name": data,
        "data.max_length": 1024,
        "training.batch_size": ROWS,
        "training.gradient_accumulation_steps": 1,
        "training.precision": "bf16",
        "training.learning_rate": 1e-5,
        **more,
    }


def contestants(
    model: Path, data: Path, adapters: Sequence[str], precision: str, steps: int, threads: int, folder: Path
) -> list[Contestant]:
    """Returns sansgpu and the Trainer, each with every adapter. With int16, the Trainer computes in fp32."""
    found = []
    total = WARM_UP + steps
    frugal: dict[str, object] = {"training.master_weights": "bf16", "training.optimizer_state": "8bit"}
    for adapter in adapters:
        label = ADAPTERS[adapter]
        asked = {k: v for k, v in settings(model, data, adapter).items() if k != "training.window_warmup_ratio"}
        asked |= {"training.max_steps": total, "training.threads": threads, "training.precision": precision}
        variants: dict[str, dict[str, object]] = {"": {}}
        if precision == "bf16":
            variants[", bf16 weights, 8-bit moments"] = frugal
        if adapter != "none":
            by_row: dict[str, object] = {"training.batch_size": 1, "training.gradient_accumulation_steps": ROWS}
            int8: dict[str, object] = {"training.precision": "int8"}
            variants = {"": {}, ", int8 products": int8}
            for base in ("int8", "int4"):
                variants[f", {base} base"] = {"model.base_precision": base, **by_row}
            variants[", int8 base and products"] = {"model.base_precision": "int8", **by_row, **int8}
        for suffix, changes in variants.items():
            name = f"{OURS}, {label}{suffix}"
            output = folder / f"{name.replace(' ', '-')}"
            line = command(output, {**asked, **changes})
            found.append(Contestant(name, line, partial(our_sample, folder, name), until=at_step(total)))
        job = folder / f"hf-{adapter}.json"
        facts = {"overrides": assignments(asked), "steps": total, "threads": threads, "cache": str(folder / "cache")}
        job.write_text(json.dumps(facts))
        line = [sys.executable, "-m", "benchmarks.fine_tuning.trainer_peer", str(job)]
        name = f"{HF}, {label}"
        found.append(Contestant(name, line, partial(their_sample, folder, name), needs=("accelerate", "peft")))
    return found


def our_sample(folder: Path, name: str, outcome: Outcome) -> Sample:
    """Returns the measured steps of sansgpu and writes their token counts to a file."""
    counts = [event["tokens"] for _, event in outcome.named("step")]
    note_tokens(folder, name, [after - before for before, after in zip([0, *counts], counts, strict=False)])
    return sample(outcome)


def their_sample(folder: Path, name: str, outcome: Outcome) -> Sample:
    """Returns the measured steps of the Trainer and writes their token counts to a file."""
    if not outcome.named("result"):
        raise outcome.no_result()
    result = outcome.named("result")[0][1]
    note_tokens(folder, name, result["tokens"])
    seconds = result["step_seconds"]
    return Sample(seconds[WARM_UP:], seconds[0], outcome.peak_rss_bytes, result["losses"][-1], outcome.wall_seconds)


def note_tokens(folder: Path, name: str, tokens: list[int]) -> None:
    """Writes the token counts of the measured steps, which are the same in every round."""
    (folder / f"{name}.tokens").write_text(json.dumps(tokens[WARM_UP:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows in a format of task sft")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: random weights, Qwen2.5-0.5B's shape")
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=list(ADAPTERS), help="default: all")
    parser.add_argument("--precision", choices=("bf16", "int16"), default="bf16", help="int16: the Trainer uses fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sansgpu-fine-tuning-") as name:
        folder = Path(name)
        model = arguments.model or made_model(folder / "model")
        options = (arguments.adapters, arguments.precision, arguments.steps, arguments.threads)
        given = (model.absolute(), arguments.data.absolute(), *options)
        field = contestants(*given, folder)
        rows = take_turns(field, arguments.rounds)
        for row in rows:
            if "runs" in row:
                measured = json.loads((folder / f"{row['name']}.tokens").read_text())
                seconds = [second for one in row["runs"] for second in one["step_seconds"]]
                row["tokens_per_second"] = sum(measured) * len(row["runs"]) / sum(seconds)
                row["peak_gb"] = row["peak_rss_bytes"] / 1e9
    peer = f"{HF}, {ADAPTERS[arguments.adapters[0]]}"
    add_ratios(rows, "tokens_per_second", peer)
    print_table(f"4 rows a step, {arguments.precision}; speed against {peer}", COLUMNS, rows)
    asked: dict[str, Any] = {**vars(arguments), "data": str(arguments.data), "model": str(arguments.model)}
    write_json(arguments.json, "fine_tuning", asked, rows)


def made_model(folder: Path) -> Path:
    """Writes a random model of SHAPE in a separate process, because this process must need little memory."""
    say("initializing weights")
    shape = ["--vocabulary", "16384", "--bf16", "--shape", json.dumps(SHAPE)]
    outcome = spawn([sys.executable, "-m", "tools.tiny_model", str(folder), *shape])
    if outcome.code:
        raise outcome.no_result()
    return folder


if __name__ == "__main__":
    main()
