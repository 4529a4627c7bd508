"""A dataset on the Hub is downloaded only as far as it is read, survives network failures, and stays in the cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sansgpu.cli import run as cli
from sansgpu.config import DataConfig, UnreachableError
from sansgpu.data import hub_stream
from sansgpu.data.hub_stream import HubStream, open_stream
from tests.hub_server import Fault, Hub, connect, serving
from tests.processes import (
    TINY,
    Captured,
    digests,
    events_of,
    finish_apart,
    kill_when,
    options,
    start_apart,
    use_cache,
    write_rows,
)

ROWS, FILES = 120, 3
WORDS = ["north", "wind", "river", "stone", "house", "light", "paper", "metal", "field", "water", "cloud", "grass"]


def text_of(number: int) -> str:
    draw = random.Random(number)
    return " ".join(draw.choice(WORDS) for _ in range(60)) + f" {number}"


TEXTS = [text_of(number) for number in range(ROWS * FILES)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serves a dataset of 360 rows in three files; shards have about 10 rows."""
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    for number in range(FILES):
        rows = TEXTS[number * ROWS : (number + 1) * ROWS]
        table = pyarrow.table({"text": rows, "number": list(range(ROWS))})
        file = folder / "data" / f"train-{number:05d}-of-{FILES:05d}.parquet"
        pyarrow.parquet.write_table(table, file, row_group_size=20, compression="none")
    (folder / "README.md").write_text("---\nlicense: cc0-1.0\n---\n")
    use_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(hub_stream, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(hub_stream, "READ_RETRY_SECONDS", 0)
    monkeypatch.setattr(hub_stream, "SHARD_CHARS", 10 * len(TEXTS[0]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    served = Hub("org/corpus", folder)
    with serving(served) as address:
        connect(monkeypatch, address, tmp_path)
        yield served


def stream() -> HubStream:
    return open_stream("org/corpus", DataConfig(dataset_name="org/corpus"))


def faults(*given: Fault) -> Callable[[int], Fault]:
    return lambda number: given[number - 1] if number <= len(given) else None


def test_all_texts_are_read_in_order_and_then_from_the_cache(hub: Hub) -> None:
    assert list(stream().texts()) == TEXTS
    assert hub.sent < 2 * sum(file.stat().st_size for file in hub.files().values())
    before = hub.requests
    assert list(stream().texts()) == TEXTS
    assert hub.requests == before


def test_only_what_is_read_is_downloaded(hub: Hub) -> None:
    assert list(islice(stream().texts(), 25)) == TEXTS[:25]
    assert all(entry.startswith("data/train-00000") for entry in hub.downloads)
    begun = len(hub.downloads)
    assert list(islice(stream().texts(), ROWS + 25)) == TEXTS[: ROWS + 25]
    assert any(entry.startswith("data/train-00001") for entry in hub.downloads[begun:])
    assert not any(entry.startswith("data/train-00002") for entry in hub.downloads)


LONG = pytest.mark.long


@pytest.mark.parametrize("fault", ["cut", pytest.param("fail", marks=LONG), pytest.param("stall", marks=LONG)])
def test_texts_are_the_same_when_downloads_fail_and_are_repeated(hub: Hub, fault: Fault) -> None:
    hub.fault = faults(None, fault, None, None, fault)
    assert list(stream().texts()) == TEXTS


def test_what_was_downloaded_is_kept_when_the_hub_stops_answering(hub: Hub) -> None:
    opened = stream()
    assert list(islice(opened.texts(), 5)) == TEXTS[:5]
    hub.fault = lambda _: "gone"
    found = []
    with pytest.raises(
        UnreachableError, match=r"stopped answering after 1\d rows of org/corpus, which are kept .*again"
    ):
        found.extend(opened.texts())
    hub.fault = faults()
    assert list(stream().texts()) == TEXTS


def test_a_damaged_shard_is_downloaded_again(hub: Hub) -> None:
    opened = stream()
    assert list(opened.texts()) == TEXTS
    shard = opened.folder / "00003.parquet"
    shard.write_bytes(shard.read_bytes()[:-9] + b"123456789")
    assert list(stream().texts()) == TEXTS


def test_the_revision_stays_the_one_of_the_first_download(hub: Hub) -> None:
    assert next(stream().texts()) == TEXTS[0]
    hub.revision = "b" * 40
    assert stream().revision == "a" * 40


def arguments(run: Path, tokens: int, *more: str) -> list[str]:
    values = {**TINY, "data.dataset_name": "org/corpus", "data.streaming": True, "data.max_tokens": tokens}
    return ["train", *options(values), "--output-dir", str(run), "--max-steps", "6", *more]


def test_a_run_trains_on_the_first_tokens_and_resumes_without_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = tmp_path / "run"
    assert cli(arguments(run, 3000)) == 0
    [start] = events_of(run, "start")
    assert 2500 < start["train_tokens"] <= 3000
    assert not any(entry.startswith("data/train-00002") for entry in hub.downloads)
    connect(monkeypatch, "http://127.0.0.1:9", tmp_path)  # no server
    assert cli(["train", "--resume", "--output-dir", str(run), "--max-steps", "8"]) == 0
    assert events_of(run, "step")[-1]["step"] == 8
    capsys.readouterr()
    assert cli(arguments(tmp_path / "longer", 1_000_000)) == 2
    assert "run the same command again to continue, or lower data.max_tokens" in capsys.readouterr().err


def test_a_limit_in_bytes_bounds_the_download_and_what_is_cleaned(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of a local file with the same text."""
    repeated = [*TEXTS[:30], *TEXTS[:30], *TEXTS[60:]]
    table = pyarrow.table({"text": repeated[:ROWS], "number": list(range(ROWS))})
    pyarrow.parquet.write_table(table, hub.folder / "data" / f"train-00000-of-{FILES:05d}.parquet", row_group_size=20)
    limit = sum(map(len, repeated[:100])) / 1e9
    changes = {"data.max_tokens": "null", "data.max_gb": limit, "data.deduplicate": "exact"}
    run, local = tmp_path / "run", tmp_path / "local"
    assert cli(arguments(run, 0, *options(changes))) == 0
    assert events_of(run, "start")[0]["cleaning"] == ["data.deduplicate exact: 30 of 100 documents left out"]
    assert not any(entry.startswith("data/train-00001") for entry in hub.downloads)
    file = write_rows(tmp_path / "local.jsonl", ({"text": text} for text in repeated))
    assert cli(arguments(local, 0, *options({**changes, "data.streaming": False, "data.dataset_name": file}))) == 0
    assert digests(run) == digests(local)
    connect(monkeypatch, "http://127.0.0.1:9", tmp_path)  # no server
    assert cli(["train", "--resume", "--output-dir", str(run), "--max-steps", "8"]) == 0


@pytest.mark.long
def test_a_killed_download_continues_after_its_last_shard(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "other cache"
    hub.fault = lambda number: "stall" if number > 4 else None
    process = start_apart(arguments(tmp_path / "run", 1_000_000), cache)
    kill_when(process, lambda: len(hub.downloads) > 4)
    hub.fault = faults()
    code, _, error = finish_apart(arguments(tmp_path / "run", 1_000_000), cache)
    assert code == 0, error


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.max_tokens": None}, "data.streaming needs data.max_tokens or data.max_gb, so that the download ends"),
        ({"data.deduplicate": "near"}, "data.deduplicate reads all of the text before its first tokens are known"),
        ({"data.quality_model": "nowhere"}, "data.quality_model reads all of the text before"),
        ({"data.dataset_name": "python-stdlib"}, "data.streaming is for datasets on the Hugging Face Hub"),
        ({"data.dataset_name": "."}, "data.streaming is for datasets on the Hugging Face Hub, but . is here"),
        ({"data.dataset_name": "org/unknown"}, "org/unknown"),
        ({"data.text_column": "title"}, "title"),
        ({"task": "sft", "model.name_or_path": "nowhere"}, "data.streaming"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(
    hub: Hub, values: dict[str, object], message: str, tmp_path: Path, capsys: Captured
) -> None:
    changes = [
        part for key, value in values.items() for part in ("--set", f"{key}={'null' if value is None else value}")
    ]
    assert cli(arguments(tmp_path / "run", 3000, *changes)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
