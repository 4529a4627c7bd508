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
    """The answer, its probability and place, and the rivals it was weighed against.

    `null_answers` says whether there may be none; by default as the run learned it.
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
    best = answer.nbest[0]
    place = {"start": best["start"]} if "start" in best else {}
    return {"answer": answer.text, "probability": best["probability"], **place, "nbest": answer.nbest}
