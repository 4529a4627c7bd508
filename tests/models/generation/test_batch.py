"""Sequences that join a running batch at any time get the tokens that they get alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.config import derive_seed
from sansgpu.models.generation.batch import Continuation, RunningBatch
from sansgpu.models.generation.generate import decoder_batch
from sansgpu.models.generation.sampling import Sampling
from tests.models.small import TEXT, TOKENIZER, model_of

CONTEXT, SLOTS = 96, 3
MODEL = decoder_batch(model_of("modern", vocab_size=300, max_seq_len=CONTEXT), TOKENIZER)
WORDS = TEXT[0].split()
SAMPLINGS = (Sampling(0.0), Sampling(1.0), Sampling(1.3, top_p=0.9), Sampling(0.7, top_k=20))


def sequence(number: int) -> Continuation:
    prompt = MODEL.text_ids(" ".join(WORDS[: 1 + number % 7]))
    draws = torch.Generator().manual_seed(derive_seed(number, "row", 0))
    return Continuation(prompt, 3 + 5 * number % 17, SAMPLINGS[number % 4], draws)


def alone(number: int) -> tuple[list[int], str | None]:
    batch, one = RunningBatch(MODEL.open_reader(1, CONTEXT), MODEL.ends), sequence(number)
    batch.step([one])
    while one.ended is None:
        batch.step()
    return one.ids, one.ended


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.none() | st.integers(0, 6)), min_size=1, max_size=8))
def test_tokens_do_not_depend_on_who_joins_or_leaves(arrivals: list[tuple[int, int, int | None]]) -> None:
    """Each arrival is a sequence, the steps before it may join, and the steps after which its owner ends it."""
    batch = RunningBatch(MODEL.open_reader(SLOTS, CONTEXT), MODEL.ends)
    waiting = [(sequence(number), after, leaves) for number, after, leaves in arrivals]
    numbers = [number for number, _, _ in arrivals]
    everyone, time, joined = [one for one, _, _ in waiting], 0, dict[Continuation, int]()
    leaving = {one: leaves for one, _, leaves in waiting}
    while waiting or any(one.ended is None for one in batch.active):
        joining = [entry for entry in waiting if entry[1] <= time][: batch.free]
        waiting = [entry for entry in waiting if entry not in joining]
        joined |= {one: time for one, _, _ in joining}
        batch.step([one for one, _, _ in joining])
        time += 1
        for one in batch.active:
            if leaving[one] is not None and one.ended is None and time - joined[one] > leaving[one]:
                one.ended = "left"
    for number, one in zip(numbers, everyone, strict=True):
        ids, reason = alone(number)
        assert one.ids == ids[: len(one.ids)]
        assert one.ended == "left" or (one.ids, one.ended) == (ids, reason)


def test_a_batch_continues_after_it_was_cleared() -> None:
    batch = RunningBatch(MODEL.open_reader(SLOTS, CONTEXT), MODEL.ends)
    batch.step([sequence(1), sequence(2)])
    batch.clear()
    assert batch.free == SLOTS
    one = sequence(3)
    batch.step([one])
    while one.ended is None:
        batch.step()
    assert (one.ids, one.ended) == alone(3)
