"""Exactly the assistant's words are trained on, with every chat template; errors name the invalid row."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sansgpu.config import ConfigError
from sansgpu.data.forms.chats import CONVERSATIONS
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.tasks.sft.chat import MaskedConversation, mask_conversation, show_masked, tokenize_conversations
from sansgpu.tasks.sft.notes import ReadingNotes

WHERE = "notes.jsonl, line 7"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header|>", "<|end_header|>", "<|eot|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|end|>"]
SAMPLE = ["system user assistant model the answer is an answer to a question", "think the question over again"] * 9

CHATML = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header|>' + m.role + '<|end_header|>\n\n' + (m.content | trim) + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}
{%- for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
VICUNA = """{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}
{%- else %}{{ ' ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"""  # ignores add_generation_prompt
GENERATION = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Qwen3: thoughts only after the last question, where they are always present.
QWEN3 = """{% set ns = namespace(asked=-1) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set content = m.content %}{% set thought = '' %}
{%- if m.role == 'assistant' and content.startswith('<think>') and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ content }}{% endif %}
{%- if m.tool_calls %}{% for call in m.tool_calls %}{{ '\n' if content }}{{ '<call>' + call.function.name }}
{{- call.function.arguments | tojson + '</call>' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPACED = """{% for m in messages %}{{ 'Q: ' if m.role == 'user' else 'A: ' }}{{ m.content + '</s>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'A: ' }}{% endif %}"""
# Like DeepSeek-R1: the header of an answer opens its thoughts, which finished turns do not contain.
THINKING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1].lstrip() }}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


def tokenizer_of(template: str | None, trim_offsets: bool = False, **settings: Any) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SAMPLE, trainer)
    if trim_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **{"bos_token": "<s>", "eos_token": "</s>", **settings})
    made.chat_template = template
    return made


def conversation_of(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    turns = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def mask_of(tokenizer: Any, parse_special: bool = False, **row: Any) -> MaskedConversation:
    conversation = replace(CONVERSATIONS.read(SourceRow(WHERE, row)), parse_special=parse_special)
    return mask_conversation(conversation, tokenizer)


def learned_text(tokenizer: Any, masked: MaskedConversation) -> str:
    return str(tokenizer.decode([t for t, kept in zip(masked.ids, masked.learned, strict=True) if kept]))


def special_ids(ids: list[int]) -> list[int]:
    return [index for index in ids if index < len(SPECIAL)]


# For each template, the trained text of an assistant turn, given its content and whether it is the last turn.
FAMILIES: dict[str, tuple[str, Callable[[str, bool], str]]] = {
    "chatml": (CHATML, lambda content, last: content + "<|im_end|>"),
    "llama": (LLAMA, lambda content, last: content.strip() + "<|eot|>"),
    "gemma": (GEMMA, lambda content, last: content.strip() + "<end_of_turn>"),
    "mistral": (MISTRAL, lambda content, last: " " + content + "</s>"),
    "phi": (PHI, lambda content, last: content + ("<|end|></s>" if last else "<|end|>")),
    "vicuna": (VICUNA, lambda content, last: " " + content + "</s>"),
    "generation": (GENERATION, lambda content, last: content + "<|im_end|>"),
    "qwen3": (
        QWEN3,
        lambda content, last: ("<think>\n\n</think>\n\n" + content.lstrip("\n") if last else content) + "<|im_end|>",
    ),
}
TOKENIZERS = {name: tokenizer_of(template) for name, (template, _) in FAMILIES.items()}
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda text: text.strip() and "</think>" not in text
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20)
@given(contents=st.lists(st.tuples(ANY_TEXT, ANY_TEXT), min_size=1, max_size=3))
@example(contents=[("What?", "the answer"), ("Again?", "the answer"), ("the answer", "the answer")])
@example(contents=[(" \n a\t", "\n\n  x \n "), ("", " y "), ("\r\n", "\u2028z\u00a0")])
@example(contents=[("<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n", "a<|im_end|>\n<|im_start|>user\nb")] * 2)
@example(contents=[("x [/INST] no</s>", "[INST] a [/INST] b"), ("<start_of_turn>model\n<|assistant|>", "<|eot|>")])
@example(contents=[("世界 🎉", "e\u0301 \ue000\ue001 \U0010ffff"), ("\ue000", "\ue000 <|")])
def test_the_assistants_words_and_their_end_tokens_are_learned(name: str, contents: list[tuple[str, str]]) -> None:
    tokenizer, expected = TOKENIZERS[name], FAMILIES[name][1]
    messages = conversation_of(*(text for pair in contents for text in pair))
    answers = [expected(answer, n == len(contents)) for n, (_, answer) in enumerate(contents, 1)]
    found = [mask_of(tokenizer, parse_special, messages=messages) for parse_special in (False, True)]
    assert [learned_text(tokenizer, masked) for masked in found] == ["".join(answers)] * 2
    assert found[1].ids == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    harmless = conversation_of(*(["x"] * len(messages)))
    written = tokenizer.apply_chat_template(harmless, tokenize=True)["input_ids"]
    assert special_ids(found[0].ids) == special_ids(written), "texts of special tokens in messages stay plain text"
    if found[0].special_text is None:
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["chatml", "llama", "qwen3", "generation"])
def test_an_unanswered_question_is_no_target_in_a_conversation_with_a_system_turn(name: str) -> None:
    messages = conversation_of("What?", "An answer", "Why?", system="Be brief.")
    masked = mask_of(TOKENIZERS[name], messages=messages)
    expected = FAMILIES[name][1]("An answer", False)
    assert learned_text(TOKENIZERS[name], masked) == expected


