"""Ollama's chat templates give the text that the model's own template gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import ConfigError
from sansgpu.machine.untrusted.templates import render_prefixes
from sansgpu.models.formats.ollama import chat_format, model_name, modelfile, stop_texts
from sansgpu.models.formats.tokenizers import TokenizerParts
from sansgpu.models.huggingface.tokenizer_files import tokenizer_parts
from tests.models.formats.go_templates import render as render_go
from tests.tasks.sft.test_chat_families import CHATML, FAMILIES, GEMMA_2, LLAMA_3, MISTRAL_3, PHI_3, tokenizer_for

SIMPLE = Path(__file__).parents[3] / "src/sansgpu/models/huggingface/templates/simple.jinja"
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{%- set system = messages[0]['content'] %}{%- else %}
{%- set rest = messages %}{% set system = false %}
{%- endif %}{% for m in rest %}
{%- if loop.index0 == 0 and system != false %}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}
{%- else %}{% set content = m['content'] %}{% endif %}
{%- if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
GEMMA_3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
{%- set first = messages[0]['content'] + '\\n\\n' -%}{%- set rest = messages[1:] -%}{%- else -%}
{%- set first = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}{%- set role = "model" if m['role'] == 'assistant' else m['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
THINKING = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
QUOTING = "{% for m in messages %}{{ '{{ \"\"\" ' + m.role + '\\u00a0\\u200b ' + m.content + '\"\" }}' }}{% endfor %}"
BRACES = "{% for m in messages %}{{ '{' + m.role + ': {{{' + m.content + '}}}\\n{' }}{% endfor %}"
TEMPLATES = {
    **{name: template for name, (template, *_) in FAMILIES.items()},
    "llama 2": LLAMA_2, "gemma 3": GEMMA_3, "thinking": THINKING, "quotes": QUOTING,
    "braces": BRACES, "simple": SIMPLE.read_text("utf-8"),
}  # fmt: skip
WITHOUT_SYSTEM = "gemma 2", "mistral v1"

# Templates that Ollama has for models of these families, from its repository (template/*.gotmpl).
OLLAMA_CHATML = """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
OLLAMA_PHI_3 = """{{- range .Messages }}<|{{ .Role }}|>
{{ .Content }}<|end|>
{{ end }}<|assistant|>
"""
OLLAMA_GEMMA = """{{- $system := "" }}
{{- range .Messages }}
{{- if eq .Role "system" }}
{{- if not $system }}{{ $system = .Content }}
{{- else }}{{ $system = printf "%s\\n\\n%s" $system .Content }}
{{- end }}
{{- continue }}
{{- else if eq .Role "user" }}<start_of_turn>user
{{- if $system }}
{{ $system }}
{{- $system = "" }}
{{- end }}
{{- else if eq .Role "assistant" }}<start_of_turn>model
{{- end }}
{{ .Content }}<end_of_turn>
{{ end }}<start_of_turn>model
"""


def parts_of(template: str) -> TokenizerParts:
    parts: TokenizerParts = tokenizer_parts(tokenizer_for(template))
    return parts


def own_text(parts: TokenizerParts, messages: list[dict[str, str]]) -> str:
    assert parts.chat_template is not None
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return render_prefixes(parts.chat_template, names, messages, [(len(messages), True)])[0].text


