"""What a task decides once for all rows of a dataset: their columns, and how a row is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.data.forms.chats import ConversationOptions
from sansgpu.data.forms.label_columns import find_label_columns
from sansgpu.data.forms.pairs import TEXT_GROUPS, TextRow, of_one_kind, read_text_rows
from sansgpu.data.forms.preferences import PreferenceRow
from sansgpu.data.forms.questions import Question
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import ROW_REMEDY, BadRowError, LeftOutError
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import Source
from sansgpu.data.tables import Columns
from sansgpu.tasks.embed.pair_labels import pair_meaning, with_meaning
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
                return columns, _grouped(config, columns, source, notes)
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


def _grouped(config: Config, columns: Columns, source: Source, notes: list[str]) -> Learned:
    """Reads all pairs with labels, because their meaning is decided together: similarities, or classes of NLI."""
    report, checked, data = RowReport("skip"), of_one_kind(), EmbeddingDataConfig.of(config)
    first = next(iter(RowReport("skip").parsed(source.rows(), lambda row: TEXT_GROUPS.read(row, columns))), None)
    if config.task != "embed" or first is None or first.pair_label is None:
        return checked
    rows = read_text_rows(source.rows(), columns, report)
    meaning, note = pair_meaning(rows, data, source.name)
    notes += [note] if note else []
    known = {row.where: row for row in with_meaning(rows, meaning, report, source.name, notes)}

    def learned(row: TextRow) -> TextRow:
        if row.where in report.problems:
            raise BadRowError(report.problems[row.where])
        if row.pair_label is not None and row.where not in known:
            raise LeftOutError(row.where, "that has no triplet of its own, because its texts are not entailed")
        return checked(known.get(row.where, row))

    return learned
