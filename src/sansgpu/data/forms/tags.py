"""Texts with tagged words: CoNLL sentences, rows with `tokens` and `tags`, and rows with `text` and `spans`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.data.conll import DOCUMENT_START, ConllLayout, conll_layout
from sansgpu.data.formats.names import TABLES, file_form
from sansgpu.data.formats.opening import suffix_of
from sansgpu.data.forms.cells import parsed_cell
from sansgpu.data.forms.form import Form, Forms, any_row, unused_columns
from sansgpu.data.forms.offsets import SpannedText
from sansgpu.data.forms.sentences import SENTENCE_NAMES, tagged_rows, word_columns
from sansgpu.data.forms.spans import (
    MARK_COLUMNS,
    SPAN_COLUMNS,
    TEXT_COLUMNS,
    RawSpan,
    checked_spans,
    is_label_studio,
    label_studio_task,
    label_studio_text,
    span_column,
    span_items,
    spanned_text,
    text_column_of,
    unused_of_label_studio,
    unused_of_spans,
)
from sansgpu.data.forms.words import TaggedText, WordSpan, iob2_tags, longest_first, of_tokens, word_bounds
from sansgpu.data.lines import read_lines
from sansgpu.data.rows import Row, SourceRow, column_names
from sansgpu.data.tables import MAX_FIRST_LINES, Columns, is_table, table_lines

TOKEN_COLUMNS = ("tokens", "words", "tokenized_text")
TAG_COLUMNS = (
    "tags",
    "ner_tags",
    "ner",
    "labels",
    "label",
    "tag",
    "ner_labels",
    "bio_tags",
    "iob_tags",
    "word_labels",
    "upos",
    "pos_tags",
)  # fmt: skip  in the order in which they are tried
TOKEN_SPAN_COLUMNS = ("ner", "entities", "spans")  # with token numbers instead of offsets
_SENTENCES = ("sentence", "Sentence", "text")  # columns with a sentence whose words, between spaces, have tags


def untagged_text(row: SourceRow) -> TaggedText:
    """Reads the text or the tokens of a row without its tags. Raises BadRowError if it is invalid."""
    row = row._replace(value=TAGGED.with_usual_names(row.value))
    value = row.columns(TAGGED.needed)
    name = _token_column(value)
    if name is not None and not (isinstance(value[name], str) and text_column_of(value)):
        return of_tokens(row, _list(value[name]))
    if is_label_studio(value, Columns()):
        text = label_studio_text(row)
    elif name := text_column_of(value):
        text = row.required_text(name)
    else:
        raise row.error(
            f"it has the columns {column_names(value)}, but needs `tokens` and `tags`, or `text` and `spans`"
        )
    return TaggedText(row.where, text, *word_bounds(text))


def _token_column(row: Row) -> str | None:
    """Returns the column with the words of a row, or None. Prodigy's tokens are objects, which follow from the text."""
    for name in TOKEN_COLUMNS if not isinstance(row.get("sentence"), list) else (*TOKEN_COLUMNS, "sentence"):
        tokens = row.get(name)
        if isinstance(tokens, (list, str)) and not (tokens and isinstance(tokens[0], dict)):
            return name
    return None


def _list(value: Any) -> Any:
    """Returns a list that a table has as text: in JSON, in Python's or NumPy's notation, or words between spaces."""
    if not isinstance(value, str):
        return value
    found = parsed_cell(value)
    return found if isinstance(found, list) else value.split()


# Tags of tokens


def _tag_column(row: Row) -> str | None:
    """Returns the column with the tags: the first whose values are not lists or objects, such as spans."""
    names = {str(name).casefold(): name for name in reversed(row)}
    for name in (names[known] for known in TAG_COLUMNS if known in names):
        tags = _list(row[name]) if isinstance(row[name], str) else row[name]
        if tags is not None and not (isinstance(tags, list) and tags and isinstance(tags[0], (list, dict))):
            return str(name)
    return None


def _sentence_column(row: Row) -> str | None:
    """Returns the column with a text whose words have tags, which are a list, or None."""
    has_list = isinstance(parsed_cell(row.get(_tag_column(row))), list)
    return next((name for name in _SENTENCES if has_list and isinstance(row.get(name), str)), None)


def _has_tags(row: Row, columns: Columns) -> bool:
    has_spans = text_column_of(row) is not None and span_column(row) is not None
    if _token_column(row) is not None:
        return _tag_column(row) is not None or not has_spans
    return _sentence_column(row) is not None and not has_spans


