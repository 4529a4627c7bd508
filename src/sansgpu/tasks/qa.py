"""Trains extractive question answering: the model predicts the start and end of the answer in a context."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.config import SETTINGS, Config, ConfigError, DataConfig, SansGPUError
from sansgpu.config.atomic import write_text
from sansgpu.data.answers import Answer, AnswerRules, best_answers, exact_match_f1, predictions_json
from sansgpu.data.questions import (
    Question,
    QuestionWindow,
    make_windows,
    read_questions,
    single_questions,
    unanswered_question,
)
from sansgpu.data.rows import BadRows, SourceRow, located
from sansgpu.data.sequences import PackedSequences, WindowedTexts
from sansgpu.data.shards import ReportProgress
from sansgpu.data.sources import open_single, open_sources
from sansgpu.data.split import describe_split
from sansgpu.models.pretrained import load_tokenizer_of
from sansgpu.tasks.evaluation import require_rows, whole_groups
from sansgpu.tasks.fine_tuning import FineTuning, FineTuningTask, longest_example, require_examples, split_rows
from sansgpu.tasks.task import Gather, Sums
from sansgpu.tasks.trained_model import EvaluationRequest, TrainedModel
from sansgpu.tasks.variable_length_corpus import TokenizedCorpus

PREDICTION_FILES = ("predictions.json", "nbest_predictions.json", "null_odds.json")


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


class QAObjective(FineTuning):
    """A model with a question-answering head, and its loss."""

    head_kind = "qa"

    def summed_loss(self, batch: PackedSequences) -> torch.Tensor:
        """Sums the mean cross-entropy of the start and end positions over windows, ()."""
        losses = [(_position_loss(s, t[0]) + _position_loss(e, t[1])) / 2 for s, e, t in self.scores(batch)]
        return torch.stack(losses).sum()

    def scores(self, batch: PackedSequences) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields start logits (T,), end logits (T,) and target positions (2,) for each window."""
        starts, ends = self.unpadded.qa_logits(batch.tokens, batch.lengths, batch.types)
        lengths = batch.lengths.tolist()
        return zip(starts.split(lengths), ends.split(lengths), batch.targets, strict=True)


def _position_loss(logits: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[None], position[None], reduction="sum")


class QA(QAObjective, FineTuningTask):
    """`task: qa`."""

    settings = SETTINGS["qa"]
    verbs = ("evaluate", "predict", "export")
    verbs_for_any_model = ("predict",)
    row_forms = (("question", "context"),)
    objective_class = QAObjective
    evaluator: QAEvaluator

    def __init__(self, config: Config, corpus: QuestionCorpus, effective_batch: int) -> None:
        super().__init__(config)
        self.use_corpus(corpus, effective_batch)
        self.evaluator = QAEvaluator(self, corpus.validation, config.data)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, QuestionCorpus]:
        """Reads and tokenizes the questions. Raises ConfigError if there are too few, or one is invalid."""
        sources, data = open_sources(config.data), config.data
        tokenizer = load_tokenizer_of(config.model)
        notes: list[str] = []
        train_rows, held_rows = BadRows(data.on_bad_row), BadRows("skip")
        questions = read_questions(sources.train.rows(), train_rows)
        require_examples(sources, [len(questions)], "question", train_rows.notes())
        split = None
        if sources.validation is not None:
            train, held = questions, read_questions(sources.validation.rows(), held_rows)
        else:
            contents = [question.context.encode() for question in questions]
            train, held = split_rows(questions, contents, data.validation_split)
            split = describe_split(len(train), len(held), "question", data.validation_split)

        def tokenized(part: list[Question], rows: BadRows, name: str) -> TokenizedQuestions:
            size = sum(len(question.context) for question in part)
            progress("tokenizing", size, size)
            made = tokenize_questions(part, config, tokenizer, rows)
            rows.report(lambda note: notes.append(f"{name} questions: {note}"))
            return made

        splits = tokenized(train, train_rows, "training"), tokenized(held, held_rows, "validation")
        require_examples(sources, [len(part.questions) for part in splits], "question", notes)
        asked = splits[0].questions
        if data.null_answers is None:
            null = any(question.impossible for question in asked)
            config = config.model_copy(update={"data": data.model_copy(update={"null_answers": null})})
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(asked)}-{len(splits[0])}-{splits[0].lengths.sum()}"
        return config, QuestionCorpus(splits[0], splits[1], notes, fingerprint, tokenizer, split=split)

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> PackedSequences:
        """Builds `size` windows of random tokens with the answer at the first token."""
        drawn = cls.random_tokens(config, size, tokens)
        return PackedSequences.of(drawn, np.zeros((size, 2), np.int64))

    def collect(self, gather: Gather) -> None:
        self.evaluator.collect(gather)

    def export(self, folder: Path) -> None:
        """Writes the model to `folder` and the answers to the validation questions to its parent."""
        super().export(folder)
        self.evaluator.save(folder.parent)

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> QAEvaluator:
        if request.data is None:
            part, name = cast(QuestionCorpus, request.own_corpus()).validation, "validation questions"
        else:
            settings = DataConfig(dataset_name=request.data, dataset_config=loaded.config.data.dataset_config)
            source, bad_rows = open_single(request.data, settings), BadRows("skip")
            questions, name = read_questions(source.rows(), bad_rows), source.name
            part = tokenize_questions(questions, loaded.config, loaded.tokenizer, bad_rows)
        part.bad_rows.report(lambda note: request.warn(f"{name}: {note}"))
        require_rows(part, name)
        return QAEvaluator(loaded.objective, part, loaded.config.data)

    @classmethod
    def rows_to_predict(cls, rows: Iterable[SourceRow]) -> Iterable[SourceRow]:
        return single_questions(rows)

    @classmethod
    def predict(
        cls, loaded: TrainedModel, rows: Sequence[dict[str, Any]], null_answers: bool | None = None
    ) -> list[dict[str, Any]]:
        """Answers each row's `question` from its `context`. `null_answers` None follows the run's configuration."""
        questions = [unanswered_question(row) for row in located(rows)]
        data = loaded.config.data
        if null_answers is not None:
            data = data.model_copy(update={"null_answers": null_answers})
        too_long = BadRows("skip")
        asked = tokenize_questions(questions, loaded.config, loaded.tokenizer, too_long)
        if too_long.first:
            raise ConfigError(too_long.first)
        evaluator = QAEvaluator(loaded.objective, asked, data)
        for batch in evaluator.validation_batches(cls.evaluation_batch(loaded.config)):
            evaluator.evaluate(batch.to(loaded.device))
        ids = ({"id": row["id"]} if "id" in row else {} for row in rows)
        return [given | answer for given, answer in zip(ids, evaluator.predictions(), strict=True)]


