"""Token stores are built once and completely, even if builders run concurrently or are killed."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sansgpu.config import Config, ConfigError, DataConfig
from sansgpu.data import files, shards
from sansgpu.data.batch import IGNORE
from sansgpu.data.files import Piece
from sansgpu.data.shards import build_store, build_tokenizer
from sansgpu.data.sources import open_sources
from sansgpu.data.split import all_documents
from sansgpu.tasks.configuration import as_config
from sansgpu.tasks.pretrain.task import Pretrain
from tests.forks import Fork
from tests.processes import environment, fork_server, kill_when, write_corpus


def silent(doing: str, done: int, total: int) -> None:
    pass


def data_of(path: Path, **settings: object) -> DataConfig:
    return DataConfig.model_validate({"dataset_name": str(path), "vocab_size": 300, **settings})


def build(corpus: Path, cache: Path) -> Fork:
    """Starts to tokenize a corpus in a fork."""
    return fork_server().start([str(corpus), str(cache)], environment(cache), "tests.data.build_store")


def prepare(config: Config, cache: Path) -> None:
    Pretrain.prepare(config, cache, silent)


def test_tokens_are_the_documents_each_after_an_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    source = open_sources(data_of(tmp_path / "a.jsonl")).train
    tokenizer = build_tokenizer(data_of(tmp_path / "a.jsonl"), source, tmp_path / "cache", silent)
    store = build_store(source, tokenizer, tmp_path / "cache", silent)
    end = tokenizer.end_id
    assert store.tokens.tolist() == [end, *tokenizer.encode("one two"), end, *tokenizer.encode("three")]
    assert store.tokens.dtype == np.uint16
    assert store.documents["end"].tolist()[-1] == len(store.tokens)


def test_documents_in_pieces_and_batches_are_stored_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_CHARS", 10)
    monkeypatch.setattr(shards, "ENCODE_CHARS", 25)
    texts = ["short", "a first line\nand é世 more of it\n" * 4, "", "x" * 33, "short", "last\n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = open_sources(data_of(tmp_path / "a.jsonl")).train
    tokenizer = build_tokenizer(data_of(tmp_path / "a.jsonl"), source, tmp_path / "cache", silent)
    store = build_store(source, tokenizer, tmp_path / "cache", silent)
    kept = [text for text in texts if text]
    whole = all_documents(store)
    ranges = list(zip(whole.starts.tolist(), whole.stops.tolist(), strict=True))
    assert [store.tokens[a] for a, _ in ranges] == [tokenizer.end_id] * len(kept)
    assert [tokenizer.decode(store.tokens[a + 1 : b].tolist()) for a, b in ranges] == kept
    hashes = store.documents["content_hash"].tolist()
    assert (hashes[0], len(set(hashes))) == (hashes[3], len(kept) - 1)  # equal documents have equal hashes


def test_a_tokenizers_sample_is_spread_over_the_whole_text(tmp_path: Path) -> None:
    line = {False: "plain words at first ", True: "zebrafish swim behind "}
    rows = [
        {"text": line[number > 1800] * 50} for number in range(2000)
    ]  # twice the sample size; zebrafish only near the end
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_of(tmp_path / "a.jsonl", tokenizer_sample_mb=1)
    tokenizer = build_tokenizer(data, open_sources(data).train, tmp_path / "cache", silent)
    assert len(tokenizer.encode(" zebrafish")) == 1


def test_progress_is_reported_up_to_the_whole_text(tmp_path: Path) -> None:
    source = open_sources(data_of(write_corpus(tmp_path / "a.jsonl"))).train
    said: list[tuple[str, int, int]] = []
    tokenizer = build_tokenizer(data_of(tmp_path / "a.jsonl"), source, tmp_path / "cache", silent)
    build_store(source, tokenizer, tmp_path / "cache", lambda *event: said.append(event))
    assert {doing for doing, _, _ in said} == {"tokenizing"}
    assert [done for _, done, _ in said] == sorted(done for _, done, _ in said)
    assert said[-1][1] == sum(len(piece.text) for piece in source.read())
    assert all(done <= total for _, done, total in said)


def test_a_validation_part_is_read_with_the_training_parts_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/train.txt").write_text("training words " * 60)
    (tmp_path / "text/valid.txt").write_text("held out é")
    config = Config.model_validate({"model": {"max_seq_len": 64}, "data": data_of(tmp_path / "text").model_dump()})
    settled, corpus = Pretrain.prepare(config, tmp_path / "cache", silent)
    assert settled.model.vocab_size == -(-corpus.tokenizer.vocab_size // 64) * 64
    batch = corpus.validation.batch(np.arange(len(corpus.validation)))
    learned = batch.targets[batch.targets != IGNORE].tolist()
    assert learned == [*corpus.tokenizer.encode("held out é"), corpus.tokenizer.end_id]
    assert corpus.train_tokens == 1 + len(corpus.tokenizer.encode("training words " * 60))


def test_what_is_in_the_cache_is_not_read_again(tmp_path: Path) -> None:
    source = open_sources(data_of(write_corpus(tmp_path / "a.jsonl"))).train
    tokenizer = build_tokenizer(data_of(tmp_path / "a.jsonl"), source, tmp_path / "cache", silent)
    first = build_store(source, tokenizer, tmp_path / "cache", silent)

    def unreadable() -> Iterator[Piece]:
        raise AssertionError("read again")

    cached = dataclasses.replace(source, read=unreadable)
    assert np.array_equal(build_store(cached, tokenizer, tmp_path / "cache", silent).tokens, first.tokens)
    other = build_tokenizer(data_of(tmp_path / "a.jsonl", tokenizer="char"), source, tmp_path / "cache", silent)
    with pytest.raises(AssertionError, match="read again"):
        build_store(cached, other, tmp_path / "cache", silent)
    for changed in ({"vocab_size": 301}, {"tokenizer_sample_mb": 1}):
        with pytest.raises(AssertionError, match="read again"):
            build_tokenizer(data_of(tmp_path / "a.jsonl", **changed), cached, tmp_path / "cache", silent)
    build_tokenizer(data_of(tmp_path / "a.jsonl"), cached, tmp_path / "cache", silent)


def test_a_source_that_fails_midway_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    source = open_sources(data_of(write_corpus(tmp_path / "a.jsonl"))).train
    tokenizer = build_tokenizer(data_of(tmp_path / "a.jsonl"), source, tmp_path / "cache", silent)
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "{broken\n")
    with pytest.raises(ConfigError, match="line 61 is not valid JSON"):
        build_store(source, tokenizer, tmp_path / "cache", silent)
    assert not [path for path in (tmp_path / "cache/tokens").iterdir() if path.is_dir()]


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + n) for n in range(20_000)) + "".join(chr(0x20000 + n) for n in range(42_000))
    (tmp_path / "a.txt").write_text(text + "".join(chr(0xAC00 + n) for n in range(11_000)))
    source = open_sources(data_of(tmp_path / "a.txt")).train
    tokenizer = build_tokenizer(data_of(tmp_path / "a.txt", tokenizer="char"), source, tmp_path / "cache", silent)
    store = build_store(source, tokenizer, tmp_path / "cache", silent)
    assert store.tokens.dtype == np.uint32
    assert tokenizer.decode(store.tokens[1:].tolist()) == (tmp_path / "a.txt").read_text()


def test_two_processes_building_the_same_agree(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", documents=3000)
    processes = [build(corpus, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""


def test_what_a_killed_builder_left_is_not_trusted(tmp_path: Path) -> None:
    corpus, cache = write_corpus(tmp_path / "a.jsonl", documents=6_000), tmp_path / "cache"
    partial = cache / "tokens"
    assert kill_when(build(corpus, cache), lambda: bool(list(partial.glob(".sansgpu-*")))) == -9
    assert list(partial.glob(".sansgpu-*"))
    again = build(corpus, cache).communicate(timeout=120)[0]
    fresh = build(corpus, tmp_path / "other").communicate(timeout=120)[0]
    assert again == fresh != ""
    assert not list(partial.glob(".sansgpu-*"))


@pytest.mark.parametrize(
    ("text", "model", "data", "sentence"),
    [
        ("", {}, {}, "contains no text"),
        ("too short", {}, {}, "less than one window"),
        ("word " * 500, {"vocab_size": 100}, {}, "smaller than the tokenizer's"),
        ("word " * 500, {}, {"validation_split": 1e-9}, "validation split .* is empty"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, text: str, model: dict[str, object], data: dict[str, object], sentence: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    settings = {"dataset_name": str(tmp_path / "a.txt"), "vocab_size": 300, **data}
    config = Config.model_validate({"model": {"max_seq_len": 64, **model}, "data": settings})
    with pytest.raises(ConfigError, match=sentence):
        prepare(config, tmp_path / "cache")


@pytest.mark.parametrize("damage", [b"\xff\xff", b""])
def test_damaged_tokens_are_noticed(tmp_path: Path, damage: bytes) -> None:
    config = Config(data=data_of(write_corpus(tmp_path / "a.jsonl")))
    prepare(config, tmp_path / "cache")
    (tokens,) = (tmp_path / "cache").rglob("tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2] + damage)
    with pytest.raises(ConfigError, match="damaged; delete that folder"):
        prepare(config, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"cannot be written.*cache_dir"):
        prepare(Config(data=data_of(corpus)), tmp_path / "cache")


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_no_more_than_max_tokens_are_read(tokenizer: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl")
    data = data_of(corpus, tokenizer=tokenizer)
    source = open_sources(data).train
    trained = build_tokenizer(data, source, tmp_path / "cache", silent)
    whole = build_store(source, trained, tmp_path / "cache", silent)
    for limit in (1, 2, 333, len(whole.tokens) - 1, len(whole.tokens), len(whole.tokens) + 1):
        store = build_store(source, trained, tmp_path / "cache", silent, limit)
        assert store.tokens.tolist() == whole.tokens[:limit].tolist()
        assert store.documents["end"][-1] == len(store.tokens)


def test_max_tokens_limits_what_a_run_trains_on(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl")
    for limit in (None, 2000):
        model = {"d_model": 16, "n_heads": 1, "n_layers": 1, "max_seq_len": 16}
        config = as_config({"model": model, "data": {"dataset_name": str(corpus), "max_tokens": limit}})
        _, prepared = Pretrain.prepare(config, tmp_path / "cache", silent)
        assert (prepared.train_tokens + prepared.validation_tokens <= 2000) is (limit is not None)
