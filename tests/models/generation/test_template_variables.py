"""Variables become defaults in the template itself, which transformers uses, too, and unknown ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.tiny_model import make_tokenizer
from transformers import AutoTokenizer

from sansgpu.config import ConfigError
from sansgpu.models.generation.prompts import prompt_text
from sansgpu.models.generation.template_variables import set_template_variables

ASKED = [{"role": "user", "content": "Hi"}]
TEMPLATE = """
{%- macro state() %}[{{ style | tojson }}]{% endmacro %}
{%- for m in messages %}{{ state() if style is defined }}{{ m.content }}{{ bos_token }}
{%- if enable_thinking is defined and not enable_thinking %} short{% endif %}{% endfor %}
{%- if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def trained() -> Any:
    return make_tokenizer(encoder=False)


@pytest.fixture
def tokenizer(trained: Any) -> Any:
    trained.chat_template = TEMPLATE
    return trained


def theirs(tokenizer: Any, **variables: Any) -> str:
    return str(tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True, **variables))


@pytest.mark.parametrize(
    "value",
    [
        False, True, None, 0, -3, 1.5, 1e300, "", "it's {{ messages }} {% if %} %} \"x\" \\n \n\t\\ é 日本 😀 \x07",
        [1, [None, "a"]], {"a": {"b c": [True]}}, [],
    ],
)  # fmt: skip
def test_a_default_is_what_transformers_renders_with_the_value(tokenizer: Any, value: Any) -> None:
    wanted = theirs(tokenizer, style=value)
    set_template_variables(tokenizer, {"style": value})
    assert theirs(tokenizer) == prompt_text(tokenizer, ASKED) == wanted
    assert theirs(tokenizer, style=["other"]) == prompt_text(tokenizer, ASKED, variables={"style": ["other"]}) != wanted


def test_defaults_are_saved_with_the_tokenizer_and_can_be_replaced(tokenizer: Any, tmp_path: Path) -> None:
    before = theirs(tokenizer)
    assert "short" not in before
    set_template_variables(tokenizer, {"enable_thinking": False})
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert "short" in theirs(loaded)
    set_template_variables(loaded, {"enable_thinking": True})  # in a second training
    assert theirs(loaded) == before


def test_the_beginning_of_a_template_stays_as_it_is(tokenizer: Any) -> None:
    for start in ("\n\nA", " \nA", "{{ 'A' }}", "\n{%- if style is defined %}A{% endif %}"):
        tokenizer.chat_template = f"{start}{{{{ style }}}}{{{{ messages[0].content }}}}"
        wanted = theirs(tokenizer, style="s")
        set_template_variables(tokenizer, {"style": "s"})
        assert theirs(tokenizer) == wanted


def test_several_named_templates_all_get_the_defaults(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "T" + TEMPLATE}
    set_template_variables(tokenizer, {"enable_thinking": False})
    assert prompt_text(tokenizer, ASKED).endswith(" short>")
    assert prompt_text(tokenizer, ASKED, tools=[{"type": "function"}]).endswith(" short>")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("enable_thinkin", "did you mean enable_thinking?"),
        ("temperature", "it uses enable_thinking, style"),
        ("messages", "has no variable"),
        ("bos_token", "has no variable"),
        ("state", "has no variable"),
        ("range", "has no variable"),
    ],
)
def test_variables_that_the_template_does_not_use_are_refused(tokenizer: Any, name: str, words: str) -> None:
    for use in (
        lambda: set_template_variables(tokenizer, {name: 1}),
        lambda: prompt_text(tokenizer, ASKED, variables={name: 1}),
    ):
        with pytest.raises(ConfigError) as caught:
            use()
        assert words in str(caught.value)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        set_template_variables(tokenizer, {name: 1})
