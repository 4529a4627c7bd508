"""Messages for the user about conversations and chat templates, before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sansgpu.config.wording import counted, shown
from sansgpu.models.generation.answer_end import answer_end


def end_notes(model: str, tokenizer: Any) -> Iterator[str]:
    """Yields a message if the chat template ends an answer without a token at which every program stops."""
    end = answer_end(tokenizer)
    if end is None or (end.is_learned and end.token is not None):
        return
    if not end.is_learned:
        yield (
            f"{model}: the chat template writes nothing after an answer, so the model cannot learn to stop; "
            "write {{ eos_token }} there, in a file for data.chat_template."
        )
        return
    text = end.text.strip()
    count = counted(len(tokenizer(text, add_special_tokens=False).input_ids), "token")
    yield (
        f"{model}: the chat template ends an answer with {shown(text)}, which is no token of this tokenizer but "
        f"{count} of text: sansgpu stops at this text, but other programs may run on; write {{{{ eos_token }}}} in "
        "its place, in a file for data.chat_template, or use a model whose tokenizer has such a token."
    )


def special_text_notes(source: str, rows: int, text: str | None) -> Iterator[str]:
    """Yields a message if `rows` of a source have texts of special tokens, such as `text`, in their messages."""
    if rows:
        yield (
            f"{source}: {counted(rows, 'row has', 'rows have')} the text of a special token in a message, such as "
            f"{shown(text)}, which stays plain text; set data.parse_special_tokens=true to read such texts as tokens, "
            "if you trust the rows."
        )