def conversation(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def read_modelfile(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Modelfile, read by the rules of Ollama's parser."""
    assert all(character in "\n\t" or character.isprintable() for character in text), "Ollama drops others"
    found, left = [], ""
    for line in text.splitlines(keepends=True):
        left += line
        name, value = left.removeprefix("PARAMETER ").split(" ", 1)
        quote = next((quote for quote in ('"""', '"') if value.startswith(quote)), "")
        value = value.strip()
        if not quote or (len(value) >= 2 * len(quote) and value.endswith(quote)):
            found.append((name, value[len(quote) : len(value) - len(quote)]))
            left = ""
    assert not left
    return found


def test_the_system_message_of_a_template_is_an_instruction() -> None:
    template = (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = chat_format(parts_of(template))
    assert found.default_system == "You help."
    instructions = dict(read_modelfile(modelfile("a.gguf", found.go_template(), [], {}, found.default_system)))
    assert instructions["SYSTEM"] == "You help."
    messages = conversation("Hi", "Yes", "Why?")
    with_system = [{"role": "system", "content": instructions["SYSTEM"]}, *messages]
    assert render_go(instructions["TEMPLATE"], with_system) == own_text(parts_of(template), messages)
    for unwritable in ('Say """.', "\x07", 'a"""\nADAPTER /etc/passwd\n"""', "a\rb"):
        assert "SYSTEM" not in dict(read_modelfile(modelfile("a.gguf", "", [], {}, unwritable)))
        with pytest.raises(ConfigError, match=r'^the text ".*", at which answers of the model end, contains three quo'):
            modelfile("a.gguf", "", [unwritable], {})
    for number in ("1\nSYSTEM evil", float("nan"), None, True):
        with pytest.raises(ConfigError, match=r"^temperature in the model's settings is .*; set it to a number\.$"):
            modelfile("a.gguf", "", [], {"temperature": number})


@pytest.mark.parametrize("name", TEMPLATES)
def test_both_templates_give_the_same_text(name: str) -> None:
    parts = parts_of(TEMPLATES[name])
    found = chat_format(parts)
    instructions = dict(read_modelfile(modelfile("a.gguf", found.go_template(), [], {})))
    conversations = [conversation("Hi"), conversation("Hi", "Yes", "Why?"), conversation("a", "b", "c\nd", "e", "f")]
    if name not in WITHOUT_SYSTEM:
        conversations += [[{"role": "system", "content": 'Be "brief".'}, *messages] for messages in conversations]
    assert (found.system is None) == (name in WITHOUT_SYSTEM)
    for messages in conversations:
        text = own_text(parts, messages)
        assert text
        assert render_go(instructions["TEMPLATE"], messages) == text == found.render(messages)


WORDS = st.text("ab{}\"'\\% <>|\n", min_size=1, max_size=12).map(lambda text: f"x{text}x")


@settings(max_examples=30)
@given(st.lists(WORDS, min_size=1, max_size=7).filter(lambda turns: len(turns) % 2), st.none() | WORDS)
def test_they_agree_on_any_content(turns: list[str], system: str | None) -> None:
    for template in (CHATML, LLAMA_3, MISTRAL_3, GEMMA_3, PHI_3):
        parts, messages = parts_of(template), conversation(*turns, system=system)
        assert render_go(chat_format(parts).go_template(), messages) == own_text(parts, messages)


@pytest.mark.parametrize(
    ("own", "ollama"), [(CHATML, OLLAMA_CHATML), (PHI_3, OLLAMA_PHI_3), (GEMMA_2, OLLAMA_GEMMA)], ids=str.split
)
def test_they_agree_with_those_of_ollama(own: str, ollama: str) -> None:
    system = None if own == GEMMA_2 else "Be brief."
    messages = conversation("Hi", "Yes", "Why?", system=system)
    found = chat_format(parts_of(own)).without("<s>")
    assert render_go(found.go_template(), messages) == render_go(ollama, messages)


def test_an_answer_that_was_begun_is_continued() -> None:
    found = chat_format(parts_of(PHI_3))
    text = render_go(found.go_template(), conversation("Hi", "Yes, because"))
    assert text == "<|user|>\nHi<|end|>\n<|assistant|>\nYes, because"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}",
        "{% for m in messages %}{{ loop.index }}. {{ m.content }}\n{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{{ raise_exception('never') }}",
    ],
)
def test_a_template_that_does_more_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^the model's chat template cannot be written for Ollama, .*\.$"):
        chat_format(parts_of(template))


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is not valid Jinja .*; fix the template\.$"):
        chat_format(parts_of("{% for %}"))


def test_answers_stop_at_end_tokens_and_at_tokens_of_the_template() -> None:
    parts: Any = parts_of(CHATML)
    assert stop_texts(parts, chat_format(parts)) == ["<|im_end|>", "</s>", "<|im_start|>"]
    assert stop_texts(replace(parts, turn_end_id=None, other_end_ids=(), turn_end="\nEND"), None) == [
        "<|im_end|>",
        "END",
    ]


def test_a_modelfile_is_read_as_it_was_written() -> None:
    written = modelfile("model.gguf", 'a "b"\n\n c ', ["<|end|>", 'a "b', "two words", "a\nb"], {"num_ctx": 32})
    assert read_modelfile(written) == [
        ("FROM", "./model.gguf"), ("TEMPLATE", 'a "b"\n\n c '), ("stop", "<|end|>"), ("stop", 'a "b'),
        ("stop", "two words"), ("stop", "a\nb"), ("num_ctx", "32"),
    ]  # fmt: skip


def test_names_are_those_that_ollama_accepts() -> None:
    names = {"Tiny": "tiny", "my run/2": "my-run-2", "..": "model", "ü": "model", "a.b_c-d": "a.b_c-d"}
    assert {name: model_name(name) for name in names} == names
