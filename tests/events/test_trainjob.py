"""A run in a pod of a TrainJob reports its progress to Kubeflow Trainer, and no server can stop it."""

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sansgpu.events import trainjob
from tests import processes
from tests.processes import events_of

pytestmark = pytest.mark.usefixtures("home")
Requests = list[tuple[str, str | None, dict[str, Any]]]  # path, authorization, body
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/research/trainjobs/trial/status"


@contextmanager
def serving(answers: list[int], certificate: Path | None = None) -> Iterator[tuple[HTTPServer, Requests]]:
    """Starts a server that answers with these codes in turn, then with 200, and records the requests."""
    received: Requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.path, self.headers["Authorization"], body))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, received
    server.shutdown()
    server.server_close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret-1\n")
    return tmp_path / "token"


def in_pod(patch: pytest.MonkeyPatch, url: str, token: Path, certificate: Path | None = None) -> None:
    patch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url + PATH)
    patch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
    patch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate or token.parent / "missing.crt"))


def train(home: Path, run: Path) -> list[str]:
    """Trains 6 steps, each of which is logged, and returns the warnings."""
    assert processes.train(home, run, training__max_steps=6, training__logging_steps=1) == 0
    return [event["message"] for event in events_of(run, "warning") if event["cause"] == "callback"]


def test_progress_and_metrics_are_reported_as_the_schema_requires(
    home: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as Request  # takes seconds

    monkeypatch.setattr(trainjob, "SEND_SECONDS", 0.0)
    with serving([500]) as (server, received):
        in_pod(monkeypatch, f"http://127.0.0.1:{server.server_port}", token)
        assert train(home, home / "reported") == []
    assert {(path, authorization) for path, authorization, _ in received} == {(PATH, "Bearer secret-1")}
    for _, _, body in received:
        read = Request.from_dict(body)
        assert read is not None
        assert read.to_dict()["trainerStatus"].keys() == body["trainerStatus"].keys()
    statuses = [body["trainerStatus"] for _, _, body in received]
    percentages = [status["progressPercentage"] for status in statuses]
    assert percentages == sorted(percentages)
    first, last = statuses[0], statuses[-1]
    assert (first["progressPercentage"], last["progressPercentage"]) == (16, 100)
    assert last["estimatedRemainingSeconds"] == 0
    values = {metric["name"]: float(metric["value"]) for metric in last["metrics"]}
    steps, evaluations = events_of(home / "reported", "step"), events_of(home / "reported", "eval")
    assert values["loss"] == pytest.approx(steps[-1]["loss"], rel=1e-4)
    assert values["eval_loss"] == pytest.approx(evaluations[-1]["loss"], rel=1e-4)
    assert values["step"] == 6


def test_requests_are_rare_and_the_last_one_is_sent(home: Path, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainjob, "SEND_SECONDS", 600.0)
    with serving([]) as (server, received):
        in_pod(monkeypatch, f"http://127.0.0.1:{server.server_port}", token)
        train(home, home / "rare")
    assert [body["trainerStatus"]["progressPercentage"] for _, _, body in received] == [16, 100]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_server_is_authenticated_by_its_certificate(
    home: Path, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: tmp_path / f"{name}.pem" for name in ("own", "other")}
    for path in paths.values():
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
             "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
             "-keyout", path, "-out", f"{path}.crt"],
            check=True, capture_output=True,
        )  # fmt: skip
        path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    with serving([], paths["own"]) as (server, received):
        url = f"https://localhost:{server.server_port}"
        in_pod(monkeypatch, url, token, Path(f"{paths['own']}.crt"))
        assert train(home, home / "trusted") == []
        count = len(received)
        assert count > 0
        in_pod(monkeypatch, url, token, Path(f"{paths['other']}.crt"))
        [message] = train(home, home / "untrusted")
        assert "the TrainJob's status failed and was disabled" in message
        assert "certificate verify failed" in message
        assert len(received) == count, "the token was sent to an unknown server"


def test_a_server_that_refuses_is_named_and_training_continues(
    home: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving([403] * 50) as (server, _):
        in_pod(monkeypatch, f"http://127.0.0.1:{server.server_port}", token)
        [message] = train(home, home / "refused")
    expected = "the TrainJob's status failed and was disabled (HTTP Error 403: Forbidden); training continues."
    assert message == expected
    [message] = train(home, home / "gone")
    assert "Connection refused" in message


def test_a_missing_token_is_named_and_training_continues(
    home: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token.unlink()
    in_pod(monkeypatch, "http://127.0.0.1:9", token)
    [message] = train(home, home / "tokenless")
    assert "No such file or directory" in message
