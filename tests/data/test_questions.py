"""Questions are parsed and tokenized: windows cover the whole context, and labels are exactly the answer's tokens."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.files import SourceRow
from sansgpu.data.questions import Question, QuestionWindow, make_windows, read_questions
from sansgpu.data.sources import open_sources

CONTEXT = "The cat sat on the mat. It slept there."
WORDS = ["the", "cat", "sat", "on", "mats", "who", "?", "cafés", "日本", "🎉"]


def word_piece() -> Any:
    """BERT: [CLS] question [SEP] context [SEP], with token types; `mats` and `cafes` are two tokens each."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "who", "?", "cafe", "##s"]
    return BertTokenizerFast(vocab={piece: number for number, piece in enumerate(pieces)})


def byte_level() -> Any:
    """RoBERTa: <s> question </s></s> context </s>, without token types; a rare character is several tokens."""
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
    """XLNet: context <sep> question <sep> <cls>."""
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


def no_warning(message: str) -> None:
    raise AssertionError(message)


def read(path: Path, on_bad_row: Any = "fail", warn: Any = no_warning) -> list[Question]:
    source = open_sources(DataConfig.model_validate({"dataset_name": str(path)})).train
    return read_questions(source.rows(), on_bad_row, warn)


def flat(**changes: Any) -> dict[str, Any]:
    row = {"id": "a", "question": "Who sat?", "context": CONTEXT, "answers": {"text": ["cat"], "answer_start": [4]}}
    return {key: value for key, value in (row | changes).items() if value is not ...}


def nested(*asked: Any, context: Any = CONTEXT) -> dict[str, Any]:
    return {"title": "Cats", "paragraphs": [{"context": context, "qas": list(asked)}]}


def ask(context: str, answer: str | None = None, question: str = "who ?") -> Question:
    answers = () if answer is None else ((context.index(answer), answer),)
    return Question("a", question, context, answers, answer is None)


def test_nested_articles_of_the_first_version(tmp_path: Path) -> None:
    answers = [{"text": "cat", "answer_start": 4}, {"text": "The cat", "answer_start": 0}]
    article = nested({"id": "1", "question": "Who sat?", "answers": answers})
    article["paragraphs"] += nested(
        {"id": "2", "question": "Where?", "answers": [{"text": "here", "answer_start": 3}]}, context="Is here."
    )["paragraphs"]
    (tmp_path / "train.json").write_text(json.dumps({"version": "1.1", "data": [article, nested()]}))
    assert read(tmp_path / "train.json") == [
        Question("1", "Who sat?", CONTEXT, ((4, "cat"), (0, "The cat")), False),
        Question("2", "Where?", "Is here.", ((3, "here"),), False),
    ]


def test_nested_articles_of_the_second_version(tmp_path: Path) -> None:
    plausible = [{"text": "cat", "answer_start": 4}]
    article = nested(
        {"id": "1", "question": "Who ran?", "answers": [], "is_impossible": True, "plausible_answers": plausible},
        {"id": "2", "question": "Who sat?", "answers": plausible, "is_impossible": False},
        {"id": "3", "question": "Who fled?", "is_impossible": True},
    )
    (tmp_path / "train.json").write_text(json.dumps({"version": "v2.0", "data": [article]}))
    assert read(tmp_path / "train.json") == [
        Question("1", "Who ran?", CONTEXT, (), True),
        Question("2", "Who sat?", CONTEXT, ((4, "cat"),), False),
        Question("3", "Who fled?", CONTEXT, (), True),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_flat_columns(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train{suffix}"
    empty: dict[str, list[Any]] = {"text": [], "answer_start": []}
    rows = [flat(), flat(id="b", answers={"text": ["It", "cat"], "answer_start": [24, 4]}), flat(id="c", answers=empty)]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows))
    assert read(path) == [
        Question("a", "Who sat?", CONTEXT, ((4, "cat"),), False),
        Question("b", "Who sat?", CONTEXT, ((24, "It"), (4, "cat")), False),
        Question("c", "Who sat?", CONTEXT, (), True),
    ]


def test_answers_may_be_a_list_of_objects_and_ids_numbers() -> None:
    rows = [
        SourceRow("x", flat(id=7, answers=[{"text": "cat", "answer_start": 4}])),
        SourceRow("y", flat(answers=None)),
    ]
    first, second = read_questions(rows, "fail", no_warning)
    assert (first.id, first.answers, first.impossible) == ("7", ((4, "cat"),), False)
    assert (second.answers, second.impossible) == ((), True)


