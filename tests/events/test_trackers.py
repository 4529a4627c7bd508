"""Trackio and MLflow receive what metrics.jsonl has, once, also after a resume, and cannot stop a run."""

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sansgpu.events import trackers
from sansgpu.events.loggers import scalars
from tests import processes
from tests.processes import digests, events_of

pytestmark = pytest.mark.usefixtures("home", "stores")

train = partial(processes.train, training__max_steps=6, training__logging_steps=1, training__lr_scheduler="constant")
Point = tuple[str, int, float]  # metric, step, value


@pytest.fixture(scope="module")
def stores(home: Path) -> Iterator[None]:
    """Makes folders of this module's the local stores, before the libraries are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
        yield


def trackio_runs(name: str) -> list[tuple[list[Point], dict[str, object]]]:
    """Returns the points and the configuration of every Trackio run with a name."""
    from trackio.sqlite_storage import SQLiteStorage

    found = []
    for run in SQLiteStorage.get_run_records("sansgpu"):
        if run["name"] == name:
            rows = SQLiteStorage.get_logs("sansgpu", name, run_id=run["id"])
            points = [(key, row["step"], row[key]) for row in rows for key in row if "/" in key]
            found.append((points, SQLiteStorage.get_run_config("sansgpu", name, run_id=run["id"])))
    return found


def mlflow_runs(name: str) -> list[tuple[list[Point], dict[str, object]]]:
    """Returns the points and the parameters of every MLflow run with a name."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("sansgpu")
    found = []
    for run in client.search_runs([experiment.experiment_id]):
        if run.info.run_name == name:
            histories = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
            points = [(point.key, point.step, point.value) for history in histories for point in history]
            found.append((points, {"status": run.info.status, **run.data.params}))
    return found


def recorded(run: Path) -> list[Point]:
    """Returns the points that metrics.jsonl has."""
    events = events_of(run, "step", "eval")
    return [(name, event["step"], value) for event in events for name, value in scalars(event).items()]


def of_losses(points: list[Point]) -> list[Point]:
    """Returns the points that two equal runs have in common, in order."""
    return sorted(point for point in points if point[0].endswith(("/loss", "/lr", "/grad_norm")))


@pytest.mark.parametrize(("tracker", "runs"), [("trackio", trackio_runs), ("mlflow", mlflow_runs)])
def test_a_resumed_run_continues_its_run_of_the_tracker(
    tracker: str, runs: object, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(tracker)
    assert callable(runs)
    run = home / f"with {tracker}'s"
    assert train(home, run, "--headless", training__report_to=tracker) == 0
    printed = capsys.readouterr().out
    assert printed == (run / "metrics.jsonl").read_text("utf-8"), "the library must print nothing"
    [(points, config)] = runs(run.name)
    assert sorted(points) == sorted(recorded(run))
    expected = 6 if tracker == "trackio" else "6"
    training = config["training"] if tracker == "trackio" else {"max_steps": config["training.max_steps"]}
    assert training["max_steps"] == expected  # type: ignore[index]
    assert config.get("status", "FINISHED") == "FINISHED"

    longer = ("--resume", "4", "--set", "training.max_steps=9")
    assert train(home, run, *longer, training__report_to=tracker) == 0
    [(points, config)] = runs(run.name)
    assert of_losses(points) == of_losses(recorded(run))
    assert config.get("status", "FINISHED") == "FINISHED"
    plain = home / f"without {tracker}"
    assert train(home, plain, training__max_steps=9) == 0
    assert digests(run / "final") == digests(plain / "final")


class _Broken(BaseHTTPRequestHandler):
    """Answers requests only after the test."""

    over = threading.Event()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.over.wait(60)

    def do_POST(self) -> None:
        self.do_GET()


@pytest.fixture
def hanging_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Broken)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    _Broken.over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("server", ["hanging", "refusing"])
def test_a_broken_server_neither_ends_nor_slows_training(
    server: str, hanging_server: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", hanging_server if server == "hanging" else "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setattr(trackers, "END_SECONDS", 5.0)
    run, begun = home / server, time.monotonic()
    assert train(home, run, training__report_to="mlflow") == 0
    assert time.monotonic() - begun < 40
    events = events_of(run)
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    [warning] = [event for event in events if event.get("cause") == "callback"]
    assert warning["message"].startswith("MLflow failed and was disabled (")
    end = next(event for event in events if event["event"] == "end")
    assert end["seconds"] < 15, "training must not wait for the server"


@pytest.mark.filterwarnings("ignore:.*trackio:UserWarning", "ignore:.*remote server:UserWarning")
def test_trackio_keeps_what_its_server_does_not_take(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "token")
    run = home / "unsent"
    assert train(home, run, training__report_to="trackio") == 0
    [(points, _)] = trackio_runs(run.name)
    assert sorted(points) == sorted(recorded(run))


def test_a_tracker_that_cannot_start_is_a_warning_after_the_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")

    def fail(**_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(trackio, "init", fail)
    assert train(home, home / "full", training__report_to="trackio") == 0
    kinds = [event["event"] for event in events_of(home / "full")]
    assert kinds[:2] == ["start", "warning"]
    assert "trackio failed and was disabled (no space)" in str(events_of(home / "full", "warning"))
    assert "trackio" in sys.modules
