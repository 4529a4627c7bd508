"""Refuses local tasks that would run code, or read data in other ways than from files that contain only data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as READERS
from lm_eval.api.registry import metric_registry

from sansgpu.config import ConfigError
from sansgpu.config.wording import shown, truncate
from sansgpu.files.reading import require_regular_file

ALLOW = "pass --trust-remote-code if you trust it"
# Readers of `datasets` for files that contain only text and numbers. Others read pickles, or connect to a database
# through a class that the options name.
SAFE_READERS = ("arrow", "csv", "json", "parquet", "text")
# Options of `datasets.load_dataset` and of these readers. Others, e.g. storage_options, choose code that reads files.
SAFE_OPTIONS = (
    "column_names", "columns", "data_dir", "data_files", "delimiter", "encoding", "field", "header", "keep_linebreaks",
    "names", "quotechar", "revision", "sample_by", "sep", "skiprows", "streaming", "trust_remote_code", "usecols",
)  # fmt: skip
_OTHER_ADDRESS = re.compile(r"(?!hf://)\w{2,}:/|.*::")  # schemes and chains of fsspec, e.g. http://, reference::


def require_no_code(file: Path, values: Any) -> None:
    """Raises ConfigError if a task names code other than by !function.

    A group can override any value of its members, so values are checked wherever they are.
    """
    if isinstance(values, list):
        for value in values:
            require_no_code(file, value)
    if not isinstance(values, dict):
        return
    if values.get("use_prompt") is not None:
        raise ConfigError(f"{file} loads prompts of other packages or files with use_prompt; {ALLOW}.")
    _require_known_metrics(file, values.get("metric_list"))
    _require_data_only(file, values)
    for key, value in values.items():
        if key != "dataset_kwargs":
            require_no_code(file, value)


def _require_known_metrics(file: Path, metrics: Any) -> None:
    for metric in metrics if isinstance(metrics, list) else []:
        name = metric.get("metric") if isinstance(metric, dict) else None
        if name is not None and (name not in metric_registry or metric.get("hf_evaluate")):
            raise ConfigError(
                f"{file}: {truncate(str(name))} is not a metric of lm-evaluation-harness ({', '.join(metric_registry)})"
                f", and others are Python code that `evaluate` loads; {ALLOW}."
            )


def _require_data_only(file: Path, values: dict[str, Any]) -> None:
    """Raises ConfigError if the data of a task would be read by a reader that may run code."""
    reader, options = values.get("dataset_path"), values.get("dataset_kwargs") or {}
    if reader is not None and not isinstance(reader, str):
        raise ConfigError(f"{file}: dataset_path is {shown(reader)}, but must be a name or a path.")
    if reader in READERS and reader not in SAFE_READERS:
        raise ConfigError(
            f"{file}: dataset_path {reader} may run code in the data; convert the data to JSON, or {ALLOW}."
        )
    if not isinstance(options, dict):
        raise ConfigError(f"{file}: dataset_kwargs is {shown(options)}, but must have keys and values.")
    if other := next((key for key in options if key not in SAFE_OPTIONS), None):
        raise ConfigError(
            f"{file}: dataset_kwargs has {shown(other)}, but only {', '.join(SAFE_OPTIONS)} are known to run no code; "
            f"remove it, or {ALLOW}."
        )
    for path in _texts([reader, options.get("data_files"), options.get("data_dir")]):
        if _OTHER_ADDRESS.match(path):
            raise ConfigError(
                f"{file} reads data from {truncate(path)}, but only folders and the Hub (hf://) are known to run no "
                f"code and to contact nobody else; {ALLOW}."
            )
        require_regular_file(Path(path))
        require_regular_file(file.parent / path)


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in nested lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
