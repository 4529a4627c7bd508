"""Commands say what is wrong with the Hub, the token or the proxy, and read public models without a wrong token."""

from __future__ import annotations

import os
import re
import shutil
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.data.sources import open_sources
from sansgpu.machine.hub.client import HUB, told_wait
from tests import processes
from tests.hub_server import Hub, connect, serving
from tests.processes import ended, fork_server, messages, options, use_cache
from tests.tasks.folders import model_folder

NAME = "someone/tiny"
NOBODY = "127.0.0.1:9"  # the port of the discard service, where nobody listens


def generate(tmp_path: Path, endpoint: str, model: str = NAME, **variables: str) -> tuple[int, list[str], list[str]]:
    """Runs the command in a fork, which reads the Hub's variables; returns exit code, warnings and other messages."""
    usual = {key: value for key, value in os.environ.items() if not re.search("(?i)proxy|^HF_", key)}
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "SANSGPU_CACHE": str(tmp_path / "cache")}
    command = ["generate", model, "--prompt", "red", "--max-new-tokens", "2"]
    code, _, error = ended(fork_server().start(command, usual | own | variables))
    return code, re.findall("warning: .*", error), messages(error)


def test_a_public_model_is_read_without_a_rejected_token(tmp_path: Path) -> None:
    hub = Hub(NAME, model_folder("qwen2"), kind="models", rejects_tokens=True)
    with serving(hub) as address:
        code, warnings, errors = generate(tmp_path, address, HF_TOKEN="hf_wrong")
    assert (code, errors) == (0, [])
    assert warnings == [
        "warning: the Hub rejects the token in HF_TOKEN, so only public repositories can be read; correct it, or run "
        "`hf auth login`."
    ]


def test_a_proxy_that_does_not_answer_is_named_soon(tmp_path: Path) -> None:
    start = time.monotonic()
    code, _, (error,) = generate(tmp_path, "http://hub.invalid", http_proxy=f"http://{NOBODY}")
    assert code == 2
    assert "the Hub is unreachable ([Errno 111] Connection refused), and it is not in the cache" in error
    assert time.monotonic() - start < 60  # with the repetitions of the library, it was a minute more than the imports


@pytest.mark.skipif(find_spec("socksio") is not None, reason="the package for SOCKS proxies is installed")
@pytest.mark.parametrize("model", [NAME, pytest.param("", marks=pytest.mark.long)])
def test_a_socks_proxy_needs_a_package_only_if_the_network_is_used(tmp_path: Path, model: str) -> None:
    target = model or str(model_folder("qwen2"))
    code, warnings, errors = generate(tmp_path, "http://hub.invalid", target, ALL_PROXY=f"socks5://{NOBODY}")
    if model:
        assert code == 2
        assert "needs the package socksio; run `pip install socksio`" in errors[0]
    else:
        assert (code, warnings, errors) == (0, [], [])


@pytest.mark.parametrize(("status", "phrase"), [(500, "Internal Server Error"), (429, "Too Many Requests")])
def test_a_hub_that_answers_with_errors_is_asked_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, phrase: str
) -> None:
    monkeypatch.setattr("sansgpu.machine.hub.client.PATIENCE_SECONDS", 2.0)
    use_cache(monkeypatch, tmp_path / "cache")
    with serving(Hub("someone/data", tmp_path, status=status)) as address:
        connect(monkeypatch, address, tmp_path)
        given = {**processes.TINY, "data.dataset_name": "someone/data", "training.max_steps": 3}
        assert cli(["train", *options(given), "--output-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"warning: the Hub answers {status} ({phrase}); trying again for up to 2 seconds." in error
    assert f'dataset "someone/data" was not found: no such file or folder, and the Hub answers {status}' in error


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Collects what the Hub's client tells the user."""
    use_cache(monkeypatch, tmp_path / "cache")
    messages: list[str] = []
    monkeypatch.setattr(HUB, "report", messages.append)
    return messages


def rows_of(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, config: str | None = None
) -> list[Any]:
    connect(monkeypatch, address, tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    data = DataConfig(dataset_name=f"someone/{name}", dataset_config=config, cache_dir=str(tmp_path / "own"))
    sources = open_sources(data)
    parts = (sources.train, sources.validation, sources.test)
    return [[row.value for row in part.rows()] for part in parts if part is not None]


def test_a_dataset_with_a_script_is_read_from_its_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    script, converted = tmp_path / "script", tmp_path / "converted"
    script.mkdir()
    (script / "script.py").write_text("raise SystemExit('this was run')")
    for part in ("train", "validation", "test"):
        (converted / "plain" / part).mkdir(parents=True)
        table = pyarrow.table({"tokens": [[part, "b"]], "tags": [["O", "B-PER"]]})
        pyarrow.parquet.write_table(table, converted / "plain" / part / "0000.parquet")
    hub = Hub("someone/script", script)
    with serving(hub) as address:
        with pytest.raises(ConfigError, match=r"no conversion of it to Parquet .*choose another repository"):
            rows_of(address, monkeypatch, tmp_path, "script")
        hub.converted = converted
        found = rows_of(address, monkeypatch, tmp_path, "script")
        assert [[row["tokens"] for row in rows] for rows in found] == [
            [["train", "b"]], [["validation", "b"]], [["test", "b"]],
        ]  # fmt: skip
        shutil.copytree(converted / "plain", converted / "more")
        with pytest.raises(ConfigError, match=r"has the parts more, plain; set data\.dataset_config to one of them"):
            rows_of(address, monkeypatch, tmp_path, "script")
        assert len(rows_of(address, monkeypatch, tmp_path, "script", "more")) == 3
    assert said[0] == (
        "someone/script is a Python script, which is not run, so the Hub's conversion of it is read "
        "(refs/convert/parquet)."
    )


def test_a_request_is_repeated_after_the_time_that_the_hub_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("sansgpu.machine.hub.client.time.sleep", slept.append)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "red"}\n')
    waits = [{"Retry-After": "7"}, {"RateLimit": '"api";r=0;t=55'}]
    with serving(Hub("someone/limited", folder, waits=waits)) as address:
        assert rows_of(address, monkeypatch, tmp_path, "limited") == [[{"text": "red"}]]
    assert slept[:2] == [7.0, 55.0]
    assert said == [
        f"the Hub answers 429 (Too Many Requests) and asks to wait {seconds} seconds; waiting." for seconds in (7, 55)
    ]


def test_a_wait_that_is_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    slept: list[float] = []
    monkeypatch.setattr("sansgpu.machine.hub.client.time.sleep", slept.append)
    (tmp_path / "train.jsonl").write_text('{"text": "red"}\n')
    with (
        serving(Hub("someone/late", tmp_path, waits=[{"Retry-After": "3600"}] * 99)) as address,
        pytest.raises(ConfigError, match="asks to wait 3600 seconds, which is too long"),
    ):
        rows_of(address, monkeypatch, tmp_path, "late")
    assert sum(slept) < 60


def test_waits_are_read_from_headers() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    told = [{"retry-after": "5"}, {"retry-after": later}, {"ratelimit": '"api";r=0;t=12'}, {"retry-after": "soon"}, {}]
    assert [told_wait(headers) for headers in told] == [5.0, pytest.approx(40, abs=2), 12.0, None, None]
