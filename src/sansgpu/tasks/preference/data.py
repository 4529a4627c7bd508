"""Tokenized preferences: prompts with two answers each, or with one rated answer."""

from __future__ import annotations

from dataclasses import dataclass

from sansgpu.tasks.preference.batch import PreferenceExamples
from sansgpu.tasks.preference.objective import ANSWERS
from sansgpu.tasks.sft.chat import show_masked
from sansgpu.tasks.variable_length_corpus import TokenizedCorpus, largest_batch


@dataclass(frozen=True)
class PreferenceCorpus(TokenizedCorpus[PreferenceExamples]):
    """Tokenized preferences for training and validation."""

    needs_reference: bool

    @property
    def reference_tokens(self) -> int:
        return self.train_tokens + self.validation_tokens if self.needs_reference else 0

    def preview(self) -> str | None:
        """Returns the text of the first example; brackets enclose the chosen and the rejected answer."""
        first = self.train.examples[0]
        prompt = [(int(token), False) for token in first.prompt]
        shown = []
        for before, ids, learned in zip((prompt, []), first.ids, first.learned, strict=False):
            tokens = [*before, *zip(ids.tolist(), learned.tolist(), strict=True)]
            shown.append(show_masked([t for t, _ in tokens], [known for _, known in tokens], self.tokenizer))
        return "\n".join(shown)

    @property
    def sequence_tokens(self) -> float:
        return float(self.train.sequence_lengths.mean())

    def most_tokens(self, examples: int, padded: bool) -> int:
        parts = (self.train, self.validation)
        if padded:
            return ANSWERS * examples * max(int(part.sequence_lengths.max()) for part in parts)
        return max(largest_batch(part.lengths, examples) for part in parts)
