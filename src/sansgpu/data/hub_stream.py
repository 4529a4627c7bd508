"""The text of a dataset on the Hugging Face Hub, of which only as much is downloaded as is read.

The text is kept in a folder of the cache, in Parquet files (shards) of about SHARD_CHARS characters. Beside each is a
JSON file with its SHA-256 and the position in the dataset at its end. It is written last, so a shard is complete if
both exist, and the download goes on after the last complete one. The folder also records the dataset's revision, so
that a dataset that changes on the Hub does not change the data of a run.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from sansgpu.config import ConfigError, SansGPUError, UnreachableError
from sansgpu.config.data import DataConfig
from sansgpu.config.wording import counted, first_line, truncate
from sansgpu.data.rows import row_text
from sansgpu.files.atomic import PRIVATE_MODE, atomic_write, make_folder, write_failures_as, write_text
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.hub import is_unreachable, reading_hub, why_unread
from sansgpu.machine.hub.client import HUB

SHARD_CHARS = 4 << 20
ATTEMPTS = 4  # downloads of a shard before giving up
RETRY_SECONDS = 2.0  # pause before the second attempt; doubled before each further one
READ_RETRIES = 3  # attempts of `datasets` to read a part of a file
READ_RETRY_SECONDS = 1


@dataclass(frozen=True)
class Shard:
    """A complete shard: its texts, and the position in the dataset after them."""

    texts: list[str]
    state: dict[str, Any]  # what `load_state_dict` of datasets.IterableDataset needs to continue there
    is_last: bool


@dataclass(frozen=True)
class HubStream:
    """The training split of a dataset on the Hub at a fixed revision."""

    name: str
    subset: str | None
    column: str | int | None
    revision: str
    folder: Path

    def texts(self) -> Iterator[str]:
        """Yields the text of each row, downloading what is not in the cache.

        Raises UnreachableError if the Hub stops answering. What was downloaded until then is kept.
        """
        number, state, rows = 0, None, 0
        downloads: Iterator[Shard] | None = None
        while True:
            cached = self._cached(number)
            shard, downloads = (cached, None) if cached else self._download(number, state, rows, downloads)
            yield from shard.texts
            if shard.is_last:
                return
            number, state, rows = number + 1, shard.state, rows + len(shard.texts)

    def _files(self, number: int) -> tuple[Path, Path]:
        return self.folder / f"{number:05d}.parquet", self.folder / f"{number:05d}.json"

    def _cached(self, number: int) -> Shard | None:
        """Returns a shard from the cache, or None if it is missing or damaged."""
        import pyarrow.parquet

        file, record = self._files(number)
        try:
            facts, content = json.loads(record.read_text(encoding="utf-8")), file.read_bytes()
        except (OSError, ValueError):
            return None
        if hashlib.sha256(content).hexdigest() != facts["sha256"]:
            return None
        texts = pyarrow.parquet.read_table(io.BytesIO(content)).column("text").to_pylist()
        return Shard(texts, facts["state"], facts["is_last"])

    def _download(
        self, number: int, state: dict[str, Any] | None, rows: int, downloads: Iterator[Shard] | None
    ) -> tuple[Shard, Iterator[Shard] | None]:
        """Downloads the shard after `rows` rows, unless another process just did.

        `downloads` yields this shard next; if it is None, the dataset is opened at `state`. Also returns the iterator
        that yields the shard after this one, or None if the dataset must be opened again.
        """
        with FileLock(self.folder / "download.lock"):
            if shard := self._cached(number):
                return shard, None
            for attempt in range(ATTEMPTS):
                if attempt:
                    time.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
                try:
                    downloads = downloads or self._shards(state, rows)
                    with _few_retries():
                        shard = next(downloads)
                    break
                except SansGPUError:
                    raise
                except Exception as error:  # several libraries raise their own classes when the network fails
                    problem, downloads = error, None
            else:
                raise UnreachableError(
                    f"the Hub stopped answering after {counted(rows, 'row')} of {self.name}, which are kept "
                    f"({first_line(problem)}); run the same command again to continue, or lower data.max_tokens or "
                    "data.max_gb."
                )
            self._keep(number, shard)
            return shard, downloads

    def _shards(self, state: dict[str, Any] | None, rows: int) -> Iterator[Shard]:
        """Yields the shards after `rows` rows.

        They come from one open stream, because opening it at `state` reads the file at that position from its start.
        """
        with reading_hub():
            stream = _training_split(self.name, self.subset, self.revision)
        if state is not None:
            stream.load_state_dict(state)
        texts: list[str] = []
        size = 0
        for number, row in enumerate(stream, rows + 1):
            texts.append(row_text(row, self.column, f"{self.name}, row {number}"))
            size += len(texts[-1])
            if size >= SHARD_CHARS:
                yield Shard(texts, stream.state_dict(), is_last=False)
                texts, size = [], 0
        yield Shard(texts, {}, is_last=True)

    def _keep(self, number: int, shard: Shard) -> None:
        import pyarrow
        import pyarrow.parquet

        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": shard.texts}), content, compression="zstd")
        file, record = self._files(number)
        with atomic_write(file) as partial:
            partial.write_bytes(content.getvalue())
        facts = {"sha256": hashlib.sha256(content.getvalue()).hexdigest(), "state": shard.state}
        write_text(record, json.dumps({**facts, "is_last": shard.is_last}))


def open_stream(name: str, data: DataConfig) -> HubStream:
    """Opens a dataset on the Hub. Its revision is the one of the first download, or the latest if there was none.

    Raises exceptions of the Hub's client if the dataset does not exist or the Hub cannot be reached.
    """
    key = hashlib.sha256(repr((name, data.dataset_config, data.text_column, SHARD_CHARS)).encode()).hexdigest()[:32]
    folder = cache_dir(data.cache_dir) / "streams" / key
    with write_failures_as(ConfigError, folder, "data.cache_dir"):
        make_folder(folder, PRIVATE_MODE)
    record = folder / "revision.txt"
    if not record.is_file():
        from huggingface_hub import HfApi

        with reading_hub():
            revision = HfApi().dataset_info(name).sha
            _training_split(name, data.dataset_config, revision)  # raises an exception if there is none
        with write_failures_as(ConfigError, record, "data.cache_dir"):
            write_text(record, str(revision))
    revision = record.read_text(encoding="utf-8").strip()
    return HubStream(name, data.dataset_config, data.text_column, revision, folder)


CONVERTED = "refs/convert/parquet"  # the branch in which the Hub stores many datasets with a script as Parquet files
_NO_SCRIPTS = "scripts are no longer supported"  # in the message of `datasets` about a dataset with a script
_NOT_CACHED = "Couldn't find cache for"


def load_from_hub(name: str, subset: str | None, cache: str | None) -> Any:
    """Loads a dataset on the Hub. One with a script, which cannot be run, is read from the Hub's conversion of it.

    Raises ConfigError if there is no conversion, and exceptions of `datasets` and the Hub's client.
    """
    import datasets

    try:
        return datasets.load_dataset(name, subset, cache_dir=cache)
    except (RuntimeError, ValueError) as error:
        # Once the conversion of a script is in its cache, `datasets` only says that it finds nothing else there.
        is_cached = _NOT_CACHED in str(error) and bool(_converted_entries(name, ""))
        if _NO_SCRIPTS not in str(error) and not is_cached:
            raise
    files = _converted_files(name, subset)
    HUB.report(f"{name} is a Python script, which is not run, so the Hub's conversion of it is read ({CONVERTED}).")
    return datasets.load_dataset(name, data_files=files, revision=CONVERTED, cache_dir=cache)


def _converted_files(name: str, subset: str | None) -> dict[str, list[str]]:
    """Returns the files of each split of a subset in the Hub's conversion of a dataset. Raises ConfigError."""
    folders = _converted_entries(name, "")
    if not folders:
        raise ConfigError(
            f"{name} is a Python script, which is not run, and the Hub has no conversion of it to Parquet (branch "
            f"{CONVERTED}); choose another repository with the same data in .parquet or .jsonl files."
        )
    chosen = folders[0] if subset is None and len(folders) == 1 else subset
    if chosen not in folders:
        raise ConfigError(
            f"{name} has the parts {truncate(', '.join(folders))}; set data.dataset_config to one of them."
        )
    splits = {split.rpartition("/")[2].removeprefix("partial-"): split for split in _converted_entries(name, chosen)}
    return {split: _converted_entries(name, folder) for split, folder in splits.items()}


