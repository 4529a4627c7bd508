"""Sinks that log scalars to experiment trackers: Weights & Biases, Trackio and MLflow."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from sansgpu.config import flatten
from sansgpu.events.event import Event, Sink
from sansgpu.events.loggers import scalars

PROJECT = "sansgpu"
SEND_SECONDS, MAX_UNSENT = 1.0, 500  # seconds and values between requests to MLflow, each of which takes time
END_SECONDS = 30.0  # longest wait at the end of a run for a tracker that has not received everything


@dataclass(frozen=True)
class TrackedRun:
    """The name, folder and configuration of a run, for trackers. A resumed run continues the same run of a tracker."""

    name: str
    folder: Path
    config: dict[str, Any]
    is_resumed: bool


class WeightsAndBiases:
    """A sink that logs scalars to Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=PROJECT, name=run.name, id=run.name, dir=str(run.folder), config=run.config, resume="allow"
        )

    def emit(self, event: Event) -> None:
        if values := scalars(event):
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A sink that logs scalars to Trackio's local database, or wherever its environment variables point.

    Trackio sends them in a thread of its own, and warns if that fails.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        options: dict[str, Any] = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        with _silenced():
            resume = "allow" if run.is_resumed else "never"
            self._run = trackio.init(project=PROJECT, name=run.name, config=run.config, resume=resume, **options)
        self._finish = trackio.finish
        self._logged = self._run._next_step - 1  # Trackio has no public way to ask for the last step

    def emit(self, event: Event) -> None:
        if (values := scalars(event)) and event["step"] > self._logged:
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        with _silenced():
            self._finish()  # unlike the run's own method, it also ends what Trackio would do when Python exits


class MLflow:
    """A sink that logs scalars to MLflow: to MLFLOW_TRACKING_URI, by default a database in the working directory.

    Requests wait for the server, so this sink belongs into `InBackground`.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient, telemetry
        from mlflow.entities import Metric, Param
        from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

        if not MLFLOW_DISABLE_TELEMETRY.is_set():  # by default MLflow reports its use to its makers
            MLFLOW_DISABLE_TELEMETRY.set(True)
            telemetry.set_telemetry_client()
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # by default it logs how it creates its database
        self._client, self._metric = MlflowClient(), Metric
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        folder = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()  # filters cannot quote every path
        query = f"tags.`{_FOLDER_TAG}` = '{folder}'"
        found = self._client.search_runs([number], query, max_results=1) if run.is_resumed else []
        tracked = found[0] if found else self._client.create_run(number, tags={_FOLDER_TAG: folder}, run_name=run.name)
        self._id, self._status = str(tracked.info.run_id), "FAILED"  # unless an end event arrives
        self._logged: dict[str, int] = {}
        self._unsent: list[Any] = []
        self._sent_at = -inf
        if found:
            self._client.update_run(self._id, status="RUNNING")
            self._logged = {kind: self._last_step(name) for kind, name in _ALWAYS_LOGGED.items()}
        else:
            params = [Param(key, str(value)) for key, value in flatten(run.config).items()]
            for start in range(0, len(params), 100):  # the server's limit
                self._client.log_batch(self._id, params=params[start : start + 100])

    def _last_step(self, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._id, name)), default=-1)

    def emit(self, event: Event) -> None:
        if event["event"] == "end":
            self._status = "FINISHED" if event["reason"] in ("done", "early_stopping") else "KILLED"
        values = scalars(event)
        if values and event["step"] > self._logged.get(event["event"], -1):
            now = time.time_ns() // 1_000_000
            for name, value in values.items():
                allowed = re.sub(r"[^\w./ :-]", "_", name)  # MLflow refuses names with other characters
                self._unsent.append(self._metric(allowed, value, now, event["step"]))
        is_due = time.monotonic() - self._sent_at > SEND_SECONDS or len(self._unsent) > MAX_UNSENT
        if self._unsent and (is_due or event["event"] == "snapshot"):
            self._send()

    def _send(self) -> None:
        self._client.log_batch(self._id, self._unsent)
        self._unsent, self._sent_at = [], time.monotonic()

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._id, self._status)


_FOLDER_TAG = "sansgpu.folder_sha256"
_ALWAYS_LOGGED = {"step": "train/tokens", "eval": "validation/seconds"}  # a number in every event of its kind


class InBackground:
    """A sink that makes another sink and passes events to it in a thread, so that a slow server does not slow training.

    At an end event it waits for up to END_SECONDS. `emit` raises what the other sink raised.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name = name  # named in the warning if the sink fails
        self._events: Queue[Event | None] = Queue()
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        self._events.put(dict(event))
        if event["event"] == "end":
            self._finish()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._finish()

    def _finish(self) -> None:
        self._events.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive() and self._error is None:
            self._error = TimeoutError(f"not everything was logged within {END_SECONDS:.0f} s of the end")

    def _run(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            while (event := self._events.get()) is not None:
                sink.emit(event)
            sink.close()
        except Exception as error:  # raised by the next emit
            self._error = error


def trackers(run: TrackedRun) -> dict[str, Callable[[], Sink]]:
    """Returns what makes the sink of each tracker, by its name in `training.report_to`."""
    return {
        "wandb": partial(WeightsAndBiases, run),
        "trackio": partial(Trackio, run),
        "mlflow": lambda: InBackground("MLflow", partial(MLflow, run)),
    }


def _silenced() -> contextlib.redirect_stdout[io.StringIO]:
    """Returns a context that discards what a library prints, because --headless prints only events."""
    return contextlib.redirect_stdout(io.StringIO())
