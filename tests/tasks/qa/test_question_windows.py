"""Windows cover the whole context of a question, and labels are exactly the answer's tokens."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from sansgpu.config import ConfigError
from sansgpu.data.forms.questions import Question
from sansgpu.data.row_report import RowReport
from sansgpu.tasks.qa.data import QuestionWindow
from sansgpu.tasks.qa.data import make_windows as make_all_windows

WORDS = ["the", "cat", "sat", "on", "mats", "who", "?", "cafés", "日本", "🎉"]


def word_piece() -> Any:
    """A tokenizer like BERT's: [CLS] question [SEP] context [SEP]; `mats` and `cafes` are two tokens each."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "who", "?", "cafe", "##s"]
    return BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)})


def byte_level() -> Any:
    """A tokenizer like RoBERTa's: <s> question </s></s> context </s>; rare characters are several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(["the cat sat on the mats", "who sat on the cat ?"] * 5, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **names)


def left_padding() -> Any:
    """A tokenizer like XLNet's: context <sep> question <sep> <cls>."""
    vocab = {name: number for number, name in enumerate(["<pad>", "<unk>", "<cls>", "<sep>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="$A:0 <sep>:0 <cls>:2",
        pair="$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        special_tokens=[("<sep>", 3), ("<cls>", 2)],
    )
    names = {"cls_token": "<cls>", "sep_token": "<sep>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)


TOKENIZERS = {"word-piece": word_piece(), "byte-level": byte_level(), "left-padding": left_padding()}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
CONTEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=40)


def make_windows(questions: list[Question], tokenizer: Any, max_length: int, doc_stride: int) -> list[QuestionWindow]:
    return make_all_windows(questions, tokenizer, max_length, doc_stride, RowReport("fail"))[1]


def ask(context: str, answer: str | None = None, question: str = "who ?") -> Question:
    answers = () if answer is None else ((context.index(answer), answer),)
    return Question("a", question, context, answers, answer is None)


def context_tokens(window: QuestionWindow) -> list[tuple[int, int, int]]:
    """Returns the id and the character range of each context token: (id, start, stop)."""
    inside = window.offsets[:, 0] >= 0
    return [(int(i), int(a), int(b)) for i, (a, b) in zip(window.ids[inside], window.offsets[inside], strict=True)]


def all_tokens(tokenizer: Any, text: str) -> list[tuple[int, int, int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [(i, a, b) for i, (a, b) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)]


@each_tokenizer
@given(CONTEXTS, st.integers(0, 4), st.integers(1, 6))
def test_windows_cover_the_context_and_overlap_by_the_stride(
    tokenizer: Any, words: list[str], doc_stride: int, more: int
) -> None:
    context = "  ".join(words)
    question_ids = [token for token, _, _ in all_tokens(tokenizer, "who ?")]
    max_length = len(question_ids) + tokenizer.num_special_tokens_to_add(pair=True) + doc_stride + more
    windows = make_windows([ask(context, question="  who ?")], tokenizer, max_length, doc_stride)
    pieces = [context_tokens(window) for window in windows]
    assert pieces[0] + [token for piece in pieces[1:] for token in piece[doc_stride:]] == all_tokens(tokenizer, context)
    for before, piece in pairwise(pieces):
        assert before[len(before) - doc_stride :] == piece[:doc_stride]
    assert all(len(window.ids) == max_length for window in windows[:-1])
    assert len(windows[-1].ids) <= max_length
    left = tokenizer.padding_side == "left"
    for window, piece in zip(windows, pieces, strict=True):
        ids = [token for token, _, _ in piece]
        assert window.ids.tolist() == wrapped(tokenizer, *((ids, question_ids) if left else (question_ids, ids)))
        assert window.start == window.end == window.cls == (len(window.ids) - 1 if left else 0)  # no answer


def wrapped(tokenizer: Any, first: list[int], second: list[int]) -> list[int]:
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    if tokenizer.padding_side == "left":
        return [*first, sep, *second, sep, cls]
    between = [sep] if "token_type_ids" in tokenizer.model_input_names else [sep, sep]
    return [cls, *first, *between, *second, sep]


def test_types_are_those_of_the_tokenizer() -> None:
    (window,) = make_windows([ask("the cat")], TOKENIZERS["word-piece"], 20, 4)
    assert window.type_ids is not None
    assert window.type_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (window.ids.dtype, window.type_ids.dtype, window.offsets.dtype) == (np.int32, np.int8, np.int32)
    (window,) = make_windows([ask("the cat")], TOKENIZERS["byte-level"], 20, 4)
    assert window.type_ids is None


def run_qa_label(window: QuestionWindow, begin: int, stop: int) -> tuple[int, int]:
    """Returns the start and end labels of transformers' run_qa.py, limited to the context."""
    places = [place for place, (a, _) in enumerate(window.offsets.tolist()) if a >= 0]
    start, end = places[0], places[-1]
    if not (window.offsets[start, 0] <= begin and window.offsets[end, 1] >= stop):
        return window.cls, window.cls
    while start <= places[-1] and window.offsets[start, 0] <= begin:
        start += 1
    while end >= places[0] and window.offsets[end, 1] >= stop:
        end -= 1
    return start - 1, end + 1


@pytest.mark.parametrize("name", ["word-piece", "left-padding"])
@given(CONTEXTS, st.integers(0, 3), st.integers(1, 6), st.data())
def test_labels_are_those_of_run_qa(
    name: str, words: list[str], doc_stride: int, more: int, data: st.DataObject
) -> None:
    context = "  ".join(words)
    inked = [place for place, character in enumerate(context) if character != " "]
    begin, last = sorted((data.draw(st.sampled_from(inked)), data.draw(st.sampled_from(inked))))
    question = Question("a", "who", context, ((begin, context[begin : last + 1]), (0, context[:1])), False)
    for window in make_windows([question], TOKENIZERS[name], 4 + doc_stride + more, doc_stride):
        assert (window.start, window.end) == run_qa_label(window, begin, last + 1)


@each_tokenizer
@given(CONTEXTS, st.integers(1, 8), st.data())
def test_only_windows_with_the_whole_answer_have_a_label(
    tokenizer: Any, words: list[str], more: int, data: st.DataObject
) -> None:
    first, last = sorted((data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, len(words) - 1))))
    before, text = " ".join(words[:first]), " ".join(words[first : last + 1])
    begin = len(before) + (first > 0)
    question = Question("a", "who", " ".join(words), ((begin, text),), False)
    labeled = False
    for window in make_windows([question], tokenizer, 8 + more, 2):
        characters = {c for _, a, b in context_tokens(window) for c in range(a, b)}
        inside = characters.issuperset(c for c in range(begin, begin + len(text)) if question.context[c] != " ")
        assert (window.start != window.cls) == inside
        if inside:
            labeled = True
            assert question.context[window.offsets[window.start, 0] : window.offsets[window.end, 1]] == text
    if first == last and tokenizer is not TOKENIZERS["byte-level"]:
        assert labeled  # some window contains both tokens of the word


@pytest.mark.parametrize(
    ("context", "text"),
    [
        ("sat on the cat", "cat"),
        ("who 🎉 sat", "🎉"),
        ("the 日本 cat", "日本"),
        ("日本", "本"),
        ("on  cafés  on", "cafés"),
    ],
)
def test_label_tokens_decode_to_the_answer(context: str, text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    (window,) = make_windows([ask(context, text)], tokenizer, 64, 4)
    assert tokenizer.decode(window.ids[window.start : window.end + 1]).strip() == text


def test_windows_refer_to_their_question_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [ask(" ".join(WORDS[:5] * n), WORDS[n % 5], " ".join(["who"] * (1 + n % 3))) for n in range(1, 8)]

    def fields(window: QuestionWindow) -> tuple[Any, ...]:
        return window.ids.tolist(), window.start, window.end, window.cls, window.offsets.tolist()

    alone = [[fields(w) for w in make_windows([q], TOKENIZERS["word-piece"], 12, 2)] for q in questions]
    expected = [(number, *window) for number, windows in enumerate(alone) for window in windows]
    for size in (3, 7, 1000):
        monkeypatch.setattr("sansgpu.tasks.qa.data.BATCH", size)
        together = make_windows(questions, TOKENIZERS["word-piece"], 12, 2)
        assert [(window.text, *fields(window)) for window in together] == expected


@pytest.mark.parametrize("context", ["\x00", "the \x00 cat"])
def test_an_answer_without_tokens_is_no_label(context: str) -> None:
    (window,) = make_windows([ask(context, "\x00")], TOKENIZERS["word-piece"], 12, 2)  # BERT drops control characters
    assert (window.start, window.end) == (0, 0)
    assert (window.offsets >= 0).any() == ("cat" in context)


@each_tokenizer
def test_a_question_that_leaves_no_room_is_named(tokenizer: Any) -> None:
    questions = [ask("the cat"), Question("long", "who ? " * 9, "the cat", ((4, "cat"),), False)]
    with pytest.raises(ConfigError, match=r"question long has \d+ tokens, .* no room .* data.max_length 16"):
        make_windows(questions, tokenizer, 16, 2)


@each_tokenizer
def test_questions_that_leave_no_room_can_be_skipped(tokenizer: Any) -> None:
    long = Question("long", "who ? " * 9, "the cat", (), True)
    questions = [long, ask("the cat", "cat"), long, ask("on the cat", "cat")]
    skipped = RowReport("skip")
    kept, windows = make_all_windows(questions, tokenizer, 16, 2, skipped)
    assert kept == [questions[1], questions[3]]
    assert [window.text for window in windows] == [0, 1]
    assert skipped.skipped == 2
    assert str(skipped.first).startswith("question long has ")
    assert make_all_windows([long], tokenizer, 16, 2, skipped) == ([], [])


@each_tokenizer
def test_an_overlap_that_leaves_no_room_is_refused_before_the_tokenizer_fails(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.doc_stride 16 leaves no room"):
        make_windows([ask("the cat")], tokenizer, 16, 16)
    questions = [ask("the cat " * 20), Question("long", "who " * 6, "the cat " * 20, (), True)]
    with pytest.raises(ConfigError, match=r"question long leaves \d tokens .* no more than data.doc_stride 8; lower"):
        make_windows(questions, tokenizer, 17, 8)


def test_a_context_that_fits_needs_no_room_for_an_overlap() -> None:
    (window,) = make_windows([ask("the cat", "cat", "who who who who who")], TOKENIZERS["word-piece"], 10, 6)
    assert (window.start, window.end) == (8, 8)
