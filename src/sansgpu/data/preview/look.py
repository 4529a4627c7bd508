"""What `sansgpu data` finds out about a dataset: plain data, for the terminal, JSON and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sansgpu.data.preview.example import Parts


@dataclass(frozen=True)
class RowExample:
    """A row as the model learns it, or the `problem` because of which it is left out."""

    row: int  # its number in its split, from 1
    where: str
    reason: str  # why it is shown, e.g. "the longest"
    form: str = ""
    parts: Parts = ()
    problem: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """Rows that cannot be read for the same reason. `first` is the message about the first of them."""

    rows: int
    first: str


@dataclass(frozen=True)
class SplitLook:
    """The rows of one split."""

    name: str
    part: str  # training or validation
    rows: int
    usable: int
    forms: Mapping[str, int]  # columns of each form, and the number of its rows
    used: Mapping[str, int]  # columns, and the number of rows that have them
    not_used: Mapping[str, int]
    left_out: tuple[LeftOut, ...]
    problem: str | None  # error that ended reading early
    is_whole: bool  # False: only the first rows were read
    bad_rows: int = 0  # invalid ones among those that are left out
    max_bad_rows: float | None = None  # set if more rows are invalid than it allows, so that a run stops
    source_rows: int = 0  # rows of the files, of which each may hold several rows, or several make one


@dataclass(frozen=True)
class Repetition:
    """Rows of the training data that repeat an earlier one, and validation rows that repeat a training row."""

    equal: int
    nearly: int  # without those that are equal
    validation_equal: int | None  # None: the data have no validation part
    validation_nearly: int | None


@dataclass(frozen=True)
class LengthLook:
    """Lengths of training examples. `bins` has (longest length of the bin, examples in it)."""

    unit: str  # tokens, words or characters
    examples: int  # measured; a sample if there are many rows
    shortest: int
    median: int
    longest: int
    bins: tuple[tuple[int, int], ...]
    max_length: int | None = None  # data.max_length, in tokens
    longer: int = 0  # examples longer than that
    effect: str = ""  # what happens to them
    learned_share: float | None = None  # targets / all of the unit; None: the task has none


@dataclass(frozen=True)
class LabelLook:
    """Labels, entities or tags. `mapping` has the class that each label becomes, in order, with its number of rows."""

    kind: str
    counted: str  # what the numbers count: rows or spans
    mapping: tuple[tuple[str, int], ...]
    numbered: bool  # True: the place of a label is its class
    note: str | None
    different: int = 0  # texts that occur with different labels


@dataclass(frozen=True)
class ScoreLook:
    """Scores or numbers to predict, over training rows."""

    smallest: float
    median: float
    largest: float
    scale: str  # in words


@dataclass(frozen=True)
class AnswerLook:
    """Answers that the model learns to give. `repeated` has the most frequent ones that occur more than once."""

    answers: int
    empty: int
    distinct: int
    repeated: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DataLook:
    """All facts about a dataset."""

    data: str
    task: str
    task_is_guessed: bool
    other_tasks: Mapping[str, str]  # tasks that read the rows, too, and the form that they see
    model: str | None
    notes: tuple[str, ...]
    splits: tuple[SplitLook, ...]
    held_out: float | None  # share of the rows that training will hold out; None: there are validation data
    repetition: Repetition | None = None
    lengths: LengthLook | None = None
    labels: LabelLook | None = None
    scores: ScoreLook | None = None
    answers: AnswerLook | None = None
    scripts: Mapping[str, float] | None = None  # share of the letters
    examples: tuple[RowExample, ...] = ()
    rows: tuple[Mapping[str, str], ...] = ()  # some training rows as the files have them, with long values cut