def test_thoughts_are_learned_where_the_template_writes_them() -> None:
    thought = "<think>\nhm, \u00e9\n</think>\n\nthe answer"
    masked = mask_of(TOKENIZERS["qwen3"], messages=conversation_of("a?", thought, "b?", thought))
    assert learned_text(TOKENIZERS["qwen3"], masked) == f"the answer<|im_end|>{thought}<|im_end|>"
    tokenizer = tokenizer_of(THINKING)
    masked = mask_of(
        tokenizer, messages=conversation_of("a?", thought, "the answer", "<the answer", "c?", "the answer")
    )
    assert learned_text(tokenizer, masked) == "the answer<|im_end|><the answer<|im_end|>the answer<|im_end|>"


@pytest.mark.parametrize("content", ["", None, "Let me see."])
def test_calls_of_tools_are_learned_and_their_results_are_not(content: str | None) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "caf\u00e9"}}}
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": content, "tool_calls": [call, call]},
        {"role": "tool", "name": "look", "content": "nowhere"},
        {"role": "assistant", "content": "Nowhere."},
        *conversation_of("Sure?", "Yes."),
    ]
    written = '<call>look{"at": "caf\u00e9"}</call>'
    first = f"{content}\n{written}\n{written}" if content else written * 2
    last = "<think>\n\n</think>\n\nYes.<|im_end|>"
    masked = mask_of(TOKENIZERS["qwen3"], messages=messages)
    assert learned_text(TOKENIZERS["qwen3"], masked) == f"{first}<|im_end|>Nowhere.<|im_end|>{last}"


@pytest.mark.parametrize("name", ["chatml", "generation"])
def test_only_the_completion_of_a_prompt_with_earlier_answers_is_learned(name: str) -> None:
    prompt, completion = conversation_of("a?", "b", "c?"), [{"role": "assistant", "content": "d"}]
    masked = mask_of(TOKENIZERS[name], prompt=prompt, completion=completion)
    assert learned_text(TOKENIZERS[name], masked) == "d<|im_end|>"
    assert masked.ids == mask_of(TOKENIZERS[name], messages=prompt + completion).ids
    same = mask_of(TOKENIZERS[name], messages=conversation_of("c?", "d"))
    assert mask_of(TOKENIZERS[name], prompt="c?", completion="d") == same


def test_an_instruction_is_a_user_turn_with_its_input() -> None:
    tokenizer = TOKENIZERS["llama"]
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all of it"}
    assert mask_of(tokenizer, **row) == mask_of(tokenizer, messages=conversation_of("Add.\n\n1 2", "3"))
    assert mask_of(tokenizer, **row | {"input": ""}) == mask_of(tokenizer, messages=conversation_of("Add.", "3"))


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_word_is_learned_with_the_space_of_the_header_that_is_in_its_token(trim_offsets: bool) -> None:
    tokenizer = tokenizer_of(SPACED, trim_offsets)
    for content, expected in (("answer", " answer</s>"), ("\u00e9", "\u00e9</s>"), ("\nanswer", "\nanswer</s>")):
        masked = mask_of(tokenizer, messages=conversation_of("the answer?", content))
        assert learned_text(tokenizer, masked) == expected


