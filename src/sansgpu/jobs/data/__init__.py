"""Looks at a dataset before training: what is recognized, used and left out, and examples as a model learns them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sansgpu.config import ConfigError, Override, SansGPUError, change_config
from sansgpu.config.data import DataConfig
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted, truncate
from sansgpu.data.forms.files import file_notes
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.preview.canonical import canonical_row
from sansgpu.data.preview.example import shortened
from sansgpu.data.preview.facts import (
    ReadRow,
    SplitFacts,
    answer_look,
    length_look,
    plain_lengths,
    repetition,
    scripts_of,
)
from sansgpu.data.preview.look import DataLook, LabelLook, LengthLook, RowExample, ScoreLook
from sansgpu.data.preview.row_types import parts_of
from sansgpu.data.rows import ROW_REMEDY, BadRowError, SourceRow, is_text
from sansgpu.data.sources import Source, local_files
from sansgpu.events.progress import ReportProgress, ignore_progress
from sansgpu.files.atomic import atomic_write, write_failures_as, write_text
from sansgpu.files.ownership import HTML_SIGNATURE, require_file
from sansgpu.jobs.data.decisions import decide
from sansgpu.jobs.data.guess import Guess, OpenedData, TaskFit, fitting_tasks, has_documents, rows_of
from sansgpu.tasks.classify.checks import alike_labels
from sansgpu.tasks.classify.label_values import LabelCells, number_of
from sansgpu.tasks.classify.labels import Labels, find_labels
from sansgpu.tasks.classify.settings import WeightedDataConfig
from sansgpu.tasks.configuration import SCHEMA, as_config
from sansgpu.views.data_look import look_page

if TYPE_CHECKING:
    from sansgpu.jobs.data.tokens import TokenizedParts

PROGRESS_ROWS = 2000  # rows between two reports of progress
SHOWN_ROWS, SHOWN_CHARACTERS = 8, 300  # rows that are shown as the files have them, and characters of a cell
DRY_RUN_ROWS = 100_000  # rows that `train --dry-run` looks at
NO_MODEL = "none"  # in place of the model of a task that fine-tunes one
# What happens to rows that are longer than data.max_length, by their kind.
_EFFECTS = {
    "texts": "they are cut into windows, so no token is lost",
    "conversations": "their oldest turns, or the beginning of a text, are removed",
    "preferences": "their oldest turns are removed, or they are skipped",
    "prompts": "they are skipped",
    "labeled texts": "their ends are cut off",
    "text groups": "their ends are cut off",
    "tagged texts": "they are read in overlapping windows",
    "questions": "they are read in overlapping windows",
    "graphs": "their ends are cut off",
}


@dataclass(frozen=True)
class DataRequest:
    """Arguments of `sansgpu data`."""

    data: str
    task: str | None = None
    model: str | None = None
    overrides: tuple[Override, ...] = ()
    row: int | None = None  # the number of a training row to show instead of others
    all_rows: bool = False
    write: Path | None = None  # file for the rows in the canonical form


def look(request: DataRequest, progress: ReportProgress) -> DataLook:
    """Reads the data and returns what is found. Invalid rows are counted, not fatal.

    Raises ConfigError if the data cannot be opened, no task reads it, or the row to show does not exist.
    """
    if request.write is not None:
        require_new_file(request.write, request.data)
    progress("reading rows", 0, 0)
    guess = Guess([TaskFit(request.task, "")], []) if request.task else _guess(request)
    config = _config(request, guess.tasks[0].task)
    found = _Look(config, request, progress).found()
    others = {fit.task: fit.form for fit in guess.tasks[1:]}
    notes = (*found.notes, *guess.notes)
    return replace(found, task_is_guessed=request.task is None, other_tasks=others, notes=notes)


def require_new_file(path: Path, data: str) -> None:
    """Raises ConfigError unless `--write` names a new .jsonl file outside the data."""
    if path.suffix != ".jsonl":
        raise ConfigError(f"--write {path} must end in .jsonl, because the rows are written as JSON lines; rename it.")
    if path.exists():
        raise ConfigError(f"--write {path} exists; choose another name.")
    folder = local_path(data)
    if folder.is_dir() and path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--write {path} is in the folder of the data, which is never changed; choose another folder."
        )


def write_page(found: DataLook, path: Path) -> None:
    """Writes the HTML page about a dataset. Raises ConfigError if the file exists and is not such a page."""
    require_file(path, HTML_SIGNATURE)
    with write_failures_as(SansGPUError, path, "--report"):
        write_text(path, look_page(found))


def look_briefly(config: Config) -> DataLook | None:
    """Returns the forms, columns and invalid rows of a run's data, of which it reads at most `DRY_RUN_ROWS` rows.

    Returns None if the run reads no rows, or would have to download them.
    """
    if config.outside_class or config.settings.rows not in FORMS or not local_files(config.data, text_rows=True):
        return None
    found = _Look(config, DataRequest(config.data.dataset_name, config.task), ignore_progress, brief=True)
    return None if found.has_documents else found.found()


def guess_tasks(data: str) -> list[TaskFit]:
    """Returns the tasks that use most of a dataset's columns, the best first. Raises ConfigError if there are none."""
    return _guess(DataRequest(data)).tasks


