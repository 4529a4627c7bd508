"""Conversations of well-known model families are rendered and masked as these models expect them.

The templates are shorter than the originals, but treat system messages, roles, tools, dates and ends of turns alike.
"""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sansgpu.data.forms.chats import CONVERSATIONS
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.tasks.sft.chat import mask_conversation, show_masked, tokenize_conversations
from sansgpu.tasks.sft.notes import ReadingNotes
from tests.tasks.sft.test_chat import tokenizer_of

REFUSED = "Conversation roles must alternate"
# ChatML without a BOS token. Without a system message, the template writes its own.
CHATML = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% else %}{% set system = 'You are NAME.' %}{% endif %}
{{- '<|im_start|>system\\n' + system }}{% if tools %}{{ '\\n# Tools' }}{% endif %}{{ '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{% if not loop.first and messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{% endif %}{{ '\\n<result>' + m.content + '</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# BOS inside the template, the date and all system text in one system turn, at most one call per turn.
LLAMA_3 = """{{- bos_token }}{%- if date_string is not defined %}
{%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}{%- endif %}
{%- set system = '' %}{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|head|>system<|body|>\\n\\nToday: ' + date_string + '\\n\\n' + system + '<|eot|>' }}
{%- for m in messages %}{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
{{- '<|head|>assistant<|body|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '"}<|eot|>' }}
{%- elif m.role == 'tool' %}{{- '<|head|>ipython<|body|>\\n\\n' + m.content | tojson + '<|eot|>' }}
{%- else %}{{- '<|head|>' + m.role + '<|body|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|body|>\\n\\n' }}{%- endif %}"""
# No generation prompt and no system role.
MISTRAL_1 = """{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"""
# The system message is part of the last turn, if that is a question; otherwise it is left out.
MISTRAL_3 = """{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}
{%- for m in rest %}{%- if m['role'] == 'user' and loop.last and system is defined %}
{{- '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}
{%- elif m['role'] == 'user' %}{{- '[INST] ' + m['content'] + '[/INST]' }}
{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"""
# The assistant's role is `model`, and a system message is an error.
GEMMA_2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}{% for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# Roles are tokens, tools are ignored, and a finished conversation ends with EOS.
PHI_3 = """{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') %}
{{- '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
PHI_4 = """{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') %}
{{- '<|im_start|>' + m['role'] + '<|sep|>' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|sep|>' }}{% endif %}"""
# TRL's way of marking the tokens to train on.
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}
{{- m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TWO = [("user", "A"), ("assistant", "A"), ("user", "Why?"), ("assistant", " So. ")]
SYSTEM = [("system", " Be brief."), ("user", "Q"), ("assistant", "A")]
# Each template with the expected text for TWO, SYSTEM and TOOL, with the trained tokens in ⟦⟧, or the expected error.
FAMILIES = {
    "smollm2, qwen2.5": (
        CHATML,
        "<|im_start|>system\nYou are NAME.<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
        "<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦ So. <|im_end|>⟧\n",
        "<|im_start|>system\n Be brief.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n⟦A<|im_end|>⟧\n",
        "<|im_start|>system\nYou are NAME.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
        "⟦<call>look</call><|im_end|>⟧\n<|im_start|>user\n<result>7</result><|im_end|>\n"
        "<|im_start|>assistant\n⟦Seven.<|im_end|>⟧\n",
    ),
    "llama 3": (
        LLAMA_3,
        "<s><|head|>system<|body|>\n\nToday: 26 Jul 2024\n\n<|eot|><|head|>user<|body|>\n\nA<|eot|>"
        "<|head|>assistant<|body|>\n\n⟦A<|eot|>⟧<|head|>user<|body|>\n\nWhy?<|eot|><|head|>assistant<|body|>\n\n⟦So.<|eot|>⟧",
        "<s><|head|>system<|body|>\n\nToday: 26 Jul 2024\n\nBe brief.<|eot|><|head|>user<|body|>\n\nQ<|eot|>"
        "<|head|>assistant<|body|>\n\n⟦A<|eot|>⟧",
        "<s><|head|>system<|body|>\n\nToday: 26 Jul 2024\n\n<|eot|><|head|>user<|body|>\n\nQ<|eot|>"
        '<|head|>assistant<|body|>\n\n⟦{"name": "look"}<|eot|>⟧<|head|>ipython<|body|>\n\n"7"<|eot|>'
        "<|head|>assistant<|body|>\n\n⟦Seven.<|eot|>⟧",
    ),
    "mistral v1": (MISTRAL_1, "<s>[INST] A [/INST]⟦A</s>⟧[INST] Why? [/INST]⟦ So. </s>⟧", REFUSED, REFUSED),
    "mistral v3": (
        MISTRAL_3,
        "<s>[INST] A[/INST]⟦ A</s>⟧[INST] Why?[/INST]⟦ So.</s>⟧",
        "<s>[INST] Q[/INST]⟦ A</s>⟧",
        "calls a tool in turn 2",
    ),
    "gemma 2": (
        GEMMA_2,
        "<s><start_of_turn>user\nA<end_of_turn>\n<start_of_turn>model\n⟦A<end_of_turn>⟧\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n⟦So.<end_of_turn>⟧\n",
        "System role not supported",
        REFUSED,
    ),
    "phi 3": (
        PHI_3,
        "<|user|>\nA<|end|>\n<|assistant|>\n⟦A<|end|>⟧\n<|user|>\nWhy?<|end|>\n<|assistant|>\n⟦ So. <|end|>\n</s>⟧",
        "<|system|>\n Be brief.<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n⟦A<|end|>\n</s>⟧",
        "calls a tool in turn 2, but the chat template omits tool calls",
    ),
    "phi 4": (
        PHI_4,
        "<|im_start|>user<|sep|>A<|im_end|><|im_start|>assistant<|sep|>⟦A<|im_end|>⟧"
        "<|im_start|>user<|sep|>Why?<|im_end|><|im_start|>assistant<|sep|>⟦ So. <|im_end|>⟧",
        "<|im_start|>system<|sep|> Be brief.<|im_end|><|im_start|>user<|sep|>Q<|im_end|>"
        "<|im_start|>assistant<|sep|>⟦A<|im_end|>⟧",
        "calls a tool in turn 2, but the chat template omits tool calls",
    ),
    "generation blocks": (
        MARKED,
        "<|im_start|>user\nA<|im_end|>\n"
        "<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦ So. <|im_end|>⟧\n",
        "<|im_start|>system\n Be brief.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n⟦A<|im_end|>⟧\n",
        "calls a tool in turn 2, but the chat template omits tool calls",
    ),
}
MARKS = ["<|head|>", "<|body|>", "<|system|>", "<|sep|>"]


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = tokenizer_of(template)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


def row_of(turns: list[Any]) -> SourceRow:
    messages = [turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns]
    return SourceRow("talk.jsonl, line 3", {"messages": messages})


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
TOOL = [("user", "Q"), CALL, ("tool", "7"), ("assistant", "Seven.")]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_learns_the_answers_and_their_end_tokens(family: str) -> None:
    template, *shown = FAMILIES[family]
    tokenizer = tokenizer_for(template)
    for turns, expected in zip((TWO, SYSTEM, TOOL), shown, strict=True):
        row = row_of(turns)
        if "⟦" in expected:
            masked = mask_conversation(CONVERSATIONS.read(row), tokenizer)
            assert show_masked(masked.ids, masked.learned, tokenizer) == expected
            continue
        with pytest.raises(BadRowError, match=rf"^talk\.jsonl, line 3 .*{expected}.*; fix or remove the row\.$"):
            mask_conversation(CONVERSATIONS.read(row), tokenizer)


def test_system_messages_that_the_template_leaves_out_are_counted() -> None:
    rows = [row_of(SYSTEM), row_of(TWO), row_of([*SYSTEM, ("user", "Last?")])]
    for template, count in ((MISTRAL_3, 1), (CHATML, 0)):
        notes = ReadingNotes()
        found = tokenize_conversations(rows, tokenizer_for(template), 500, "truncate", notes)
        assert (len(found), notes.lacking_system) == (3, count)


def test_dates_are_fixed_in_the_format_of_the_template() -> None:
    row = row_of(SYSTEM)
    for code, day in (("%Y-%m-%d", "2024-07-26"), ("%A, %B %d", "Friday, July 26"), ("%d %b %Y", "26 Jul 2024")):
        tokenizer = tokenizer_for("{{ strftime_now('" + code + "') }}" + MARKED)
        masked = mask_conversation(CONVERSATIONS.read(row), tokenizer)
        assert show_masked(masked.ids, masked.learned, tokenizer).startswith(f"{day}<|im_start|>system")
