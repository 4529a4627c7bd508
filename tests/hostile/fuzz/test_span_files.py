"""Damaged files of spans, tags and questions: each row that is not damaged is read, each damaged one read or named."""

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sansgpu.config import ConfigError
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.questions import read_questions
from sansgpu.data.forms.tags import TAGGED
from sansgpu.data.row_report import RowReport
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import open_single
from sansgpu.tasks.tokens.tagged import in_iob2, read_tagged
from tests.hostile.fuzz.test_table_files import MUTATIONS
from tests.hostile.fuzz.values import changed

SEED = int(os.environ.get("SANSGPU_FUZZ_SEED", "0"))
NUMBER = 500  # of files for each form
COUNT = 12  # texts of a file
TAGS = {
    "iob2": "B-PER I-PER O O B-LOC", "iob1": "I-PER I-PER O O I-LOC", "iobes": "B-PER E-PER O O S-LOC",
    "bilou": "B-PER L-PER O O U-LOC",
}  # fmt: skip


class Form(NamedTuple):
    """A form of files: its suffix, and the rows of a file, or the lines of each sentence."""

    suffix: str
    rows: list[Any]
    questions: bool = False


def words(number: int) -> list[str]:
    return ["Ada", f"Bell{number}", "visited", "old", "Łódź"]


def text(number: int) -> str:
    return " ".join(words(number))


def spans(number: int) -> list[tuple[int, int, str]]:
    end, whole = len(f"Ada Bell{number}"), len(text(number))
    return [(0, end, "PER"), (whole - 4, whole, "LOC")]


def objects(number: int) -> list[dict[str, Any]]:
    return [{"start": start, "end": end, "label": label} for start, end, label in spans(number)]


def studio(number: int) -> dict[str, Any]:
    results = [{"type": "labels", "value": {**one, "labels": [one["label"]]}} for one in objects(number)]
    return {"id": number, "data": {"text": text(number)}, "annotations": [{"result": results}]}


def columns(tags: str, number: int) -> list[str]:
    return [f"{word} NN {tag}" for word, tag in zip(words(number), tags.split(), strict=True)]


def conllu(number: int) -> list[str]:
    pairs = zip(words(number), TAGS["iob2"].split(), strict=True)
    return [f"{n}\t{word}\t{word}\tX\t_\t_\t0\t_\t_\tNE={tag}" for n, (word, tag) in enumerate(pairs, 1)]


def question(number: int) -> dict[str, Any]:
    answer = {"text": f"Bell{number}", "answer_start": 4}
    return {"id": f"q{number}", "question": f"Who went {number}?", "answers": [answer]}


def article(number: int, version: int) -> dict[str, Any]:
    more = {"is_impossible": False} if version == 2 else {}
    return {"title": "t", "paragraphs": [{"context": text(number), "qas": [{**question(number), **more}]}]}


def flat(number: int) -> dict[str, Any]:
    answers = {"text": [f"Bell{number}"], "answer_start": [4]}
    return {**question(number), "context": text(number), "answers": answers}


EVERY = range(COUNT)
GLINER = [[0, 1, "PER"], [4, 4, "LOC"]]
FORMS = {
    "doccano": Form(".jsonl", [{"id": n, "text": text(n), "label": spans(n)} for n in EVERY]),
    "spacy": Form(".json", [[text(n), {"entities": spans(n)}] for n in EVERY]),
    "objects": Form(".jsonl", [{"text": text(n), "spans": objects(n)} for n in EVERY]),
    "label studio": Form(".json", [studio(n) for n in EVERY]),
    "gliner": Form(".json", [{"tokenized_text": words(n), "ner": GLINER} for n in EVERY]),
    "tokens": Form(".jsonl", [{"tokens": words(n), "ner_tags": TAGS["iob2"].split()} for n in EVERY]),
    **{name: Form(".conll", [columns(tags, n) for n in EVERY]) for name, tags in TAGS.items()},
    "conllu": Form(".conllu", [conllu(n) for n in EVERY]),
    "squad 1": Form(".json", [article(n, 1) for n in EVERY], questions=True),
    "squad 2": Form(".json", [article(n, 2) for n in EVERY], questions=True),
    "flat squad": Form(".jsonl", [flat(n) for n in EVERY], questions=True),
}