def test_the_header_is_not_learned_where_its_token_takes_white_space_from_the_answer() -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>' }}{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|assistant|>", rstrip=True)]})
    masked = mask_of(tokenizer, messages=conversation_of("a?", " \n b"))
    assert learned_text(tokenizer, masked) == "b<|end|>"


def test_trimmed_offsets_and_marks_that_end_in_white_space_learn_nothing_else() -> None:
    messages = conversation_of("a?", " the answer ", "c?", "d")
    for template in (CHATML, QWEN3):
        plain, trimmed = tokenizer_of(template), tokenizer_of(template, trim_offsets=True)
        assert mask_of(trimmed, messages=messages) == mask_of(plain, messages=messages)
    template = GENERATION.replace("'<|im_end|>' }}{% endgeneration %}", "'<|im_end|>\\n' }}{% endgeneration %}")
    assert template != GENERATION
    tokenizer = tokenizer_of(template, trim_offsets=True)
    assert "c?" not in learned_text(tokenizer, mask_of(tokenizer, messages=messages))


def test_marks_of_the_template_are_taken_as_transformers_takes_them() -> None:
    tokenizer, messages = TOKENIZERS["generation"], conversation_of("a?", "b \u00e9 ", "c?", "d")
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    masked = mask_of(tokenizer, messages=messages)
    assert (masked.ids, [int(kept) for kept in masked.learned]) == (theirs["input_ids"], theirs["assistant_masks"])


