"""`sansgpu serve` bounds what each request and connection may cost, so that no client keeps the others waiting."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.processes import messages
from tests.tasks.folders import model_folder

pytest.importorskip("openai")

from tests.jobs.serve.serving import Server, served

MEGABYTE = 1 << 20
CONTEXT = 65536
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURN = {"role": "user", "content": "red"}
EMPTY_PART = {"type": "text", "text": ""}
LARGE = "red " * (15 * MEGABYTE // 4)
HUGE = 10**30
SMALL_LIMITS = (
    "import resource, sansgpu.machine.http.server as server\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    "server.REQUEST_SECONDS = 2"
)
REFUSED: dict[str, tuple[str, object, str]] = {
    "answers": (COMPLETIONS, {"prompt": "red", "n": 10**8}, "divide it into several requests"),
    "answers to a chat": (CHAT, {"messages": [TURN], "n": 10**8, "stream": True}, "divide it into several requests"),
    "huge number of answers": (COMPLETIONS, {"prompt": "red", "n": HUGE}, "less than or equal to"),
    "huge number of tokens": (COMPLETIONS, {"prompt": "red", "max_tokens": HUGE}, "less than or equal to"),
    "huge number of tokens of a chat": (CHAT, {"messages": [TURN], "max_completion_tokens": HUGE}, "less than"),
    "huge top_k": (COMPLETIONS, {"prompt": "red", "top_k": HUGE}, "less than or equal to"),
    "best_of": (COMPLETIONS, {"prompt": "red", "best_of": HUGE}, "best_of is not supported"),
    "number of many digits": (COMPLETIONS, b'{"prompt": "red", "n": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    "NaN": (COMPLETIONS, b'{"prompt": "red", "temperature": NaN}', "less than or equal to 2"),
    "long prompt": (COMPLETIONS, {"prompt": LARGE}, "the prompt has 15,728,640 bytes"),
    "long prompts": (COMPLETIONS, {"prompt": [LARGE[: 5 * MEGABYTE]] * 3}, "the prompt has 5,242,880 bytes"),
    "long chat": (CHAT, {"messages": [{**TURN, "content": LARGE}]}, "the prompt has 15,728,640 bytes"),
    "token ids": (COMPLETIONS, {"prompt": [1] * 10**6}, "more than 100,000 values"),
    "lists of token ids": (COMPLETIONS, {"prompt": [[1]] * 10**6}, "more than 100,000 values"),
    "prompts": (COMPLETIONS, {"prompt": ["red"] * 3000}, "prompt can have at most 2,048 items"),
    "parts": (CHAT, {"messages": [{**TURN, "content": [EMPTY_PART] * 500_000}]}, "more than 100,000 values"),
    "fewer parts": (CHAT, {"messages": [{**TURN, "content": [EMPTY_PART] * 3000}]}, "at most 2,048 items"),
    "messages": (CHAT, {"messages": [TURN] * 3000}, "messages can have at most 2,048 items"),
    "ignored values": (COMPLETIONS, {"prompt": "red", "metadata": [[1]] * 10**6}, "more than 100,000 values"),
    "nested lists": (COMPLETIONS, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "not valid JSON"),
    "unknown key": (COMPLETIONS, {"prompt": "red", "k" * 15 * MEGABYTE: 1}, "kkk... is not supported"),
    "unknown key of a message": (CHAT, {"messages": [{**TURN, "k" * 15 * MEGABYTE: 1}]}, "kkk... is not supported"),
    "value": (COMPLETIONS, {"prompt": "red", "temperature": "v" * 15 * MEGABYTE}, 'temperature is "vvv'),
    "list as a value": (COMPLETIONS, {"prompt": "red", "temperature": [1] * 90_000}, "temperature is [1, 1"),
    "model": (COMPLETIONS, {"prompt": "red", "model": "m" * 15 * MEGABYTE}, "there is no model mmm"),
    "stop": (COMPLETIONS, {"prompt": "red", "stop": "s" * 15 * MEGABYTE}, "at most 1000 characters"),
    "body": (COMPLETIONS, b" " * (40 * MEGABYTE), "the body is larger than 16 MB"),
    "invalid UTF-8": (COMPLETIONS, b'{"prompt": "\xff"}', "not valid JSON"),
}


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    folder = model_folder("qwen2", max_position_embeddings=CONTEXT)
    with served(folder, home / "cache", "--max-batch", "2", "--context", str(CONTEXT)) as server:
        yield server


def peak_megabytes(server: Server) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found
    return int(found[1]) // 1024


def test_requests_that_would_cost_much_are_refused_at_once(server: Server) -> None:
    before = peak_megabytes(server)
    for name, (path, body, words) in REFUSED.items():
        start = time.monotonic()
        status, answer = server.post(path, body)
        assert status in (400, 404, 413), name
        assert words in answer["error"]["message"], name
        assert len(json.dumps(answer)) < 500, name
        assert time.monotonic() - start < 10, name
    assert peak_megabytes(server) - before < 300
    assert server.post("/v1/" + "x" * 15_000, {})[1]["error"]["message"].endswith("xxx....")


def test_large_bodies_that_arrive_slowly_take_little_memory(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (8 * MEGABYTE)
    with contextlib.ExitStack() as open_:
        for _ in range(8):
            open_.enter_context(server.connect()).sendall(head + b" " * (3 * MEGABYTE))
        status, answer = server.post(COMPLETIONS, {"prompt": LARGE[: 2 * MEGABYTE]})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert server.post(COMPLETIONS, {"prompt": "red", "max_tokens": 1})[0] == 200
    start = time.monotonic()
    while server.post(COMPLETIONS, {"prompt": LARGE[: 12 * MEGABYTE]})[0] != 400:  # once the others have been dropped
        assert time.monotonic() - start < 20


def test_tokenizing_a_long_prompt_delays_no_running_text(server: Server) -> None:
    """The prompt has fewer bytes than its context might hold, so it is tokenized, which takes about a second."""
    client, model = server.client(), server.client().models.list().data[0].id
    with client.completions.create(
        model=model, prompt="red blue", stream=True, max_tokens=60_000, temperature=0
    ) as stream:
        pieces = iter(stream)
        next(pieces)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, COMPLETIONS, {"prompt": LARGE[:MEGABYTE]})
            count = 0
            while not asked.done():
                next(pieces)
                count += 1
        status, answer = asked.result()
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert count > 10


def _ask(server: Server) -> int:
    return server.post(COMPLETIONS, {"prompt": "red", "max_tokens": 2})[0]


def _gets_closed(connection: Any) -> bool:
    """Waits until the server has closed a connection, perhaps after an error."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1024):
            pass
    return True


