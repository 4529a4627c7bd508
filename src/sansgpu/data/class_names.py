"""Names of labels that Hugging Face's `datasets` stores as numbers (its feature ClassLabel)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ClassNames = dict[str, list[str]]  # the names of each column's classes


def class_names(features: Mapping[str, Any]) -> ClassNames:
    """Returns the names of each column of labels, or of lists of labels; `features` are as in `Features.to_dict`."""
    found = {column: _names(feature) for column, feature in features.items()}
    return {column: names for column, names in found.items() if names}


def parquet_class_names(metadata: Mapping[bytes, bytes] | None) -> ClassNames:
    """Returns the names of a Parquet file that `datasets` wrote; none for other files."""
    try:
        return class_names(json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def with_names(row: Mapping[str, Any], names: ClassNames) -> dict[str, Any]:
    """Returns a row with the names of its labels; None for -1, which means that there is no label."""
    named = {column: _by_name(row[column], own) for column, own in names.items() if column in row}
    return {**row, **named}


def _names(feature: Any) -> list[str]:
    inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
    return [str(name) for name in inner.get("names") or ()] if inner.get("_type") == "ClassLabel" else []


def _by_name(value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [_by_name(label, names) for label in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
