"""Opens datasets: local files and folders, Hugging Face datasets, Python's standard library."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sansgpu.config import ARITHMETIC, PYTHON_STDLIB, PYTHON_STDLIB_CHAT, ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.config.errors import require
from sansgpu.config.paths import BUILT_IN_NAMES, local_path
from sansgpu.config.plain_data import unreadable
from sansgpu.data.built_in import library_files, stdlib_conversations, sums, sums_fingerprint
from sansgpu.data.documents.formats import format_of, readers
from sansgpu.data.files import PIECE_CHARS, Piece, describe_file, pieces, read_documents, read_rows, text_file_rows
from sansgpu.data.formats.names import (
    CONVERT,
    PARTS,
    TEXT_SUFFIXES,
    file_form,
    folder_split,
    split_of,
)
from sansgpu.data.formats.opening import archived_files, is_archive, sha256_of, size_of
from sansgpu.data.rows import SourceRow, class_names, is_conversation, row_text, with_names
from sansgpu.data.settings import CorpusDataConfig
from sansgpu.data.tables import Columns
from sansgpu.events.progress import ReportProgress, ignore_progress
from sansgpu.files.folders import entries_below
from sansgpu.files.reading import require_regular_file
from sansgpu.machine.hub import reading_hub

BYTES_PER_TOKEN = 4  # bytes of text per token, assumed before the text is tokenized


@dataclass(frozen=True)
class Source:
    """A corpus of documents or rows in a fixed order.

    `fingerprint` identifies its content. `notes` are messages about files that are left out.
    """

    name: str
    fingerprint: str
    size_bytes: int  # size of the files on disk, in total; 0 if unknown
    read: Callable[[], Iterator[Piece]]
    rows: Callable[[], Iterator[SourceRow]]
    files: Mapping[str, Path] = field(default_factory=dict)  # by path relative to the folder; empty for a Hub dataset
    notes: Sequence[str] = ()
    row_count: int = 0  # 0 if unknown before the rows are read


@dataclass(frozen=True)
class Sources:
    """The splits of a dataset; validation and test are optional."""

    train: Source
    validation: Source | None
    test: Source | None = None

    @property
    def notes(self) -> list[str]:
        """Messages about files that are left out, each with the name of its source."""
        parts = filter(None, (self.train, self.validation, self.test))
        return [f"{part.name}: {note}" for part in parts for note in part.notes]


def open_sources(data: DataConfig, text_rows: bool = False, progress: ReportProgress = ignore_progress) -> Sources:
    """Opens the configured training and validation data; see `open_parts`."""
    if isinstance(data, CorpusDataConfig) and data.streaming:
        sources = Sources(_streamed_source(data.dataset_name, data), None)
    else:
        sources = open_parts(data.dataset_name, data, text_rows, progress)
    if data.validation_name:
        return replace(sources, validation=open_single(data.validation_name, data, text_rows, progress))
    return sources


def open_single(
    name: str, data: DataConfig, text_rows: bool = False, progress: ReportProgress = ignore_progress
) -> Source:
    """Opens a dataset to evaluate on: its validation split, or all of it if it has none."""
    sources = open_parts(name, data, text_rows, progress)
    return sources.validation or sources.train


def has_conversations(name: str) -> bool:
    """Returns whether the first row of a dataset to evaluate on is a conversation."""
    source = open_single(name, DataConfig(dataset_name=name))
    try:
        first = next(source.rows(), None)
    except ConfigError:  # plain text, or a damaged file: reading that as text will raise the same error
        return False
    return first is not None and isinstance(first.value, dict) and is_conversation(first.value)


def open_parts(
    name: str, data: DataConfig, text_rows: bool = False, progress: ReportProgress = ignore_progress
) -> Sources:
    """Opens all splits of a dataset. Raises ConfigError if it does not exist.

    Documents are read at once, so that those that cannot be read are known; their text is cached.

    With `text_rows`, plain text files have rows, too: a file in a folder named after its label is one row with `text`
    and `label`, and in other text files each line is one row. Folders named train, validation and test that contain
    such label folders are splits.
    """
    if name == PYTHON_STDLIB:
        return Sources(_files_source(name, *library_files(), data), None)
    if name == PYTHON_STDLIB_CHAT:
        return Sources(_stdlib_chat(open_parts(PYTHON_STDLIB, data).train), None)
    if name == ARITHMETIC:
        return Sources(_arithmetic("train"), _arithmetic("validation"))
    path = local_path(name)
    if path.is_file() and not is_archive(path):
        if file_form(path) is None and Columns.of(data).tag is None:
            raise ConfigError(f"{path} has an unknown suffix; {CONVERT}.")
        labels = partial(_label, root=path.parent, depth=0) if text_rows else None
        return Sources(_files_source(name, path.parent, [path], data, labels, progress), None)
    if path.is_dir() or path.is_file():
        if is_saved_dataset(path):
            return _hub_sources(name, data, local=True)
        return _folder_sources(path, data, text_rows, progress)
    require_regular_file(path)
    if path.is_absolute() or name.startswith((".", "~")) or file_form(path) is not None:
        raise ConfigError(f"{name} does not exist; give a file, a folder or a dataset on the Hub.")
    return _hub_sources(name, data, local=False)


def _stdlib_chat(library: Source) -> Source:
    """Returns a source whose rows are questions and answers about the standard library; its text is the modules."""

    fingerprint = files_fingerprint(library.files, (PYTHON_STDLIB_CHAT,))
    rows = partial(stdlib_conversations, library.files)  # far smaller than the files, so size_bytes is unknown
    return replace(library, name=PYTHON_STDLIB_CHAT, fingerprint=fingerprint, size_bytes=0, rows=rows)


def _arithmetic(part: str) -> Source:
    name, digest = _title(ARITHMETIC, part), hashlib.sha256(sums_fingerprint(part).encode()).hexdigest()

    def read() -> Iterator[Piece]:
        raise ConfigError(f"{name} has prompts with answers, not documents; choose a different dataset.")

    return Source(name, digest, 0, read, partial(sums, part))


def local_files(data: DataConfig, text_rows: bool = False) -> list[Path]:
    """Returns the local files of the configured training and validation data, except Hugging Face datasets."""
    found: list[Path] = []
    for name in filter(None, (data.dataset_name, data.validation_name)):
        path = local_path(name)
        if name in BUILT_IN_NAMES:
            continue
        if path.is_file() and not is_archive(path):
            found.append(path)
        elif path.exists() and not is_saved_dataset(path):
            splits, _ = split_files(path, text_rows)
            found += [*splits["train"], *splits["validation"]]
    return found


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()


def split_files(root: Path, text_rows: bool) -> tuple[dict[str, list[Path]], bool]:
    """Returns the files of each split, and whether names decide the splits, which they do if any is "train"."""
    files = dataset_files(root)
    parts = {path: named_split(path, root, text_rows) for path in files}
    if "train" not in parts.values():
        return {"train": files, "validation": [], "test": []}, False
    return {part: [path for path in files if (parts[path] or "train") == part] for part in PARTS}, True


def named_split(path: Path, root: Path, text_rows: bool) -> str | None:
    """Returns the split that the name of a file or of its folders says, or None."""
    if text_rows and _is_text(path):
        return _split_folder(path, root)
    return split_of(path) or (None if _is_text(path) else folder_split(path, root))


def _folder_sources(root: Path, data: DataConfig, text_rows: bool, progress: ReportProgress) -> Sources:
    """Opens all files below `root`, as splits if their names say so."""
    splits, named = split_files(root, text_rows)
    labels = partial(_label, root=root, depth=int(named)) if text_rows else None
    sources = {
        part: _files_source(_title(str(root), part), root, files, data, labels, progress)
        for part, files in splits.items()
        if files
    }
    return Sources(sources["train"], sources.get("validation"), sources.get("test"))


def dataset_files(root: Path) -> list[Path]:
    """Returns the files below a folder or in an archive with a supported suffix, sorted, except hidden ones.

    Raises ConfigError if there are none.
    """
    files = [path for path in files_below(root) if file_form(path)]
    if not files:
        raise ConfigError(f"{root} has no file with a supported suffix; {CONVERT}.")
    return files


def files_below(root: Path) -> list[Path]:
    """Returns all files below a folder, and those in archives, sorted, except hidden ones."""
    if is_archive(root) and root.is_file():
        return archived_files(root)
    found: list[Path] = []
    for path in sorted(entries_below(root)):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            found += archived_files(path) if is_archive(path) else [path]
    return found


def _title(name: str, part: str) -> str:
    return name if part == "train" else f"{name} ({part})"


def _is_text(path: Path) -> bool:
    return file_form(path) in TEXT_SUFFIXES


def _split_folder(path: Path, root: Path) -> str | None:
    """Returns the split of the top folder of a file that is also in a label folder: "train" for train/spam/1.txt."""
    folders = path.relative_to(root).parts[:-1]
    return next((part for part, names in PARTS.items() if len(folders) > 1 and folders[0].lower() in names), None)


def _label(path: Path, root: Path, depth: int) -> str | None:
    """Returns the file's label: the name of its folder at `depth` below `root`, or None if it has none."""
    folders = path.relative_to(root).parts[:-1]
    return folders[depth] if len(folders) > depth else None


