"""All forms in which the rows of tasks come."""

from __future__ import annotations

from typing import Any

from sansgpu.data.forms.chats import CONVERSATIONS, PROMPTS
from sansgpu.data.forms.form import Form, Forms, any_row, unused_columns
from sansgpu.data.forms.graphs import GRAPHS
from sansgpu.data.forms.labels import LABELED
from sansgpu.data.forms.pairs import TEXT_GROUPS
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.forms.questions import QUESTIONS
from sansgpu.data.forms.tags import TAGGED
from sansgpu.data.rows import LeftOutError, SourceRow, text_column, text_of
from sansgpu.data.tables import Columns


def _text(row: SourceRow, columns: Columns) -> str:
    if not (text := text_of(row, columns.text)):
        raise LeftOutError(row.where, "without a text")
    return text


TEXTS = Forms("a text", (
    Form(("text",), _text, {"text": "A text."}, ("content",), any_row,
         unused=lambda row, columns: unused_columns(row, (text_column(row, columns.text),))),
))  # fmt: skip
# By the name in `TaskSettings.rows` of the tasks that read them.
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
