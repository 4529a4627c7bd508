"""Tokenized questions, the data of extractive question answering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sansgpu.config import Config
from sansgpu.data.rows import BadRows
from sansgpu.data.sequences import PackedSequences, WindowedTexts
from sansgpu.tasks.evaluation import TokenizedCorpus
from sansgpu.tasks.fine_tuning import longest_example
from sansgpu.tasks.qa.questions import Question, QuestionWindow, make_windows


@dataclass(frozen=True)
class TokenizedQuestions(WindowedTexts):
    """Questions with their tokenized windows, and the bad rows that were left out."""

    questions: list[Question]
    windows: list[QuestionWindow]
    bad_rows: BadRows

    def by_question(self) -> list[list[int]]:
        """Returns the indices of each question's windows."""
        groups: list[list[int]] = [[] for _ in self.questions]
        for number, window in enumerate(self.windows):
            groups[window.question].append(number)
        return groups

    def batch(self, numbers: np.ndarray) -> PackedSequences:
        """Returns the windows with these indices; targets are the start and end positions of the answer, (B, 2)."""
        windows = [self.windows[number] for number in numbers]
        places = np.array([(window.start, window.end) for window in windows], np.int64).reshape(-1, 2)
        return self.packed(numbers, places)


@dataclass(frozen=True)
class QuestionCorpus(TokenizedCorpus[TokenizedQuestions]):
    """Questions and their windows for training and validation."""

    def preview(self) -> str | None:
        """Returns the text of the first window with its answer in brackets."""
        window = self.train.windows[0]
        parts = (window.ids[: window.start], window.ids[window.start : window.end + 1], window.ids[window.end + 1 :])
        before, answer, after = (self.tokenizer.decode(part) for part in parts)
        return f"{before} ⟦{answer}⟧ {after}"


def tokenize_questions(
    questions: list[Question], config: Config, tokenizer: Any, bad_rows: BadRows
) -> TokenizedQuestions:
    """Tokenizes questions into windows. Those that are too long are added to the `bad_rows`."""
    longest = longest_example(config, tokenizer)
    kept, windows = make_windows(questions, tokenizer, longest, config.data.doc_stride, bad_rows)
    return TokenizedQuestions(kept, windows, bad_rows)
