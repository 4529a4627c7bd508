"""Prompts that begin like running or finished sequences reuse their keys and values, and get the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sansgpu.models.generation.generate import DecoderSlots, decoder_step
from sansgpu.models.generation.prefix_cache import MIN_SHARED, PrefixCache
from sansgpu.models.huggingface.generation import PretrainedSlots, pretrained_step
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.modules import narrow_matrices
from tests.models.small import model_of
from tests.tasks.folders import model_folder

SLOTS, LENGTH = 3, 200
KINDS = ["decoder", "decoder-layers", "qwen2", "qwen2-layers"]
SYSTEM = [number * 7 % 60 for number in range(90)]


def readers(kind: str) -> Callable[[], Any]:
    """Returns a function that opens readers of a model."""
    if kind.startswith("decoder"):
        model = model_of("modern").eval()
        fused = decoder_step(model) if kind == "decoder" else None
        return lambda: DecoderSlots(model, SLOTS, LENGTH, fused)
    pretrained: Any = AutoModelForCausalLM.from_pretrained(model_folder("qwen2")).eval()
    patch_model(pretrained)
    unpadded = UnpaddedModel(pretrained, True, LENGTH)
    fused = pretrained_step(pretrained) if kind == "qwen2" else None
    return lambda: PretrainedSlots(unpadded, SLOTS, LENGTH, fused)


class Separate:
    """Generates with a reader for each sequence, so that nothing is shared."""

    def __init__(self, opened: Callable[[], Any]) -> None:
        self._open, self._readers = opened, list[Any]()

    def add(self, prompts: list[list[int]]) -> torch.Tensor:
        added = [self._open() for _ in prompts]
        self._readers += added
        return torch.cat([reader.add([prompt]) for reader, prompt in zip(added, prompts, strict=True)])

    def step(self, tokens: list[int]) -> torch.Tensor:
        return torch.cat([reader.step([token]) for reader, token in zip(self._readers, tokens, strict=True)])

    def keep(self, kept: list[int]) -> None:
        self._readers = [self._readers[number] for number in kept]

    def reset(self) -> None:
        self._readers = []


def prompt(*more: int) -> list[int]:
    return [*SYSTEM, *(number % 60 for start in more for number in range(start, start + 20))]


def copies_of(reader: Any) -> list[int]:
    """Returns a list to which the reader will add the number of tokens of each copied beginning."""
    found: list[int] = []
    cache, copy, restore = reader.cache, reader.cache.copy, reader.cache.restore
    cache.copy = lambda to, slot, count: (found.append(count), copy(to, slot, count))
    cache.restore = lambda slot, layers, count: (found.append(count), restore(slot, layers, count))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_without_a_cache(kind: str) -> None:
    opened = readers(kind)
    separate, reader = Separate(opened), opened()
    reader.prefixes = PrefixCache(SLOTS * LENGTH)
    copies = copies_of(reader)

    def both(method: str, *arguments: Any) -> None:
        found = [getattr(one, method)(*arguments) for one in (separate, reader)]
        if found[0] is not None:
            assert torch.equal(*found), method

    both("add", [prompt(1), [5, 6, 7]])
    for token in (9, 10, 11):
        both("step", [token, token + 1])
    both("keep", [1])
    copies.clear()
    continued = [*prompt(1), 9, 10, *range(30)]  # the conversation goes on after an answer
    both("add", [prompt(25), continued])
    assert copies == [len(SYSTEM), len(prompt(1)) + 2]
    for token in (12, 13):
        both("step", [token, token + 1, token + 2])
    both("keep", [0])
    copies.clear()
    both("add", [[8, 9], prompt(25)[: len(SYSTEM) + 3]])
    assert copies == [len(SYSTEM) + 2], "the last token is processed"
    both("step", [1, 2, 3])
    both("reset")
    both("add", [prompt(40), prompt(40), prompt(40)])


@pytest.mark.parametrize("narrow", [False, True])
def test_a_decoder_step_reads_a_prompt_at_once_or_token_by_token_alike(narrow: bool) -> None:
    model = model_of("modern").eval()
    if narrow:
        narrow_matrices(model)
    fused = decoder_step(model)
    assert fused is not None
    at_once, in_parts = (DecoderSlots(model, SLOTS, LENGTH, fused) for _ in range(2))
    whole, other = prompt(1, 30), [7, 8, 9]
    expected = at_once.add([whole, other])
    found = in_parts.add([whole[:70], other])
    for token in whole[70:]:
        found = in_parts.step([token, 3])
    assert torch.equal(found[0], expected[0])
    assert torch.equal(in_parts.add([whole])[0], expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_batch_share_their_beginnings(kind: str) -> None:
    opened = readers(kind)
    separate, reader = Separate(opened), opened()
    copies = copies_of(reader)
    prompts = [prompt(1), prompt(2, 7), [*prompt(2), 3]]
    for calls in ([prompts], [prompts[:1], prompts[1:]], [prompts[:1], prompts[1:2], prompts[2:]]):
        copies.clear()
        found = torch.cat([reader.add(together) for together in calls])
        expected = separate.add(prompts)
        assert torch.equal(found, expected)
        assert copies in ([len(SYSTEM)] * 2, [len(SYSTEM), len(prompt(2))])
        assert torch.equal(reader.step([4, 5, 6]), separate.step([4, 5, 6]))
        for one in (reader, separate):
            one.reset()


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 130), st.integers(0, 40), st.booleans()), min_size=1, max_size=8
    )
)
def test_logits_do_not_depend_on_what_prompts_share(arrivals: list[tuple[int, int, int, bool]]) -> None:
    """Each arrival is a prompt: its kind, the tokens it may share, its own tokens, and whether a new call adds it."""
    opened = readers("decoder")
    calls: list[list[list[int]]] = []
    for kind, shared, own, is_new in arrivals[:SLOTS]:
        tokens = [(number * (7 + kind)) % 60 for number in range(shared)] + [(kind + own + n) % 60 for n in range(own)]
        if is_new or not calls:
            calls.append([])
        calls[-1].append(tokens or [1])
    separate, reader, tokens = Separate(opened), opened(), list[int]()
    for call in calls:
        assert torch.equal(reader.add(call), separate.add(call))
        tokens += [len(one) % 60 for one in call]
        assert torch.equal(reader.step(tokens), separate.step(tokens))


def test_the_memory_is_bounded_and_the_newest_sequences_stay() -> None:
    reader = readers("decoder")()
    reader.prefixes = PrefixCache(150)
    for start in (1, 20, 40):
        reader.add([[(start + number) % 60 for number in range(70)]])
        reader.keep([])
    lengths = [reader.prefixes.find([(start + number) % 60 for number in range(90)])[0] for start in (1, 20, 40)]
    assert lengths == [0, 70, 70]
    reader.add([[(40 + number) % 60 for number in range(90)]])
    reader.keep([])
    assert reader.prefixes.find([(20 + number) % 60 for number in range(90)])[0] == 0, "90 + 70 are more than 150"
    reader.add([[3] * (MIN_SHARED - 1)])
    reader.keep([])
    assert reader.prefixes.find([3] * 90)[0] == 0, "too short to be kept"


def test_what_a_failed_pass_leaves_is_not_reused() -> None:
    reader = readers("decoder")()
    reader.prefixes = PrefixCache(1000)
    reader.add([prompt(1)])
    reader.reset()
    assert reader.prefixes.find(prompt(1, 2))[0] == 0
