"""Selects answers and n-best lists from start and end logits, and computes exact match and F1.

The selection follows postprocess_qa_predictions in transformers' examples/pytorch/question-answering/utils_qa.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.data.forms.questions import Question
from sansgpu.tasks.qa.data import QuestionWindow

NO_SPAN = "empty"  # utils_qa's answer if no span is valid and the null answer is not allowed
SPAN = np.dtype([("begin", "i4"), ("stop", "i4"), ("start_logit", "f8"), ("end_logit", "f8")])  # [begin, stop): chars


@dataclass(frozen=True)
class AnswerRules:
    """Rules for selecting answers. `max_answer_length` is in tokens, the threshold in logits."""

    n_best_size: int = 20
    max_answer_length: int = 30
    null_score_diff_threshold: float = 0.0


class _Scored(TypedDict):
    start_logit: float
    end_logit: float
    text: str
    probability: float


class AnswerCandidate(_Scored, total=False):
    """A candidate answer. `start` is its first character in the context; the null answer has none."""

    start: int


@dataclass(frozen=True)
class Answer:
    """The selected candidate, all candidates from best to worst, and the null score minus the best span's (logits).

    The selected candidate may not be the first, because a threshold decides between null and the best non-empty span.
    """

    chosen: AnswerCandidate
    nbest: list[AnswerCandidate]
    null_score_diff: float | None

    @property
    def text(self) -> str:
        """Returns the text of the selected candidate, which is "" for no answer."""
        return self.chosen["text"]


def best_answers(
    question: Question,
    windows: list[QuestionWindow],
    logits: list[tuple[np.ndarray, np.ndarray]],
    rules: AnswerRules,
    may_be_null: bool,
) -> Answer:
    """Selects the answer to `question` from the start and end logits (T,) of its windows. Ignores right padding.

    Ties go to the earlier window, then the larger start logit, then the earlier token; null comes last.
    """
    pairs = list(zip(windows, logits, strict=True))
    spans = np.concatenate([_spans(window, start, end, rules) for window, (start, end) in pairs])
    best = spans[np.argsort(-_span_scores(spans), kind="stable")[: rules.n_best_size]]
    candidates = [_candidate(question, span) for span in best]
    chosen = next((candidate for candidate in candidates if candidate["text"]), None)
    if not may_be_null:
        if chosen is None:
            chosen = AnswerCandidate(start_logit=0.0, end_logit=0.0, text=NO_SPAN, probability=0.0)
            candidates.insert(0, chosen)
        return _answer(chosen, candidates, None)
    null = min((_null_candidate(window, start, end) for window, (start, end) in pairs), key=_score)
    rank = int(np.count_nonzero(_span_scores(best) >= _score(null)))
    candidates.insert(rank, null)
    if rank < rules.n_best_size:
        del candidates[rules.n_best_size :]
    difference = _score(null) - (_score(chosen) if chosen else 0.0)
    is_null = chosen is None or difference > rules.null_score_diff_threshold
    return _answer(null if chosen is None or is_null else chosen, candidates, difference)


def _spans(window: QuestionWindow, start: np.ndarray, end: np.ndarray, rules: AnswerRules) -> np.ndarray:
    """Returns the valid spans from the best start tokens to the best end tokens, ordered by start logit."""
    start, end = (np.asarray(side[: len(window.ids)], np.float64) for side in (start, end))
    firsts, lasts = (np.argsort(-side, kind="stable")[: rules.n_best_size] for side in (start, end))
    first, last = np.repeat(firsts, len(lasts)), np.tile(lasts, len(firsts))
    in_context = window.offsets[:, 0] >= 0
    fits = in_context[first] & in_context[last] & (last >= first) & (last - first < rules.max_answer_length)
    first, last = first[fits], last[fits]
    spans = np.empty(len(first), SPAN)
    spans["begin"], spans["stop"] = window.offsets[first, 0], window.offsets[last, 1]
    spans["start_logit"], spans["end_logit"] = start[first], end[last]
    return spans


def _span_scores(spans: np.ndarray) -> np.ndarray:
    scores: np.ndarray = spans["start_logit"] + spans["end_logit"]
    return scores


def _score(candidate: AnswerCandidate) -> float:
    return candidate["start_logit"] + candidate["end_logit"]


def _candidate(question: Question, span: np.void) -> AnswerCandidate:
    begin, stop, start_logit, end_logit = span.tolist()
    text = question.context[begin:stop]
    return AnswerCandidate(start_logit=start_logit, end_logit=end_logit, text=text, probability=0.0, start=begin)


def _null_candidate(window: QuestionWindow, start: np.ndarray, end: np.ndarray) -> AnswerCandidate:
    start_logit, end_logit = float(start[window.cls]), float(end[window.cls])
    return AnswerCandidate(start_logit=start_logit, end_logit=end_logit, text="", probability=0.0)


def _answer(chosen: AnswerCandidate, nbest: list[AnswerCandidate], null_score_diff: float | None) -> Answer:
    """Sets the probabilities by a softmax over the scores of `nbest` and `chosen`, which may not be in `nbest`."""
    candidates = nbest if any(candidate is chosen for candidate in nbest) else [*nbest, chosen]
    scores = np.array([_score(candidate) for candidate in candidates])
    weights = np.exp(scores - scores.max())
    for candidate, probability in zip(candidates, (weights / weights.sum()).tolist(), strict=True):
        candidate["probability"] = probability
    return Answer(chosen, nbest, null_score_diff)


def exact_match_f1(questions: list[Question], predictions: dict[str, str]) -> dict[str, float]:
    """Computes exact match and F1 in percent with SQuAD's normalization. A missing prediction counts as "".

    For an unanswerable question, "" is the correct prediction. If there are any, the result has separate scores for
    questions with and without an answer; `answerable` and `unanswerable` are their counts. Raises ConfigError if there
    are no questions.
    """
    if not questions:
        raise ConfigError("the dataset has no questions to evaluate on; use a different dataset.")
    answerable = [question for question in questions if not question.impossible]
    impossible = [question for question in questions if question.impossible]
    exact, f1 = _squad_scores(answerable, predictions) if answerable else (0.0, 0.0)
    refused = sum(100.0 for question in impossible if not predictions.get(question.id, ""))
    scores = {
        "exact_match": (exact * len(answerable) + refused) / len(questions),
        "f1": (f1 * len(answerable) + refused) / len(questions),
    }
    if impossible:
        scores["no_answer_exact_match"] = refused / len(impossible)
        if answerable:
            scores |= {"has_answer_exact_match": exact, "has_answer_f1": f1}
    return scores | {"answerable": float(len(answerable)), "unanswerable": float(len(impossible))}


def _squad_scores(questions: list[Question], predictions: dict[str, str]) -> tuple[float, float]:
    """Computes exact match and F1 in percent for questions that have answers."""
    from torchmetrics.functional.text.squad import squad  # slow to import, and training does not need it

    targets: list[Any] = [
        {"id": q.id, "answers": {"text": [t for _, t in q.answers], "answer_start": [s for s, _ in q.answers]}}
        for q in questions
    ]
    scores = squad([{"id": q.id, "prediction_text": predictions.get(q.id, "")} for q in questions], targets)
    return float(scores["exact_match"]), float(scores["f1"])


def predictions_json(
    answers: dict[str, Answer],
) -> tuple[dict[str, str], dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Returns the contents of run_qa's predictions.json, nbest_predictions.json and null_odds.json, by question id."""
    predictions = {name: answer.text for name, answer in answers.items()}
    nbest = {
        name: [{key: value for key, value in candidate.items() if key != "start"} for candidate in answer.nbest]
        for name, answer in answers.items()
    }
    odds = {name: a.null_score_diff for name, a in answers.items() if a.null_score_diff is not None}
    return predictions, nbest, odds
