"""Parses and tokenizes rows with a prompt and the columns that a reward depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.forms.answers import ANSWER_COLUMNS, answer_column
from sansgpu.data.forms.chats import PROMPTS, ConversationOptions, Prompt
from sansgpu.data.forms.form import is_empty
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow, bad_row
from sansgpu.data.shards import rows_with_progress
from sansgpu.data.sources import Source
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.generation.omitted import omitted_parts
from sansgpu.models.generation.prompts import (
    RejectedConversationError,
    encoded_prompt,
    prompt_text,
    text_prompt_ids,
)
from sansgpu.models.generation.special_texts import EncodedConversation
from sansgpu.tasks.evaluation import TokenizedCorpus
from sansgpu.tasks.grpo.batch import PromptRow, Prompts
from sansgpu.tasks.grpo.rewards import check_answer
from sansgpu.tasks.grpo.settings import GRPOTrainingConfig
from sansgpu.tasks.sft.notes import ReadingNotes
from sansgpu.tasks.sft.rendering import with_fixed_date


@dataclass(frozen=True)
class PromptExamples:
    """The prompts of a split. Each is completed `group_size` times, with at most `longest` tokens."""

    questions: Sequence[PromptRow]
    group_size: int
    longest: int

    def __len__(self) -> int:
        return len(self.questions)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The maximum number of tokens of each prompt with its completion."""
        return np.array([len(question.ids) + self.longest for question in self.questions], np.int64)

    def batch(self, indices: np.ndarray, step: int = 0) -> Prompts:
        """Returns the prompts with the indices `indices`, to complete in a training step."""
        return Prompts([self.questions[index] for index in indices], step)

    @property
    def targets(self) -> int:
        """The maximum number of tokens of all completions in an epoch."""
        return self.group_size * self.longest * len(self)


@dataclass(frozen=True)
class PromptCorpus(TokenizedCorpus[PromptExamples]):
    """Tokenized prompts for training and validation. Counts of tokens assume completions of maximum length."""

    def preview(self) -> str | None:
        """Returns the text of the first prompt."""
        text: str = self.tokenizer.decode(self.train.questions[0].ids.tolist(), skip_special_tokens=False)
        return text

    @property
    def train_examples(self) -> int:
        return self.train.group_size * len(self.train)

    @property
    def example_tokens(self) -> float:
        return float(self.train.lengths.mean())

    @property
    def train_tokens(self) -> int:
        return self.train.group_size * int(self.train.lengths.sum())

    def shared_tokens(self, examples: int, micro_batch: int) -> float:
        """Returns the mean number of tokens of a prompt that another completion of its micro-batch has computed."""
        prompt = self.example_tokens - self.train.longest
        return prompt * (1 - 1 / min(self.train.group_size, micro_batch))

    def most_tokens(self, examples: int, padded: bool) -> int:
        return examples * int(self.train.lengths.max())


def read_prompts(
    source: Source, config: Config, tokenizer: Any, progress: ReportProgress, notes: list[str]
) -> PromptExamples:
    """Reads and tokenizes all rows of a source, and adds messages about skipped rows to `notes`.

    Raises BadRowError if a row is invalid, and ConfigError if the chat template does not work.
    """
    grpo, found, too_long = GRPOTrainingConfig.of(config).grpo, ReadingNotes(RowReport.of(config.data)), 0
    options = ConversationOptions.of(config.data)
    room, questions = config.window - grpo.max_completion_length, list[PromptRow]()

    def parse(row: SourceRow) -> PromptRow:
        # a reward function of the user may use all columns
        report = found.bad_rows if grpo.reward_function is None else None
        prompt = options.applied_to_prompt(PROMPTS.read(row, options.columns, report))
        columns = prompt.columns
        if grpo.reward_function is None:
            check_answer(columns, prompt.where)
            given = (name for name in ANSWER_COLUMNS if not is_empty(columns.get(name)))
            found.bad_rows.not_used(name for name in given if name != answer_column(columns))
        with tokenizer_errors(row.where):
            encoded = _encoded(prompt, tokenizer, config.data.parse_special_tokens)
        found.count(encoded.special_text, omitted=_omitted(prompt, tokenizer))
        return PromptRow(prompt.where, np.array(encoded.ids, np.int64), prompt.text or list(prompt.turns), columns)

    for question in found.bad_rows.parsed(rows_with_progress(source, progress), parse):
        if len(question.ids) > room:
            too_long += 1
        else:
            questions.append(question)
    notes += found.messages(source.name, room)
    if too_long:
        notes.append(
            f"{source.name}: {counted(too_long, 'row was', 'rows were')} skipped, because the prompt is longer than "
            f"{room} tokens, which is what data.max_length {config.window} leaves beside completions of "
            f"{grpo.max_completion_length}; raise data.max_length to keep them."
        )
    return PromptExamples(questions, grpo.group_size, grpo.max_completion_length)


def _encoded(prompt: Prompt, tokenizer: Any, parse_special: bool) -> EncodedConversation:
    """Tokenizes a prompt: as a conversation if it has turns and there is a chat template, otherwise as text."""
    if prompt.turns and tokenizer.chat_template is not None:
        try:
            return encoded_prompt(tokenizer, prompt.turns, with_fixed_date, parse_special, prompt.tools)
        except RejectedConversationError as error:
            raise bad_row(prompt.where, str(error).rstrip(".")) from None
    if not prompt.text:
        raise bad_row(
            prompt.where,
            "has messages, but the model's tokenizer has no chat template; set data.chat_template to simple or to a "
            "Jinja file",
        )
    return EncodedConversation(text_prompt_ids(tokenizer, prompt.text), [])


def _omitted(prompt: Prompt, tokenizer: Any) -> list[str]:
    """Names the parts of a prompt that are not in the text to complete."""
    if tokenizer.chat_template is None or not prompt.turns:
        return ["tools"] if prompt.tools else []
    return [*omitted_parts(prompt.turns, prompt.tools, lambda turns, tools: prompt_text(tokenizer, turns, tools=tools))]
