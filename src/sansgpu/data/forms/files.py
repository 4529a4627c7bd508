"""Says how the local files of a dataset are read, and which of them are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sansgpu.config.data import DataConfig
from sansgpu.config.paths import BUILT_IN_NAMES, local_path
from sansgpu.config.wording import counted, truncate
from sansgpu.data.files import describe_file
from sansgpu.data.formats.names import CONVERT, TABLES, TEXT_SUFFIXES, file_form, split_of
from sansgpu.data.formats.opening import is_archive, suffix_of
from sansgpu.data.sources import files_below, is_saved_dataset, local_files, split_files
from sansgpu.data.tables import Columns


def file_notes(data: DataConfig, rows: str) -> list[str]:
    """Returns messages about how the files of the configured data are read. `rows` is a key of `FORMS`.

    Files in UTF-8 with the separator of their suffix need none. Raises ConfigError if a file cannot be read.
    """
    forms, text_rows = dict[str, list[Path]](), _has_text_rows(rows)
    for path in local_files(data, text_rows):
        if form := describe_file(path, Columns.of(data).format):
            forms.setdefault(form, []).append(path)
    notes = []
    for form, (first, *others) in forms.items():
        more = f" and {counted(len(others), 'other file')}" if others else ""
        keys = "data.separator and data.encoding change" if file_form(first) in TABLES else "data.encoding changes"
        notes.append(f"{first}{more}: read as {form}; {keys} this.")
    for name in filter(None, (data.dataset_name, data.validation_name)):
        root = local_path(name)
        has_files = root.is_dir() or (root.is_file() and is_archive(root))
        if name not in BUILT_IN_NAMES and has_files and not is_saved_dataset(root):
            notes += _folder_notes(root, text_rows)
    return notes


def _has_text_rows(rows: str) -> bool:
    if rows == "texts":
        return False
    from sansgpu.data.forms.registry import FORMS  # has much code that pretraining does not need

    return FORMS[rows].text_rows


def _folder_notes(root: Path, text_rows: bool) -> Iterator[str]:
    unread = [path for path in files_below(root) if file_form(path) is None and not path.name.startswith("_")]
    if unread:
        kinds = Counter(suffix_of(path) or "no suffix" for path in unread)
        listed = truncate(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()))
        yield f"{root}: {counted(len(unread), 'file')} left out ({listed}), e.g. {unread[0].name}; {CONVERT}."
    splits, named = split_files(root, text_rows)
    held = [path for path in splits["train"] if suffix_of(path) not in TEXT_SUFFIXES and split_of(path)]
    if held and not named:
        yield (
            f"{held[0]} is named after a split, but trained on, because no file is named train; rename the file to "
            "train on, or set data.dataset_name and data.validation_name."
        )
