"""Measures how much faster a step is if examples that begin with the same tokens share the computation of that.

    python -m benchmarks.fine_tuning.shared_beginnings --model FOLDER_OR_GGUF [--layers 8] [--rounds 5] [--json FILE]

The batches are those of a grpo update, of a preference pair and of conversations with a system prompt, and ordinary
conversations that share only what the chat template writes. They have random tokens and go forward and backward through
the model with a LoRA adapter, without its head, which computes only targets. Shared and separate passes take turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.contest import Row, print_table, say, write_json
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.shared_prefixes import SharedPrefixes
from sansgpu.tasks.base import ModelUse
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.tasks.sft.objective import SFTObjective

COLUMNS = {
    "": ("name", "s"),
    "tokens": ("tokens", ",d"),
    "computed": ("computed", ",d"),
    "fewer tokens": ("fewer", ".2f"),
    "separate, s": ("separate_seconds", ",.3f"),
    "shared, s": ("shared_seconds", ",.3f"),
    "faster": ("faster", ".2f"),
    "gradient differs by": ("difference", ".1e"),
}


class Shape(NamedTuple):
    """The numbers of examples, of tokens with which all of them begin, and of tokens that each has of its own."""

    examples: int
    shared: int
    own: int


BATCHES = {
    "grpo, 8 completions of 128 tokens to a prompt of 256": Shape(8, 256, 128),
    "a pair of answers of 128 tokens to a prompt of 256": Shape(2, 256, 128),
    "8 conversations of 150 tokens after a system prompt of 300": Shape(8, 300, 150),
    "16 conversations of 107 tokens after 21 of the chat template": Shape(16, 21, 107),
}


def batch_of(shape: Shape, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random tokens (N,) and the lengths (B,) of the examples."""
    draws = np.random.default_rng(0)
    shared = draws.integers(0, vocabulary, shape.shared)
    examples = [np.concatenate((shared, draws.integers(0, vocabulary, shape.own))) for _ in range(shape.examples)]
    return torch.from_numpy(np.concatenate(examples)), torch.full((shape.examples,), shape.shared + shape.own)


def timed_pass(model: UnpaddedModel, tokens: torch.Tensor, lengths: torch.Tensor, shares: bool) -> float:
    """Returns the seconds of a forward and backward pass, whose gradients stay in the model."""
    model.shares = shares
    model.model.zero_grad()
    start = time.perf_counter()
    states = model.hidden_states(tokens, lengths)
    factors = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))  # random gradients
    states.backward(factors)
    return time.perf_counter() - start


def gradients_of(model: UnpaddedModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.model.parameters() if p.grad is not None])


def measure(model: UnpaddedModel, name: str, shape: Shape, rounds: int) -> Row:
    """Returns medians of passes that take turns, after one of each that is not timed."""
    tokens, lengths = batch_of(shape, int(model.model.config.get_text_config().vocab_size))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    found = {}
    for _ in range(1 + rounds):
        for shares in (True, False):
            seconds[shares].append(timed_pass(model, tokens, lengths, shares))
            found[shares] = gradients_of(model)
    shared, separate = (median(seconds[shares][1:]) for shares in (True, False))
    computed = len(SharedPrefixes.of(tokens, lengths))
    return {
        "name": name,
        "tokens": len(tokens),
        "computed": computed,
        "fewer": len(tokens) / computed,
        "separate_seconds": separate,
        "shared_seconds": shared,
        "faster": separate / shared,
        "difference": float((found[True] - found[False]).abs().max() / found[False].abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a decoder; its weights are replaced by random ones")
    parser.add_argument("--layers", type=int, help="number of blocks; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = {"name_or_path": arguments.model, "adapter": "lora", "lora_rank": 16, "lora_alpha": 32}
    config = SCHEMA.model_validate({"task": "sft", "model": settings, "data": {"dataset_name": "-"}})
    model = SFTObjective(config, ModelUse(random=True, layers=arguments.layers)).unpadded
    if not model.shares:
        parser.error(f"{arguments.model} does not share beginnings; pass a decoder with attention in all layers.")
    rows = []
    for name, shape in BATCHES.items():
        say(name)
        rows.append(measure(model, name, shape, arguments.rounds))
    print_table("Shared beginnings", COLUMNS, rows)
    write_json(arguments.json, "shared_beginnings", {"model": arguments.model, "layers": arguments.layers}, rows)


if __name__ == "__main__":
    main()
