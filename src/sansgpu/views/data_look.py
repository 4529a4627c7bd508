"""Shows what is known of a dataset, and examples as the model learns them: on the terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from sansgpu.config.wording import counted, truncate
from sansgpu.data.preview.example import ExamplePart, TextSegment
from sansgpu.data.preview.look import DataLook, LengthLook, Repetition, RowExample, SplitLook
from sansgpu.views.page import page
from sansgpu.views.tables import grid, percent

BAR_WIDTH = 30  # characters of the longest bar of a histogram
MAX_LISTED, MAX_LABELS, MAX_SCRIPTS = 20, 40, 5
MAX_PAGE_LABELS = 200
LEARNED, SPECIAL, NAME = "green", "dim", "bold"  # styles on the terminal
BEGIN, END = "⟦", "⟧"  # around learned text where there are no colors

Facts = list[tuple[str, str]]  # a name, and one line or several


def facts_of(look: DataLook) -> Facts:
    """Returns all facts in words."""
    return [*split_facts(look), *_text_facts(look)]


def split_facts(look: DataLook) -> Facts:
    """Returns the facts on rows and columns."""
    facts: Facts = [("task", _task(look))]
    for split in look.splits:
        facts += [(name if split.part == "training" else f"{split.part} {name}", text) for name, text in _split(split)]
    if look.held_out is not None and look.splits[0].rows:
        first, share = look.splits[0], f"{100 * look.held_out:.3g}% of the data"
        held = f"about {max(1, round(look.held_out * first.usable)):,} of {first.usable:,} rows, {share},"
        facts.append(("validation", f"{held if first.is_whole else share} will be held out (data.validation_split)"))
    return facts + [("note", note) for note in look.notes]


def look_lines(look: DataLook) -> list[str]:
    """Returns the facts on rows and columns as lines of text."""
    return [
        line for name, text in split_facts(look)[1:] for line in f"{name}: {text}".replace("\n", "\n  ").splitlines()
    ]


def _task(look: DataLook) -> str:
    if not look.task_is_guessed:
        return look.task
    others = ", ".join(look.other_tasks)
    return f"{look.task}, guessed from the rows" + (f"; --task could also be {others}" if others else "")


def _split(split: SplitLook) -> Iterator[tuple[str, str]]:
    first = "" if split.is_whole else "the first "
    made = split.is_whole and split.source_rows != split.rows
    yield (
        "rows",
        f"{first}{split.rows:,} in {split.name}"
        + (f", made of {counted(split.source_rows, 'row')} of its files" if made else ""),
    )
    if split.forms:
        yield "form", _listed(split.forms)
        yield "used columns", _listed(_quoted(split.used)) or "none"
        yield "unused columns", _listed(_quoted(split.not_used)) or "none"
    if skipped := split.rows - split.usable:
        effect = "their own values say so, so a run goes on"
        if split.bad_rows:
            them = "them" if split.bad_rows == skipped else f"{split.bad_rows:,} of them"
            effect = f"data.on_bad_row: fail stops a run at {them}, skip leaves them out"
        if split.max_bad_rows is not None:
            effect = f"a run stops, because they are more than data.max_bad_rows={split.max_bad_rows:g} allows"
        lines = [f"{skipped:,} of {counted(split.rows, 'row')} ({effect})"]
        lines += [f"{one.rows:,}: {one.first}" for one in split.left_out]
        if others := skipped - sum(one.rows for one in split.left_out):
            lines.append(f"{others:,} for other reasons")
        yield "left out", "\n".join(lines)
    if split.problem:
        yield "error", split.problem


def _quoted(counts: Mapping[str, int]) -> dict[str, int]:
    return {repr(name): count for name, count in counts.items()}


def _listed(counts: Mapping[str, int]) -> str:
    """Lists names with numbers of rows, e.g. "text (12 rows), label (10)"."""
    names = [f"{name} ({counted(count, 'row') if not place else f'{count:,}'})"
             for place, (name, count) in enumerate(counts.items())]  # fmt: skip
    left = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {left:,} others" if left > 0 else "")


def _text_facts(look: DataLook) -> Iterator[tuple[str, str]]:
    if look.repetition is not None:
        yield "repeated texts", _repetition(look.repetition)
    if look.lengths is not None:
        yield "lengths", _lengths(look.lengths)
    if look.labels is not None:
        yield from _labels(look)
    if (scores := look.scores) is not None:
        yield "scores", f"{scores.scale}; half of them are up to {scores.median:g}"
    if (answers := look.answers) is not None:
        lines = [f"{answers.answers:,}, {answers.distinct:,} of them distinct, {answers.empty:,} empty"]
        lines += [f"{count:,} times {truncate(text)!r}" for text, count in answers.repeated]
        yield "answers", "\n".join(lines)
    if look.scripts:
        shares = [f"{name} {share:.1%}" for name, share in [*look.scripts.items()][:MAX_SCRIPTS]]
        yield "scripts", ", ".join(shares)


def _repetition(found: Repetition) -> str:
    text = f"{counted(found.equal, 'row')} equal to an earlier one, {found.nearly:,} nearly"
    if found.validation_equal is None:
        return text
    leaks = (f"{found.validation_equal:,} equal to a training row", f"{found.validation_nearly:,} nearly")
    return f"{text}; of the validation rows {', '.join(leaks)}"


def _lengths(found: LengthLook) -> str:
    what = "the tokens are" if found.unit == "tokens" else "the text is"
    share = "" if found.learned_share is None else f"; {found.learned_share:.1%} of {what} learned"
    lines = [
        f"{found.shortest:,} to {found.longest:,} {found.unit}, half of the {found.examples:,} measured texts up to "
        f"{found.median:,}{share}"
    ]
    most, width = max(count for _, count in found.bins), len(f"{found.bins[-1][0]:,}")
    for limit, count in found.bins:
        lines.append(f"up to {limit:>{width},} {'█' * round(BAR_WIDTH * count / most)} {count:,}")
    if found.max_length is not None:
        cut = f"{found.longer:,} ({percent(found.longer / found.examples)}) are longer than data.max_length "
        lines.append(f"{cut}{found.max_length:,}{f': {found.effect}' if found.longer else ''}")
    return "\n".join(lines)


def _labels(look: DataLook) -> Iterator[tuple[str, str]]:
    labels = look.labels
    assert labels is not None
    listed = [
        f"{f'{place} = ' if labels.numbered else ''}{truncate(name)} ({count:,})"
        for place, (name, count) in enumerate(labels.mapping[:MAX_LABELS])
    ]
    left = len(labels.mapping) - MAX_LABELS
    if listed:
        kind = "" if labels.kind == "labels" else f", {labels.kind}"
        more = f" and {left:,} others" if left > 0 else ""
        yield "labels", f"{len(labels.mapping):,}{kind}, with {labels.counted}: {', '.join(listed)}{more}"
    if labels.note:
        yield "labels", labels.note
    if labels.different:
        yield "labels", f"{counted(labels.different, 'text has', 'texts have')} different labels in different rows"


def print_look(console: Console, look: DataLook, in_color: bool = True) -> None:
    """Prints the facts and the examples. `in_color`: use colors if there are any."""
    table = grid()
    for name, text in facts_of(look):
        table.add_row(name, text)
    console.print(table)
    for example in look.examples:
        console.print()
        print_example(console, example, in_color and console.color_system is not None)


def print_example(console: Console, example: RowExample, in_color: bool) -> None:
    """Prints a row, with learned text in color, or in ⟦ ⟧ where there is none."""
    console.print(Text(f"--- {_place(example)}", style="dim"), soft_wrap=True)
    if example.problem:
        console.print(Text(f"left out: {example.problem}", style="yellow"), soft_wrap=True)
    for part in example.parts:
        console.print(_in_color(part) if in_color else Text(plain_part(part)), soft_wrap=True)


def _place(example: RowExample) -> str:
    form = f" ({example.form})" if example.form else ""
    return f"{example.reason}{form}{f': {example.where}' if example.where else ''}"


def plain_part(part: ExamplePart) -> str:
    """Returns a part as text, with brackets around learned text and the names of marked spans after them."""
    return f"{_heading(part)}: " + "".join(
        f"{BEGIN}{one.text}{END}{one.label and f'({one.label})'}" if one.learned else one.text
        for one in _joined(part.segments)
    )


def _in_color(part: ExamplePart) -> Text:
    text = Text(f"{_heading(part)}: ", style=NAME)
    for one in part.segments:
        style = LEARNED if one.learned else SPECIAL if one.special else ""
        text.append(one.text, style=f"not bold {style}".strip())
        if one.label:
            text.append(f"({one.label})", style="not bold cyan")
    return text


def _joined(segments: Iterable[TextSegment]) -> Iterator[TextSegment]:
    """Joins neighbors that differ only in whether they are special tokens."""
    last: TextSegment | None = None
    for one in segments:
        if last is not None and (last.learned, last.label) == (one.learned, one.label) and not one.label:
            last = replace(last, text=last.text + one.text)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _heading(part: ExamplePart) -> str:
    if part.tokens is None:
        return part.name
    learned = "" if part.learned_tokens is None else f", {part.learned_tokens:,} learned"
    return f"{part.name} ({counted(part.tokens, 'token')}{learned})"


class _Bars(NamedTuple):
    """A chart of horizontal bars. Each has a name, a number, and its share of the longest bar in percent."""

    title: str
    bars: list[tuple[str, int, float]]
    note: str = ""


def look_page(look: DataLook) -> str:
    """Renders a page with the facts, the distributions and the examples. It is small, so that it can be mailed."""
    return page("data.html", (), title=look.data, **look_parts(look))


def look_parts(look: DataLook) -> dict[str, Any]:
    """Returns the facts, the distributions and the examples for the macros of look.html."""
    facts = [(name, text.splitlines()) for name, text in facts_of(look) if name != "lengths"]
    lengths = [] if look.lengths is None else [("lengths", [_lengths(replace(look.lengths, bins=((1, 1),)))])]
    for name, text in lengths:
        facts.append((name, [line for line in text[0].splitlines() if "█" not in line]))
    examples = [(_place(example), example, [_heading(part) for part in example.parts]) for example in look.examples]
    return {"facts": facts, "examples": examples, "charts": [*_charts(look)]}


def _charts(look: DataLook) -> Iterator[_Bars]:
    if (lengths := look.lengths) is not None:
        counts = [(f"up to {limit:,}", count) for limit, count in lengths.bins]
        note = "" if lengths.max_length is None else f"data.max_length is {lengths.max_length:,}"
        yield _Bars(f"Texts by length in {lengths.unit}", _bars(counts), note)
    if look.labels is not None and look.labels.mapping:
        counts = [*look.labels.mapping[:MAX_PAGE_LABELS]]
        yield _Bars(f"{look.labels.counted.capitalize()} by label", _bars(counts))


def _bars(counts: Sequence[tuple[str, int]]) -> list[tuple[str, int, float]]:
    most = max(1, *(count for _, count in counts))
    return [(name, count, round(100 * count / most, 1)) for name, count in counts]
