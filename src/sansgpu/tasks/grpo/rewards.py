"""Rewards of completions: a comparison with the row's answer, or a Python function of the user."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from sansgpu.config import ConfigError, SansGPUError, import_class
from sansgpu.config.wording import counted, first_line, shown
from sansgpu.data.forms.answers import answer_column, right_answer
from sansgpu.data.rows import bad_row
from sansgpu.machine.untrusted.user_code import preserved_state
from sansgpu.tasks.grpo.batch import PromptRow

MAX_REWARD = 1e30  # squares of larger ones overflow in statistics
REMEDY = "correct the function, and continue the run with --resume"

# Computes the reward of each completion, given as text and as token ids.
Reward = Callable[[Sequence[PromptRow], Sequence[str], Sequence[list[int]]], list[float]]

_BOXED = "\\boxed{"
_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_MARK = "####"  # precedes the answer in GSM8K
# Ways in which LaTeX and typesetting write signs within numbers; the last one is the minus sign.
_WRITTEN = {"{,}": ",", "\\$": "$", "\\%": "%", "\\!": "", "\\,": "", "\u2212": "-"}
_FONT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s?\{([^{}]*)\}")  # text in LaTeX
_NUMBER = re.compile(r"-?(?:\d[\d,]*)?\.?\d+")
_DEBT = re.compile(r"-[$€£¥] ?(?=[\d.])")  # -$5
_AROUND = " \t\n\r.,;:!?\"'`*()[]$€£¥%"  # characters around an answer that do not belong to it


def open_reward(name: str) -> Reward:
    """Returns the reward with the name `training.grpo.reward`. Raises ConfigError if it cannot be imported."""
    if ":" not in name:
        return _answer_rewards
    function = import_class(name, "training.grpo.reward")
    if not callable(function):
        raise ConfigError(f"training.grpo.reward {name} is a {type(function).__name__}, not a function; correct it.")
    return _FunctionReward(name, function)


def check_answer(columns: Mapping[Any, Any], where: str) -> None:
    """Raises BadRowError if a row has no answer to compare completions with."""
    column, value = answer_column(columns), right_answer(columns)
    if column is None:
        raise bad_row(where, "has no answer, which training.grpo.reward answer compares completions with")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not final_answer(str(value)):
        raise bad_row(where, f"has the {column} {shown(value)} instead of a text or a number")


def _answer_rewards(
    questions: Sequence[PromptRow], completions: Sequence[str], ids: Sequence[list[int]]
) -> list[float]:
    pairs = zip(questions, completions, strict=True)
    return [float(is_right(completion, str(right_answer(question.columns)))) for question, completion in pairs]


def is_right(completion: str, answer: str) -> bool:
    """Returns whether a completion ends with the right answer.

    If the answer is a number, the last number of the completion must be equal to it. Otherwise the completion must end
    with the same words, whatever their case. Only the text in the last `\\boxed{}` or in the line after the last `####`
    counts if there is one, in the answer as well; after `####`, the first number does.
    """
    wanted, found = final_answer(answer), final_answer(completion)
    if (number := _number(wanted)) is not None:
        numbers = _NUMBER.findall(found)
        is_marked = _MARK in completion and _boxed(completion) is None
        return bool(numbers) and _number(numbers[0 if is_marked else -1]) == number
    return re.search(rf"(?<!\w){re.escape(wanted.casefold())}$", found.casefold()) is not None


def final_answer(text: str) -> str:
    """Returns the text in the last `\\boxed{}`, or in the line after the last `####`, or else all of it."""
    boxed, marked = _boxed(text), text.rpartition(_MARK)[2].strip()
    found = boxed if boxed is not None else marked.split("\n")[0] if _MARK in text else text
    for written, sign in _WRITTEN.items():
        found = found.replace(written, sign)
    found = _FONT.sub(r"\1", found)
    return _DEBT.sub("-", found).strip(_AROUND)


def _boxed(text: str) -> str | None:
    """Returns the text in the last complete `\\boxed{}`, which may contain braces itself; None if there is none."""
    found: str | None = None
    opened: list[int | None] = []  # where the text in each open brace starts; None: not that of a \\boxed{}
    for sign in _BRACES.finditer(text):
        if sign[0] in ("{", _BOXED):
            opened.append(sign.end() if sign[0] == _BOXED else None)
        elif sign[0] == "}" and opened and (start := opened.pop()) is not None:
            found = text[start : sign.start()]
    return found


def _number(text: str) -> Decimal | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of rewards that are coroutines. What they open, e.g. a connection, stays usable.

    It runs in a thread, because the caller's thread may have a loop of its own, as in notebooks.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


def _awaited(found: Awaitable[Any]) -> Any:
    """Returns the result of an `async def` function."""

    async def result() -> Any:
        try:
            return await found
        except SystemExit as error:  # it would end the loop's thread, and the caller would wait forever
            return error

    value = asyncio.run_coroutine_threadsafe(result(), _event_loop()).result()
    if isinstance(value, SystemExit):
        raise value
    return value


class _FunctionReward:
    """Calls a reward function with the arguments that TRL's GRPOTrainer passes, apart from its trainer's state.

    A function without `**kwargs` gets only the arguments that it names. It may be `async def`.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a function in C
            parameters = {}.values()
        is_open = not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._named = None if is_open else [one.name for one in parameters]

    def __call__(
        self, questions: Sequence[PromptRow], completions: Sequence[str], ids: Sequence[list[int]]
    ) -> list[float]:
        columns = dict.fromkeys(name for question in questions for name in question.columns)
        given: dict[str, Any] = {str(name): [question.columns.get(name) for question in questions] for name in columns}
        given["prompts"] = [question.prompt for question in questions]
        given["completions"] = [
            text if isinstance(question.prompt, str) else [{"role": "assistant", "content": text}]
            for question, text in zip(questions, completions, strict=True)
        ]
        given["completion_ids"] = list(ids)
        if self._named is not None:
            given = {name: values for name, values in given.items() if name in self._named}
        try:
            with preserved_state():
                found = self._function(**copy.deepcopy(given))  # a function that changes rows must not change the data
                if inspect.isawaitable(found):
                    found = _awaited(found)
                if isinstance(found, Iterable) and not isinstance(found, (str, Mapping, Set)):
                    found = list(found)  # runs a generator
        except (Exception, SystemExit) as error:
            raise SansGPUError(
                f"the reward function {self._name} failed with {type(error).__name__}: {first_line(error)}; {REMEDY}."
            ) from error
        return self._checked(found, len(questions))

    def _checked(self, found: Any, count: int) -> list[float]:
        if not isinstance(found, list):
            raise SansGPUError(
                f"the reward function {self._name} returned {shown(found)} instead of a list of numbers; {REMEDY}."
            )
        if len(found) != count:
            raise SansGPUError(
                f"the reward function {self._name} returned {counted(len(found), 'reward')} for "
                f"{counted(count, 'completion')}; {REMEDY}."
            )
        rewards = []
        for value in found:
            try:
                rewards.append(math.nan if isinstance(value, str) else float(value))
            except (TypeError, ValueError):
                rewards.append(math.nan)
            if not abs(rewards[-1]) <= MAX_REWARD:
                raise SansGPUError(
                    f"the reward function {self._name} returned {shown(value)}, which is not a finite number of usual "
                    f"size; {REMEDY}."
                )
        return rewards
