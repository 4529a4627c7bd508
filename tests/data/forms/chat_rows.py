"""A question, its answer, and rows with both."""

from typing import Any

from sansgpu.data.forms.chats import CONVERSATIONS, Conversation
from sansgpu.data.rows import SourceRow
from sansgpu.data.tables import Columns

WHERE = "talk.jsonl, line 3"
ASKED, GIVEN = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = (ASKED, GIVEN)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def read(row: Any, columns: Columns | None = None) -> Conversation:
    return CONVERSATIONS.read(SourceRow(WHERE, row), columns or Columns())


def calling(call: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": None, **call}], **more}