class QAEvaluator:
    """Answers questions with a model and computes exact match and F1."""

    def __init__(self, objective: QAObjective, tokenized: TokenizedQuestions, data: DataConfig) -> None:
        self._objective, self._tokenized = objective, tokenized
        self._rules = AnswerRules(data.n_best_size, data.max_answer_length, data.null_score_diff_threshold)
        self._may_be_null = bool(data.null_answers)
        self.answers: dict[str, Answer] = {}  # by question id, for the questions answered so far

    @property
    def model(self) -> torch.nn.Module:
        return self._objective.model

    def validation_batches(self, size: int) -> Iterator[PackedSequences]:
        """Yields about `size` windows at a time; all windows of a question are in one batch."""
        self.answers = {}
        groups, lengths = self._tokenized.by_question(), self._tokenized.lengths
        yield from map(self._tokenized.batch, whole_groups(groups, lengths, size, self._objective.ordered))

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the loss, the counts of windows and questions, and the sums of exact match and F1."""
        assert batch.numbers is not None
        scored = list(self._objective.scores(batch))
        loss = sum(float(_position_loss(s, t[0]) + _position_loss(e, t[1])) / 2 for s, e, t in scored)
        logits = {
            int(n): (s.cpu().numpy(), e.cpu().numpy()) for n, (s, e, _) in zip(batch.numbers, scored, strict=True)
        }
        by_question: dict[int, list[int]] = {}
        for number in logits:
            by_question.setdefault(self._tokenized.windows[number].question, []).append(number)
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
        """Returns each question's answer, its characters in the context, its probability, and the n best candidates.

        The start and end of no answer are None. The probability is the `score`; `probability` is its older name.
        """
        found = []
        for answer in (self.answers[question.id] for question in self._tokenized.questions):
            start, score = answer.chosen.get("start"), answer.chosen["probability"]
            end = None if start is None else start + len(answer.text)
            row = {"answer": answer.text, "start": start, "end": end, "score": score, "probability": score}
            found.append(row | {"nbest": answer.nbest})
        return found

    def detailed(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Adds scores of questions with and without answer, and the number of bad rows, which have no score."""
        answered = [question for question in self._tokenized.questions if question.id in self.answers]
        scores = exact_match_f1(answered, {q.id: self.answers[q.id].text for q in answered})
        return {**metrics, **scores, "skipped": float(self._tokenized.bad_rows.count)}

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
                    raise SansGPUError(f"{folder / name} cannot be written: {error.strerror}.") from None
                written.append(folder / name)
        return written


def tokenize_questions(
    questions: list[Question], config: Config, tokenizer: Any, bad_rows: BadRows
) -> TokenizedQuestions:
    """Tokenizes questions into windows. Those that are too long are added to the `bad_rows`."""
    longest = longest_example(config, tokenizer)
    kept, windows = make_windows(questions, tokenizer, longest, config.data.doc_stride, bad_rows)
    return TokenizedQuestions(kept, windows, bad_rows)
