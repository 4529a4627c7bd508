"""Recognizes how a column writes its labels: one or several in a cell, 0/1 vectors, classes or measured numbers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sansgpu.config.wording import truncate
from sansgpu.data.forms.cells import DECIMAL_COMMA, parsed_text, with_point
from sansgpu.data.forms.label_columns import flag
from sansgpu.data.forms.labels import label_name

SEPARATORS = ("||", "|", ";", "\n", ",")  # between labels in a cell, in the order in which they are tried
MAX_NUMBER_CLASSES = 30  # up to this many distinct whole numbers are classes, however often each of them occurs
MAX_NUMBER = 1e300
MAX_LABEL_WORDS = 4  # longest label that a comma may separate from others
DENSE = 0.8  # numbers from 0 or 1 on are counted as gapless if at least this share of them occurs
# Rows per distinct number from which whole numbers are classes: those from 0 or 1 on without gaps, and others.
ROWS_OF_INDEX, ROWS_OF_CODE = 2, 5
MAX_DENSITY_OF_CODES = 0.5  # largest share of the numbers between the least and the largest code
MAX_RARE_CODES = 0.1  # largest share of codes that only one row has
MIN_LISTS = 0.5  # share of lists from which all cells of a column are read as lists
# Shares of 0/1 vectors of the same length from which others are invalid: of two numbers, and of more, which repeat one.
MIN_VECTORS, MIN_LONG_VECTORS = 0.9, 0.6
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_WRITTEN_NUMBER = re.compile(r"[+-]?\s?[$€£¥]?\s?\d+([.,]\d+)*\s?[%$€£¥]?|[+-]?inf(inity)?", re.IGNORECASE)
LEADING_ZERO = re.compile(r"-?0\d+")
MAX_ODD, MIN_NUMBERS = 0.4, 3  # share of other labels, and number of distinct numbers, up to and from which it is said
_BITS = re.compile(r"[01](\s*[,;|\s]\s*[01])+")


@dataclass(frozen=True)
class LabelCells:
    """How a column writes the labels of a row: a single one, a list of names, or a vector of zeros and ones."""

    kind: Literal["one", "list", "vector"] = "one"
    separator: str | None = None  # between the labels of a cell that is text
    width: int = 0  # numbers of a vector
    why: str = ""  # describes the labels, for messages

    def labels_of(self, value: Any) -> list[Any]:
        """Returns the labels of a cell, or the numbers of a vector."""
        if isinstance(value, list):
            return value
        if self.kind == "one" or not isinstance(value, str):
            return [value]
        if (found := listed(value)) is not None:
            return found
        if self.kind == "vector" and _BITS.fullmatch(value.strip()):
            return re.split(r"[,;|\s]+", value.strip())
        if self.separator is None:
            return [value]
        return [part for part in map(str.strip, value.split(self.separator)) if part]


def bit(value: Any) -> bool | None:
    """Returns a number of a vector of zeros and ones, or None if it is something else, such as a name."""
    return None if isinstance(value, str) and value.strip().isalpha() else flag(value)


def number_of(value: Any) -> float | None:
    """Converts a label that is a number, or text with one, to float; None if it is not a finite number."""
    if isinstance(value, str):
        text = with_point(value.strip())
        value = float(text) if _NUMBER.fullmatch(text) else None
    if value is None or isinstance(value, (bool, list)) or abs(value) > MAX_NUMBER:
        return None
    return float(value) if math.isfinite(value) else None


def listed(cell: str) -> list[Any] | None:
    """Returns the items of a list, tuple or set as Python, JSON, numpy or pandas write it; None for other text."""
    text = cell.strip()
    if text == "set()":
        return []
    value = parsed_text(text)
    if isinstance(value, (list, tuple, set)):
        return [item for item in value if item is not None]
    inner = text[1:-1].replace("\n", " ").strip()
    if text[:1] + text[-1:] != "[]" or "..." in inner or any(sign in inner for sign in "[]{}"):
        return None
    if quoted := re.findall(r"'([^']*)'|\"([^\"]*)\"", inner):  # other items are null
        return [one or other for one, other in quoted]
    return [part.strip() for part in (inner.split(",") if "," in inner else inner.split())]


def is_broken_list(value: Any) -> bool:
    return isinstance(value, str) and value.strip().startswith("[") and listed(value) is None


def recognize_cells(values: Sequence[Any], split: bool | None, separator: str | None) -> LabelCells:
    """Returns how a column writes the labels of its rows.

    `split` says whether a cell may hold several labels; None: if all cells agree. `separator` is the configured one.
    """
    if split is False:
        return LabelCells()
    if separator is not None:
        return LabelCells("list", separator, why=f"cells have several labels between {separator!r}")
    texts = [value for value in values if isinstance(value, str)]
    parsed = [found for value in texts if (found := listed(value)) is not None]
    lists = [value for value in values if isinstance(value, list)] + parsed
    if not lists and len(texts) == len(values) and all(_BITS.fullmatch(text.strip()) for text in texts):
        lists = [re.split(r"[,;|\s]+", text.strip()) for text in texts]
    if len(lists) > len(parsed) or (texts and len(lists) >= MIN_LISTS * len(texts)):
        return _vectors(lists) or LabelCells("list", why="labels are lists")
    between = _separator([text.strip() for text in texts], bool(split)) if len(texts) == len(values) else None
    if between is not None:
        return LabelCells("list", between, why=f"cells have several labels between {between!r}")
    return LabelCells("list" if split else "one", why=_unsplit([text.strip() for text in texts]))


def _unsplit(texts: Sequence[str]) -> str:
    """Describes labels that could be several, although not all cells agree on that; empty if there are none."""
    distinct = dict.fromkeys(texts)
    for separator in (*SEPARATORS, "/", "+", " "):
        for text in distinct:
            parts = [part.strip() for part in text.split(separator)]
            are_tags = all(part.startswith("#") for part in parts)
            if len(parts) > 1 and all(parts) and (are_tags or (separator != " " and distinct.keys() & {*parts})):
                return f"labels such as {truncate(text)!r} are read as one label"
    return ""


def _vectors(lists: Sequence[list[Any]]) -> LabelCells | None:
    """Returns the length of the vectors of zeros and ones that nearly all lists are, or None."""
    bits = Counter(len(value) for value in lists if len(value) > 1 and all(bit(v) is not None for v in value))
    width, count = bits.most_common(1)[0] if bits else (0, 0)
    filled = sum(len(value) > 0 for value in lists)
    least = MIN_VECTORS if width == 2 else MIN_LONG_VECTORS
    if width < 2 or count < least * filled or (width == 2 and filled < len(lists)):
        return None  # lists of two label ids are no vectors if other lists are empty
    return LabelCells("vector", width=width, why=f"labels are vectors of {width} zeros and ones")


def _separator(texts: Sequence[str], asked: bool) -> str | None:
    """Returns the text between the labels of cells that hold several, or None."""
    for separator in SEPARATORS:
        if any(separator in text for text in texts) and (asked or _is_separator(texts, separator)):
            return separator
    return None


def _is_separator(texts: Sequence[str], separator: str) -> bool:
    """Returns whether the parts of cells are labels: they are short, and occur in several combinations.

    Commas also occur in the names of classes ("Arts, Crafts") and in numbers, so more of their parts must recur.
    """
    trimmed = dict.fromkeys(text.strip(f"{separator} ") for text in texts)
    cells = {text: [part.strip() for part in text.split(separator)] for text in trimmed}
    if any(not part for parts in cells.values() for part in parts):
        return False
    if separator == "," and _are_decimals([*cells]):
        return False
    used, places = Counter[str](), defaultdict[str, set[object]](set)
    for parts in cells.values():
        used.update(set(parts))
        for place, part in enumerate(parts):
            places[part].add("alone" if len(parts) == 1 else place)
    combined = {part for parts in cells.values() if len(parts) > 1 for part in parts}
    recurring = [part for part in combined if used[part] > 1]
    if separator != ",":
        return bool(recurring)
    moves = any("alone" in places[part] or len(places[part]) > 1 for part in recurring)
    short = all(len(part.split()) <= MAX_LABEL_WORDS for part in combined)
    return moves and short and 2 * len(recurring) + all(map(str.isdigit, combined)) > len(combined)


def _are_decimals(cells: Sequence[str]) -> bool:
    """Returns whether cells are numbers with a decimal comma instead of several numbers of labels."""
    if not all(DECIMAL_COMMA.fullmatch(cell) or _NUMBER.fullmatch(cell) for cell in cells):
        return False
    pairs = [cell.split(",") for cell in cells if "," in cell]
    falls = any(int(whole) >= int(part) or LEADING_ZERO.match(part) for whole, part in pairs)
    return falls or len(pairs) == len(cells)


def unusual_number(values: Sequence[Any]) -> str | None:
    """Returns a label that is no plain number if most others are, or have a sign as in `45%`, `1,200` or `$5.50`."""
    distinct = dict.fromkeys(str(value).strip() for value in values)
    odd = [text for text in distinct if number_of(text) is None]
    written = [text for text in odd if _WRITTEN_NUMBER.fullmatch(text)]
    plain = len(distinct) - len(odd)
    if not odd or len(odd) - len(written) > MAX_ODD * len(distinct) or plain + len(written) < MIN_NUMBERS:
        return None
    return (written or odd)[0]


def numbers_kind(values: Sequence[Any]) -> tuple[Literal["single", "regression"], str] | None:
    """Returns what labels that are all numbers mean, with the reason; None if they are not all numbers."""
    numbers = [number_of(value) for value in values]
    if not numbers or any(number is None for number in numbers):
        return None
    counts = Counter(number for number in numbers if number is not None)
    distinct, rows = len(counts), len(numbers)
    names = len({label_name(value) for value in values})
    if codes := [value for value in values if isinstance(value, str) and LEADING_ZERO.fullmatch(value.strip())]:
        return "single", f"labels are codes such as {truncate(codes[0])!r}, so each of the {names} is a class"
    if any(not number.is_integer() for number in counts):
        return "regression", "labels are numbers with fractions, so the model predicts a number (regression)"
    what, classes = f"labels are {distinct} distinct whole numbers", "so each is a class"
    if distinct <= MAX_NUMBER_CLASSES:
        return "single", f"{what}, {classes}"
    low, span = min(counts), max(counts) - min(counts) + 1
    rare = sum(count == 1 for count in counts.values())
    is_index = low in (0, 1) and distinct >= DENSE * span and rows >= ROWS_OF_INDEX * distinct
    is_percentage = (low, max(counts)) == (0, 100)
    sparse = distinct < MAX_DENSITY_OF_CODES * span  # unlike ages, years and other measures
    is_code = sparse and rows >= ROWS_OF_CODE * distinct and rare <= MAX_RARE_CODES * distinct
    if is_code or (is_index and not is_percentage):
        return "single", f"{what}, each in {rows / distinct:.3g} rows on average, {classes}"
    return "regression", f"{what}, so the model predicts a number (regression)"