def _guess(request: DataRequest) -> Guess:
    return fitting_tasks(OpenedData(_data_settings(request)), request.data)


def _data_settings(request: DataRequest) -> DataConfig:
    """Returns the settings of the data without knowing the task: those of the first task that has all given keys."""
    problems: list[ConfigError] = []
    for task in SCHEMA.tasks.tasks:
        try:
            return _config(replace(request, model=None), task).data
        except ConfigError as error:
            problems.append(error)
    raise problems[0]


def _config(request: DataRequest, task: str) -> Config:
    """Returns the configuration of a run that would train on the data."""
    if task not in SCHEMA.tasks.tasks:
        raise ConfigError(f"--task is {truncate(task)!r}, but must be one of {', '.join(SCHEMA.tasks.tasks)}.")
    model = {"name_or_path": request.model or NO_MODEL} if SCHEMA.tasks.tasks[task].fine_tunes else {}
    config = as_config({"task": task, "model": model, "data": {"dataset_name": request.data}})
    return change_config(config, request.overrides) if request.overrides else config


class _Look:
    """One look at a dataset with the settings of a configuration."""

    def __init__(self, config: Config, request: DataRequest, progress: ReportProgress, brief: bool = False) -> None:
        self._request, self._progress, self._brief = request, progress, brief
        self._kind = config.settings.rows
        self._forms = FORMS[self._kind]
        self._sources, data, note = OpenedData(config.data).open(self._kind)
        self._config = config.model_copy(update={"data": data})
        self._notes = [*file_notes(data, self._kind), *self._sources.notes, *([note] if note else [])]
        if self._sources.test is not None:
            self._notes.append(f"{self._sources.test.name} is the test part, from which a run does not learn")
        self._columns, self._learned = decide(self._config, self._sources.train, self._notes)
        self._examples: list[RowExample] = []
        self._tokenized: TokenizedParts | None = None

    @property
    def has_documents(self) -> bool:
        """True if the data are texts without columns."""
        return has_documents(self._sources.train, self._kind)

    def found(self) -> DataLook:
        if self._request.model is not None:
            self._tokenized = self._tokenizer(self._request.model)
        train = self._read(self._sources.train, "training")
        validation = self._sources.validation
        held = None if validation is None else self._read(validation, "validation")
        self._require_rows(train)
        limit = self._config.data.max_bad_rows
        splits = [train.look(self._sources.train.name, "training", limit)]
        if held is not None and validation is not None:
            splits.append(held.look(validation.name, "validation", limit))
        config, request = self._config, self._request
        found = DataLook(
            request.data, config.task, False, {}, request.model, (), tuple(splits),
            None if held is not None else config.data.validation_split,
        )  # fmt: skip
        if self._brief:
            return replace(found, notes=tuple(self._notes))
        self._progress("comparing texts", 0, 0)
        return replace(
            found,
            repetition=repetition(train, held) if train.forms else None,
            lengths=self._lengths(train),
            labels=self._labels(train),
            scores=_scores(train),
            answers=answer_look(train),
            scripts=scripts_of(train.sample),
            examples=tuple(self._examples or self._chosen_examples(train)),
            notes=tuple(self._notes),
            rows=tuple(_cells(read.row.value) for read in train.sample[:SHOWN_ROWS]),
        )

    def _tokenizer(self, model: str) -> TokenizedParts:
        self._progress("loading the tokenizer", 0, 0)
        from sansgpu.jobs.data.tokens import TokenizedParts  # imports torch and transformers

        return TokenizedParts(self._config.with_values("model", name_or_path=model))

    def _read(self, source: Source, part: str) -> SplitFacts:
        """Reads a split, collects the examples to show of the training split, and writes it if that is requested."""
        request, is_train = self._request, part == "training"
        learned = self._learned if is_train else decide(self._config, source, self._notes)[1]
        facts = SplitFacts(self._brief, learned)
        rows = rows_of(source, self._kind, self._columns)
        limit = DRY_RUN_ROWS if self._brief else None
        read = facts.read(self._reported(rows, source), self._forms, self._columns, limit)
        if is_train and request.write is not None:
            self._write(request.write, self._shown(facts, read))
        else:
            for _ in self._shown(facts, read) if is_train else read:
                pass
        return facts

    def _reported(self, rows: Iterator[SourceRow], source: Source) -> Iterator[SourceRow]:
        for number, row in enumerate(rows, 1):
            yield row
            if number % PROGRESS_ROWS == 0:
                self._progress(f"reading {source.name}", number, 0, "row")

    def _shown(self, facts: SplitFacts, read: Iterator[ReadRow | BadRowError]) -> Iterator[ReadRow | BadRowError]:
        """Yields the rows that are read, and adds those that the request names to the examples."""
        request = self._request
        for one in read:
            if request.all_rows or facts.rows == request.row:
                reason = f"row {facts.rows:,}"
                if isinstance(one, ReadRow):
                    self._examples.append(self._example(one, reason))
                else:
                    self._examples.append(RowExample(facts.rows, "", reason, problem=str(one)))
            yield one

    def _write(self, path: Path, read: Iterator[ReadRow | BadRowError]) -> None:
        """Writes the valid rows as JSON lines in the canonical form."""
        with (
            write_failures_as(SansGPUError, path, "--write"),
            atomic_write(path) as partial,
            partial.open("w", encoding="utf-8") as file,
        ):
            for one in read:
                if isinstance(one, ReadRow):
                    file.write(_json_line(canonical_row(self._forms, one.row, one.typed)))

    def _require_rows(self, train: SplitFacts) -> None:
        """Raises ConfigError if there is nothing to show, or not the requested row."""
        if not train.rows:
            raise ConfigError(train.problem or f"{self._sources.train.name} has no rows; add some.")
        if not train.forms and len(train.reasons) == 1 and not self._brief:
            (reason,) = train.reasons.values()
            raise ConfigError(
                f"{self._sources.train.name}: no row is usable for task {self._config.task}: "
                f"{reason.first.removesuffix(ROW_REMEDY).removesuffix('.')}."
            )
        row = self._request.row
        if row is not None and not self._examples:
            raise ConfigError(
                f"--row is {row}, but {self._sources.train.name} has only {counted(train.rows, 'row')}; lower it."
            )

    def _chosen_examples(self, train: SplitFacts) -> list[RowExample]:
        """Returns the first example, the longest, and the first of each form."""
        firsts = list(train.first_of_form.values())
        chosen = {read.number: (read, "the first of its form") for read in reversed(firsts)}
        for read, reason in ((train.longest, "the longest"), (firsts[0] if firsts else None, "the first")):
            if read is not None:
                chosen[read.number] = (read, reason)
        return [self._example(read, reason) for _, (read, reason) in sorted(chosen.items())]

    def _example(self, read: ReadRow, reason: str) -> RowExample:
        example = RowExample(read.number, read.row.where, reason, read.form)
        try:
            parts = parts_of(read.typed) if self._tokenized is None else self._tokenized.parts_of(read.typed)
        except BadRowError as error:
            return replace(example, problem=str(error))
        is_asked_for = self._request.all_rows or self._request.row is not None
        return replace(example, parts=parts if is_asked_for else tuple(map(shortened, parts)))

    def _lengths(self, train: SplitFacts) -> LengthLook | None:
        """Returns the lengths: in tokens of a sample if a model is given, else of all rows in words or characters."""
        if self._tokenized is None:
            return plain_lengths(train)
        lengths, learned, refused = list[int](), list[int](), Counter[str]()
        self._tokenized.forget_notes()
        for number, read in enumerate(train.sample, 1):
            self._progress("tokenizing", number, len(train.sample), "row")
            try:
                measured = [part for part in self._tokenized.parts_of(read.typed) if part.tokens is not None]
            except BadRowError as error:
                refused[str(error)] += 1
                continue
            lengths += [part.tokens or 0 for part in measured]
            learned += [part.learned_tokens or 0 for part in measured]
        some = f", in a sample of {counted(len(train.sample), 'row')}" if len(train.sample) < train.rows else ""
        self._notes += self._tokenized.notes.messages(f"{self._sources.train.name}{some}", 0)
        if refused:
            first = next(iter(refused))
            self._notes.append(
                f"the model cannot learn from {refused.total():,} of {len(train.sample):,} rows: {first}"
            )
        if not lengths:
            return None
        array, most = np.array(lengths), self._tokenized.max_length
        found = length_look("tokens", array, sum(learned) / max(1, sum(lengths)))
        if most is None:
            return found
        effect = _EFFECTS.get(self._kind, "see data.max_length")
        return replace(found, max_length=most, longer=int((array > most).sum()), effect=effect)

    def _labels(self, train: SplitFacts) -> LabelLook | None:
        if train.label_counts:
            what = "spans" if self._kind == "tagged texts" else "rows"
            alike = " ".join(alike_labels(train.label_counts)) or None
            return LabelLook("labels", what, tuple(train.label_counts.most_common()), False, alike)
        if not train.labels:
            return None
        texts = [LabeledText("", "", None, label) for label in train.labels]
        data = WeightedDataConfig.of(self._config)
        different = sum(len(labels) > 1 for labels in train.labels_of_text.values())
        try:
            labels = find_labels(texts, data, self._sources.train.name, self._columns.labels)
        except ConfigError as error:  # e.g. there is only one label
            counts = Counter(name for text in texts for name in text.labels)
            return LabelLook("labels", "rows", tuple(counts.most_common()), False, str(error), different)
        if labels.kind == "regression":
            train.scores.extend(number for label in train.labels if (number := number_of(label)) is not None)
            return LabelLook(labels.kind, "rows", (), False, " ".join(labels.notes), different)
        counts = Counter(name for text in texts for name in _names(labels, text))
        mapping = tuple((name, counts[name]) for name in labels.names)
        note = " ".join((*labels.notes, *alike_labels(labels.names)))
        return LabelLook(labels.kind, "rows", mapping, True, note, different)


