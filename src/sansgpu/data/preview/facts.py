"""Gathers facts about the rows of a split while they are read, in one pass."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import truncate
from sansgpu.data.duplicates import DocumentHashes, hash_documents
from sansgpu.data.files import Piece
from sansgpu.data.forms.form import Form, Forms, is_empty
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.forms.pairs import TextRow
from sansgpu.data.forms.words import TaggedText
from sansgpu.data.preview.example import Parts, learned_length, text_in
from sansgpu.data.preview.look import AnswerLook, LeftOut, LengthLook, Repetition, SplitLook
from sansgpu.data.preview.row_types import answers_in, parts_of, tagged_spans
from sansgpu.data.row_report import RowReport, are_too_many
from sansgpu.data.rows import ROW_REMEDY, BadRowError, LeftOutError, Row, SourceRow, is_text
from sansgpu.data.tables import Columns

HASHED_ROWS = 1000  # rows that are hashed at a time
HASHED_CHARACTERS = 4000  # longer texts are compared by their beginning
SAMPLED_ROWS = 2000  # at most twice as many rows, evenly spaced, are tokenized or searched for scripts
SCRIPT_CHARACTERS = 500  # each sampled row is searched for scripts up to this length
MAX_REPEATED, MAX_REASONS = 5, 20
MAX_ANSWER_CHARACTERS = 80
MANY_CHARACTERS_PER_WORD = 15  # texts without spaces are measured in characters
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*")


@dataclass(frozen=True)
class ReadRow:
    """A row that was read, and its number in its split."""

    number: int
    row: SourceRow
    form: str
    typed: Any


@dataclass
class SplitFacts:
    """What is known of the rows of one split. With `brief`, only what `SplitLook` has."""

    brief: bool = False
    learned: Callable[[Any], Any] = field(default=lambda typed: typed)  # what the task learns from a typed row
    rows: int = 0
    source_rows: int = 0
    bad_rows: int = 0
    problem: str | None = None
    is_whole: bool = True
    report: RowReport = field(default_factory=lambda: RowReport("skip"))
    forms: Counter[str] = field(default_factory=Counter)
    columns: Counter[Any] = field(default_factory=Counter)
    reasons: dict[str, LeftOut] = field(default_factory=dict)
    words: array[int] = field(default_factory=lambda: array("q"))
    characters: array[int] = field(default_factory=lambda: array("q"))
    learned_characters: int = 0
    labels: list[Any] = field(default_factory=list)  # labels of labeled texts
    label_counts: Counter[str] = field(default_factory=Counter)  # labels of spans and of texts for embedding models
    labels_of_text: dict[int, set[str]] = field(default_factory=dict)  # by the hash of the text
    scores: array[float] = field(default_factory=lambda: array("d"))
    answers: Counter[str] = field(default_factory=Counter)
    first_of_form: dict[str, ReadRow] = field(default_factory=dict)
    longest: ReadRow | None = None
    sample: list[ReadRow] = field(default_factory=list)
    _longest_characters: int = 0
    _every: int = 1
    _texts: list[str] = field(default_factory=list)
    _hashes: list[DocumentHashes] = field(default_factory=list)

    def read(self, rows: Iterable[SourceRow], forms: Forms[Any], columns: Columns, limit: int | None) -> Iterator[Any]:
        """Reads rows, and yields each as a ReadRow, or the BadRowError about it."""
        try:
            for row in forms.single_rows(self._counted(rows)):
                if self.rows == limit:
                    self.is_whole = False
                    return
                self.rows += 1
                yield self._read(row, forms, columns)
        except ConfigError as error:  # about the file, so that its later rows cannot be read
            self.problem = str(error)

    def _counted(self, rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
        for row in rows:
            self.source_rows += 1
            yield row

    def _read(self, row: SourceRow, forms: Forms[Any], columns: Columns) -> ReadRow | BadRowError:
        try:
            form, content = forms.read_with_form(row, columns, self.report)
            typed = self.learned(content)
        except BadRowError as error:
            self.bad_rows += not isinstance(error, LeftOutError)
            self._leave_out(row.where, str(error))
            return error
        given = row.value if isinstance(row.value, dict) else {}
        for name, value in given.items():
            if not is_empty(value):
                self.columns[name] += 1
        named = forms.with_usual_names(given, columns)
        return self._add(ReadRow(self.rows, row, _name(form, named, columns), typed))

    def _leave_out(self, where: str, message: str) -> None:
        reason = message.removeprefix(where).removesuffix(ROW_REMEDY)
        key = _VALUES.sub("…", reason)
        found = self.reasons.get(key, LeftOut(0, message))
        if key in self.reasons or len(self.reasons) < MAX_REASONS:
            self.reasons[key] = LeftOut(found.rows + 1, found.first)

    def _add(self, read: ReadRow) -> ReadRow:
        self.forms[read.form] += 1
        self.first_of_form.setdefault(read.form, read)
        if self.brief:
            return read
        parts = parts_of(read.typed)
        text = text_in(parts)
        if len(text) > self._longest_characters or self.longest is None:
            self.longest, self._longest_characters = read, len(text)
        self.characters.append(len(text))
        self.words.append(len(text.split()))
        self.learned_characters += learned_length(parts)
        self._texts.append(text[:HASHED_CHARACTERS])
        if len(self._texts) == HASHED_ROWS:
            self._hash()
        if (read.number - 1) % self._every == 0:
            self.sample.append(read)
        if len(self.sample) > 2 * SAMPLED_ROWS:
            self._every *= 2
            self.sample = [one for one in self.sample if (one.number - 1) % self._every == 0]
        self._add_targets(read.typed, parts, text)
        return read

    def _add_targets(self, typed: Any, parts: Parts, text: str) -> None:
        for answer in answers_in(typed, parts):
            key = answer.strip()
            is_long = len(key) > 2 * MAX_ANSWER_CHARACTERS
            self.answers[f"{key[:MAX_ANSWER_CHARACTERS]}{hash(key)}" if is_long else key] += 1
        match typed:
            case LabeledText(label=label) if label is not None:
                self.labels.append(label)
                self.labels_of_text.setdefault(hash(text), set()).add(str(label))
            case TextRow(score=float(score)):
                self.scores.append(score)
            case TextRow(label=str(label)):
                self.label_counts[label] += 1
            case TaggedText():
                self.label_counts.update(label for _, _, label in tagged_spans(typed))

    def _hash(self) -> None:
        self._hashes.append(hash_documents((Piece(text or " ", True) for text in self._texts), near=True))
        self._texts.clear()

    def hashes(self) -> DocumentHashes:
        """Returns the hashes of the texts of all rows."""
        if self._texts or not self._hashes:
            self._hash()
        contents = np.concatenate([found.content for found in self._hashes])
        return DocumentHashes(contents, np.concatenate([found.signatures for found in self._hashes]))

    def look(self, name: str, part: str, max_bad_rows: float) -> SplitLook:
        not_used = {_valid(name): count for name, count in self.report.unused.items()}
        used = {_valid(str(name)): count - not_used.get(_valid(str(name)), 0) for name, count in self.columns.items()}
        return SplitLook(
            name,
            part,
            self.rows,
            sum(self.forms.values()),
            dict(self.forms.most_common()),
            {column: count for column, count in used.items() if count > 0},
            not_used,
            tuple(self.reasons.values()),
            self.problem,
            self.is_whole,
            self.bad_rows,
            max_bad_rows if are_too_many(self.bad_rows, self.rows, max_bad_rows) else None,
            self.source_rows,
        )


def _valid(name: str) -> str:
    """Replaces unpaired surrogates in the name of a column, which cannot be written."""
    return name if is_text(name) else name.encode(errors="replace").decode()


def _name(form: Form[Any], row: Row, columns: Columns) -> str:
    """Returns the columns of a form that a row has; the form may read other names of them."""
    usual = [key for key in dict.fromkeys((*form.keys, *form.optional)) if key in row and not is_empty(row[key])]
    usual = usual if all(key in usual for key in form.keys) else []
    unused = () if usual else {*form.unused_parts(row, columns)}
    others = (_valid(str(name)) for name, value in row.items() if not is_empty(value) and name not in unused)
    return " + ".join(usual or others) or form.name


def repetition(train: SplitFacts, validation: SplitFacts | None) -> Repetition:
    """Counts equal and nearly equal texts."""
    ours = train.hashes()
    both = ours if validation is None else ours.followed_by(validation.hashes())
    equal, nearly = (hashes.first_of_group() for hashes in (DocumentHashes(both.content, None), both))
    numbers, held = np.arange(len(ours)), slice(len(ours), None)
    repeats_equal, repeats = equal[: len(ours)] != numbers, nearly[: len(ours)] != numbers
    if validation is None:
        return Repetition(int(repeats_equal.sum()), int((repeats & ~repeats_equal).sum()), None, None)
    leaks_equal, leaks = equal[held] < len(ours), nearly[held] < len(ours)
    return Repetition(
        int(repeats_equal.sum()),
        int((repeats & ~repeats_equal).sum()),
        int(leaks_equal.sum()),
        int((leaks & ~leaks_equal).sum()),
    )


def length_bins(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Counts lengths in bins that end at 1, 2, 5, 10, 20, 50, ..."""
    edges = [1, 2, 5]
    while edges[-1] < lengths.max(initial=1):
        edges.append(edges[-3] * 10)
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
    filled = np.flatnonzero(counts)
    return tuple((edges[n], int(counts[n])) for n in range(filled[0], filled[-1] + 1)) if len(filled) else ()


