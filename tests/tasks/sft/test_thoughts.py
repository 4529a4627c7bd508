"""Thoughts that the chat template leaves out are counted, and `chat` prompts in the state that was learned."""

from __future__ import annotations

from typing import Any

import pytest
from tools.tiny_model import make_tokenizer

from sansgpu.data.forms.chats import CONVERSATIONS
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.models.generation.prompts import prompt_ids
from sansgpu.models.generation.template_variables import set_template_variables
from sansgpu.tasks.sft.chat import mask_conversation, tokenize_conversations
from sansgpu.tasks.sft.notes import ReadingNotes

# As Qwen3's: the thoughts of the last answer are written, those of earlier answers are not.
LAST = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% set c = m.content %}{% set r = m.reasoning_content or '' %}
{%- if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set c = c.split('</think>')[-1].lstrip() %}{% endif %}
{%- if loop.index0 > ns.last %}{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}{% endif %}{{ c }}{% else %}{{ m.content }}
{%- endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
SWITCH = "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
OPENED = LAST.replace(SWITCH, "{{- '<think>\\n' }}")  # as DeepSeek-R1's: the header of an answer opens its thoughts
NEVER = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
ALWAYS = NEVER.replace(" m.content", " (m.reasoning_content or '') + m.content").replace(
    "+ m.c", "+ (m.reasoning_content or '') + m.c"
)


def asked(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}


def said(answer: str, **thoughts: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer, **thoughts}


KEYS = [asked("2+3?"), said("5", reasoning_content="adding"), asked("And 1?"), said("6", reasoning_content="5+1")]
MARKS = [asked("2+3?"), said("<think>\nadding\n</think>\n\n5"), asked("?"), said("<think>5+1</think>6")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(encoder=False)


def notes_of(tokenizer: Any, template: str, *rows: list[dict[str, Any]]) -> list[str]:
    tokenizer.chat_template = template
    notes = ReadingNotes(RowReport("fail"))
    sources = [SourceRow(f"row {number}", {"messages": turns}) for number, turns in enumerate(rows)]
    tokenize_conversations(sources, tokenizer, 500, "drop", notes)
    return [note for note in notes.messages("chats", 500) if "thoughts" in note]


@pytest.mark.parametrize(
    ("template", "turns", "lost"),
    [
        (LAST, KEYS, 1),
        (LAST, MARKS, 1),
        (LAST, KEYS[:2], 0),
        (LAST, [asked("a"), said("b")], 0),
        (LAST, [*KEYS, *MARKS], 3),
        (LAST, [asked("a"), said("b", reasoning_content=" \n"), asked("c"), said("d")], 0),  # no thoughts
        (LAST, [asked("adding 5"), said("adding", reasoning_content="adding"), asked("c"), said("d")], 1),
        (NEVER, KEYS, 2),
        (NEVER, MARKS, 0),
        (NEVER, [asked("a"), said("b", thinking="c")], 1),
        (NEVER, [asked("<think>a</think>"), said("b")], 0),
        (LAST, [asked("a"), said("opened in the header</think>b"), asked("c"), said("d")], 1),
        (ALWAYS, KEYS, 0),
    ],
)
def test_lost_thoughts_are_counted(tokenizer: Any, template: str, turns: list[dict[str, Any]], lost: int) -> None:
    noted = notes_of(tokenizer, template, turns, [asked("a"), said("b")])
    words = f"leaves out the thoughts of {lost} turn{'s' * (lost > 1)} in 1 row,"
    assert [words in note for note in noted] == [True] * bool(lost)


def test_thoughts_are_counted_over_all_rows(tokenizer: Any) -> None:
    (note,) = notes_of(tokenizer, LAST, KEYS, MARKS, [asked("a"), said("b")], [*KEYS, *KEYS])
    assert "the thoughts of 5 turns in 3 rows" in note
    assert "data.chat_template" in note


@pytest.mark.parametrize("template", [LAST, OPENED])
@pytest.mark.parametrize("turns", [KEYS, MARKS, [asked("2+3?"), said("5"), asked("And?"), said("6")]])
def test_a_chat_prompts_as_the_last_answer_was_learned(
    tokenizer: Any, template: str, turns: list[dict[str, Any]]
) -> None:
    """The earlier answer comes back as it was generated, with its thoughts."""
    tokenizer.chat_template = template
    masked = mask_conversation(CONVERSATIONS.read(SourceRow("row", {"messages": turns})), tokenizer)
    generated = [turns[0], said("adding\n</think>\n\n5"), turns[2]]
    whole = tokenizer.decode(masked.ids)
    learned = tokenizer.decode([token for token, known in zip(masked.ids, masked.learned, strict=True) if known])
    for before in (turns[:-1], generated):
        prompt = tokenizer.decode(prompt_ids(tokenizer, before))
        assert whole.startswith(prompt)
        assert learned.endswith(whole[len(prompt) :].strip())
        assert whole[len(prompt) :].endswith("6<|im_end|>\n")


def test_a_variable_changes_what_is_learned_and_the_prompt(tokenizer: Any) -> None:
    turns, template = [asked("2+3?"), said("5")], LAST
    tokenizer.chat_template = template
    row = CONVERSATIONS.read(SourceRow("row", {"messages": turns}))
    thinking, prompt = mask_conversation(row, tokenizer), prompt_ids(tokenizer, turns[:1])
    set_template_variables(tokenizer, {"enable_thinking": False})
    direct, short = mask_conversation(row, tokenizer), prompt_ids(tokenizer, turns[:1])
    assert thinking.ids == direct.ids
    assert thinking.ids[: len(prompt)] == prompt
    assert direct.ids[: len(short)] == short
    assert direct.learned.index(True) == len(short) > len(prompt) == thinking.learned.index(True)
    assert prompt_ids(tokenizer, turns[:1], variables={"enable_thinking": True}) == prompt