def _tagged(row: SourceRow, columns: Columns) -> TaggedText:
    value = row.value
    name, key = _token_column(value) or _sentence_column(value), _tag_column(value)
    as_text = key is not None and isinstance(value[key], str)
    tokens = value[name]
    text = of_tokens(row, _list(tokens) if as_text or name in _SENTENCES else tokens)
    if key is None:
        raise row.error("it has no tags or ner_tags")
    tags = _list(value[key]) if isinstance(tokens, str) else value[key]
    if not isinstance(tags, list):
        raise row.error(f"its {key} are of type {type(tags).__name__} instead of a list")
    if len(tags) != len(text.starts):
        raise row.error(f"its {key} have {counted(len(tags), 'value')} for {counted(len(text.starts), 'token')}")
    if all(type(tag) is int for tag in tags):
        if (lowest := min(tags)) < 0:
            raise row.error(f"its {key} contain {lowest}; give each word a tag, and no tags of parts of words")
        return replace(text, tags=tuple(map(str, tags)), has_numbers=True)
    return replace(text, tags=tuple(row.valid_text(tag, key) for tag in tags))


def _unused_of_tags(row: Row, columns: Columns) -> Iterator[str]:
    return unused_columns(row, map(str, (_token_column(row) or _sentence_column(row), _tag_column(row))), columns)


def _word(row: SourceRow, columns: Columns) -> TaggedText:
    return _tagged(next(tagged_rows([row])), columns)


# Spans of tokens


def _token_span_column(row: Row) -> str | None:
    """Returns the column with spans of a row's tokens, or None."""
    for name in TOKEN_SPAN_COLUMNS if _token_column(row) else ():
        spans = row.get(name)
        if isinstance(spans, list) and all(isinstance(span, (list, tuple, dict)) for span in spans):
            return name
    return None


def _has_token_spans(row: Row, columns: Columns) -> bool:
    has_others = text_column_of(row) is not None or _tag_column(row) not in (None, *TOKEN_SPAN_COLUMNS)
    return _token_span_column(row) is not None and not has_others


def _with_token_spans(row: SourceRow, columns: Columns) -> TaggedText:
    """Tags the tokens of spans. The end of a list (GLiNER) is the last token, that of an object the one after it."""
    name, tokens = _token_span_column(row.value), _token_column(row.value)
    text = of_tokens(row, row.value[tokens])
    given = checked_spans(row, [span for item in row.value[name] for span in _token_spans(item)])
    for number, (start, end, _, _) in enumerate(given):
        if not 0 <= start < end <= len(text.starts):
            size = counted(len(text.starts), "token")
            raise row.error(f"span {number} from {start} to {end} is empty or not within the {size}")
    kept, dropped = longest_first(WordSpan(*span[:3]) for span in given)
    return replace(text, tags=iob2_tags(kept, len(text.starts)), dropped_spans=dropped)


def _token_spans(item: Any) -> Iterator[RawSpan]:
    """Yields the span of an item of a list. Its end is exclusive."""
    numbers: Any = item.get("index") if isinstance(item, dict) else None
    is_list = isinstance(numbers, list) and bool(numbers) and all(type(number) is int for number in numbers)
    if is_list and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:  # W2NER
        item = {**item, "index": None, "start": numbers[0], "end": numbers[-1] + 1}
    for span in span_items(item):
        yield span._replace(end=span.end + 1) if not isinstance(item, dict) and type(span.end) is int else span


def _unused_of_token_spans(row: Row, columns: Columns) -> Iterator[str]:
    name = str(_token_span_column(row))
    yield from unused_columns(row, (str(_token_column(row)), name), columns)
    yield from dict.fromkeys(key for item in row[name] for span in _token_spans(item) for key in span.unused)


# Columns of files


def find_tag_column(paths: Sequence[Path], columns: Columns) -> tuple[Columns, str | None]:
    """Returns the number of the tags' column if files without the suffix .conll have CoNLL columns, and a message.

    Raises ConfigError if tables have neither CoNLL columns nor a header with columns of a tagged text.
    """
    if columns.tag is not None:
        return columns, None
    others = [path for path in paths if suffix_of(path) in (*TABLES, ".txt") or file_form(path) is None]
    layouts = {
        path: conll_layout(path, encoding=columns.encoding)
        for path in paths
        if file_form(path) == ".conll" or path in others
    }
    wrong = [path for path in others if not _has_tagged_words(path, layouts[path], columns.encoding)]
    if table := next((path for path in wrong if is_table(path) and not _has_tagged_texts(path, columns)), None):
        raise ConfigError(
            f"{table} does not look like CoNLL columns (one word with its tag per line, and an empty line after each "
            "sentence), and has no header with the columns `sentence`, `word` and `tag`, or `text` and `spans`; if it "
            "is in CoNLL format, set data.tag_column to the number of the tags' column, or -1 for the last."
        )
    said = {path: found for path, layout in layouts.items() if path not in wrong and (found := layout.described())}
    distinct = {found: path for path, found in reversed(said.items())}
    note = "; ".join(f"{path}: {found}" for found, path in reversed(distinct.items())) or None
    if not others or wrong or any(file_form(path) not in (*TABLES, ".txt", ".conll", None) for path in paths):
        return columns, note
    tags = {layout.tag for layout in layouts.values()}
    if len(tags) > 1:
        named = "; ".join(f"{path} in column {layout.tag}" for path, layout in layouts.items())
        raise ConfigError(f"the files have their tags in different columns ({named}); set data.tag_column for all.")
    found = next(iter(said.values()), "word = column 0, tag = column -1, the last")
    note = f"{others[0]}: its lines look like words with tags, so it is read as CoNLL columns: {found}"
    return replace(columns, tag=tags.pop()), note