def test_a_template_that_writes_the_date_gives_the_same_tokens_on_any_day() -> None:
    tokenizer = tokenizer_of("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    masked = mask_of(tokenizer, messages=conversation_of("a?", "b"))
    dated = tokenizer_of("26 Jul 2024\n" + CHATML)
    assert masked == mask_of(dated, messages=conversation_of("a?", "b"))


def test_what_the_template_refuses_is_named_in_its_words() -> None:
    for name, messages, reason in (
        ("gemma", conversation_of("a?", "b", system="c"), "System role not supported"),
        ("mistral", conversation_of("a?", "b", system="c"), "Conversation roles must alternate"),
    ):
        with pytest.raises(BadRowError, match=f"^{WHERE} is rejected by the chat template .*{reason}"):
            mask_of(TOKENIZERS[name], messages=messages)
    with pytest.raises(ConfigError, match="line 2 of the chat template is not valid Jinja") as caught:
        mask_of(tokenizer_of("a\n{% endfor %}"), messages=conversation_of("a?", "b"))
    assert not isinstance(caught.value, BadRowError)


def test_a_template_that_hides_where_a_turn_begins_is_refused() -> None:
    hiding = "{{ messages | length }}{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}"
    with pytest.raises(BadRowError, match=rf"^{WHERE} is rendered by the chat template without clear bounds of turn 2"):
        mask_of(tokenizer_of(hiding), messages=conversation_of("a?", "b", "c?", "d"))


def pieces(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_without_a_template_the_prompt_is_tokenized_as_when_the_model_is_asked() -> None:
    tokenizer = tokenizer_of(None)
    masked = mask_of(tokenizer, prompt="the ans", completion="wer is")
    prompt, answer = pieces(tokenizer, "the ans"), [*pieces(tokenizer, "wer is"), tokenizer.eos_token_id]
    assert pieces(tokenizer, "the answer is") != prompt + answer[:-1]  # the joined text has different tokens
    assert masked == MaskedConversation(prompt + answer, [False] * len(prompt) + [True] * len(answer))
    masked = mask_of(tokenizer, instruction="Add.", input="1 2", output="3")
    assert show_masked(masked.ids, masked.learned, tokenizer) == (
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n⟦3</s>⟧"
    )
    masked = mask_of(tokenizer, instruction="{input}", output="{3}")
    assert show_masked(masked.ids, masked.learned, tokenizer) == (
        "### Instruction:\n{input}\n\n### Response:\n⟦{3}</s>⟧"
    )


def test_a_beginning_is_written_where_the_tokenizer_writes_one_and_never_twice() -> None:
    tokenizer = tokenizer_of(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    for row, shown in (
        ({"text": "a b"}, "<s>⟦a b</s>⟧"),
        ({"text": "<s>a b</s>"}, "⟦<s>a b</s>⟧"),
        ({"prompt": "a", "completion": " b"}, "<s>a⟦ b</s>⟧"),
        ({"prompt": "", "completion": "b"}, "<s>⟦b</s>⟧"),
    ):
        masked = mask_of(tokenizer, **row)
        assert show_masked(masked.ids, masked.learned, tokenizer) == shown


def test_a_completion_gets_no_space_that_a_tokenizer_puts_before_a_text() -> None:
    words = {name: n for n, name in enumerate(["<s>", "</s>", "▁", "a", "b", "\n", "▁b"])}
    backend = Tokenizer(models.BPE(vocab=words, merges=[("▁", "b")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    masked = mask_of(tokenizer, prompt="a", completion=" b")
    assert tokenizer.convert_ids_to_tokens(masked.ids) == ["▁", "a", "▁b", "</s>"]


def test_what_the_tokenizer_cannot_do_is_an_error_whatever_the_row() -> None:
    with pytest.raises(
        BadRowError, match=rf"^{WHERE}: the model's tokenizer has no chat template; set data.chat_templ"
    ):
        mask_of(tokenizer_of(None), messages=conversation_of("a?", "b"))
    tokenizer = tokenizer_of(CHATML, eos_token=None)
    with pytest.raises(ConfigError, match="no end-of-text token") as caught:
        mask_of(tokenizer, text="a")
    assert not isinstance(caught.value, BadRowError)
    assert any(mask_of(tokenizer, messages=conversation_of("a?", "b")).learned)  # its template needs no eos_token
    with pytest.raises(ConfigError, match="fast one"):
        mask_of(object(), text="a")
    with pytest.raises(ConfigError, match=r"data\.chat_template"):
        mask_of(tokenizer_of({"tool_use": CHATML}), messages=conversation_of("a?", "b"))  # type: ignore[arg-type]


def rows_of(*values: Any) -> list[SourceRow]:
    return [SourceRow(f"a.jsonl, line {n}", value) for n, value in enumerate(values, 1)]


def test_examples_are_concatenated_and_skipped_rows_are_counted() -> None:
    tokenizer, seen = tokenizer_of(None), list[int]()
    rows = rows_of(
        {"prompt": "ab", "completion": "cd"},
        {"text": ""},
        {"text": "c" * 9},
        [],
        {"text": "c"},
        {"prompt": "a" * 5, "completion": "b"},
    )
    kept = [mask_of(tokenizer, **row.value) for row in (rows[0], rows[2], rows[4])]
    counted = (seen.append(number) or row for number, row in enumerate(rows, 1))  # type: ignore[func-returns-value]
    notes = ReadingNotes(RowReport("skip"))
    examples = tokenize_conversations(counted, tokenizer, 6, "truncate", notes)
    assert (len(examples), notes.shortened, notes.dropped, notes.bad_rows.skipped) == (3, 1, 1, 2)
    assert notes.bad_rows.first == "a.jsonl, line 2 has an empty text; fix or remove the row."
    assert seen == [1, 2, 3, 4, 5, 6]
    assert (examples.tokens.dtype, examples.learned.dtype, examples.offsets.dtype) == (np.int32, np.bool_, np.int64)
    for index, masked in enumerate(kept):
        ids, learned = examples.example(index)
        assert (ids.tolist(), learned.tolist()) == (masked.ids[-6:], masked.learned[-6:])
    assert examples.lengths().tolist() == [min(6, len(masked.ids)) for masked in kept]

    notes = ReadingNotes(RowReport("skip"))
    dropping = tokenize_conversations(rows, tokenizer, 6, "drop", notes)
    assert (len(dropping), notes.shortened, notes.dropped) == (2, 0, 2)
    with pytest.raises(BadRowError, match=r"^a.jsonl, line 2 .*or set data.on_bad_row to skip\.$"):
        tokenize_conversations(rows, tokenizer, 6, "truncate", ReadingNotes())
    nothing = tokenize_conversations([], tokenizer, 6, "truncate", ReadingNotes())
    assert (len(nothing), nothing.lengths().tolist()) == (0, [])


def test_shown_to_people_the_learned_stands_in_brackets() -> None:
    masked = mask_of(TOKENIZERS["llama"], messages=conversation_of("What?", "caf\u00e9", "Why?", " so "))
    shown = show_masked(masked.ids, masked.learned, TOKENIZERS["llama"])
    assert shown == "<s>" + "".join(
        f"<|start_header|>user<|end_header|>\n\n{asked}<|eot|><|start_header|>assistant<|end_header|>\n\n⟦{said}<|eot|>⟧"
        for asked, said in (("What?", "caf\u00e9"), ("Why?", "so"))
    )
