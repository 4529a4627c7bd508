"""If the dataset is unreachable, `plan` and `bench` use random tokens, and the length of an epoch is unknown."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from sansgpu.cli import run as cli
from tests import processes
from tests.processes import Captured, finish_apart, messages, options, use_cache
from tests.tasks.folders import model_folder
from tests.tasks.graph.test_graph_runs import TINY as GRAPH

COMMON = {"training.precision": "fp32", "training.compile": "off", "training.threads": 1, "device": "cpu"}
COMMON |= {"training.batch_size": 1, "training.gradient_accumulation_steps": 2, "data.dataset_name": "wikitext"}
KINDS = {
    "pretrain": {**processes.TINY, "data.tokenizer": "bpe", "data.dataset_config": "wikitext-2-raw-v1"},
    "characters": {**processes.TINY, "data.tokenizer": "char"},
    "graph": {key: value for key, value in GRAPH.items() if key != "training.max_steps"},
    "sft": {"task": "sft", "data.max_length": 32},
    "qa": {"task": "qa", "data.max_length": 64, "data.doc_stride": 16},
    "masked": {"task": "graph", "data.max_length": 32},
}
OFTEN = ("pretrain", "sft")  # the others are planned before a release
MODELS = {"sft": "qwen2", "qa": "bert", "masked": "bert"}


@pytest.fixture(autouse=True)
def _no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")  # no server
    use_cache(monkeypatch, tmp_path / "cache")


def arguments(kind: str, *more: str) -> list[str]:
    values: dict[str, object] = {**KINDS[kind], **COMMON, "training.num_epochs": 3}
    if kind in MODELS:
        values["model.name_or_path"] = model_folder(MODELS[kind])
    return [*options(values), *more]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.long) for k in KINDS])
def test_a_plan_of_data_that_cannot_be_reached(kind: str, capsys: Captured) -> None:
    assert cli(["plan", *arguments(kind), "--json"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    [warning] = [line for line in captured.err.splitlines() if line.startswith("warning: ")]
    assert 'dataset "wikitext" was not found' in warning
    assert "the Hub is unreachable ([Errno 111] Connection refused)" in warning
    assert "random tokens" in warning
    assert "the length of an epoch is unknown" in warning
    assert plan["memory_bytes"]["total"] > 0
    assert plan["tokens_per_second"] * plan["seconds_per_million_tokens"] == pytest.approx(1e6)
    assert plan["total_steps"] is plan["total_seconds"] is plan["epochs"] is plan["train_tokens"] is None


def test_a_plan_of_known_length_says_how_long_it_takes(capsys: Captured) -> None:
    assert cli(["plan", *arguments("pretrain", "--set", "training.max_steps=7"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_steps"] == 7
    assert plan["total_seconds"] > 0
    assert cli(["plan", *arguments("pretrain")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "s per million tokens" in shown
    assert "time unknown, because" in shown


def test_nodes_need_a_length(capsys: Captured) -> None:
    assert cli(["plan", *arguments("pretrain"), "--nodes", "2"]) == 2
    assert "set training.max_steps" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pretrain", "graph", "sft"])
def test_a_bench_of_data_that_cannot_be_reached(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The name of the configuration contains shell commands, which start.sh must not run."""
    monkeypatch.chdir(tmp_path)
    name = "x';touch pwned;'$(touch pwned)`touch pwned` \"#"
    Path(f"{name}.yaml").write_text("{}")
    assert cli(["bench", f"{name}.yaml", *arguments(kind), "--steps", "2", "--no-what-if", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "the length of an epoch is unknown" in captured.err
    assert result["tokens_per_second"] * result["seconds_per_million_tokens"] == pytest.approx(1e6)
    assert result["peak_rss_bytes"] > 0
    assert result["write_seconds"] > 0
    assert any("data could not be read" in note for note in result["warnings"])
    assert "s per million tokens" in (Path("bench") / name / "report.md").read_text()
    done = subprocess.run([Path("bench") / name / "start.sh", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path("pwned").exists()


def test_training_on_unreachable_data_is_refused(tmp_path: Path, capsys: Captured) -> None:
    assert cli(["train", *arguments("pretrain"), "--output-dir", str(tmp_path / "run")]) == 2
    assert 'dataset "wikitext" was not found' in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--set", "data.streaming=true", "--set", "data.max_tokens=9")])
def test_a_file_format_is_no_dataset(tmp_path: Path, capsys: Captured, more: tuple[str, ...]) -> None:
    """The library would read all files of the current folder, in earlier versions even pickles."""
    assert (
        cli(
            [
                "train",
                *arguments("pretrain", "--set", "data.dataset_name=pandas", *more),
                "--output-dir",
                str(tmp_path / "run"),
            ]
        )
        == 2
    )
    assert "pandas is a file format of `datasets`; set data.dataset_name to" in capsys.readouterr().err


class _Answers(BaseHTTPRequestHandler):
    """Answers every request to a Hub or a proxy with `status`."""

    status = 200
    error = ""

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        if self.error:
            self.send_header("X-Error-Code", self.error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_CONNECT = do_HEAD  # noqa: N815  names that http.server calls

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def _server(status: int, error: str = "") -> Iterator[str]:
    """Starts a web server on this machine that always answers the same, and yields its address."""
    handler = type("Handler", (_Answers,), {"status": status, "error": error})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _is_reachable(address: str, **environment: str) -> bool:
    """Checks in a new process, because the Hub client reads the proxy variables only once."""
    code = f"from sansgpu.machine.hub import reachable; raise SystemExit(not reachable({address!r}))"
    bare = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return subprocess.run([sys.executable, "-c", code], env=bare | environment).returncode == 0


def test_a_hub_that_answers_is_reachable_unless_a_proxy_refuses_it() -> None:
    with _server(200) as server, _server(403) as proxy:
        assert _is_reachable(server)
        assert _is_reachable("http://no-such-host.invalid", http_proxy=server)
        assert not _is_reachable("https://no-such-host.invalid", https_proxy=proxy)
    assert not _is_reachable("http://no-such-host.invalid")


@pytest.mark.long
def test_a_name_that_the_hub_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate needs no data, but the user wants to learn of a misspelled name right away."""
    with _server(404, "RepoNotFound") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub)
        code, _, error = finish_apart(["plan", *arguments("pretrain")], tmp_path)
    assert code == 2
    [message] = messages(error)
    assert "'wikitext' doesn't exist on the Hub" in message


def test_a_bench_of_a_name_with_control_characters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    for odd in ("x\ntouch pwned", "x\x1b[2J"):
        Path(f"{odd}.yaml").write_text("{}")
        assert cli(["bench", f"{odd}.yaml"]) == 2
        assert "contains control characters" in capsys.readouterr().err
