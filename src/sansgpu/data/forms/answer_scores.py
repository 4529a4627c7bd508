"""Scores of a chosen and a rejected answer in columns of their own, which must agree with the choice."""

from __future__ import annotations

import math
from typing import Any

from sansgpu.data.rows import Row, SourceRow, bad_row

# As in ultrafeedback_binarized (score_chosen) and its cleaned version (chosen-rating).
_NAMES = ("score", "rating", "reward")
MARGIN = "margin"  # the score of the chosen answer minus that of the rejected one
EQUAL = "the scores of the chosen and the rejected answer are equal, but the pair is learned as it is"


def remark_on_scores(row: SourceRow) -> str | None:
    """Returns a remark if the scores of both answers are equal.

    Raises BadRowError if the rejected answer has the higher score, because learning it would teach the opposite.
    """
    found = _scores(row.value)
    if found is None:
        return None
    names, chosen, rejected = found
    if rejected > chosen:
        raise bad_row(
            row.where, f"has {names}, so its rejected answer is the better one; swap the answers, or remove the scores"
        )
    return EQUAL if rejected == chosen else None


def _scores(row: Row) -> tuple[str, float, float] | None:
    """Returns both scores and a text about them for messages; None if the row has no scores."""
    columns = {str(name).strip().casefold().replace("-", "_").replace(" ", "_"): name for name in row}
    for name in _NAMES:
        for keys in (f"chosen_{name}", f"rejected_{name}"), (f"{name}_chosen", f"{name}_rejected"):
            chosen, rejected = (_number(row.get(columns.get(key))) for key in keys)
            if chosen is not None and rejected is not None:
                return f"{columns[keys[0]]} {chosen:g} and {columns[keys[1]]} {rejected:g}", chosen, rejected
    margin = _number(row.get(columns.get(MARGIN)))
    return None if margin is None else (f"{columns[MARGIN]} {margin:g}", margin, 0.0)


def _number(value: Any) -> float | None:
    try:
        number = math.nan if value is None or isinstance(value, (bool, list, dict)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
