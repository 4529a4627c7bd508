"""Extractive question answering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.data.questions import Question
from sansgpu.jobs.fine_tuned import load_fine_tuned
from sansgpu.machine.probe import resolve_device
from sansgpu.tasks.qa import QAEvaluator, QAObjective, tokenize_questions
from sansgpu.train.evaluate import evaluate
from sansgpu.train.step import StepPlan

WINDOWS = 8  # per micro-batch


def predict(
    target: str,
    question: str,
    context: str,
    null_answers: bool | None,
    snapshot: str,
    warn: Callable[[str], None],
    remote_code: bool = False,
) -> dict[str, Any]:
    """Returns the answer, its probability, its start in the context, and the n best candidates.

    `null_answers` allows an empty answer; None follows the run's configuration. Raises ConfigError if there is no text.
    """
    if not question.strip() or not context.strip():
        raise ConfigError("--question and --context must not be empty.")
    loaded = load_fine_tuned(target, "qa", snapshot, warn, remote_code)
    assert isinstance(loaded.objective, QAObjective)
    examples = tokenize_questions(
        [Question("question", question, context, (), impossible=True)], loaded.config, loaded.tokenizer
    )
    data = loaded.config.data
    if null_answers is not None:
        data = data.model_copy(update={"null_answers": null_answers})
    reader = QAEvaluator(loaded.objective, examples, data)
    evaluate(reader, StepPlan(WINDOWS, resolve_device(loaded.config.training), "fp32"))
    answer = reader.answers["question"]
    chosen = answer.chosen
    place = {"start": chosen["start"]} if "start" in chosen else {}
    return {"answer": answer.text, "probability": chosen["probability"], **place, "nbest": answer.nbest}