def test_a_question_without_an_id_is_named_by_its_place(tmp_path: Path) -> None:
    asked = {"question": "Who?", "answers": []}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [flat(id=...), nested(asked, asked), flat()])))
    ids = [question.id for question in read(tmp_path / "train.jsonl")]
    assert ids[0].endswith("train.jsonl, line 1")
    assert ids[3] == "a"
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("text", "start", "found"),
    [
        ("cat", 4, (4, "cat")),
        (" cat", 3, (3, " cat")),  # unchanged
        ("cat", 3, (4, "cat")),
        (" cat", 4, (4, "cat")),
        ("slept \n", 27, (27, "slept")),
        ("\tcat sat\n", 3, (4, "cat sat")),
    ],
)
def test_an_answer_is_found_where_white_space_at_its_ends_has_moved(
    text: str, start: int, found: tuple[int, str]
) -> None:
    answers = {"text": [text], "answer_start": [start]}
    (question,) = read_questions([SourceRow("x", flat(answers=answers))], "fail", no_warning)
    assert question.answers == (found,)


def answer(text: Any, start: Any) -> dict[str, Any]:
    return flat(answers={"text": [text], "answer_start": [start]})


BAD = [
    ("a row", "x: it is a str, not an object"),
    ([1], "x: it is a list, not an object"),
    (flat(question=...), "x: no question"),
    (flat(question=" "), "x: no question"),
    (flat(question=3), "x: no question"),
    (flat(context=None), "x: no context"),
    (flat(context=""), "x: no context"),
    (flat(context="\ud800 cat"), "x: its context contains an unpaired surrogate"),
    (flat(question="\udfff?"), "x: its question contains an unpaired surrogate"),
    (answer("\ud83c", 4), "x: an answer contains an unpaired surrogate"),
    (flat(id=[1]), r"x: its id is \[1\]"),
    (flat(id="\ud800"), r"x: its id is '\\ud800'"),
    (answer("", 4), "x: an answer has no text"),
    (answer("  ", 3), "x: an answer has no text"),
    (answer(None, 4), "x: an answer has no text"),
    (answer("cat", 17), "x: the answer 'cat' is not at character 17 of the context"),
    (answer("cat", 5), "x: the answer 'cat' is not at character 5 of the context"),
    (answer("there.", -6), "x: the answer 'there.' is not at character -6 of the context"),
    (answer("cat", 4000), "x: the answer 'cat' is not at character 4000 of the context"),
    (answer("cat", 4.0), "x: the answer 'cat' starts at 4.0, which is not an integer"),
    (answer("cat", True), "x: the answer 'cat' starts at True"),
    (answer("cat", None), "x: the answer 'cat' starts at None"),
    (flat(answers={"text": ["cat", "The"], "answer_start": [4]}), "x: its answers have 2 texts, but 1 starts"),
    (flat(answers={"text": "cat", "answer_start": 4}), "x: its answers do not have the lists"),
    (flat(answers={"text": ["cat"]}), "x: its answers do not have the lists"),
    (flat(answers=["cat"]), "x: its answers are not a list of objects"),
    (flat(answers="cat"), "x: its answers are not a list of objects"),
    (flat(answers=...), "x: no answers"),
    (flat(is_impossible=True), "x: is_impossible is true, but there are answers"),
    (flat(is_impossible="no"), "x: is_impossible is 'no'"),
    ({"paragraphs": {}}, "x: its paragraphs are not a list"),
    ({"paragraphs": [3]}, "x, paragraph 1: it is not an object with a list `qas`"),
    ({"paragraphs": [{"context": "c", "qas": None}]}, "x, paragraph 1: it is not an object with a list `qas`"),
    (nested("who"), "x, paragraph 1, question 1: it is a str"),
    (nested({"question": "Who?"}), "x, paragraph 1, question 1: no answers"),
    (nested({"question": "Who?", "id": "b", "answers": []}, context=None), "x, question b: no context"),
    (
        nested({"question": "Who?", "id": "b", "answers": [{"text": "cat", "answer_start": 0}]}),
        "x, question b: the answer 'cat' is not at character 0 of the context",
    ),
]


