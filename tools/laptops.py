"""Lists what computers of a given memory can train in an hour and in a night: the tables of docs/laptops.md.

    python -m tools.laptops [--memory 8GB 16GB 32GB] [--here] [--json FILE]

Nothing is trained. Memory comes from `sansgpu plan --memory`, within what the operating system and a browser leave
free. Speed comes from the model of `sansgpu plan --presets`: a processor's published peak rate times the measured share
of it. `python -m benchmarks.fine_tuning.quantized_base` and `sansgpu train` measure the memory and the speed of a row.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.contest import Row, print_table, write_json

from sansgpu.config import Config
from sansgpu.config.wording import count
from sansgpu.planning.memory_options import memory_options, parse_memory
from sansgpu.planning.presets import PROCESSORS, Processor, this_machine
from sansgpu.planning.propose import propose_quickly
from sansgpu.tasks.registry import task_of
from tools.written_model import write_config

SIZES = ("135m", "0.5b", "1.5b", "3b", "7b")  # names of sizes in tools.written_model
SYSTEM_BYTES = int(2.5e9)  # memory that the operating system and a browser use
CONTEXT = 1024  # tokens per example
CONVERSATION_TOKENS = 256
HOURS = {"an hour": 1.0, "a night": 10.0}
TEXT_BYTES = 2 << 30  # more than any of these runs reads
METHODS = {
    "all weights": ("whole", None),
    "LoRA, bf16 base": ("lora", "bf16"),
    "LoRA, int8 base": ("lora", "int8"),
    "LoRA, int4 base": ("lora", "int4"),
}
FROM_SCRATCH = {name: (name, "s") for name in ("processor", "time", "parameters", "tokens")}


def largest_models(memories: Sequence[str]) -> Iterator[Row]:
    """Yields for each memory size the largest model that each method fine-tunes, with the memory it needs."""
    with tempfile.TemporaryDirectory(prefix="sansgpu-laptops-") as name:
        folders = {size: Path(name) / size for size in SIZES}
        for size, folder in folders.items():
            write_config(folder, size)
        for memory in memories:
            row: Row = {"memory": memory}
            available = parse_memory(memory) - SYSTEM_BYTES
            for size, folder in folders.items():
                for option in memory_options(str(folder), str(available))["options"]:
                    label = next(m for m, key in METHODS.items() if key == (option["method"], option["base_precision"]))
                    if option["fits"] and option["context"] == CONTEXT:
                        star = "*" if option["gradient_checkpointing"] else ""
                        row[label] = f"{size.upper()}{star} ({option['needed_bytes'] / 1e9:.1f} GB)"
            yield row


def from_scratch(processors: Sequence[Processor], memory: str) -> Iterator[Row]:
    """Yields, for each kind of processor and each duration, the model with the lowest expected loss."""
    available = parse_memory(memory) - SYSTEM_BYTES
    for processor in processors:
        for time, hours in HOURS.items():
            run = propose_quickly("text", TEXT_BYTES, hours, processor, available)
            yield {
                "processor": processor.name,
                "time": time,
                "parameters": count(run.parameters),
                "tokens": count(int(run.tokens)),
            }


def conversations(processors: Sequence[Processor]) -> Iterator[Row]:
    """Yields, for each model and duration, how many conversations LoRA trains on with each kind of processor."""
    with tempfile.TemporaryDirectory(prefix="sansgpu-laptops-") as name:
        for size in SIZES:
            write_config(folder := Path(name) / size, size)
            model = {"name_or_path": str(folder), "adapter": "lora", "base_precision": "int8"}
            data = {"dataset_name": "-", "max_length": CONVERSATION_TOKENS}
            config = Config.model_validate({"task": "sft", "model": model, "data": data})
            flops = task_of(config).costs(config).work(1).needed
            speeds = {processor.name: processor.tokens_per_second(flops) for processor in processors}
            for time, hours in HOURS.items():
                cells = {name: count(int(speed * hours * 3600 / CONVERSATION_TOKENS)) for name, speed in speeds.items()}
                yield {"model": size.upper(), "time": time, **cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs="+", default=["8GB", "16GB", "32GB"], help="memory sizes of computers")
    parser.add_argument("--here", action="store_true", help="also estimate the speed of this machine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    processors = (*PROCESSORS[:4], *([this_machine(Config())] if arguments.here else []))
    models = list(largest_models(arguments.memory))
    columns = {"memory": ("memory", "s"), **{method: (method, "s") for method in METHODS}}
    print_table(f"largest model to fine-tune, examples of {CONTEXT} tokens", columns, models)
    scratch = list(from_scratch(processors, arguments.memory[0]))
    print_table("best model from scratch", FROM_SCRATCH, scratch)
    chats = list(conversations(processors))
    columns = {key: (key, "s") for key in chats[0]}
    print_table(f"LoRA: conversations of {CONVERSATION_TOKENS} tokens read", columns, chats)
    write_json(arguments.json, "laptops", vars(arguments), [*models, *scratch, *chats])


if __name__ == "__main__":
    main()
