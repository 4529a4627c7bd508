"""Long conversations lose their oldest turns, and never a part of a question or an answer."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.data.forms.chats import CONVERSATIONS
from sansgpu.data.rows import SourceRow
from sansgpu.tasks.sft.chat import mask_within, show_masked
from tests.tasks.sft.test_chat import ANY_TEXT, TOKENIZERS, WHERE, conversation_of, mask_of, pieces, tokenizer_of


def within(tokenizer: Any, limit: int, long_rows: Any = "truncate", **row: Any) -> tuple[str | None, bool]:
    masked, shortened = mask_within(CONVERSATIONS.read(SourceRow(WHERE, row)), tokenizer, limit, long_rows)
    return (None if masked is None else show_masked(masked.ids, masked.learned, tokenizer)), shortened


@pytest.mark.parametrize(
    "name",
    ["chatml", "gemma", "qwen3", *(pytest.param(n, marks=pytest.mark.long) for n in ("llama", "vicuna", "generation"))],
)
@pytest.mark.parametrize("system", [None, "Be brief."])
@settings(max_examples=15)
@given(st.lists(st.tuples(ANY_TEXT, ANY_TEXT), min_size=1, max_size=5), st.integers(2, 200))
def test_a_long_conversation_loses_as_few_of_its_oldest_turns_as_possible(
    name: str, system: str | None, pairs: list[tuple[str, str]], limit: int
) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "gemma":
        system = None
    later = [
        mask_of(tokenizer, messages=conversation_of(*(text for pair in pairs[n:] for text in pair), system=system))
        for n in range(len(pairs))
    ]
    expected = next((n for n, masked in enumerate(later) if len(masked.ids) <= limit), None)
    turns = conversation_of(*(text for pair in pairs for text in pair), system=system)
    conversation = CONVERSATIONS.read(SourceRow(WHERE, {"messages": turns}))
    found = mask_within(conversation, tokenizer, limit, "truncate")
    assert found == ((None, False) if expected is None else (later[expected], expected > 0))
    dropping = mask_within(conversation, tokenizer, limit, "drop")
    assert dropping == (found if len(later[0].ids) <= limit else (None, False))


def test_a_shortened_conversation_has_its_prompt_and_answers_where_they_were() -> None:
    tokenizer = TOKENIZERS["chatml"]

    def shown(*turns: str) -> str:
        parts = zip(("system", "user", "assistant", "user", "assistant"), turns, strict=False)
        return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in parts)

    prompt = conversation_of("old " * 9, "the answer", "new?", system="Be brief.")
    completion = [{"role": "assistant", "content": "yes"}]
    limit = len(pieces(tokenizer, shown("Be brief.", "new?", "yes")))
    expected = shown("Be brief.", "new?", "yes").replace("yes<|im_end|>", "⟦yes<|im_end|>⟧")
    assert within(tokenizer, limit, prompt=prompt, completion=completion) == (expected, True)
    assert within(tokenizer, limit - 1, prompt=prompt, completion=completion) == (None, False)
    more = [*completion, *conversation_of("why?", "so")]
    found, _ = within(tokenizer, limit, prompt=prompt, completion=more)
    assert found == shown("Be brief.", "why?", "so").replace("so<|im_end|>", "⟦so<|im_end|>⟧")
    unanswered = [*prompt, *completion, {"role": "user", "content": "more?"}]
    assert within(tokenizer, limit, messages=unanswered) == (None, False)  # no answer would be left


def test_calls_of_tools_stay_with_their_question() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    looked = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "here"}]
    last = [{"role": "user", "content": "Where?"}, *looked, {"role": "assistant", "content": "Here."}]
    long = [*conversation_of("old " * 50, "b"), *last]
    limit = len(mask_of(TOKENIZERS["qwen3"], messages=last).ids)
    masked, _ = mask_within(
        CONVERSATIONS.read(SourceRow(WHERE, {"messages": long})), TOKENIZERS["qwen3"], limit, "truncate"
    )
    assert masked == mask_of(TOKENIZERS["qwen3"], messages=last)


def test_only_texts_are_cut_and_answers_without_a_template_are_kept_whole() -> None:
    tokenizer = tokenizer_of(None)
    ids = mask_of(tokenizer, text="x y z").ids
    assert within(tokenizer, 3, text="x y z") == (f"⟦{tokenizer.decode(ids[-3:])}⟧", True)
    for row in ({"prompt": "abc", "completion": "de"}, {"instruction": "abc", "output": "de"}):
        whole = mask_of(tokenizer, **row)
        assert within(tokenizer, len(whole.ids), **row)[0] is not None
        assert within(tokenizer, len(whole.ids) - 1, **row) == (None, False)
