"""Answers are selected as by run_qa and scored as by SQuAD's evaluation script."""

import json
import string
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import ConfigError
from sansgpu.data.forms.questions import Question
from sansgpu.tasks.qa.answers import Answer, AnswerRules, best_answers, exact_match_f1, predictions_json
from sansgpu.tasks.qa.data import QuestionWindow

Logits = list[tuple[np.ndarray, np.ndarray]]


def window_of(question: Question, first: int, length: int, asked: int) -> QuestionWindow:
    """Returns [CLS] question [SEP] `length` context words from word `first` on [SEP]; each word is one token."""
    stops = np.cumsum([len(word) + 1 for word in question.context.split(" ")]) - 1
    starts = np.concatenate([[0], stops[:-1] + 1])
    offsets = np.full((asked + length + 3, 2), -1, np.int32)
    place = slice(asked + 2, asked + 2 + length)
    offsets[place, 0], offsets[place, 1] = starts[first : first + length], stops[first : first + length]
    return QuestionWindow(0, np.zeros(len(offsets), np.int32), None, 0, 0, 0, offsets)


def question_of(words: int) -> Question:
    return Question("q", "who?", " ".join(f"w{number}" for number in range(words)), (), True)


def logits_of(window: QuestionWindow, peaks: dict[int, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and end logits, which are -9 except at the tokens in `peaks`."""
    start, end = np.full(len(window.ids), -9.0, np.float32), np.full(len(window.ids), -9.0, np.float32)
    for place, (of_start, of_end) in peaks.items():
        start[place], end[place] = of_start, of_end
    return start, end


def plain_answer(
    question: Question, windows: list[QuestionWindow], logits: Logits, rules: AnswerRules, may_be_null: bool
) -> tuple[str, list[dict[str, Any]], float | None]:
    """Returns (text, n-best, score difference) as in transformers' utils_qa.py, one candidate at a time."""
    found: list[dict[str, Any]] = []
    null: dict[str, Any] = {"score": float("inf")}
    for window, (start, end) in zip(windows, logits, strict=True):
        score = float(start[window.cls]) + float(end[window.cls])
        if score < null["score"]:
            null = {"text": "", "score": score, "logits": (float(start[window.cls]), float(end[window.cls]))}
        tokens = range(len(window.ids))
        for a in sorted(tokens, key=lambda place: -float(start[place]))[: rules.n_best_size]:
            for b in sorted(tokens, key=lambda place: -float(end[place]))[: rules.n_best_size]:
                if window.offsets[a, 0] < 0 or window.offsets[b, 0] < 0:
                    continue
                if b < a or b - a + 1 > rules.max_answer_length:
                    continue
                text = question.context[window.offsets[a, 0] : window.offsets[b, 1]]
                pair = (float(start[a]), float(end[b]))
                found.append({"text": text, "score": sum(pair), "logits": pair, "start": int(window.offsets[a, 0])})
    if may_be_null:
        found.append(null)
    best = sorted(found, key=lambda candidate: candidate["score"], reverse=True)[: rules.n_best_size]
    if may_be_null and not any(candidate is null for candidate in best):
        best.append(null)
    weights = np.exp([candidate["score"] - max(c["score"] for c in best) for candidate in best])
    nbest = [
        {"start_logit": c["logits"][0], "end_logit": c["logits"][1], "text": c["text"], "probability": p}
        | ({"start": c["start"]} if "start" in c else {})
        for c, p in zip(best, (weights / weights.sum()).tolist(), strict=True)
    ]
    spans = [candidate for candidate in best if candidate["text"]]
    if not may_be_null:
        return spans[0]["text"], nbest, None
    difference = null["score"] - spans[0]["score"]
    return "" if difference > rules.null_score_diff_threshold else spans[0]["text"], nbest, difference


@st.composite
def cases(draw: st.DrawFn) -> tuple[Question, list[QuestionWindow], Logits]:
    words = draw(st.integers(1, 12))
    question, asked = question_of(words), draw(st.integers(1, 3))
    length = draw(st.integers(1, words))
    step = draw(st.integers(1, length))
    firsts = range(0, max(words - length, 0) + step, step)
    windows = [window_of(question, f, min(length, words - f), asked) for f in firsts if f < words]
    if draw(st.booleans()):  # [CLS] comes last, as with left padding
        windows = [replace(window, cls=len(window.ids) - 1) for window in windows]
    random, few = np.random.default_rng(draw(st.integers(0, 9999))), draw(st.booleans())
    draws = [random.normal(0, 3, (2, len(w.ids) + 2)) for w in windows]  # two padding tokens
    logits = [tuple((np.round(values) if few else values).astype(np.float32)) for values in draws]
    return question, windows, logits  # type: ignore[return-value]


@settings(max_examples=100)
@given(cases(), st.integers(20, 40), st.integers(1, 12), st.sampled_from([-3.0, 0.0, 2.0]), st.booleans())
def test_answers_are_those_of_utils_qa(
    case: tuple[Question, list[QuestionWindow], Logits], size: int, longest: int, threshold: float, may_be_null: bool
) -> None:
    rules = AnswerRules(size, longest, threshold)
    assert_as_plain(case, rules, may_be_null)


@settings(max_examples=100)
@given(cases(), st.integers(1, 6), st.booleans())
def test_a_short_list_of_the_best_is_that_of_utils_qa(
    case: tuple[Question, list[QuestionWindow], Logits], size: int, may_be_null: bool
) -> None:
    question, windows, logits = case
    rules = AnswerRules(size, 30, 0.0)
    spans = best_answers(question, windows, logits, rules, may_be_null=False).nbest
    null = best_answers(question, windows, logits, rules, may_be_null=True).nbest
    if "start" in spans[0] and any("start" in candidate for candidate in null):  # otherwise utils_qa.py finds no span
        assert_as_plain(case, rules, may_be_null)


def assert_as_plain(case: tuple[Question, list[QuestionWindow], Logits], rules: AnswerRules, may_be_null: bool) -> None:
    text, nbest, difference = plain_answer(*case, rules, may_be_null)
    answer = best_answers(*case, rules, may_be_null)
    assert answer.text == text
    assert answer.null_score_diff == (None if difference is None else pytest.approx(difference))
    assert [{**c, "probability": 0} for c in answer.nbest] == [{**c, "probability": 0} for c in nbest]
    assert [c["probability"] for c in answer.nbest] == pytest.approx([c["probability"] for c in nbest])


def test_the_best_span_of_all_windows_is_the_answer() -> None:
    question = question_of(6)
    windows = [window_of(question, 0, 4, 1), window_of(question, 2, 4, 1)]
    logits = [logits_of(windows[0], {3: (2, 0), 4: (0, 2)}), logits_of(windows[1], {4: (3, 0), 6: (0, 3)})]
    answer = best_answers(question, windows, logits, AnswerRules(), may_be_null=False)
    assert answer.text == "w3 w4 w5"
    best = {"start_logit": 3.0, "end_logit": 3.0, "text": "w3 w4 w5", "start": 9}
    assert answer.nbest[0] == {**best, "probability": answer.nbest[0]["probability"]}
    shorter = best_answers(question, windows, logits, AnswerRules(max_answer_length=2), may_be_null=False)
    assert shorter.text == "w0 w1"


def test_the_null_score_is_the_least_of_all_windows() -> None:
    question = question_of(4)
    windows = [window_of(question, 0, 3, 1), window_of(question, 1, 3, 1)]
    logits = [logits_of(windows[0], {0: (5, 5), 3: (1, 1)}), logits_of(windows[1], {0: (1, 2), 4: (2, 2)})]
    answer = best_answers(question, windows, logits, AnswerRules(), may_be_null=True)
    assert (answer.text, answer.null_score_diff) == ("w2", 3.0 - 4.0)
    assert [candidate["text"] for candidate in answer.nbest[:2]] == ["w2", ""]
    assert "start" not in answer.nbest[1]
    strict = best_answers(question, windows, logits, AnswerRules(null_score_diff_threshold=-1.5), may_be_null=True)
    assert (strict.text, strict.null_score_diff) == ("", -1.0)
    assert best_answers(question, windows, logits, AnswerRules(), may_be_null=False).text == "w2"


def test_the_threshold_itself_still_gives_the_span() -> None:
    question = question_of(2)
    windows = [window_of(question, 0, 2, 1)]
    logits = [logits_of(windows[0], {0: (2, 2), 3: (2, 1)})]
    for threshold, text in [(0.5, ""), (1.0, "w0"), (1.5, "w0")]:
        rules = AnswerRules(null_score_diff_threshold=threshold)
        assert best_answers(question, windows, logits, rules, may_be_null=True).text == text


def test_null_stays_in_the_list_though_its_score_is_too_low() -> None:
    question = question_of(5)
    windows = [window_of(question, 0, 5, 1)]
    logits = [logits_of(windows[0], {0: (-50, -50), **dict.fromkeys(range(3, 8), (1, 1))})]
    answer = best_answers(question, windows, logits, AnswerRules(n_best_size=3), may_be_null=True)
    assert [candidate["text"] for candidate in answer.nbest] == ["w0", "w0 w1", "w0 w1 w2", ""]
    assert sum(candidate["probability"] for candidate in answer.nbest) == pytest.approx(1)


@pytest.mark.parametrize(("may_be_null", "text", "texts"), [(True, "", [""]), (False, "empty", ["empty"])])
def test_where_no_span_is_possible(may_be_null: bool, text: str, texts: list[str]) -> None:
    question = question_of(3)
    windows = [window_of(question, 0, 3, 1)]
    logits = [logits_of(windows[0], {0: (5, 4), 1: (3, 3), 2: (3, 3)})]
    answer = best_answers(question, windows, logits, AnswerRules(n_best_size=2), may_be_null)
    assert answer.text == text
    assert [candidate["text"] for candidate in answer.nbest] == texts
    assert [candidate["probability"] for candidate in answer.nbest] == [1.0]
    assert answer.null_score_diff == (9.0 if may_be_null else None)


def test_a_span_of_no_characters_is_no_answer() -> None:
    question = question_of(3)
    window = window_of(question, 0, 3, 1)
    window.offsets[4] = 3  # byte-level tokenizers have such a token for a single space
    logits = [logits_of(window, {0: (1, 1), 4: (3, 3), 5: (2, 2)})]
    for may_be_null in (False, True):
        answer = best_answers(question, [window], logits, AnswerRules(max_answer_length=1), may_be_null)
        assert answer.nbest[0]["text"] == ""
        assert answer.text == "w2"


def test_ties_go_to_the_earlier_window_and_token() -> None:
    question = question_of(4)
    windows = [window_of(question, 2, 2, 1), window_of(question, 0, 2, 1)]
    logits = [logits_of(window, dict.fromkeys(range(len(window.ids)), (1, 1))) for window in windows]
    answer = best_answers(question, windows, logits, AnswerRules(), may_be_null=True)
    assert [c["text"] for c in answer.nbest] == ["w2", "w2 w3", "w3", "w0", "w0 w1", "w1", ""]
    assert answer.text == "w2"


def normalized(text: str) -> list[str]:
    """Returns the words that SQuAD's evaluation script compares: lower case, no punctuation, no articles."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def plain_scores(prediction: str, answers: list[str]) -> tuple[float, float]:
    """Returns (exact match, F1) of the prediction for one question."""
    exact, f1 = 0.0, 0.0
    words = normalized(prediction)
    for known in map(normalized, answers):
        common = (Counter(known) & Counter(words)).total()
        exact = max(exact, float(known == words))
        f1 = max(f1, 2 * common / (len(known) + len(words)) if known and words else float(known == words))
    return exact, f1


def asked(number: int, *answers: str) -> Question:
    return Question(str(number), "who?", " ".join(answers), tuple((0, text) for text in answers), not answers)


TEXTS = st.lists(st.sampled_from(["The", "cat", "cat's", "cats", "a", "hat!", "Théâtre", "1,000", "-"]), max_size=4)
SOME_TEXT = TEXTS.filter(bool).map(" ".join)


@given(st.lists(st.tuples(st.lists(SOME_TEXT, max_size=3), TEXTS.map(" ".join)), min_size=1, max_size=8))
def test_scores_are_those_of_the_plain_normalization(cases: list[tuple[list[str], str]]) -> None:
    questions = [asked(number, *answers) for number, (answers, _) in enumerate(cases)]
    predictions = {str(number): text for number, (_, text) in enumerate(cases)}
    kinds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for answers, text in cases:
        kinds[bool(answers)].append(plain_scores(text, answers) if answers else (float(not text),) * 2)
    exact, f1 = (100 * np.mean(values) for values in zip(*kinds[True], *kinds[False], strict=True))
    expected = {"exact_match": exact, "f1": f1, "answerable": len(kinds[True]), "unanswerable": len(kinds[False])}
    if kinds[False]:
        expected["no_answer_exact_match"] = 100 * np.mean(kinds[False])
    if kinds[True] and kinds[False]:
        expected["has_answer_exact_match"], expected["has_answer_f1"] = 100 * np.mean(kinds[True], axis=0)
    scores = exact_match_f1(questions, predictions)
    assert scores == pytest.approx(expected, rel=1e-5)
    assert all(type(value) is float for value in scores.values())


def test_scores_of_a_few_known_answers() -> None:
    questions = [asked(0, "the cat", "a small cat"), asked(1, "mat"), asked(2, "dog"), asked(3), asked(4)]
    predictions = {"0": "Cat!", "1": "red mat", "3": "", "4": "dog"}  # no prediction for question 2
    assert exact_match_f1(questions, predictions) == pytest.approx(
        {
            "exact_match": 40.0,
            "f1": 100 * (1 + 2 / 3 + 0 + 1 + 0) / 5,
            "has_answer_exact_match": 100 / 3,
            "has_answer_f1": 100 * (1 + 2 / 3) / 3,
            "no_answer_exact_match": 50.0,
            "answerable": 3,
            "unanswerable": 2,
        }
    )
    assert set(exact_match_f1(questions[:2], predictions)) == {"exact_match", "f1", "answerable", "unanswerable"}


def test_there_is_no_score_of_nothing() -> None:
    with pytest.raises(ConfigError, match="no questions to evaluate on"):
        exact_match_f1([], {})


def test_files_have_the_form_of_run_qa() -> None:
    question = question_of(2)
    windows = [window_of(question, 0, 2, 1)]
    logits = [logits_of(windows[0], {0: (1, 1), 3: (2, 2)})]
    answers: dict[str, Answer] = {
        "first": best_answers(question, windows, logits, AnswerRules(), may_be_null=True),
        "second": best_answers(question, windows, logits, AnswerRules(), may_be_null=False),
    }
    predictions, nbest, odds = json.loads(json.dumps(predictions_json(answers)))
    assert predictions == {"first": "w0", "second": "w0"}
    assert odds == {"first": -2.0}
    assert list(nbest) == ["first", "second"]
    assert [candidate["text"] for candidate in nbest["first"][:2]] == ["w0", ""]
    keys = ["start_logit", "end_logit", "text", "probability"]
    assert all(list(candidate) == keys for candidates in nbest.values() for candidate in candidates)
