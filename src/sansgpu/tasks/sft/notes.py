"""Messages for the user about conversations and chat templates, before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sansgpu.config import NATIVE_TEMPLATE
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted, shown
from sansgpu.data.row_report import RowReport, counted_parts
from sansgpu.models.generation.answer_end import answer_end


def template_notes(config: Config, tokenizer: Any) -> Iterator[str]:
    """Yields messages about a chat template that is not the model's own, or does not end an answer with a token."""
    model = str(config.model.name_or_path)
    if config.data.chat_template == NATIVE_TEMPLATE:
        yield f"{model}: conversations are written with the special tokens of its family (data.chat_template: native)."
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


@dataclass
class ReadingNotes:
    """Counts the rows of a source that were shortened, skipped or changed by the chat template."""

    bad_rows: RowReport = field(default_factory=lambda: RowReport("fail"))
    shortened: int = 0  # conversations whose oldest turns, and texts whose beginning, were cut off
    dropped: int = 0  # rows that are too long, or have nothing to learn
    lacking_system: int = 0  # conversations whose system message the chat template omitted
    omitted: Counter[str] = field(default_factory=Counter)  # rows by a part that the chat template omitted
    from_marks: int = 0  # texts of ChatML turns, which were read as conversations
    losing_thoughts: int = 0  # conversations with such turns as below
    lost_thoughts: int = 0  # turns whose thoughts the chat template left out
    with_special_text: int = 0  # rows with the text of a special token, which stayed plain text
    special_text: str | None = None  # the first such text

    def count(self, special_text: str | None, lacks_system: bool = False, omitted: Iterable[str] = ()) -> None:
        """Counts an example."""
        self.omitted.update(omitted)
        self.lacking_system += lacks_system
        self.with_special_text += special_text is not None
        self.special_text = self.special_text or special_text

    def count_thoughts(self, lost: int) -> None:
        """Counts a conversation in which the chat template leaves out the thoughts of `lost` turns."""
        self.losing_thoughts += lost > 0
        self.lost_thoughts += lost

    def messages(self, name: str, max_length: int, cut: str = "", whole: str = "they") -> Iterator[str]:
        """Yields messages about the source `name`. `cut` says what was cut off, and `whole` what was too long."""
        if self.with_special_text:
            rows = counted(self.with_special_text, "row has", "rows have")
            yield (
                f"{name}: {rows} the text of a special token in a message, such as {shown(self.special_text)}, which "
                "stays plain text; set data.parse_special_tokens=true to read such texts as tokens, if you trust the "
                "rows."
            )
        if self.shortened:
            yield f"{name}: {self.shortened} rows are longer than {max_length} tokens, so {cut}."
        if self.dropped:
            yield (
                f"{name}: {self.dropped} rows were skipped, because {whole} are longer than {max_length} tokens or "
                "there is nothing to learn; raise data.max_length (with eval: --window) to keep the long ones."
            )
        if self.lacking_system:
            yield (
                f"{name}: the chat template omits the system message of {self.lacking_system} rows; to train on it, "
                "add it to the first question."
            )
        if self.omitted:
            yield (
                f"{name}: not used by the chat template: {counted_parts(self.omitted)}; to train on it, set "
                "data.chat_template to a template that writes it."
            )
        if self.from_marks:
            yield (
                f"{name}: {counted(self.from_marks, 'text is', 'texts are')} made of <|im_start|> turns, read as "
                "conversations: only the assistant's turns are learned."
            )
        if self.lost_thoughts:
            yield (
                f"{name}: the chat template leaves out the thoughts of {counted(self.lost_thoughts, 'turn')} in "
                f"{counted(self.losing_thoughts, 'row')}, so the model does not learn them; to teach them, set "
                "data.chat_template to a template that writes them."
            )
        yield from (f"{name}: {note}" for note in self.bad_rows.notes())
