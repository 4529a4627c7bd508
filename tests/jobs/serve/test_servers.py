"""Servers with their own options start, refuse to start, and end with one sentence."""

from __future__ import annotations

import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from tests.processes import Captured, messages, sentence, train
from tests.tasks.folders import model_folder

openai = pytest.importorskip("openai")

from tests.jobs.serve.serving import CONTEXT, ENDLESS, served, target  # noqa: E402  needs openai


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signals_end_open_answers_with_an_error(home: Path, number: signal.Signals) -> None:
    with served(target(), home / "cache", "--context", str(CONTEXT)) as server:
        client = server.client()
        stream = iter(client.completions.create(model=target().name, stream=True, max_tokens=60000, **ENDLESS))
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(server.end, number)
            with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
                list(stream)
            code, error = ending.result()
    assert code == 0
    assert messages(error) == ["stopping; press Ctrl-C again to stop now"]


@pytest.mark.long
def test_a_killed_server_can_be_started_again_at_its_port(home: Path) -> None:
    with served(target(), home / "cache", "--context", str(CONTEXT)) as server:
        stream = iter(server.client().completions.create(model=target().name, stream=True, **ENDLESS, max_tokens=60000))
        next(stream)
        server.end(signal.SIGKILL)
        with pytest.raises(Exception, match=r"peer closed connection|Connection"):
            list(stream)
    with served(target(), home / "cache", "--port", server.url.rpartition(":")[2]) as again:
        assert again.client().completions.create(model=target().name, prompt="red").usage.prompt_tokens


def test_a_key_is_required_and_compared(home: Path) -> None:
    with served(target(), home / "cache", "--host", "0.0.0.0", SANSGPU_API_KEY="sécret") as server:
        address = server.url.replace("0.0.0.0", "127.0.0.1")
        server.url = address
        asked = {"prompt": "red", "max_tokens": 1}
        right = "Bearer sécret".encode().decode("latin-1")
        assert server.post("/v1/completions", asked, Authorization=right)[0] == 200
        for wrong in ("Bearer secret", "Bearer ", "Basic x", right + "x"):
            status, answer = server.post("/v1/completions", asked, Authorization=wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.post("/v1/completions", asked)[0] == server.post("/v1/nothing", asked)[0] == 401
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()


@pytest.mark.parametrize("folder", ["run", pytest.param("run/final", marks=pytest.mark.long)])
def test_a_decoder_of_our_own_has_completions_but_no_chat(home: Path, tmp_path: Path, folder: str) -> None:
    assert train(home, tmp_path / "run", training__max_steps=2) == 0
    with served(tmp_path / folder, home / "cache", "--context", "20") as server:
        assert "up to 20 tokens" in server.line
        client = server.client()
        with pytest.raises(openai.BadRequestError, match="The server's --context can be raised"):
            client.completions.create(model="run", prompt="the model", max_tokens=20)
        answer = client.completions.create(model="run", prompt="the model", max_tokens=5, temperature=0)
        assert answer.usage.completion_tokens == 5
        assert client.completions.create(model="run", prompt="the " * 8, temperature=0).usage.total_tokens <= 20
        with pytest.raises(openai.BadRequestError, match="use /v1/completions"):
            client.chat.completions.create(model="run", messages=[{"role": "user", "content": "x"}])


@pytest.mark.long
def test_a_model_without_batches_answers_one_after_another(home: Path) -> None:
    folder = model_folder("recurrent_gemma")
    with served(folder, home / "cache", "--precision", "fp32") as server:
        assert "1 text at once" in server.line
        asked = {"model": folder.name, "prompt": "red blue", "max_tokens": 8, "temperature": 0}
        with ThreadPoolExecutor(3) as pool:
            texts = list(pool.map(lambda _: server.client().completions.create(**asked).choices[0].text, range(3)))
        assert len({*texts}) == 1


def test_places_of_a_model_without_batches_are_refused(home: Path, capsys: Captured) -> None:
    folder = model_folder("recurrent_gemma")
    capsys.readouterr()  # transformers prints a bar if the model is new
    assert cli(["serve", str(folder), "--max-batch", "2", "--port", "0"]) == 2
    assert "one text at a time" in sentence(capsys)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "set --api-key or SANSGPU_API_KEY"),
        (["--api-key", " "], "--api-key is empty"),
        (["--context", "99999"], "is longer than the model's context"),
        (["--host", "203.0.113.7", "--api-key", "x"], "cannot be used"),
        (["--port", "{taken}"], "choose another --port"),
    ],
)
def test_a_server_that_cannot_start_says_why(home: Path, options: list[str], words: str, capsys: Captured) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [option.format(taken=taken.getsockname()[1]) for option in options]
        assert cli(["serve", str(target()), "--port", "0", *given]) == 2
    assert words in sentence(capsys)