def _files_source(
    name: str,
    root: Path,
    files: list[Path],
    data: DataConfig,
    label_of: Callable[[Path], str | None] | None = None,
    progress: ReportProgress = ignore_progress,
) -> Source:
    """Opens files as one source.

    Text files have rows only with `label_of`: one row per file if it returns a label, one per line if None. Documents,
    and text files without a label such as README.md, have none beside files with rows.
    """
    notes, sizes = list[str](), dict[Path, int]()
    if any(map(format_of, files)):
        from sansgpu.data.documents.collection import readable_files  # most runs read no documents

        files, notes, sizes = readable_files(files, progress)
    columns = Columns.of(data)
    header, tag_column, configured = columns.has_header, columns.tag, columns.format
    rowless = frozenset[Path]()
    if not all(map(_is_text, files)) and tag_column is None:
        texts = (path for path in files if _is_text(path) and not (label_of is not None and label_of(path)))
        rowless = frozenset(sizes).union(texts)
    named = {str(path.relative_to(root)): path for path in files}
    settings = (*([] if header else ["no header"]), *([] if tag_column is None else [tag_column]))
    if name != PYTHON_STDLIB:
        settings += *configured.settings, *filter(None, (describe_file(path, configured) for path in files))
    settings += (*readers(files),)
    fingerprint = files_fingerprint(named, (data.text_column, PIECE_CHARS, *settings))

    def read() -> Iterator[Piece]:
        for path in files:
            yield from read_documents(path, data.text_column, name == PYTHON_STDLIB, header, configured)

    def rows() -> Iterator[SourceRow]:
        if rowless:
            from sansgpu.data.documents.collection import warn_of_left_out

            warn_of_left_out(rowless)
        for path in (path for path in files if path not in rowless):
            if label_of is not None and _is_text(path):
                column = "text" if data.text_column is None else data.text_column
                yield from text_file_rows(path, label_of(path), column, configured.encoding)
            else:
                yield from read_rows(path, header, tag_column, configured)

    size = sum(sizes[path] if path in sizes else size_of(path) for path in files)
    return Source(name, fingerprint, size, read, rows, named, notes)