def _has_tagged_words(path: Path, layout: ConllLayout, encoding: str) -> bool:
    """Returns whether a file looks like CoNLL.

    It has empty lines, and a header, entity tags, or the first tag recurs with a different word.
    """
    first: tuple[str, str] | None = None
    has_ends, is_repeated, at_start, at_header = False, layout.header or layout.has_entities, True, layout.header
    for line in islice(read_lines(path, True, encoding), MAX_FIRST_LINES):
        columns = [] if line.problem else layout.columns(line.value)
        place = layout.place(columns)
        if columns and (at_header or columns[0] == DOCUMENT_START or layout.is_comment(line.value, columns, at_start)):
            at_header = False
            continue
        at_start = not columns
        if first is None and columns:
            if place is None or {value.casefold() for value in columns} & {"text", "tokens", "spans", *TAG_COLUMNS}:
                return False
            first = columns[layout.word], columns[place]
        elif first is not None and not columns:
            has_ends = has_ends or not line.problem
        elif first is not None and place is not None and columns[layout.word] != first[0]:
            is_repeated = is_repeated or columns[place] == first[1]
        if has_ends and is_repeated:
            return True
    return False


def _has_tagged_texts(path: Path, columns: Columns) -> bool:
    """Returns whether a table has a header with the columns of a tagged text or of words in sentences."""
    lines = table_lines(path, columns)
    header = next(lines, ())
    names: Row = dict.fromkeys(header, "")
    if word_columns(names):
        word, tag = (header.index(name) for name in word_columns(names) or ())
        has_gaps = (len(line) > max(word, tag) and not line[word] and not line[tag] for line in lines)
        return any(name.strip().casefold() in SENTENCE_NAMES for name in names) or any(has_gaps)
    texts = {name.casefold() for name in names} & {*TEXT_COLUMNS, *TOKEN_COLUMNS}
    return bool(texts and {name.casefold() for name in names} & {*SPAN_COLUMNS, *TAG_COLUMNS})


def _has_spans_in(column: str) -> Callable[[Row, Columns], bool]:
    return lambda row, columns: text_column_of(row) is not None and span_column(row) == column


_TEXT, _PERSON = "Ada lived in London.", {"start": 0, "end": 3, "label": "PER"}
_TOKENS = ["Ada", "lived", "in", "London"]

TAGGED: Forms[TaggedText | SpannedText] = Forms("tokens and tags, or text and spans", (
    Form(("tokenized_text", "ner"), _with_token_spans, {"tokenized_text": _TOKENS, "ner": [[0, 0, "PER"]]},
         recognizes=_has_token_spans, unused=_unused_of_token_spans),  # GLiNER
    Form(("data", "annotations"), label_studio_task,
         {"data": {"text": _TEXT}, "annotations": [{"result": [{"value": {**_PERSON, "labels": ["PER"]}}]}]},
         recognizes=is_label_studio, unused=unused_of_label_studio),  # Label Studio
    Form(("tokens", "tags"), _tagged, {"tokens": _TOKENS, "tags": ["B-PER", "O", "O", "B-LOC"]},
         ("ner_tags",), _has_tags, unused=_unused_of_tags),
    Form(("Sentence #", "Word", "Tag"), _word, {"Sentence #": "Sentence: 1", "Word": "Ada", "Tag": "B-PER"},
         recognizes=lambda row, columns: word_columns(row) is not None),  # tables with a word in each row
    Form(("text", "label"), spanned_text, {"text": _TEXT, "label": [[0, 3, "PER"]]},
         recognizes=_has_spans_in("label"), unused=unused_of_spans),  # doccano
    Form(("text", "entities"), spanned_text, {"text": _TEXT, "entities": [[0, 3, "PER"]]},
         recognizes=_has_spans_in("entities"), unused=unused_of_spans),  # spaCy
    Form(("text", "spans"), spanned_text, {"text": _TEXT, "spans": [_PERSON]},
         recognizes=any_row, unused=unused_of_spans),
), resolve=find_tag_column, regroup=tagged_rows,
   other_names=(*TEXT_COLUMNS, *SPAN_COLUMNS, *TOKEN_COLUMNS, *TAG_COLUMNS, *MARK_COLUMNS))  # fmt: skip