def test_silent_and_slow_clients_keep_nobody_out(home: Path) -> None:
    """The process may open 40 files, and a request must be complete within 2 seconds."""
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    with served(model_folder("qwen2"), home / "cache", before=SMALL_LIMITS) as server, contextlib.ExitStack() as open_:
        for sent in (b"", b"POST /v1", begun):
            connections = [open_.enter_context(server.connect()) for _ in range(60)]
            for connection in connections:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(sent)
            assert [_ask(server) for _ in range(5)] == [200] * 5
        stream = json.dumps({"prompt": "red blue", "temperature": 0, "stream": True, "max_tokens": 3000}).encode()
        for _ in range(8):
            with server.connect() as leaving:
                leaving.sendall(begun[:-1].replace(b"99", b"%d" % len(stream)) + stream)
                leaving.recv(100)
        trickling, start = open_.enter_context(server.connect()), time.monotonic()
        with contextlib.suppress(ConnectionError):
            trickling.sendall(begun)
            while time.monotonic() - start < 6:
                time.sleep(0.2)
                trickling.sendall(b" ")
        assert 1.5 < time.monotonic() - start < 6
        assert all(_gets_closed(connection) for connection in connections)
        code, error = server.end()
    assert code == 0
    assert messages(error) == ["stopping; press Ctrl-C again to stop now"]
    (warning,) = re.findall("warning: .*", error)
    assert re.fullmatch(
        "warning: [0-9]+ connections are open; those that do not complete a request are closed", warning
    )
