"""A sink that reports progress to Kubeflow Trainer, which shows it in the status of the TrainJob.

The requests are those of transformers' KubeflowCallback.
"""

from __future__ import annotations

import json
import ssl
import time
from math import inf
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from sansgpu.events.event import EVALUATION_KEYS, Event, now

SEND_SECONDS = 5.0  # between requests, as Kubeflow asks for
TIMEOUT_SECONDS = 5.0
MAX_ATTEMPTS = 10  # requests in a row that may fail
MAX_METRICS, MAX_CHARACTERS = 256, 64  # limits of the TrainJob's schema, for names and values
MAX_SECONDS = 2**31 - 1  # limit of the schema's int32
STEP_METRICS = ("step", "loss", "lr", "grad_norm", "tokens_per_second")


class TrainJobStatus:
    """Reports progress, remaining time and metrics, at most every five seconds.

    Requests wait for the server, so this sink belongs into `InBackground`. After a request that failed, the next one
    reports the newest values; the sink fails after several in a row, or if the last one of a run fails.
    """

    def __init__(self, url: str, token: Path, ca_cert: str | None) -> None:
        self._url, self._token = url, token
        self._tls = ssl.create_default_context(cafile=ca_cert) if url.startswith("https:") else None
        self._status: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._sent_at, self._failures = -inf, 0

    def emit(self, event: Event) -> None:
        kind, is_end = event["event"], event["event"] == "end"
        if kind not in ("step", "eval", "end"):
            return
        if kind == "step":
            if event["total_steps"]:
                self._status["progressPercentage"] = min(100, 100 * event["step"] // event["total_steps"])
                self._status["estimatedRemainingSeconds"] = min(MAX_SECONDS, round(event["eta_seconds"]))
            self._metrics |= {name: event[name] for name in STEP_METRICS}
        elif kind == "eval":
            self._metrics |= {f"eval_{k}": v for k, v in event.items() if k not in EVALUATION_KEYS}
        elif event["reason"] != "interrupted":
            self._status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        if is_end or time.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send(is_last=is_end)

    def close(self) -> None:
        pass

    def _send(self, is_last: bool) -> None:
        values = {k: f"{v:.6g}" for k, v in self._metrics.items() if isinstance(v, (int, float))}
        metrics = [{"name": k, "value": v} for k, v in values.items() if len(k) <= MAX_CHARACTERS][:MAX_METRICS]
        body = {"trainerStatus": {**self._status, "metrics": metrics, "lastUpdatedTime": now()}}
        self._sent_at = time.monotonic()
        try:
            headers = {  # the token is replaced regularly
                "Authorization": f"Bearer {self._token.read_text(encoding='utf-8').strip()}",
                "Content-Type": "application/json",
            }
            request = Request(self._url, json.dumps(body).encode(), headers, method="POST")
            with urlopen(request, timeout=TIMEOUT_SECONDS, context=self._tls):
                self._failures = 0
        except OSError:
            self._failures += 1
            if is_last or self._failures >= MAX_ATTEMPTS:
                raise
