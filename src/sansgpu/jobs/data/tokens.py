"""Turns typed rows into examples as a model's tokenizer splits them, with the targets of the loss marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from sansgpu.config.schema import Config
from sansgpu.data.forms.chats import Conversation, Prompt
from sansgpu.data.forms.preferences import PreferenceRow
from sansgpu.data.preview.example import ExamplePart, Parts, TextSegment
from sansgpu.data.preview.row_types import parts_of, row_type
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.generation.prompts import encoded_prompt, text_prompt_ids
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of, native_template
from sansgpu.tasks.fine_tuning import longest_example
from sansgpu.tasks.sft.chat import MaskedConversation, mask_conversation
from sansgpu.tasks.sft.notes import ReadingNotes
from sansgpu.tasks.sft.rendering import with_fixed_date
from sansgpu.tasks.sft.template import needs_template

Spans = Sequence[tuple[int, int, str]]  # start character, end character, label


class _Token(NamedTuple):
    text: str
    is_special: bool
    label: str


class TokenizedParts:
    """Makes the parts of typed rows with the tokenizer of a model."""

    def __init__(self, config: Config) -> None:
        self.tokenizer = load_tokenizer_of(config.model, config.data.chat_template)
        self.notes = ReadingNotes()  # on the rows that became parts
        self.max_length = longest_example(config, self.tokenizer) if config.data.max_length else None
        added = self.tokenizer.added_tokens_decoder.items()
        self._special = {*self.tokenizer.all_special_ids, *(token for token, content in added if content.special)}
        self._by_type: dict[type, Callable[[Any], Iterator[ExamplePart]]] = {
            str: self._document,
            Conversation: self._conversation,
            Prompt: self._prompt,
            PreferenceRow: self._preference,
        }

    def forget_notes(self) -> None:
        self.notes = ReadingNotes()

    @tokenizer_errors()
    def parts_of(self, typed: Any) -> Parts:
        """Returns the parts of a typed row. Raises BadRowError if the model cannot learn from it."""
        if self.tokenizer.chat_template is None and needs_template(typed):
            # Training chooses the same template for a base model.
            self.tokenizer.chat_template = native_template(self.tokenizer)
        return tuple(self._by_type.get(type(typed), self._texts)(typed))

    def _document(self, text: str) -> Iterator[ExamplePart]:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        yield self._decoded("text", ids, [True] * len(ids))

    def _conversation(self, row: Conversation) -> Iterator[ExamplePart]:
        masked = mask_conversation(row, self.tokenizer)
        self._count([masked])
        learned = [False, *masked.learned[1:]]  # the first token is never a target
        yield self._decoded("conversation", masked.ids, learned)

    def _preference(self, row: PreferenceRow) -> Iterator[ExamplePart]:
        names = ("chosen", "rejected") if row.label is None else ("good answer", "bad answer")
        rated = [(mask_conversation(conversation, self.tokenizer), is_good) for conversation, is_good in row.rated]
        self._count([masked for masked, _ in rated])
        for masked, is_good in rated:
            yield self._decoded(names[not is_good], masked.ids, masked.learned)

    def _count(self, masked: Sequence[MaskedConversation]) -> None:
        """Counts what the chat template leaves out of a row, whose conversations have the same prompt."""
        special = next((one.special_text for one in masked if one.special_text is not None), None)
        omitted = tuple(dict.fromkeys(name for one in masked for name in one.omitted))
        self.notes.count(special, masked[0].lacks_system, omitted)
        self.notes.count_thoughts(max(one.lost_thoughts for one in masked))

    def _prompt(self, row: Prompt) -> Iterator[ExamplePart]:
        if row.turns and self.tokenizer.chat_template is not None:
            ids = encoded_prompt(self.tokenizer, list(row.turns), with_fixed_date, tools=row.tools).ids
        else:
            ids = text_prompt_ids(self.tokenizer, row.text)
        yield self._decoded("prompt", ids, [False] * len(ids))
        yield from (part for part in parts_of(row) if part.is_target)

    def _texts(self, row: Any) -> Iterator[ExamplePart]:
        """Yields the parts of any other row, whose texts are one input or an input each, before its targets."""
        parts = parts_of(row)
        texts = [part for part in parts if not part.is_target]
        for together in [texts] if row_type(row).is_one_input else [[part] for part in texts]:
            name = " and ".join(part.name for part in together)
            yield self._encoded(name, [part.text for part in together], together[-1].spans)
        yield from (part for part in parts if part.is_target)

    def _decoded(self, name: str, ids: Sequence[int], learned: Sequence[bool]) -> ExamplePart:
        """Returns a part with the text of tokens, of which some are targets."""
        segments = []
        flags = [(bool(is_target), token in self._special) for token, is_target in zip(ids, learned, strict=True)]
        for (is_target, is_special), run in groupby(zip(ids, flags, strict=True), key=lambda pair: pair[1]):
            text = self.tokenizer.decode(
                [token for token, _ in run], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            segments.append(TextSegment(text, is_target, is_special))
        return ExamplePart(name, tuple(segments), tokens=len(ids), learned_tokens=sum(map(bool, learned)))

    def _encoded(self, name: str, texts: Sequence[str], spans: Spans) -> ExamplePart:
        """Returns a part with one or two texts and their special tokens. `spans` are in the last text."""
        encoded = self.tokenizer(*texts, verbose=False).encodings[0]
        segments = []
        for (is_special, label), run in groupby(self._tokens(encoded, texts, spans), key=lambda one: one[1:]):
            segments.append(TextSegment("".join(one.text for one in run), bool(label), is_special, label))
        return ExamplePart(name, tuple(segments), tokens=len(encoded.ids))

    def _tokens(self, encoded: Any, texts: Sequence[str], spans: Spans) -> Iterator[_Token]:
        """Yields each token with the text since the token before it, so that no character is lost."""
        reached = [0] * len(texts)
        marks = zip(encoded.ids, encoded.offsets, encoded.sequence_ids, strict=True)
        unknown = self.tokenizer.unk_token_id
        for token, (start, end), number in marks:
            if number is None:
                yield _Token(self.tokenizer.convert_ids_to_tokens(token), True, "")
                continue
            text, marked = texts[number], spans if number == len(texts) - 1 else ()
            if start > reached[number]:
                gap = reached[number], start
                yield _Token(text[slice(*gap)], False, _label_of(*gap, marked))
            if token == unknown:
                yield _Token(self.tokenizer.unk_token, True, "")
            elif end > reached[number]:
                first = max(start, reached[number])
                yield _Token(text[first:end], False, _label_of(first, end, marked))
            reached[number] = max(reached[number], end)


def _label_of(start: int, end: int, spans: Spans) -> str:
    """Returns the label of the span that shares a character with [start, end), as a byte-level token " Ada" does."""
    return next((label for first, last, label in spans if first < end and start < last), "")