def encoded(form: Form, rows: list[Any]) -> list[bytes]:
    """Returns the lines of a file. Those of a sentence are followed by an empty one."""
    if form.suffix.startswith(".conll"):
        return [f"{line}\n".encode() for sentence in rows for line in (*sentence, "")]
    if form.suffix == ".jsonl":
        return [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    whole = json.dumps({"version": "2", "data": rows} if form.questions else rows, ensure_ascii=False, indent=1)
    return [f"{line}\n".encode() for line in whole.split("\n")]


def outcome(path: Path, questions: bool) -> tuple[Counter[str], list[str]]:
    """Returns what is learned of a file, and the messages about its bad rows and about the file."""
    report = RowReport("skip")
    try:
        data, _ = resolve_columns(TaggedDataConfig(dataset_name=str(path)), TAGGED)
        source = open_single(str(path), data)
        if questions:
            found = [f"{one.context} {one.answers[:1]}" for one in read_questions(source.rows(), report)]
        else:
            texts = in_iob2(read_tagged(source.rows(), report, data, "rows", []), "rows", [])
            found = [f"{one.text} {one.tags[0]} {one.tags[-1]}" for one in texts]
    except ConfigError as error:
        return Counter(), [str(error)]
    return Counter(found), [*report.problems.values(), *report.left_out]


def complaint(path: Path, form: Form, content: bytes, place: int | None) -> str:
    """Returns why the outcome of a file with damage is wrong, or an empty string.

    Every row but number `place` must be learned; if that is None, any row may be refused.
    """
    path.write_bytes(content)
    found, messages = outcome(path, form.questions)
    wrong = [message for message in messages if message.startswith(str(path)) is not message.endswith(".")]
    if wrong:
        return f"{wrong[0]!r} names no file or no remedy"
    if place is None or any(message.startswith((f"{path} ", f"{path}:")) for message in messages):
        return ""
    numbers = [n for n in EVERY if n != place]
    lost = [n for n in numbers if not any(f"Bell{n} " in one or f"Bell{n}'" in one for one in found)]
    return f"lost row {lost[0]}; messages: {messages}" if lost else ""


def damaged_files(name: str, number: int) -> Iterator[tuple[bytes, int | None]]:
    """Yields files with an odd value in one row, or with a damaged line, and the number of the row with odd values."""
    form, draw = FORMS[name], random.Random(f"{SEED} {name}")
    for case in range(number):
        place = draw.randrange(COUNT)
        if case % 2 and not form.suffix.startswith(".conll"):
            odd = changed(form.rows[place], draw)
            try:
                yield b"".join(encoded(form, [*form.rows[:place], odd, *form.rows[place + 1 :]])), place
            except (TypeError, ValueError):  # a value that no JSON file has, such as an unpaired surrogate
                continue
        else:
            lines = encoded(form, form.rows)
            line = draw.randrange(len(lines))
            lines[line] = draw.choice(MUTATIONS)(draw, lines[line])
            is_row = form.suffix == ".jsonl"
            yield b"".join(lines), line if is_row else None


@pytest.mark.parametrize("name", FORMS)
def test_whole_files_are_learned(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"a{FORMS[name].suffix}"
    path.write_bytes(b"".join(encoded(FORMS[name], FORMS[name].rows)))
    found, messages = outcome(path, FORMS[name].questions)
    assert (found.total(), messages) == (COUNT, [])
    assert all(f"Bell{n}" in one for n, one in enumerate(found))
    assert FORMS[name].questions or all(one.endswith(" B-PER B-LOC") for one in found)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("number", [pytest.param(NUMBER, marks=pytest.mark.long), NUMBER // 20])
def test_damage_of_a_row_costs_no_other_one(tmp_path: Path, name: str, number: int) -> None:
    form, found = FORMS[name], []
    for case, (content, place) in enumerate(damaged_files(name, number)):
        if why := complaint(tmp_path / f"{case}{form.suffix}", form, content, place):
            found.append(f"case {case}: {why}")
    assert not found, f"{len(found)} of {number}: " + "\n".join(found[:5])