def files_fingerprint(files: Mapping[str, Path], settings: tuple[Any, ...]) -> str:
    """Returns a SHA-256 of the files' names and contents, and of the settings that affect how they are read.

    Raises ConfigError if a file cannot be read.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for name, path in files.items():
        try:
            digest.update(os.fsencode(f"{name}\0{sha256_of(path)}"))
        except OSError as error:
            raise unreadable(path, error) from None
    return digest.hexdigest()


def _hub_sources(name: str, data: DataConfig, local: bool) -> Sources:
    here = "" if local else " is not a file or folder here, and reading it from the Hugging Face Hub"
    require(f'dataset "{name}"{here}', "datasets")
    import datasets  # slow to import, and local files do not need it

    from sansgpu.data.hub_stream import explained, load_from_hub  # imports the Hub's client, which is slow

    datasets.disable_progress_bars()
    with explained(name, local):
        if local:
            loaded: Any = datasets.load_from_disk(name)
        else:
            with reading_hub():
                loaded = load_from_hub(name, data.dataset_config, data.cache_dir)
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    named = {part: next((splits[n] for n in names if n in splits), None) for part, names in PARTS.items()}
    if named["train"] is None:
        raise ConfigError(
            f"{name} has no training split, only {', '.join(splits)}; save the split to train on as a file, and set "
            "data.dataset_name to it."
        )
    sources = {
        part: _dataset_source(_title(name, part), split, data.text_column)
        for part, split in named.items()
        if split is not None
    }
    return Sources(sources["train"], sources.get("validation"), sources.get("test"))


def _streamed_source(name: str, data: DataConfig) -> Source:
    """Opens the training split of a dataset on the Hub, which is downloaded as far as it is read.

    Raises ConfigError if `name` is not on the Hub.
    """
    if name in BUILT_IN_NAMES or local_path(name).exists():
        raise ConfigError(
            f"data.streaming is for datasets on the Hugging Face Hub, but {name} is here; set it to false."
        )
    require(f'dataset "{name}" on the Hugging Face Hub', "datasets")
    from sansgpu.data.hub_stream import explained, open_stream  # imports the Hub's client, which is slow

    with explained(name, local=False):
        stream = open_stream(name, data)

    def read() -> Iterator[Piece]:
        for text in stream.texts():
            yield from pieces(text)

    def rows() -> Iterator[SourceRow]:
        for number, text in enumerate(stream.texts(), 1):
            yield SourceRow(f"{name}, row {number}", {"text": text})

    parts = (name, data.dataset_config, stream.revision, data.text_column, PIECE_CHARS)
    return Source(name, hashlib.sha256(repr(parts).encode()).hexdigest(), 0, read, rows)


def _dataset_source(name: str, dataset: Any, column: str | int | None) -> Source:
    def read() -> Iterator[Piece]:
        for number, row in enumerate(dataset, 1):
            yield from pieces(row_text(row, column, f"{name}, row {number}"))

    def rows() -> Iterator[SourceRow]:
        names = class_names(dataset.features.to_dict())
        for number, row in enumerate(dataset, 1):
            yield SourceRow(f"{name}, row {number}", with_names(row, names))

    fingerprint = hashlib.sha256(repr((dataset._fingerprint, column, PIECE_CHARS)).encode()).hexdigest()
    return Source(name, fingerprint, int(dataset.size_in_bytes or 0), read, rows, row_count=len(dataset))
