"""Examples that can be shown: named parts of text, in which the targets are marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TextSegment:
    """A piece of text. `learned`: the model learns to produce it; `label`: name of a marked span."""

    text: str
    learned: bool = False
    special: bool = False  # a special token
    label: str = ""


@dataclass(frozen=True)
class ExamplePart:
    """One text of an example, such as a turn, or with `is_target` what the model predicts about the texts."""

    name: str
    segments: tuple[TextSegment, ...]
    is_target: bool = False
    tokens: int | None = None  # without a tokenizer: None
    learned_tokens: int | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def spans(self) -> list[tuple[int, int, str]]:
        """Returns (start character, end character, label) of each marked span."""
        spans, start = [], 0
        for segment in self.segments:
            end = start + len(segment.text)
            spans += [(start, end, segment.label)] if segment.label else []
            start = end
        return spans


MAX_PART_CHARACTERS = 2000
Parts = tuple[ExamplePart, ...]


def text_in(parts: Parts) -> str:
    """Returns all text of an example, without what is predicted about it."""
    return "\n".join(part.text for part in parts if not part.is_target)


def learned_length(parts: Parts) -> int:
    """Returns the number of characters that the model learns to produce."""
    segments = (segment for part in parts if not part.is_target for segment in part.segments)
    return sum(len(segment.text) for segment in segments if segment.learned and not segment.label)


def plain(name: str, text: str, learned: bool = False) -> ExamplePart:
    return ExamplePart(name, (TextSegment(text, learned),))


def target(name: str, text: str) -> ExamplePart:
    """Returns a part with what the model predicts."""
    return ExamplePart(name, (TextSegment(text, True),), is_target=True)


def marked(text: str, spans: Iterable[tuple[int, int, str]], learned: bool = True) -> Iterator[TextSegment]:
    """Yields a text in segments, of which `spans` have labels. Spans do not overlap."""
    last = 0
    for start, end, label in sorted(spans):
        if start > last:
            yield TextSegment(text[last:start])
        yield TextSegment(text[start:end], learned, label=label)
        last = end
    if last < len(text):
        yield TextSegment(text[last:])


def shortened(part: ExamplePart) -> ExamplePart:
    """Cuts a long text after `MAX_PART_CHARACTERS`, for a part whose row was not asked for."""
    room, kept = MAX_PART_CHARACTERS, list[TextSegment]()
    for one in part.segments:
        if len(one.text) > room:
            kept.append(replace(one, text=one.text[:room]))
            left = len(part.text) - MAX_PART_CHARACTERS
            kept.append(TextSegment(f" ... {left:,} more characters, which --row shows", special=True))
            break
        kept.append(one)
        room -= len(one.text)
    return replace(part, segments=tuple(kept))
