"""Each word is scored at its first token and in one window, whatever the tokenizer; run_ner.py does the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sansgpu.config import ConfigError
from sansgpu.data.forms.tags import untagged_text
from sansgpu.data.forms.words import TaggedText
from sansgpu.data.rows import SourceRow
from sansgpu.tasks.tokens.data import TagWindow, make_tag_windows
from tests.tasks.tokenizer_kinds import KINDS, SPECIAL, tokenizer_of
from tests.tasks.tokenizer_kinds import TEXT as TRAINED

WORDS = [
    "The", "naïve", "café", "sells", "3", "crêpes", ",", "and", "Zoë", "'s", "dog", ".", "▁", "Ünïcödé", "世界",
    "New\u00a0York", "end", ".",
]  # fmt: skip
TEXT = "The naïve café sells 3 crêpes, and Zoë's dog. Ünïcödé 世界 end."
# Tokenizers whose tokens never span two words. Some tokens of the others do, because they were trained on one text.
WITHIN_WORDS = ("wordpiece", "unigram", "roberta", "gpt2", "qwen")


@cache
def tokenizer(kind: str) -> Any:
    if kind == "unigram":  # as in XLM-RoBERTa and DeBERTa
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
        backend.train_from_iterator([TRAINED] * 3, trainer)
    else:
        backend = tokenizer_of("gpt2" if kind == "roberta" else kind)
    if kind == "roberta":  # it adds a space before every word, even the first
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if kind in ("roberta", "unigram"):
        ids = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def text_of(**row: Any) -> TaggedText:
    return untagged_text(SourceRow("row 1", row))


def labels_of_run_ner(words: list[str], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns token ids and labels as transformers' run_ner.py does, with the index of a word as its label."""
    encoded = tokenizer(words, is_split_into_words=True)
    labels, before = [], None
    for word in encoded.word_ids():
        labels.append(-100 if word is None or word == before else word)
        before = word
    return encoded["input_ids"], labels


def labels_of(window: TagWindow) -> list[int]:
    labels = np.full(len(window.ids), -100)
    labels[window.places] = window.words
    return labels.tolist()


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "roberta"])
def test_tokens_and_labels_are_those_of_run_ner(kind: str) -> None:
    words = [word for word in WORDS if word != "▁"]  # SentencePiece reads it as a space
    (window,) = make_tag_windows([text_of(tokens=words)], tokenizer(kind), 512, 0)
    assert (window.ids.tolist(), labels_of(window)) == labels_of_run_ner(words, tokenizer(kind))


@pytest.mark.parametrize("row", [{"tokens": WORDS}, {"text": TEXT}])
@pytest.mark.parametrize("kind", dict.fromkeys([*WITHIN_WORDS, *KINDS]))
def test_each_word_is_scored_at_its_first_token(kind: str, row: dict[str, Any]) -> None:
    text, used = text_of(**row), tokenizer(kind)
    (window,) = make_tag_windows([text], used, 512, 0)
    offsets = used(text.text, return_offsets_mapping=True)["offset_mapping"]
    for place, word in zip(window.places, window.words, strict=True):
        start, end = offsets[place]
        assert start < text.ends[word]
        assert end > text.starts[word] or not text.text[start:end].strip()
        assert kind not in WITHIN_WORDS or start <= text.starts[word]
    assert (np.diff(window.words) > 0).all()
    missing = {text.word(n) for n in range(len(text.starts))} - {text.word(n) for n in window.words}
    # Words that may lack their own token: one that is read as a space, and parts of the previous word's token.
    assert kind not in WITHIN_WORDS or missing <= {"▁", "s", ".", "界"}


@pytest.mark.parametrize("overlap", [0, 3, 5])
@pytest.mark.parametrize("kind", WITHIN_WORDS)
def test_each_word_of_a_long_text_is_scored_once_with_most_context(kind: str, overlap: int) -> None:
    texts = [text_of(tokens=["short", "one"]), text_of(tokens=WORDS * 3), text_of(text=TEXT * 2)]
    used = tokenizer(kind)
    whole, parts = make_tag_windows(texts, used, 512, 0), make_tag_windows(texts, used, 16, overlap)
    assert len(whole) == 3 < len(parts)
    for number, one in enumerate(whole):
        own = [window for window in parts if window.text == number]
        assert all(len(window.ids) <= 16 for window in own)
        assert sorted(word for window in own for word in window.words) == one.words.tolist()
        for window in own:
            assert window.ids[window.places].tolist() == one.ids[one.places[np.isin(one.words, window.words)]].tolist()
    if overlap:
        middle = [w for w in parts if w.text == 1][1:-1]
        context = min(int(np.minimum(w.places, len(w.ids) - 1 - w.places).min()) for w in middle if len(w.ids) == 16)
        assert context >= overlap // 2


def test_a_text_without_tokens_has_no_window_and_a_large_overlap_is_refused() -> None:
    texts = [text_of(tokens=["\u200b"]), text_of(text="end")]
    assert [window.text for window in make_tag_windows(texts, tokenizer("wordpiece"), 16, 4)] == [1]
    with pytest.raises(
        ConfigError, match=r"data\.doc_stride 14 leaves no room for new tokens in a window of data\.max_length 16"
    ):
        make_tag_windows(texts, tokenizer("wordpiece"), 16, 14)
