"""Chooses a chat template for base models, whose tokenizers often have the tokens of one, but not the template."""

from __future__ import annotations

from typing import Any

from sansgpu.config import NATIVE_TEMPLATE
from sansgpu.config.schema import Config
from sansgpu.data.forms.chats import Conversation, Prompt
from sansgpu.data.forms.form import Forms
from sansgpu.data.forms.preferences import PreferenceRow
from sansgpu.data.rows import BadRowError
from sansgpu.data.sources import open_sources
from sansgpu.data.tables import Columns
from sansgpu.models.huggingface.tokenizer_files import native_template


def needs_template(row: Any) -> bool:
    """Returns True if a typed row is a conversation that cannot be read without a chat template."""
    match row:
        case PreferenceRow():
            return any(map(needs_template, row.conversations))
        case Conversation():
            return bool(row.turns) and row.plain is None and row.text is None
        case Prompt():
            return bool(row.turns) and not row.text
    return False


def with_native_template(config: Config, tokenizer: Any, forms: Forms[Any]) -> Config:
    """Gives a tokenizer without a chat template the one of its special tokens, if the first row needs a template.

    Returns the configuration with this choice, so that everything that loads the run has the same template.
    """
    if tokenizer.chat_template is not None or (native := native_template(tokenizer)) is None:
        return config
    row = next(iter(open_sources(config.data).train.rows()), None)
    try:
        is_needed = row is not None and needs_template(forms.read(row, Columns.of(config.data)))
    except BadRowError:  # reported when all rows are read
        is_needed = False
    if not is_needed:
        return config
    tokenizer.chat_template = native
    return config.with_values("data", chat_template=NATIVE_TEMPLATE)
