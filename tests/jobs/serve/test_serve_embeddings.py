"""`sansgpu serve` embeds texts as `sansgpu embed` does."""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sansgpu.cli import run as cli
from sansgpu.models.huggingface.sentence_embedding import EmbeddingLayout, write_layout
from tests.processes import write_rows
from tests.tasks.fine_tuned import Captured, sentence
from tests.tasks.folders import WORDS, model_folder

openai = pytest.importorskip("openai")

from tests.jobs.serve.serving import Server, served  # noqa: E402  needs openai

TEXTS = [" ".join(WORDS[: 1 + number]) for number in range(6)]


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    with served(model_folder("bert"), home / "cache", "--precision", "fp32") as server:
        yield server


@pytest.fixture(scope="module")
def expected(home: Path) -> Any:
    write_rows(home / "texts.jsonl", [{"text": text} for text in TEXTS])
    paths = ["--data", str(home / "texts.jsonl"), "--output", str(home / "vectors.npy")]
    assert cli(["embed", str(model_folder("bert")), *paths, "--precision", "fp32"]) == 0
    return np.load(home / "vectors.npy")


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_vectors_are_those_of_the_command(server: Server, expected: Any, form: str | None) -> None:
    given = {} if form is None else {"encoding_format": form}
    answer = server.client().embeddings.create(model=model_folder("bert").name, input=TEXTS, **given)
    rows = [item.embedding for item in answer.data]
    if form == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    assert np.array_equal(np.array(rows, np.float32), expected)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)


def test_many_clients_get_their_own_vectors(server: Server, expected: Any) -> None:
    def embed(number: int) -> Any:
        text = TEXTS[number % len(TEXTS)]
        return server.client().embeddings.create(model=model_folder("bert").name, input=text).data[0].embedding

    with ThreadPoolExecutor(8) as pool:
        for number, vector in enumerate(pool.map(embed, range(24))):
            np.testing.assert_allclose(vector, expected[number % len(TEXTS)], atol=1e-5)


def test_a_request_chooses_a_prompt_of_the_model(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prompted"
    shutil.copytree(model_folder("bert"), folder)
    prompts = {"query": f"{WORDS[0]} ", "passage": f"{WORDS[1]} ", "other": f"{WORDS[2]} "}
    write_layout(EmbeddingLayout("mean", True, 64, prompts, "other"), 64, folder)
    with served(folder, home / "cache", "--precision", "fp32") as server:
        client = server.client()

        def embed(text: str, **chosen: str) -> Any:
            answer = client.embeddings.create(model=folder.name, input=text, extra_body=chosen)
            return answer.data[0].embedding

        bare = {name: embed(f"{prompt}red") for name, prompt in prompts.items()}
        assert embed("red", prompt_name="query") == embed("red", input_type="query") != embed("red")
        for chosen in ({"prompt_name": "passage"}, {"input_type": "passage"}, {"input_type": "document"}):
            assert embed("red", **chosen) == embed("red", prompt_name="passage")
        assert bare["query"] != embed("red", prompt_name="query")  # the default prompt precedes it
        with pytest.raises(openai.BadRequestError, match="has no prompt new; its prompts are query passage other"):
            embed("red", prompt_name="new")


def test_what_cannot_be_embedded_is_refused(server: Server) -> None:
    client, name = server.client(), model_folder("bert").name
    for change, words in (
        ({"input": "red " * 600}, "but the model reads at most"),
        ({"input": ""}, "at least 1 character"),
        ({"input": [[1, 2]]}, "valid string"),
        ({"dimensions": 7}, "64 dimensions"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**{"model": name, "input": "red", **change})
        assert words in caught.value.body["message"]
    with pytest.raises(openai.BadRequestError, match="serve a model that generates text"):
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "red"}])


def test_texts_that_cannot_fit_are_refused_at_once(server: Server) -> None:
    large = "red " * (15 << 18)
    for texts, words in (
        (large, "text 1 has 15,728,640 bytes"),
        (["red", large], "text 2 has 15,728,640 bytes"),
        (["red"] * 3000, "input can have at most 2,048 items"),
        ([[1]] * 10**6, "more than 100,000 values"),
    ):
        start = time.monotonic()
        status, answer = server.post("/v1/embeddings", {"input": texts})
        assert (status, words in answer["error"]["message"]) == (400, True), answer
        assert time.monotonic() - start < 10


def test_options_of_generation_are_refused(capsys: Captured) -> None:
    assert cli(["serve", str(model_folder("bert")), "--max-batch", "2", "--port", "0"]) == 2
    assert "computes embeddings" in sentence(capsys)