def _cells(value: Any) -> dict[str, str]:
    """Returns the columns of a row as text, each cut to `SHOWN_CHARACTERS`."""
    columns = value if isinstance(value, dict) else {"text": value}
    texts = {
        str(name): cell if isinstance(cell, str) else json.dumps(cell, default=str) for name, cell in columns.items()
    }
    return {name: truncate(text, SHOWN_CHARACTERS) for name, text in texts.items()}


def _names(labels: Labels, text: LabeledText) -> list[str]:
    """Returns the names of the labels of a text; none if they are invalid, which the task reports."""
    try:
        return labels.names_in(text, labels.cells or LabelCells())
    except BadRowError:
        return []


def _json_line(row: Any) -> str:
    """Returns a row as a line of JSON, with escapes only if it has unpaired surrogates, which UTF-8 cannot encode."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return (text if is_text(text) else json.dumps(row, default=str)) + "\n"


def _scores(train: SplitFacts) -> ScoreLook | None:
    if not train.scores:
        return None
    values = np.array(train.scores)
    smallest, largest = float(values.min()), float(values.max())
    is_similarity = smallest >= -1 and largest <= 1
    scale = "already between -1 and 1" if is_similarity else f"from {smallest:g} to {largest:g}"
    return ScoreLook(smallest, float(np.median(values)), largest, scale)
