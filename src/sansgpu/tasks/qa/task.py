"""`task: qa` trains an encoder to answer questions with a span of their context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.data.forms.questions import QUESTIONS, Question, read_questions, unanswered_question
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow, located
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.sources import open_single, open_sources
from sansgpu.data.split import describe_split
from sansgpu.events.progress import ReportProgress
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.capabilities import Predicts
from sansgpu.tasks.evaluation import require_rows
from sansgpu.tasks.fine_tuning import FineTuningTask, require_examples, split_rows
from sansgpu.tasks.qa.data import QuestionCorpus, TokenizedQuestions, tokenize_questions
from sansgpu.tasks.qa.evaluate import QAEvaluator
from sansgpu.tasks.qa.objective import QAObjective
from sansgpu.tasks.qa.settings import SETTINGS, AnswerDataConfig
from sansgpu.tasks.task import EvaluationRequest, Gather, TrainedModel


class QA(Predicts, FineTuningTask):
    """`task: qa`."""

    settings = SETTINGS
    verbs_for_any_model = ("predict",)
    flag_columns = (("question", "context"),)
    objective_class = QAObjective
    evaluator: QAEvaluator

    def __init__(self, config: Config, corpus: QuestionCorpus, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch)
        self.evaluator = QAEvaluator(self.objective, corpus.validation, AnswerDataConfig.of(config))

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, QuestionCorpus]:
        """Reads and tokenizes the questions. Raises ConfigError if there are too few, or one is invalid."""
        sources, data = open_sources(config.data), AnswerDataConfig.of(config)
        tokenizer = load_tokenizer_of(config.model)
        notes = sources.notes
        train_rows, held_rows = RowReport.of(data), RowReport("skip")
        questions = read_questions(sources.train.rows(), train_rows)
        require_examples(sources, [len(questions)], "question", train_rows.notes())
        split = None
        if sources.validation is not None:
            train, held = questions, read_questions(sources.validation.rows(), held_rows)
        else:
            contents = [question.context.encode() for question in questions]
            train, held = split_rows(questions, contents, data.validation_split)
            split = describe_split(len(train), len(held), "question", data.validation_split)

        def tokenized(part: list[Question], rows: RowReport, name: str) -> TokenizedQuestions:
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
            config = config.with_values("data", null_answers=null)
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(asked)}-{len(splits[0])}-{splits[0].lengths.sum()}"
        return config, QuestionCorpus(splits[0], splits[1], notes, fingerprint, tokenizer, split=split)

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> PackedSequences:
        """Builds `size` windows of random tokens, with the first token as the answer."""
        drawn = cls.objective_class.random_tokens(config, size, tokens)
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
            settings = AnswerDataConfig(dataset_name=request.data, dataset_config=loaded.config.data.dataset_config)
            source, bad_rows = open_single(request.data, settings), RowReport("skip")
            questions, name = read_questions(source.rows(), bad_rows), source.name
            part = tokenize_questions(questions, loaded.config, loaded.tokenizer, bad_rows)
        part.bad_rows.report(lambda note: request.warn(f"{name}: {note}"))
        require_rows(part, name)
        return QAEvaluator(loaded.objective, part, AnswerDataConfig.of(loaded.config))

    @classmethod
    def rows_to_predict(cls, rows: Iterable[SourceRow]) -> Iterable[SourceRow]:
        return QUESTIONS.single_rows(rows)

    @classmethod
    def predict(
        cls, loaded: TrainedModel, rows: Sequence[dict[str, Any]], null_answers: bool | None = None
    ) -> list[dict[str, Any]]:
        """Answers each row's `question` from its `context`.

        `null_answers` says whether the answer may be empty; None: as in the run's configuration.
        """
        questions = [unanswered_question(row) for row in located(rows)]
        data = AnswerDataConfig.of(loaded.config)
        if null_answers is not None:
            data = data.model_copy(update={"null_answers": null_answers})
        too_long = RowReport("skip")
        asked = tokenize_questions(questions, loaded.config, loaded.tokenizer, too_long)
        if too_long.first:
            raise ConfigError(too_long.first)
        evaluator = QAEvaluator(loaded.objective, asked, data)
        for batch in evaluator.validation_batches(cls.evaluation_batch(loaded.config)):
            evaluator.evaluate(batch.to(loaded.device))
        ids = ({"id": row["id"]} if "id" in row else {} for row in rows)
        return [given | answer for given, answer in zip(ids, evaluator.predictions(), strict=True)]

    @staticmethod
    def in_words(prediction: dict[str, Any]) -> str:
        return str(prediction["answer"]) or "(no answer)"
