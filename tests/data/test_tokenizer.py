"""Decoding restores any encoded text."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

import sansgpu.tokenizer
from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.data.shards import build_tokenizer, left_out_note
from sansgpu.data.sources import open_sources
from sansgpu.data.tokenizer import (
    END_OF_TEXT,
    BoundedRuns,
    BPETokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
)

SAMPLE = ["def main():\n    return 'naïve café'\r\n\n\n", "1234567 words, and more words; and MORE\t\ttabs"] * 5
TOKENIZERS = [BPETokenizer.train(SAMPLE, 300), CharTokenizer.train(SAMPLE)]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bpe", "char"])
@given(text=ANY_TEXT)
@example(text="a\r\nb\n\n\nc\rd")
@example(text="<|endoftext|> and <0x41> are text here")
@example(text="\0 nul, \u200b zero width, e\u0301 combining, 世界 🎉 \U0010ffff")
@example(text="   leading, trailing   ")
def test_any_unicode_text_round_trips_and_its_bytes_are_counted(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_id not in ids
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())


def test_a_new_tokenizer_knows_bytes_and_is_trained_in_place(tmp_path: Path) -> None:
    tokenizer = sansgpu.tokenizer.BPETokenizer()
    text = "naïve 世界"
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.train(SAMPLE, vocab_size=300) is tokenizer
    assert tokenizer.backend.to_str() == TOKENIZERS[0].backend.to_str()
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    again = BPETokenizer.from_pretrained(str(tmp_path / "saved"))
    assert (again.encode(SAMPLE[0]), again.end_id) == (tokenizer.encode(SAMPLE[0]), tokenizer.end_id)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SAMPLE))
    from_dataset = BPETokenizer().train_from_dataset(dataset_name=str(tmp_path / "text.jsonl"), vocab_size=300)
    assert from_dataset.backend.to_str() == tokenizer.backend.to_str()


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bpe", "char"])
def test_transformers_loads_the_saved_folder_and_agrees(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "def main(): 'naïve'  世界\r\n\n  12345"
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_id
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)


@pytest.fixture(scope="module", params=TOKENIZERS, ids=["bpe", "char"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, object]:
    """Returns a tokenizer and transformers' tokenizer loaded from the folder it was saved to."""
    folder = tmp_path_factory.mktemp("tokenizer")
    request.param.save(folder)
    return request.param, AutoTokenizer.from_pretrained(folder)


@settings(max_examples=30)
@given(text=ANY_TEXT.filter(lambda text: END_OF_TEXT not in text))
@example(text="it 's , isn 't it ? a . b !  \n\r\n")  # clean_up_tokenization_spaces would change it
def test_transformers_reads_and_writes_any_text_alike(saved: tuple[Tokenizer, object], text: str) -> None:
    ours, theirs = saved
    ids = theirs(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    assert ids == ours.encode(text)
    assert theirs.decode(ids) == text  # type: ignore[attr-defined]


def test_a_tokenizer_that_truncates_and_pads_is_loaded_to_do_neither(tmp_path: Path) -> None:
    backend = Backend.from_str(TOKENIZERS[0].backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=500)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode_batch(SAMPLE) == TOKENIZERS[0].encode_batch(SAMPLE)


@pytest.mark.parametrize("end", ["<stop>", {"content": "<stop>", "special": True}])
def test_the_end_of_text_is_the_one_its_folder_names(tmp_path: Path, end: object) -> None:
    backend = Backend.from_str(TOKENIZERS[0].backend.to_str())
    backend.add_special_tokens(["<stop>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.end_of_text, loaded.end_id, loaded.vocab_size) == ("<stop>", 300, 301)
    assert loaded.token_bytes()[300] == 0


def test_batches_are_encoded_as_single_texts_are() -> None:
    for tokenizer in TOKENIZERS:
        assert tokenizer.encode_batch(SAMPLE) == [tokenizer.encode(text) for text in SAMPLE]


def test_bpe_learns_up_to_the_size_asked_for() -> None:
    assert TOKENIZERS[0].vocab_size == 300
    assert len(TOKENIZERS[0].encode(SAMPLE[0])) < len(SAMPLE[0].encode())


def test_a_character_is_one_token() -> None:
    assert len(TOKENIZERS[1].encode("naïve")) == 5


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    Backend(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_tokenizer(tmp_path)


def test_rubbish_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a usable tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(tmp_path / "none.json")


def long_runs() -> dict[str, str]:
    draws = np.random.default_rng(0)
    return {
        "DNA": "".join(draws.choice(list("ACGT"), 60_000)),
        "base64": base64.b64encode(draws.bytes(45_000)).decode(),
        "one letter": "a" * 60_000,
        "one letter of another script": "д" * 60_000,
        "minified": "".join(draws.choice(["function(", "a,b){return", "!x1;", "var_y='z'"], 8_000)),
    }


@pytest.mark.parametrize("kind", long_runs())
def test_long_runs_without_white_space_are_trained_on_up_to_a_limit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sansgpu.data.tokenizer.MAX_UNSPACED", 10_000)
    run, words = long_runs()[kind], "the quick brown fox " * 50
    texts = [f"{words}{run} and {words}", words, run[:5_000]]
    bounded = BoundedRuns(texts)
    found = "".join(bounded)
    assert bounded.left_out == len("".join(texts)) - len(found) > 40_000
    assert found == f"{words}{run[:10_000]} and {words}{words}"
    (tmp_path / "a.txt").write_text(texts[0])
    data = DataConfig(dataset_name=str(tmp_path / "a.txt"), tokenizer="bpe", vocab_size=300)
    source = open_sources(data).train
    for _ in range(2):  # trained, and from the cache
        tokenizer = build_tokenizer(data, source, tmp_path / "cache", lambda *_: None)
        assert f"not trained on {len(run) - 10_000:,} characters" in str(left_out_note(tokenizer))
        assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]


def test_usual_text_is_trained_on_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sansgpu.data.tokenizer.MAX_UNSPACED", 0)
    address = f"see https://example.org/{'x/1' * 600} there"
    texts = ["", "a b\n" * 9999, "中文没有空格，但有标点。" * 999, address, "x = [1,2,3]; " * 999]
    bounded = BoundedRuns(texts)
    assert [*bounded] == texts
    assert bounded.left_out == 0