def plain_lengths(facts: SplitFacts) -> LengthLook | None:
    """Returns the lengths in words, or in characters if the texts have few spaces. None without rows."""
    if not len(facts.characters):
        return None
    words, characters = (np.array(values, np.int64) for values in (facts.words, facts.characters))
    in_characters = characters.sum() > MANY_CHARACTERS_PER_WORD * words.sum()
    share = facts.learned_characters / max(1, int(characters.sum()))
    return length_look("characters" if in_characters else "words", characters if in_characters else words, share)


def length_look(unit: str, lengths: np.ndarray, learned_share: float | None) -> LengthLook:
    median = int(np.median(lengths))
    shortest, longest = int(lengths.min()), int(lengths.max())
    return LengthLook(
        unit, len(lengths), shortest, median, longest, length_bins(lengths), learned_share=learned_share or None
    )


def answer_look(facts: SplitFacts) -> AnswerLook | None:
    if not facts.answers:
        return None
    repeated = [
        (truncate(text, MAX_ANSWER_CHARACTERS), count)
        for text, count in facts.answers.most_common(MAX_REPEATED + 1)
        if text and count > 1
    ]
    return AnswerLook(facts.answers.total(), facts.answers[""], len(facts.answers), tuple(repeated[:MAX_REPEATED]))


def scripts_of(rows: Iterable[ReadRow]) -> dict[str, float]:
    """Returns the scripts of the letters in rows, as Unicode names them, with their shares, the most frequent first."""
    characters: Counter[str] = Counter()
    for read in rows:
        characters.update(text_in(parts_of(read.typed))[:SCRIPT_CHARACTERS])
    scripts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            scripts[unicodedata.name(character, "unknown").split()[0].capitalize()] += count
    total = max(1, scripts.total())
    return {"CJK" if name == "Cjk" else name: count / total for name, count in scripts.most_common()}
