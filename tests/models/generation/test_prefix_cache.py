"""Prompts that begin like finished sequences reuse their keys and values, and get the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sansgpu.models.generation.generate import DecoderSlots, decoder_step
from sansgpu.models.generation.prefix_cache import MIN_SHARED, PrefixCache
from sansgpu.models.huggingface.generation import PretrainedSlots, pretrained_step
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from tests.models.small import model_of
from tests.tasks.folders import model_folder

SLOTS, LENGTH = 3, 200
SYSTEM = [number * 7 % 60 for number in range(90)]


def readers(kind: str) -> list[Any]:
    """Returns two equal readers of a model."""
    if kind.startswith("decoder"):
        model = model_of("modern").eval()
        fused = decoder_step(model) if kind == "decoder" else None
        return [DecoderSlots(model, SLOTS, LENGTH, fused) for _ in range(2)]
    pretrained: Any = AutoModelForCausalLM.from_pretrained(model_folder("qwen2")).eval()
    patch_model(pretrained)
    unpadded = UnpaddedModel(pretrained, True, LENGTH)
    fused = pretrained_step(pretrained) if kind == "qwen2" else None
    return [PretrainedSlots(unpadded, SLOTS, LENGTH, fused) for _ in range(2)]


def prompt(*more: int) -> list[int]:
    return [*SYSTEM, *(number % 60 for start in more for number in range(start, start + 20))]


@pytest.mark.parametrize("kind", ["decoder", "decoder-layers", "qwen2", "qwen2-layers"])
def test_the_logits_are_those_without_a_cache(kind: str) -> None:
    plain, remembering = readers(kind)
    remembering.prefixes = PrefixCache(SLOTS * LENGTH)
    read: list[int] = []
    original = remembering.cache.restore
    remembering.cache.restore = lambda slot, layers, count: (read.append(count), original(slot, layers, count))

    def both(method: str, *arguments: Any) -> None:
        found = [getattr(reader, method)(*arguments) for reader in (plain, remembering)]
        if found[0] is not None:
            assert torch.equal(*found), method

    both("add", [prompt(1), [5, 6, 7]])
    for token in (9, 10, 11):
        both("step", [token, token + 1])
    both("keep", [1])
    continued = [*prompt(1), 9, 10, *range(30)]  # the conversation goes on after an answer
    both("add", [prompt(25), continued])
    assert read == [len(SYSTEM), len(prompt(1)) + 2]
    for token in (12, 13):
        both("step", [token, token + 1, token + 2])
    both("keep", [0])
    both("add", [[8, 9], prompt(25)[: len(SYSTEM) + 3]])
    assert read[2:] == [len(SYSTEM) + 3 - 16], "at least MIN_ROWS tokens are processed"
    both("step", [1, 2, 3])
    both("reset")
    both("add", [prompt(40), prompt(40), prompt(40)])


def test_the_memory_is_bounded_and_the_newest_sequences_stay() -> None:
    _, reader = readers("decoder")
    reader.prefixes = PrefixCache(150)
    for start in (1, 20, 40):
        reader.add([[(start + number) % 60 for number in range(70)]])
        reader.keep([])
    lengths = [reader.prefixes.find([(start + number) % 60 for number in range(90)], 1)[0] for start in (1, 20, 40)]
    assert lengths == [0, 70, 70]
    reader.add([[(40 + number) % 60 for number in range(90)]])
    reader.keep([])
    assert reader.prefixes.find([(20 + number) % 60 for number in range(90)], 1)[0] == 0, "90 + 70 are more than 150"
    reader.add([[3] * (MIN_SHARED - 1)])
    reader.keep([])
    assert reader.prefixes.find([3] * 90, 1)[0] == 0, "too short to be kept"


def test_what_a_failed_pass_leaves_is_not_reused() -> None:
    _, reader = readers("decoder")
    reader.prefixes = PrefixCache(1000)
    reader.add([prompt(1)])
    reader.reset()
    assert reader.prefixes.find(prompt(1, 2), 1)[0] == 0
