"""The table of all forms in which rows come, and the check of the columns of tables."""

from __future__ import annotations

from typing import Any

from sansgpu.config.schema import Config
from sansgpu.data.forms.chats import CONVERSATIONS, PROMPTS
from sansgpu.data.forms.form import Form, Forms, any_row, resolve_columns
from sansgpu.data.forms.graphs import GRAPHS
from sansgpu.data.forms.labels import LABELED
from sansgpu.data.forms.pairs import TEXT_GROUPS
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.forms.questions import QUESTIONS
from sansgpu.data.forms.tags import TAGGED
from sansgpu.data.rows import text_of

TEXTS = Forms("a text", (
    Form(("text",), lambda row, columns: text_of(row, columns.text), {"text": "A text."}, ("content",), any_row),
))  # fmt: skip
# The forms of the rows that a task takes, by the name in `TaskSettings.rows`.
FORMS: dict[str, Forms[Any]] = {
    "texts": TEXTS,
    "conversations": CONVERSATIONS,
    "prompts": PROMPTS,
    "preferences": PREFERENCES,
    "labeled texts": LABELED,
    "text groups": TEXT_GROUPS,
    "tagged texts": TAGGED,
    "questions": QUESTIONS,
    "graphs": GRAPHS,
}


def require_columns(config: Config) -> None:
    """Raises ConfigError if the meaning of the columns of a configured local table is unclear."""
    resolve_columns(config.data, FORMS[config.settings.rows])