@pytest.mark.parametrize(("value", "problem"), BAD, ids=range(len(BAD)))
def test_every_bad_row_is_named_and_can_be_skipped(value: Any, problem: str) -> None:
    rows = [SourceRow("w", flat(id="before")), SourceRow("x", value), SourceRow("y", flat(id="after"))]
    with pytest.raises(ConfigError, match=f"^{problem}") as refused:
        read_questions(rows, "fail", no_warning)
    str(refused.value).encode()
    warnings: list[str] = []
    assert [question.id for question in read_questions(rows, "skip", warnings.append)] == ["before", "after"]
    named, hint, _ = str(refused.value).partition(", or set data.on_bad_row to skip.")
    assert hint
    assert warnings == [f"bad rows skipped: 1; the first: {named}."]


def test_one_warning_counts_all_bad_rows_and_names_the_first(tmp_path: Path) -> None:
    bad_question = {"id": "n", "question": "", "answers": []}
    lines = [json.dumps(flat()), "{half a row", json.dumps(flat()), json.dumps(nested(bad_question)), "3"]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 2 is not valid JSON"):
        read(tmp_path / "train.jsonl")
    warnings: list[str] = []
    assert [question.id for question in read(tmp_path / "train.jsonl", "skip", warnings.append)] == ["a"]
    (warning,) = warnings
    assert warning.startswith("bad rows skipped: 4; the first: ")
    assert "line 2 is not valid JSON" in warning


def test_an_id_given_twice_is_bad_though_it_comes_from_another_article() -> None:
    asked = {"id": "a", "question": "Who?", "answers": []}
    with pytest.raises(ConfigError, match="y, question a: the id a is used by an earlier question"):
        read_questions([SourceRow("x", flat()), SourceRow("y", nested(asked))], "fail", no_warning)


def context_tokens(window: QuestionWindow) -> list[tuple[int, int, int]]:
    """(id, start, stop) of the window's context tokens, in characters."""
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
    """The labels of run_qa.py, limited to the context."""
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
def test_a_labelled_window_holds_the_answer_and_any_other_says_none(
    tokenizer: Any, words: list[str], more: int, data: st.DataObject
) -> None:
    first, last = sorted((data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, len(words) - 1))))
    before, text = " ".join(words[:first]), " ".join(words[first : last + 1])
    begin = len(before) + (first > 0)
    question = Question("a", "who", " ".join(words), ((begin, text),), False)
    labelled = False
    for window in make_windows([question], tokenizer, 8 + more, 2):
        characters = {c for _, a, b in context_tokens(window) for c in range(a, b)}
        inside = characters.issuperset(c for c in range(begin, begin + len(text)) if question.context[c] != " ")
        assert (window.start != window.cls) == inside
        if inside:
            labelled = True
            assert question.context[window.offsets[window.start, 0] : window.offsets[window.end, 1]] == text
    if first == last and tokenizer is not TOKENIZERS["byte-level"]:
        assert labelled  # some window contains both tokens of the word


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


def test_windows_know_their_question_whatever_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [ask(" ".join(WORDS[:5] * n), WORDS[n % 5], " ".join(["who"] * (1 + n % 3))) for n in range(1, 8)]

    def fields(window: QuestionWindow) -> tuple[Any, ...]:
        return window.ids.tolist(), window.start, window.end, window.cls, window.offsets.tolist()

    alone = [[fields(w) for w in make_windows([q], TOKENIZERS["word-piece"], 12, 2)] for q in questions]
    expected = [(number, *window) for number, windows in enumerate(alone) for window in windows]
    for size in (3, 7, 1000):
        monkeypatch.setattr("sansgpu.data.questions.BATCH", size)
        together = make_windows(questions, TOKENIZERS["word-piece"], 12, 2)
        assert [(window.question, *fields(window)) for window in together] == expected


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
def test_an_overlap_that_leaves_no_room_is_refused_before_the_tokenizer_fails(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.doc_stride 16 leaves no room"):
        make_windows([ask("the cat")], tokenizer, 16, 16)
    questions = [ask("the cat " * 20), Question("long", "who " * 6, "the cat " * 20, (), True)]
    with pytest.raises(ConfigError, match=r"question long leaves \d tokens .* no more than data.doc_stride 8; lower"):
        make_windows(questions, tokenizer, 17, 8)


def test_a_context_that_fits_needs_no_room_for_an_overlap() -> None:
    (window,) = make_windows([ask("the cat", "cat", "who who who who who")], TOKENIZERS["word-piece"], 10, 6)
    assert (window.start, window.end) == (8, 8)
