"""Joins rows of one word each to sentences, and takes apart values that hold several texts, before they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

from sansgpu.config import ConfigError
from sansgpu.data.conll import MAX_TOKENS, OUTSIDE, TAG_NAMES, WORD_NAMES
from sansgpu.data.forms.spans import TEXT_COLUMNS
from sansgpu.data.rows import Row, SourceRow

# The column of a table of words that says to which sentence a word belongs, in lower case.
SENTENCE_NAMES = ("sentence #", "sentence", "sentence_id", "sentence_idx", "sentence id", "sent_id", "sent", "sent_idx")
_WORD, _TAG = ("word", "token", "form"), ("tag", "ner", "ner_tag", "label", "entity", "bio", "iob", "iob2")


def tagged_rows(rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
    """Yields rows of a text each.

    Joins the rows of tables with a word and a tag in each (as on Kaggle), and takes apart lists of `[text, {"entities":
    ...}]` (spaCy 2), objects with such a list as `annotations`, and spaCy's documents of `paragraphs`.
    """
    words: list[SourceRow] = []
    for row in rows:
        columns = word_columns(row.value) if row.problem is None and isinstance(row.value, dict) else None
        if columns is None:
            yield from _sentence(words)
            words = []
            yield from _parts(row)
        else:
            if words and _starts_sentence(row.value, words[-1].value):
                yield from _sentence(words)
                words = []
            words.append(row)
            if len(words) > MAX_TOKENS:
                raise ConfigError(
                    f"{words[0].where}: the sentence has more than {MAX_TOKENS:,} words; add a column `sentence` with "
                    "the sentence's number."
                )
    yield from _sentence(words)


def word_columns(row: Row) -> tuple[Any, Any] | None:
    """Returns the columns of the word and of its tag if a row is a word of a sentence, or None."""
    names = {str(name).strip().casefold(): name for name in row}
    several = WORD_NAMES if any(name in names for name in SENTENCE_NAMES) else ()
    word = next((names[one] for one in (*_WORD, *several) if one in names), None)
    tag = next((names[one] for one in (*_TAG, *(several and TAG_NAMES)) if one in names), None)
    if word is None or tag is None or any(isinstance(value, (list, dict)) for value in row.values()):
        return None
    return word, tag


def _sentence_of(row: Row) -> Any:
    """Returns the value of the column that identifies the sentence, or None if it is empty or missing."""
    found = next((value for name, value in row.items() if str(name).strip().casefold() in SENTENCE_NAMES), None)
    return None if found in ("", None) or found != found else found


def _starts_sentence(row: Row, before: Row) -> bool:
    """Returns whether a word is not in the sentence of the word before. The cells after the first may be empty."""
    sentence = _sentence_of(row)
    return (sentence is not None and sentence != _sentence_of(before)) or _is_gap(row) or _is_gap(before)


def _is_gap(row: Row) -> bool:
    """Returns whether a row has neither a word nor a tag, and so separates sentences."""
    return all(row[name] in ("", None) for name in word_columns(row) or ())


def _sentence(words: list[SourceRow]) -> Iterator[SourceRow]:
    """Yields the row of a sentence, if it has words. Other columns are lists of their values that are not empty."""
    given = [row for row in words if not _is_gap(row.value)]
    word, tag = next((word_columns(row.value) for row in given), None) or (None, None)
    if word is None:
        return
    columns: dict[Any, list[Any]] = {"tokens": [], "tags": []}
    for row in given:
        for name, value in row.value.items():
            if name in (word, tag):
                columns["tokens" if name == word else "tags"].append("" if value is None else str(value))
            elif name and str(name).strip().casefold() not in SENTENCE_NAMES and value not in ("", None):
                columns.setdefault(name, []).append(value)
    yield SourceRow(given[0].where, columns)


def _parts(row: SourceRow) -> Iterator[SourceRow]:
    value = row.value if row.problem is None else None
    if _is_pair(value):
        text, given = value
        yield row._replace(value={**(given if isinstance(given, dict) else {"entities": given}), "text": text})
    elif isinstance(value, dict) and (name := _list_of_rows(value)):
        others = {key: other for key, other in value.items() if key not in (name, "classes")}
        for number, inner in enumerate(value[name], 1):
            if inner is not None:  # an annotator's mark of a text that it did not save
                for part in _parts(SourceRow(f"{row.where}, {name} {number}", inner)):
                    yield part._replace(value={**others, **part.value}) if isinstance(part.value, dict) else part
    elif isinstance(value, dict) and isinstance(wrapped := value.get("rasa_nlu_data"), dict):
        yield from _parts(row._replace(value=wrapped))
    elif isinstance(value, dict) and isinstance(paragraphs := value.get("paragraphs"), list) and paragraphs:
        for number, paragraph in enumerate(paragraphs, 1):
            yield from _paragraph(SourceRow(f"{row.where}, paragraph {number}", paragraph))
    else:
        yield row


def _list_of_rows(value: Row) -> str | None:
    """Returns the key of a list of texts with spans in an object without a text: of spaCy's, Rasa's, LUIS's rows."""
    if any(isinstance(value.get(name), str) for name in TEXT_COLUMNS):
        return None
    for name in ("annotations", "common_examples", "utterances", "examples"):
        rows = value.get(name)
        if isinstance(rows, list) and any(_is_pair(row) or _is_text(row) for row in rows):
            return name
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(name), str) for name in TEXT_COLUMNS)


def _is_pair(value: Any) -> TypeGuard[Sequence[Any]]:
    """Returns whether a value is `[text, {"entities": ...}]` or `[text, [[start, end, label]]]`."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and isinstance(value[0], str)
        and (isinstance(value[1], list) or (isinstance(value[1], dict) and "entities" in value[1]))
    )


def _paragraph(row: SourceRow) -> Iterator[SourceRow]:
    """Yields the sentences of a paragraph in spaCy 2's JSON; a dash stands for a missing tag."""
    sentences = row.value.get("sentences") if isinstance(row.value, dict) else None
    if not isinstance(sentences, list) or not sentences:
        yield row
        return
    others = {name: value for name, value in row.value.items() if name not in ("raw", "sentences")}
    for number, sentence in enumerate(sentences, 1):
        where = f"{row.where}, sentence {number}"
        tokens = sentence.get("tokens") if isinstance(sentence, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
            yield SourceRow(where, sentence)
        else:
            tags = [OUTSIDE if token.get("ner") in ("-", None) else token["ner"] for token in tokens]
            keys = dict.fromkeys(key for token in tokens for key in token if key not in ("id", "orth", "ner"))
            more = {f"{key} in a token": [token.get(key) for token in tokens] for key in keys}
            columns = {"tokens": [token.get("orth") for token in tokens], "tags": tags}
            yield SourceRow(where, {**others, **more, **columns})
