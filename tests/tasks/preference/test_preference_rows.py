"""Every form of a preference is divided into its prompt and its answers; other rows are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sansgpu.config import ConfigError
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.preference.rows import Answers, ReadingNotes, tokenize_preferences
from tests.tasks.preference.preference_rows import BAD, GOOD, PROMPT, config


def read(*rows: object, rated: bool = False, max_length: int = 200, long_rows: str = "truncate") -> list[Answers]:
    tokenizer = load_tokenizer_of(config().model)
    found = [SourceRow(f"row {number}", row) for number, row in enumerate(rows, 1)]
    return tokenize_preferences(found, tokenizer, max_length, long_rows, rated, ReadingNotes())  # type: ignore[arg-type]


def tokens(answers: Answers) -> list[list[int]]:
    return [answers.prompt.tolist(), *(ids.tolist() for ids in answers.ids)]


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SCORED: list[tuple[dict[str, Any], str | None]] = [
    ({"chosen_score": 8.5, "rejected_score": 3}, None),
    ({"score_chosen": 8.5, "score_rejected": "8.5"}, "equal"),
    (
        {"chosen-rating": 4, "rejected-rating": 5},
        "has chosen-rating 4 and rejected-rating 5, so its rejected answer is",
    ),
    ({"score_chosen": 3.0, "score_rejected": 7.5}, "has score_chosen 3 and score_rejected 7.5"),
    ({"margin": 0.5}, None),
    ({"margin": -0.5}, "has margin -0.5, so its rejected answer is the better one"),
    ({"chosen_score": None, "rejected_score": 5}, None),
    ({"chosen_score": "high", "rejected_score": 5}, None),
]


@pytest.mark.parametrize(("scores", "said"), SCORED, ids=range(len(SCORED)))
def test_scores_must_agree_with_the_choice(scores: dict[str, Any], said: str | None) -> None:
    for row in (
        {"prompt": "Name a color.", "chosen": GOOD, "rejected": BAD},
        {"chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
    ):
        report = RowReport("fail")
        notes = ReadingNotes(report)
        rows = [SourceRow("row 1", row | scores)]
        if said is None or said == "equal":
            found = tokenize_preferences(rows, load_tokenizer_of(config().model), 200, "truncate", False, notes)
            assert [tokens(answers) for answers in found] == [tokens(answers) for answers in read(row)]
            named = [key for key, value in scores.items() if value is not None]
            assert [*report.unused] == named
            assert any("are equal" in note for note in report.notes()) == (said == "equal")
        else:
            with pytest.raises(BadRowError, match=re.escape(said)):
                tokenize_preferences(rows, load_tokenizer_of(config().model), 200, "truncate", False, notes)


def test_an_answer_may_be_the_beginning_of_the_other() -> None:
    long, short = f"{GOOD} It is red.", GOOD
    for chosen, rejected in ((long, short), (short, long)):
        whole = [{"chosen": [*PROMPT, assistant(chosen)], "rejected": [*PROMPT, assistant(rejected)]}]
        found = read({"prompt": "Name a color.", "chosen": chosen, "rejected": rejected}, *whole)
        decode = load_tokenizer_of(config().model).decode
        for answers in found:
            prompt = decode(answers.prompt)
            assert [prompt + decode(ids) for ids in answers.ids] == [
                f"<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
                for answer in (chosen, rejected)
            ]
        with pytest.raises(BadRowError, match="unclear where the prompt ends; put it into a column prompt"):
            read({"chosen": f"Name a color. {chosen}", "rejected": f"Name a color. {rejected}"})
    with pytest.raises(BadRowError, match="rejected begins with all of chosen"):
        read({"chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(GOOD), *PROMPT, assistant(BAD)]})


def test_every_form_of_a_row_gives_the_same_tokens() -> None:
    shared = {"from": "human", "value": "Name a color."}
    forms = [
        {"prompt": "Name a color.", "chosen": GOOD, "rejected": BAD},
        {"prompt": PROMPT, "chosen": [assistant(GOOD)], "rejected": assistant(BAD)},
        {
            "conversations": [shared],
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        {"chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
        {"prompt": "Name a color.", "chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
    ]
    pairs = [tokens(answers) for answers in read(*forms)]
    assert pairs == [pairs[0]] * len(forms)
    decode = load_tokenizer_of(config().model).decode
    assert [decode(part) for part in pairs[0]] == [
        "<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n", f"{GOOD}<|im_end|>", f"{BAD}<|im_end|>",
    ]  # fmt: skip
    rated = read(
        {"messages": [*PROMPT, assistant(GOOD)], "label": True},
        {"prompt": PROMPT, "completion": [assistant(GOOD)], "label": "1"},
        {"conversations": [shared, {"from": "gpt", "value": GOOD}], "label": 1},
        rated=True,
    )
    assert [(tokens(one), one.label) for one in rated] == [(pairs[0][:2], True)] * 3
    halves = read(forms[0], rated=True)
    assert [(one.prompt.tolist(), one.ids[0].tolist(), one.label) for one in halves] == [
        (pairs[0][0], pairs[0][1], True), (pairs[0][0], pairs[0][2], False),
    ]  # fmt: skip


def test_a_long_prompt_loses_its_oldest_turns_in_both_conversations() -> None:
    turns = [*PROMPT, assistant("blue " * 20), {"role": "user", "content": "Why?"}]
    row = {"prompt": turns, "chosen": GOOD, "rejected": BAD}
    (long,), (short,), (alone,) = read(row), read(row, max_length=60), read({**row, "prompt": turns[2:]})
    assert len(long.prompt) > 60
    assert tokens(short) == tokens(alone)
    assert read(row, max_length=60, long_rows="drop") == []
    assert read(row, max_length=12) == []


def read_pair(row: dict[str, Any]) -> tuple[list[str], str, str]:
    """Returns the turns of the prompt as one text each, and the chosen and the rejected answer."""
    chosen, rejected = PREFERENCES.read(SourceRow("row 1", row)).conversations
    assert chosen.turns[: chosen.first] == rejected.turns[: rejected.first]
    prompt = [f"{turn['role']} {turn['content']}" for turn in chosen.turns[: chosen.first]]
    return prompt, chosen.turns[-1]["content"], rejected.turns[-1]["content"]


HH = "\n\nHuman: hi\n\nAssistant:"
TWO = f"{HH} ho\n\nOh: ho\n\nHuman: a\n\nb\n\nAssistant:"
MARKED: list[tuple[dict[str, Any], list[str], str, str]] = [
    ({"chosen": f"{HH} yesterday", "rejected": f"{HH} yes."}, ["user hi"], "yesterday", "yes."),
    ({"chosen": f"{HH} yes", "rejected": f"{HH} yes, yes"}, ["user hi"], "yes", "yes, yes"),
    ({"chosen": f"{HH} yes\n\n- c", "rejected": f"{HH} yes\n\n- b"}, ["user hi"], "yes\n\n- c", "yes\n\n- b"),
    ({"chosen": f"{TWO} c", "rejected": f"{TWO} d"}, ["user hi", "assistant ho\n\nOh: ho", "user a\n\nb"], "c", "d"),
    ({"chosen": f"{HH[2:]} c", "rejected": f"{HH[2:]} d"}, ["user hi"], "c", "d"),
    ({"chosen": f"Be brief.{HH} c", "rejected": f"Be brief.{HH} d"}, ["system Be brief.", "user hi"], "c", "d"),
    ({"prompt": HH, "chosen": " c", "rejected": " d"}, ["user hi"], "c", "d"),  # Dahoas
    ({"prompt": "hi", "chosen": f"{HH} c", "rejected": f"{HH} d"}, ["user hi"], "c", "d"),
    ({"prompt": "hi", "chosen": "Say Human: c", "rejected": "d"}, ["user hi"], "Say Human: c", "d"),
    ({"chosen": "Q: a\nA: b", "rejected": "Q: a\nA: c"}, ["user Q: a\nA:"], " b", " c"),
    ({"chosen": "a?\nbe", "rejected": "a?\nc"}, ["user a?\n"], "be", "c"),
    ({"chosen": "a? [/INST] b", "rejected": "a? [/INST] c"}, ["user a? [/INST]"], " b", " c"),
    ({"chosen": "### Response: b", "rejected": "### Response: c"}, ["user ### Response:"], " b", " c"),
    *(({column: "p", "prompt": None, "chosen": "The sky is blue", "rejected": "The sky is green"},
       ["user p"], "The sky is blue", "The sky is green")
      for column in ("input", "question", "instruction", "query", "user_prompt")),
    ({"question": "Name a color.", "chosen": [*PROMPT, assistant(GOOD)], "rejected": [*PROMPT, assistant(BAD)]},
     ["user Name a color."], GOOD, BAD),
]  # fmt: skip


@pytest.mark.parametrize(("row", "prompt", "chosen", "rejected"), MARKED, ids=range(len(MARKED)))
def test_a_row_is_never_divided_within_an_answer(row: Any, prompt: list[str], chosen: str, rejected: str) -> None:
    assert read_pair(row) == (prompt, chosen, rejected)


def test_a_common_beginning_ends_with_a_word() -> None:
    assert read_pair({"chosen": "The sky is blue", "rejected": "The sky is black"}) == (
        ["user The sky is"], " blue", " black",
    )  # fmt: skip


def test_marked_texts_stay_the_same_rows_without_a_chat_template() -> None:
    (one, other) = PREFERENCES.read(SourceRow("row 1", {"chosen": f"{HH} c", "rejected": f"{HH} d"})).conversations
    assert (one.plain, other.plain) == ((HH, " c"), (HH, " d"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "yes", "rejected": "yesterday"}, "rejected begins with all of chosen"),
        ({"chosen": "blue", "rejected": "black"}, "has no prompt, because chosen and rejected have no common begin"),
        ({"prompt": None, "topic": "p", "chosen": "It is blue", "rejected": "The sky is green"},
         "no common beginning; add a column prompt, or rename the one that has it (topic)"),
        ({"chosen": f"{HH} a\n\nHuman: b", "rejected": f"{HH} c"}, "ends chosen with a turn of Human"),
        ({"chosen": f"{HH} a", "rejected": f"{HH} "}, "has an empty rejected"),
        ({"chosen": f"{HH} a", "rejected": f"\n\nHuman: x{HH} b"}, "has different turns before the last answers"),
        ({"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}, "begin with the answer"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "has 3 as its prompt instead of a text or a list of turns"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "has an empty prompt"),
        ({"prompt": True, "chosen": "a", "rejected": "b"}, "has true as its prompt"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_show_its_prompt_is_bad(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRowError, match=re.escape(words)):
        read_pair(row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1], "is of type list instead of an object with prompt, chosen and rejected"),
        ({"prompt": "a", "chosen": GOOD}, "has prompt, chosen, but needs"),
        ({"prompt": "a", "chosen": GOOD, "rejected": GOOD}, "has identical chosen and rejected answers"),
        ({"prompt": "a", "chosen": GOOD, "rejected": " "}, "has an empty rejected"),
        ({"prompt": "", "chosen": GOOD, "rejected": BAD}, "has an empty prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": BAD}, "has a value of type int in chosen instead of a list"),
        ({"chosen": "Yes", "rejected": "No"}, "has no prompt, because chosen and rejected have no common beginning"),
        ({"chosen": [], "rejected": "No"}, "has no prompt; without one"),
        ({"prompt": "a\ud800", "chosen": GOOD, "rejected": BAD}, "unpaired surrogate"),
        ({"messages": PROMPT, "label": True}, "ends without an answer to rate"),
        ({"messages": [*PROMPT, assistant(GOOD)], "label": "maybe"}, "has the label 'maybe' instead of true or"),
        ({"messages": [*PROMPT, assistant(GOOD)], "label": [1]}, "has the label [1]"),
        ({"conversations": [{"from": "alien", "value": "x"}], "chosen": GOOD, "rejected": BAD}, "unknown role 'alien'"),
    ],
)
def test_a_bad_row_is_named(row: object, words: str) -> None:
    with pytest.raises(BadRowError) as error:
        read(row, rated=isinstance(row, dict) and "label" in row)
    assert str(error.value).startswith(("row 1 ", "row 1: it "))
    assert words in str(error.value)


def test_rows_that_do_not_match_the_loss_or_earlier_rows_are_refused() -> None:
    rated = {"messages": [*PROMPT, assistant(GOOD)], "label": True}
    pair = {"prompt": "a", "chosen": GOOD, "rejected": BAD}
    with pytest.raises(ConfigError, match=r"row 1 has a rated answer.*set training.preference.loss to kto"):
        read(rated)
    with pytest.raises(ConfigError, match="row 2 has a chosen and a rejected answer, but the rows before it"):
        read(rated, pair, rated=True)
