"""Tokenizers in GGUF files give the same tokens as before; those that llama.cpp cannot compute are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import Keys, TokenType
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.data.tokenizer import BPETokenizer, CharTokenizer, Tokenizer
from sansgpu.models.formats.gguf_source import open_gguf
from sansgpu.models.formats.gguf_tokenizer import read_tokenizer
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.train.loading import ModelRequest, open_model
from tests.models.formats.gguf_models import (
    GPT4O,
    TEKKEN,
    falcon,
    metadata,
    rewritten,
    sentence_piece,
    split,
    write_ours,
)
from tests.models.small import TEXT, TOKENIZER, model_of


def test_characters_and_their_bytes_come_back(tmp_path: Path) -> None:
    tokenizer = CharTokenizer.train(TEXT)
    write_ours(tmp_path / "model.gguf", model_of("modern", vocab_size=320), "f32", tokenizer)
    parts = open_gguf(tmp_path / "model.gguf").tokenizer
    assert parts.token(parts.eos_id) == "<|endoftext|>"
    assert Tokenizer(parts.backend).encode("naïve 世\n") == tokenizer.encode("naïve 世\n")
    said = metadata(tmp_path / "model.gguf")
    assert said["tokenizer.ggml.model"] == "llama"
    assert said["tokenizer.ggml.add_space_prefix"] is False


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (TOKENIZER, "dbrx"), (split(use_regex=True), "gpt-2"), (split(r"\p{N}", use_regex=True), "smollm"),
        (split(GPT4O, inverted=True), "gpt-4o"), (split(TEKKEN, ignore_merges=True), "tekken"),
        (falcon(), "falcon"),
    ],
    ids=["ours", "gpt2", "smollm", "gpt-4o", "tekken", "falcon"],
)  # fmt: skip
def test_the_split_has_llama_cpps_name(tokenizer: Tokenizer, name: str, tmp_path: Path) -> None:
    write_ours(tmp_path / "model.gguf", model_of("modern", vocab_size=704), "f32", tokenizer)
    assert metadata(tmp_path / "model.gguf")["tokenizer.ggml.pre"] == name


def unusual() -> Tokenizer:
    backend = Backend(models.WordLevel({"a": 0, "<|endoftext|>": 1}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend)


@pytest.mark.parametrize(
    "tokenizer",
    [
        split(r"\s+"), split(r"\p{N}", use_regex=True, inverted=True), unusual(), CharTokenizer.train(["a▁b"]),
        BPETokenizer.train(["ab"], 257),
    ],
    ids=["split", "only digits", "words", "underscore", "no merges"],
)  # fmt: skip
def test_a_tokenizer_that_llama_cpp_cannot_compute_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama\.cpp does not support this tokenizer"):
        write_ours(tmp_path / "model.gguf", model_of("modern"), "f32", tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_gemma_4s_tokenizer_is_made_from_its_merges() -> None:
    tokenizer = sentence_piece(adds_space=False)
    model = json.loads(tokenizer.backend.to_str())["model"]
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [TokenType.CONTROL, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * (len(names) - 257)]
    given = {
        Keys.Tokenizer.MODEL: "gemma4", Keys.Tokenizer.LIST: names, Keys.Tokenizer.TOKEN_TYPE: types,
        Keys.Tokenizer.MERGES: [" ".join(pair) for pair in model["merges"]], Keys.Tokenizer.ADD_PREFIX: False,
    }  # fmt: skip
    again = Tokenizer(Backend.from_str(read_tokenizer(given).json))
    texts = [*TEXT, "  two  spaces\n\nnaïve 世 "]
    assert [again.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]


OTHERS = {
    "dbrx": TOKENIZER,
    "gpt-2": split(use_regex=True),
    "smollm": split(r"\p{N}", use_regex=True),
    "gpt-4o": split(GPT4O, inverted=True),
    "tekken": split(TEKKEN, ignore_merges=True),
    "falcon": falcon(),
    "characters": CharTokenizer.train(TEXT),
    "gemma": sentence_piece(adds_space=False),
    "llama2": sentence_piece(adds_space=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_tokenizer_that_others_wrote_is_made_from_its_tokens(name: str, tmp_path: Path) -> None:
    tokenizer = OTHERS[name]
    write_ours(tmp_path / "model.gguf", model_of("modern", vocab_size=704), "f32", tokenizer)
    path = rewritten(tmp_path / "model.gguf", tmp_path / "other.gguf", leave_out="tokenizer.huggingface.json")
    made = open_model(ModelRequest(str(path)), "generate", pytest.fail).tokenizer
    for text in (*TEXT[:1], "naïve 世界 1234 I'LL <|endoftext|>\n\n  x"):
        assert made.encode(text) == tokenizer.encode(text)
        assert made.decode(made.encode(text)) == text
    assert made.end_id == tokenizer.end_id
    theirs = load_tokenizer_of(ModelConfig(name_or_path=str(path)))
    assert theirs("naïve").input_ids == [tokenizer.end_id, *tokenizer.encode("naïve")]


def test_a_tokenizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    write_ours(tmp_path / "model.gguf", model_of("modern"), "f32")
    path = rewritten(tmp_path / "model.gguf", tmp_path / "other.gguf", leave_out="tokenizer.huggingface.json")
    last = rewritten(path, tmp_path / "last.gguf", leave_out="tokenizer.ggml.pre")
    with pytest.raises(
        ConfigError, match=r"its tokenizer \(None\) is not supported, and the file contains no tokenizer"
    ):
        open_model(ModelRequest(str(last)), "generate", pytest.fail)
