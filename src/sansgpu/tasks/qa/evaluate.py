"""Evaluates extractive question answering by SQuAD's exact match and F1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sansgpu.config import SansGPUError
from sansgpu.data.sequences import PackedSequences
from sansgpu.files.atomic import write_text
from sansgpu.tasks.evaluation import WindowEvaluator
from sansgpu.tasks.qa.answers import Answer, AnswerRules, best_answers, exact_match_f1, predictions_json
from sansgpu.tasks.qa.data import TokenizedQuestions
from sansgpu.tasks.qa.objective import QAObjective, position_loss
from sansgpu.tasks.qa.settings import AnswerDataConfig
from sansgpu.tasks.task import Gather, Sums


class QAEvaluator(WindowEvaluator[QAObjective, TokenizedQuestions]):
    """Answers questions with a model and computes exact match and F1."""

    def __init__(self, objective: QAObjective, tokenized: TokenizedQuestions, data: AnswerDataConfig) -> None:
        super().__init__(objective, tokenized)
        self._rules = AnswerRules(data.n_best_size, data.max_answer_length, data.null_score_diff_threshold)
        self._may_be_null = bool(data.null_answers)
        self.answers: dict[str, Answer] = {}  # by question id, for the questions answered so far

    def validation_batches(self, size: int) -> Iterator[PackedSequences]:
        self.answers = {}
        yield from super().validation_batches(size)

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the loss, the counts of windows and questions, and the sums of exact match and F1."""
        assert batch.numbers is not None
        scored = list(self._objective.scores(batch))
        loss = sum(float(position_loss(s, t[0]) + position_loss(e, t[1])) / 2 for s, e, t in scored)
        logits = {
            int(n): (s.cpu().numpy(), e.cpu().numpy()) for n, (s, e, _) in zip(batch.numbers, scored, strict=True)
        }
        by_question: dict[int, list[int]] = {}
        for number in logits:
            by_question.setdefault(self._tokenized.windows[number].text, []).append(number)
        questions = [self._tokenized.questions[number] for number in by_question]
        for question, numbers in zip(questions, by_question.values(), strict=True):
            windows = [self._tokenized.windows[number] for number in numbers]
            rules, null = self._rules, self._may_be_null
            self.answers[question.id] = best_answers(question, windows, [logits[n] for n in numbers], rules, null)
        right = exact_match_f1(questions, {q.id: self.answers[q.id].text for q in questions})
        sums = {"loss": loss, "windows": float(len(scored)), "questions": float(len(questions))}
        return {**sums, "exact_match": right["exact_match"] * len(questions), "f1": right["f1"] * len(questions)}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Computes the loss per window, and exact match and F1 in percent."""
        by_question = {name: sums[name] / sums["questions"] for name in ("exact_match", "f1")}
        return {"loss": sums["loss"] / sums["windows"], **by_question, "questions": sums["questions"]}

    def predictions(self) -> list[dict[str, Any]]:
        """Returns, for each question, the answer, its start and end character, its probability and the n-best list.

        Start and end are None if there is no answer. The probability is in `score` and, for compatibility, in
        `probability`.
        """
        found = []
        for answer in (self.answers[question.id] for question in self._tokenized.questions):
            start, score = answer.chosen.get("start"), answer.chosen["probability"]
            end = None if start is None else start + len(answer.text)
            row = {"answer": answer.text, "start": start, "end": end, "score": score, "probability": score}
            found.append(row | {"nbest": answer.nbest})
        return found

    def predicted_rows(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yields each question with its context, its first answer and the predicted one."""
        for question in self._tokenized.questions:
            if (answer := self.answers.get(question.id)) is not None:
                label = question.answers[0][1] if question.answers else ""
                text = {"text": question.question, "context": question.context}
                yield {**text, "label": label, "predicted": answer.text}

    def detailed(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Adds separate scores for questions with and without answer, and the number of bad rows, which are skipped."""
        answered = [question for question in self._tokenized.questions if question.id in self.answers]
        scores = exact_match_f1(answered, {q.id: self.answers[q.id].text for q in answered})
        return super().detailed({**metrics, **scores})

    def collect(self, gather: Gather) -> None:
        """Adds the answers of other ranks."""
        for found in gather({question: asdict(answer) for question, answer in self.answers.items()}):
            self.answers |= {question: Answer(**answer) for question, answer in found.items()}

    def save(self, folder: Path) -> list[Path]:
        """Writes run_qa.py's prediction files and returns their paths."""
        written = []
        in_order = {q.id: self.answers[q.id] for q in self._tokenized.questions if q.id in self.answers}
        predictions, nbest, null_odds = predictions_json(in_order)
        for name, value in zip(PREDICTION_FILES, (predictions, nbest, null_odds), strict=True):
            if value:
                try:
                    text = json.dumps(value, indent=4, ensure_ascii=False)
                    write_text(folder / name, text + "\n")
                except OSError as error:
                    raise SansGPUError(
                        f"{folder / name} cannot be written: {error.strerror}; free some space, or "
                        "make the folder writable."
                    ) from None
                written.append(folder / name)
        return written


PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")
