"""Evaluates models on conversations: loss, perplexity and bits per byte of the assistant turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sansgpu.data.sequences import PackedSequences
from sansgpu.models.generation.generate import BatchModel, complete, stops_of
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.generation.text import without_stop
from sansgpu.tasks.evaluation import SplitEvaluator, text_metrics
from sansgpu.tasks.sft.data import ConversationExamples
from sansgpu.tasks.sft.objective import DecoderChat, SFTObjective
from sansgpu.tasks.task import Sums

ANSWER_TOKENS = 256
ANSWERED_TOGETHER = 16


class SFTEvaluator(SplitEvaluator[SFTObjective | DecoderChat, ConversationExamples]):
    """Evaluates a model on the assistant turns of conversations."""

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the summed loss, the number of targets and the bytes of text that they cover."""
        assert batch.numbers is not None
        size = self._part.target_bytes(batch.numbers.cpu().numpy())
        loss = float(self._objective.plain_loss(batch))
        return {"loss": loss, "tokens": float(batch.target_count()), "bytes": float(size)}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return text_metrics(sums)


class AnsweringEvaluator(SFTEvaluator):
    """Can also let the model write the last answer of each conversation, always with the most likely token."""

    def __init__(
        self,
        objective: SFTObjective | DecoderChat,
        part: ConversationExamples,
        open_model: Callable[[], BatchModel],
    ) -> None:
        super().__init__(objective, part)
        self._open_model = open_model

    def predicted_rows(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yields conversations before their last answer, with this answer and the model's."""
        model = self._open_model()
        asked = [pair for number in range(len(self._part)) if (pair := _last_answer(*self._part.example(number)))]
        for start in range(0, len(asked), ANSWERED_TOGETHER):
            chunk = asked[start : start + ANSWERED_TOGETHER]
            for (prompt, answer), predicted in zip(chunk, _answers(model, [ids for ids, _ in chunk]), strict=True):
                label = tokenizer.decode(answer, skip_special_tokens=True).strip()
                yield {"text": _as_read(prompt, tokenizer), "label": label, "predicted": predicted.strip()}


def _last_answer(ids: np.ndarray, learned: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Divides tokens (L,) before the last ones that are learned (L,). None: nothing precedes them."""
    stop = int(np.flatnonzero(learned)[-1]) + 1 if learned.any() else 0
    start = int(np.flatnonzero(~learned[:stop])[-1]) + 1 if not learned[:stop].all() else 0
    return (ids[:start].tolist(), ids[start:stop].tolist()) if start else None


def _as_read(ids: list[int], tokenizer: Any) -> str:
    """Returns the turns of a conversation, without special tokens, system message and the header of the next answer."""
    special, turns = set(tokenizer.all_special_ids), list[list[int]]([[]])
    for token in ids:
        turns += [[]] if token in special else []
        turns[-1] += [] if token in special else [token]
    texts = [text for turn in turns if (text := tokenizer.decode(turn).strip())]
    asked = texts[:-1] if len(texts) > 1 and len(texts[-1].split()) == 1 else texts
    shown = [text for text in asked if not text.startswith("system\n")] or asked
    return "\n".join(re.sub(r"^(user|assistant|model)\n", r"\1: ", text) for text in shown)


def _answers(model: BatchModel, prompts: list[list[int]]) -> list[str]:
    limits = [max(1, min(ANSWER_TOKENS, model.context - len(ids))) for ids in prompts]
    reader = model.open_reader(len(prompts) if model.together else 1, max(map(len, prompts)) + max(limits))
    found = complete(reader, prompts, model.ends, limits, Sampling(temperature=0.0), stops=stops_of(model))
    texts = {one.row: without_stop(model.decode(one.ids), model.stops) for one in found}
    return [texts[row] for row in range(len(prompts))]
