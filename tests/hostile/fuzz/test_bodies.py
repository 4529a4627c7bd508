"""`sansgpu serve` answers any body quickly, with a short sentence if it refuses one, and continues to serve."""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tools.tiny_model import make_folder

from tests.hostile.fuzz.test_fuzz import SEED
from tests.hostile.fuzz.values import changed, damaged, dumped, odd
from tests.jobs.serve.serving import Server, served

MOST_SECONDS, LONGEST_ANSWER = 10.0, 4000
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "model", "prompt": "def read", "max_tokens": 2, "temperature": 0, "n": 1},
        {"prompt": ["one", "two"], "max_tokens": 1, "stop": ["\n"], "logprobs": 1, "seed": 1},
        {"prompt": [1, 2, 3], "max_tokens": 1, "top_p": 0.5, "stream": False},
    ],
    "/v1/chat/completions": [
        {"model": "model", "messages": MESSAGES, "max_tokens": 2, "temperature": 0},
        {"messages": MESSAGES, "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 2, "n": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 1},
    ],
}
HUGE: list[Any] = [10**9, 10**30, "x" * 2_000_000, ["x"] * 200_000, [1] * 500_000, {str(n): n for n in range(20_000)}]


def drawn_body(draw: random.Random) -> tuple[str, bytes]:
    """Draws a path and a body in which values are odd or huge, keys are unknown, or bytes are damaged."""
    path = draw.choice(list(BODIES))
    body: Any = draw.choice(BODIES[path])
    how = draw.random()
    if how < 0.2:
        return path, damaged(json.dumps(body).encode(), draw)
    if how < 0.45:
        body = {**body, draw.choice([*body, "unknown", "best_of", "tools", "x" * 100_000]): draw.choice(HUGE)}
    elif how < 0.6:
        body = {**body, draw.choice([*body, "unknown", "n", "echo", "user", "logit_bias"]): odd(draw)}
    else:
        body = changed(body, draw)
    return path, dumped(body).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("bodies")
    with served(make_folder(home / "model", "llama", vocabulary=400), home / "cache") as running:
        yield running


def complaint(server: Server, path: str, body: bytes) -> str | None:
    """Returns what is wrong with the answer to a body, or None."""
    began = time.monotonic()
    status, answer = server.post(path, body)
    seconds, length = time.monotonic() - began, len(json.dumps(answer))
    if status not in (200, 400, 404, 413, 422, 429):
        return f"status {status}: {answer}"
    if status != 200 and (length > LONGEST_ANSWER or "\n" in answer["error"]["message"].strip()):
        return f"an error of {length:,} characters"
    return f"it took {seconds:.1f} s" if seconds > MOST_SECONDS else None


def complaints(server: Server, seed: int, count: int) -> list[str]:
    found = []
    for number in range(count):
        path, body = drawn_body(random.Random(f"{seed} bodies {number}"))
        if why := complaint(server, path, body):
            found.append(f"body {number}: {why}; {path} {body[:300]!r}")
    assert server.post("/v1/completions", BODIES["/v1/completions"][0])[0] == 200
    return found


def test_a_sample_of_bodies_is_answered(server: Server) -> None:
    assert not (found := complaints(server, 0, 15)), "\n\n".join(found)


@pytest.mark.long
def test_hundreds_of_bodies_are_answered(server: Server) -> None:
    assert not (found := complaints(server, SEED, 300)), "\n\n".join(found)
