"""Tokenized conversations, the data of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE
from sansgpu.data.forms.chats import CONVERSATIONS, ConversationOptions
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.shards import rows_with_progress
from sansgpu.data.sources import Source
from sansgpu.data.teacher_folder import Predictions, TeacherFolder
from sansgpu.events.progress import ReportProgress
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.distillation import require_same_vocabulary, with_length_of
from sansgpu.tasks.evaluation import TokenizedCorpus
from sansgpu.tasks.sft.chat import TokenizedConversations, show_masked, tokenize_conversations
from sansgpu.tasks.sft.notes import ReadingNotes, template_notes
from sansgpu.tasks.sft.settings import ConversationDataConfig


@dataclass(frozen=True)
class ConversationExamples:
    """A split: a subset of the tokenized examples, by index."""

    examples: TokenizedConversations
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Returns the number of input tokens of each example. The last token is not an input, but only a target."""
        lengths: np.ndarray = self.examples.lengths()[self.numbers] - 1
        return lengths

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids (L,) and the loss mask (L,) of one example."""
        return self.examples.example(self.numbers[index])

    def sequence(self, index: int) -> np.ndarray:
        return self.example(index)[0]

    @property
    def targets(self) -> int:
        """Returns the number of target tokens."""
        return sum(int(self.examples.example(number)[1][1:].sum()) for number in self.numbers)

    def batch(self, indices: np.ndarray) -> PackedSequences:
        """Returns a batch of the examples with these indices, with targets shifted by one token."""
        pairs = [self.examples.example(self.numbers[index]) for index in indices]
        targets = [np.where(learned[1:], ids[1:], IGNORE) for ids, learned in pairs]
        return PackedSequences.of([ids[:-1] for ids, _ in pairs], targets, numbers=self.numbers[indices])

    def target_bytes(self, numbers: np.ndarray) -> int:
        """Returns the UTF-8 bytes of the target tokens of the examples `numbers`."""
        return int(self.examples.learned_bytes[numbers].sum())


@dataclass(frozen=True)
class ChatCorpus(TokenizedCorpus[ConversationExamples]):
    """Tokenized conversations with loss masks, for training and validation."""

    teacher: Predictions | None = None

    def preview(self) -> str | None:
        """Returns the text of the first example, with brackets around the target tokens."""
        return show_masked(*self.train.examples.example(self.train.numbers[0]), self.tokenizer)


def taught_corpus(config: Config, folder: TeacherFolder, progress: ReportProgress) -> tuple[Config, ChatCorpus]:
    """Opens a teacher's folder: its conversations and predictions.

    The student gets the teacher's chat template. Raises ConfigError if its vocabulary differs from the teacher's.
    """
    template = folder.root / CHAT_TEMPLATE_FILE
    tokenizer = load_tokenizer_of(config.model, str(template) if template.is_file() else None)
    require_same_vocabulary(tokenizer.backend_tokenizer, str(config.model.name_or_path), folder)
    train, validation = (_examples_of(folder, part) for part in ("train", "validation"))
    predictions = Predictions(folder, progress)
    notes = list(template_notes(config, tokenizer))
    corpus = ChatCorpus(train, validation, notes, folder.fingerprint, tokenizer, predictions)
    return with_length_of(config, folder), corpus


def arrays_of(part: str, rows: ConversationExamples) -> dict[str, np.ndarray]:
    """Returns the concatenated tokens and loss masks of the examples, and the size of each example."""
    examples = [rows.example(number) for number in range(len(rows))]
    return {
        f"{part}_tokens": np.concatenate([ids for ids, _ in examples]),
        f"{part}_learned": np.concatenate([learned for _, learned in examples]),
        f"{part}_lengths": np.array([len(ids) for ids, _ in examples], np.int64),
        f"{part}_bytes": rows.examples.learned_bytes[rows.numbers],
    }


def _examples_of(folder: TeacherFolder, part: str) -> ConversationExamples:
    names = ("tokens", "learned", "lengths", "bytes")
    tokens, learned, lengths, sizes = (folder.array(f"{part}_{name}") for name in names)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    examples = TokenizedConversations(tokens, learned, offsets, sizes)
    return ConversationExamples(examples, np.arange(len(examples)))


def tokenize_source(
    source: Source, config: Config, tokenizer: Any, progress: ReportProgress, notes: list[str]
) -> ConversationExamples:
    """Reads all rows of a source. Raises ConfigError if one is invalid."""
    examples = examples_in(source, config, tokenizer, progress, notes)
    return ConversationExamples(examples, np.arange(len(examples)))


def examples_in(
    source: Source, config: Config, tokenizer: Any, progress: ReportProgress, notes: list[str]
) -> TokenizedConversations:
    data = config.data
    assert data.max_length is not None
    rows, window, found = rows_with_progress(source, progress), data.max_length, ReadingNotes(RowReport.of(data))
    options = ConversationOptions.of(data, ConversationDataConfig.of(config).learn)
    examples = tokenize_conversations(rows, tokenizer, window, data.long_rows, found, options)
    whole = "their last question and answer" if data.long_rows == "truncate" else "they"
    notes += found.messages(source.name, window, "their beginnings were removed, in conversations whole turns", whole)
    return examples


CHAT_TEMPLATE_FILE = "chat_template.jinja"  # the file name that transformers uses


def shared_system_message(source: Source, options: ConversationOptions) -> str | None:
    """Returns the system message with which all conversations start, or None if there is none or they differ."""
    shared: str | None = None
    for row in source.rows():
        try:
            turns = CONVERSATIONS.read(row, options.columns).turns
        except BadRowError:
            continue
        first = turns[0] if turns else {}
        message = first.get("content") if first.get("role") == "system" else None
        if not isinstance(message, str) or shared not in (None, message):
            return None
        shared = message
    return shared
