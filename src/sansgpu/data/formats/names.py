"""What the names of files say: their format, and the split of a dataset that they hold."""

from __future__ import annotations

import re
from pathlib import Path

from sansgpu.data.documents.formats import DOCUMENT_SUFFIXES
from sansgpu.data.formats.columnar import ARROW
from sansgpu.data.formats.opening import ARCHIVE, BLOCK, COMPRESSIONS, open_bytes, suffix_of
from sansgpu.data.formats.spreadsheets import SPREADSHEETS

TEXT_SUFFIXES = (".txt", ".md", ".py", *DOCUMENT_SUFFIXES)
TABLES = (".csv", ".tsv", *SPREADSHEETS)
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".json", *TABLES, ".parquet", *ARROW, ".conll")
OTHER_SUFFIXES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
OTHER_SUFFIXES |= dict.fromkeys((".conllu", ".conllup", ".conllx", ".iob", ".iob2", ".bio"), ".conll")
CONVERT = f"save the data as one of {' '.join(SUFFIXES)}, each also with {' '.join(COMPRESSIONS)}, or in a .zip archive"

TRAIN_NAMES, VALIDATION_NAMES = ("train", "training"), ("validation", "valid", "val", "dev", "eval")
TEST_NAMES = ("test", "testing")
PARTS = {"train": TRAIN_NAMES, "validation": VALIDATION_NAMES, "test": TEST_NAMES}
_SPLITS = {name: part for part, names in PARTS.items() for name in names}
_SPARK_PART = re.compile(r"part-[\w-]+")  # a file that Spark wrote, e.g. part-00000
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def file_form(path: Path) -> str | None:
    """Returns the suffix of a file's format, without that of a compression; None if the format is not supported."""
    suffix = suffix_of(path)
    if not suffix and _SPARK_PART.fullmatch(path.stem if path.suffix.lower() in COMPRESSIONS else path.name):
        return _form_of_content(path)
    suffix = OTHER_SUFFIXES.get(suffix, suffix)
    return suffix if suffix in SUFFIXES else None


def _form_of_content(path: Path) -> str | None:
    """Returns the format of a file without a suffix: Parquet, JSON lines, or a table."""
    try:
        with open_bytes(path) as file:
            start = file.read(BLOCK)
    except OSError:
        return None  # whoever reads the file reports the error
    if start.startswith(b"PAR1"):
        return ".parquet"
    if start.lstrip().startswith(b"{"):
        return ".jsonl"
    first, _, _ = start.partition(b"\n")
    return ".tsv" if b"\t" in first else ".csv" if b"," in first or b";" in first else None


def split_of(path: Path) -> str | None:
    """Returns the split that a file's name says, train, validation or test; None if it says none.

    The first word says it or, except for code, any other, as in reviews_train.csv; the last of several counts.
    """
    first = re.split(r"[-_.]", path.name)[0].lower()
    if first in _SPLITS:
        return _SPLITS[first]
    if suffix_of(path) in (".md", ".py"):  # names of code, such as test.py, name no split
        return None
    found = [_SPLITS[word.lower()] for word in _WORD.findall(path.stem) if word.lower() in _SPLITS]
    return found[-1] if found else None


def folder_split(path: Path, root: Path) -> str | None:
    """Returns the split that the innermost folder or archive below `root` with the name of a split says, or None."""
    folders = [name.lower().removesuffix(ARCHIVE) for name in path.relative_to(root).parts[:-1]]
    return next((_SPLITS[name] for name in reversed(folders) if name in _SPLITS), None)