def _converted_entries(name: str, folder: str) -> list[str]:
    """Returns the paths of the folders, or else the Parquet files, in a folder of the conversion of a dataset."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoFolder

    try:
        found = list(HfApi().list_repo_tree(name, folder or None, revision=CONVERTED, repo_type="dataset"))
    except HfHubHTTPError:
        if HUB.problem:
            raise
        return []  # there is no such branch
    folders = [entry.path for entry in found if isinstance(entry, RepoFolder)]
    return folders or [entry.path for entry in found if entry.path.endswith(".parquet")]


def _training_split(name: str, subset: str | None, revision: str | None) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(name, subset, split="train", revision=revision, streaming=True)


@contextmanager
def _few_retries() -> Iterator[None]:
    """Context in which `datasets` soon gives up reading, because a shard is retried as a whole."""
    import datasets.config

    before = datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL
    try:
        datasets.config.STREAMING_READ_MAX_RETRIES = READ_RETRIES
        datasets.config.STREAMING_READ_RETRY_INTERVAL = READ_RETRY_SECONDS
        yield
    finally:
        datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = before


@contextmanager
def explained(name: str, local: bool) -> Iterator[None]:
    """Converts exceptions of `datasets` and of the Hub's client to a ConfigError."""
    import datasets
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if not local and name in _PACKAGED_DATASETS_MODULES:  # it would read all files of the current folder
        raise ConfigError(
            f"{name} is a file format of `datasets`; set data.dataset_name to a file, a folder or a dataset."
        )
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = first_line(error)
        if "scripts are no longer supported" in reason:  # a stream of a dataset with a script
            raise ConfigError(
                f"{name} is a Python script, which is not run, and data.streaming cannot read the Hub's conversion of "
                "it; set it to false, or choose another repository with the data in .parquet files."
            ) from None
        answered = isinstance(error, datasets.exceptions.DatasetsError)  # e.g. the Hub has no dataset of this name
        if not local and not answered and is_unreachable(error):
            raise UnreachableError(
                f'dataset "{name}" was not found: no such file or folder, and {why_unread(reason)}; '
                "correct the name, or download the dataset and set data.dataset_name to its folder"
            ) from None
        raise ConfigError(
            f"{name} is not a local path, and loading it as a Hugging Face dataset failed ({reason}); correct the "
            "name, or set data.dataset_name to a file or folder."
        ) from None
