"""What a task decides once for all rows of a dataset: their columns, and how a row is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.data.forms.chats import ConversationOptions
from sansgpu.data.forms.label_columns import find_label_columns
from sansgpu.data.forms.pairs import TextRow, of_one_kind
from sansgpu.data.forms.preferences import PreferenceRow
from sansgpu.data.forms.questions import Question
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import ROW_REMEDY, BadRowError
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import Source
from sansgpu.data.tables import Columns
from sansgpu.tasks.embed.pair_labels import pair_meaning
from sansgpu.tasks.embed.settings import EmbeddingDataConfig
from sansgpu.tasks.sft.settings import ConversationDataConfig
from sansgpu.tasks.tokens.tagged import in_iob2, read_tagged

# Returns what the task learns from a typed row. Raises BadRowError if it cannot.
Learned = Callable[[Any], Any]


def decide(config: Config, source: Source, notes: list[str]) -> tuple[Columns, Learned]:
    """Returns the columns of the rows of `source`, and how the task of `config` learns a typed row.

    Adds messages about decisions to `notes`, and about what stops a run: a look goes on with the rows as they are.
    """
    columns = Columns.of(config.data)
    try:
        match config.settings.rows:
            case "labeled texts":
                columns, found = find_label_columns(source.rows, columns, source.name)
                notes += [found] if found else []
            case "tagged texts":
                return columns, _tagged(TaggedDataConfig.of(config), source, notes)
            case "conversations" | "preferences" | "prompts":
                return _of_conversations(config)
            case "questions":
                return columns, _unique_questions()
            case "text groups":
                return columns, of_one_kind()
    except ConfigError as error:
        notes.append(str(error))
    return columns, _unchanged


def _unique_questions() -> Learned:
    seen: set[str] = set()

    def learned(question: Question) -> Question:
        if question.id in seen:
            raise BadRowError(f"question {question.id}: an earlier question has the same id{ROW_REMEDY}")
        seen.add(question.id)
        return question

    return learned


def _unchanged(typed: Any) -> Any:
    return typed


def _of_conversations(config: Config) -> tuple[Columns, Learned]:
    learn = ConversationDataConfig.of(config).learn if config.task == "sft" else "all"
    options = ConversationOptions.of(config.data, learn)
    match config.settings.rows:
        case "prompts":
            return options.columns, options.applied_to_prompt
        case "preferences":

            def preference(row: PreferenceRow) -> PreferenceRow:
                return replace(row, conversations=tuple(map(options.applied, row.conversations)))

            return options.columns, preference
    return options.columns, options.applied


def _tagged(data: TaggedDataConfig, source: Source, notes: list[str]) -> Learned:
    """Reads all texts, because their tags and offsets are understood together."""
    report = RowReport("skip")
    texts = read_tagged(source.rows(), report, data, source.name, notes)
    known = {text.where: text for text in in_iob2(texts, source.name, notes)}

    def learned(row: Any) -> Any:
        if row.where in report.problems:
            raise BadRowError(report.problems[row.where])
        if row.where not in known:
            raise row.error("its spans or tags do not fit its text or those of the other rows")
        return known[row.where]

    return learned


def note_on_pairs(rows: list[Any], config: Config, name: str) -> str | None:
    """Returns what the labels of pairs mean to task embed, or why that is unclear; None for other rows."""
    pairs = [row for row in rows if isinstance(row, TextRow)]
    if not pairs or config.settings.task != "embed":
        return None
    try:
        meaning, note = pair_meaning(pairs, EmbeddingDataConfig.of(config), name)
    except ConfigError as error:
        return str(error)
    if meaning == "nli":
        return f"{name}: the labels are classes of natural language inference; the pairs are learned as triplets."
    return note
