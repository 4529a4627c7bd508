"""`sansgpu predict`: where in a text the answer to a question stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.data.questions import Question
from sansgpu.jobs.fine_tuned import load_fine_tuned
from sansgpu.machine.probe import resolve_device
from sansgpu.tasks.qa import AnswerReader, QAObjective, asked_of
from sansgpu.train.evaluate import evaluate
from sansgpu.train.step import StepPlan

WINDOWS = 8  # read at once


def predict(
    target: str,
    question: str,
    context: str,
    null_answers: bool | None,
    snapshot: str,
    warn: Callable[[str], None],
    remote_code: bool = False,
) -> dict[str, Any]:
    """Returns the answer with its probability and its start in the context, and all candidates.

    `null_answers` allows the answer to be empty; by default as in the run's training.
    """
    if not question.strip() or not context.strip():
        raise ConfigError("--question and --context need some text.")
    loaded = load_fine_tuned(target, "qa", snapshot, warn, remote_code)
    assert isinstance(loaded.objective, QAObjective)
    asked = asked_of([Question("question", question, context, (), impossible=True)], loaded.config, loaded.tokenizer)
    data = loaded.config.data
    if null_answers is not None:
        data = data.model_copy(update={"null_answers": null_answers})
    reader = AnswerReader(loaded.objective, asked, data)
    evaluate(reader, StepPlan(WINDOWS, resolve_device(loaded.config.training), "fp32"))
    answer = reader.answers["question"]
    chosen = answer.chosen
    place = {"start": chosen["start"]} if "start" in chosen else {}
    return {"answer": answer.text, "probability": chosen["probability"], **place, "nbest": answer.nbest}
