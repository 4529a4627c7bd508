"""Damaged tables and files of rows: each row that is not damaged is read, and each damaged one is read or named."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.sources import open_sources

SEED = int(os.environ.get("SANSGPU_FUZZ_SEED", "0"))
NUMBER = 500  # files for each form
COUNT = 24  # rows of a file


def texts() -> list[tuple[str, str]]:
    kinds = ("plain words {}", 'with "quotes" {}', "with, commas; and | bars {}", "über {} naïve", "two\nlines {}")
    return [(kinds[number % len(kinds)].format(number), ("pos", "neg")[number % 2]) for number in range(COUNT)]


def table(separator: str, encoding: str) -> list[bytes]:
    def field(text: str) -> str:
        special = any(char in text for char in f'"\n{separator}')
        return '"' + text.replace('"', '""') + '"' if special else text

    lines = ["text" + separator + "label", *(separator.join(map(field, row)) for row in texts())]
    return [f"{line}\n".encode(encoding) for line in lines]


def json_lines() -> list[bytes]:
    return [json.dumps({"text": text, "label": label}).encode() + b"\n" for text, label in texts()]


FORMS: dict[str, tuple[str, list[bytes]]] = {
    "commas": ("a.csv", table(",", "utf-8")),
    "semicolons": ("a.csv", table(";", "cp1252")),
    "bars": ("a.csv", table("|", "utf-8")),
    "tabs": ("a.tsv", table("\t", "utf-8")),
    "utf-16": ("a.csv", table(",", "utf-16-le")),
    "jsonl": ("a.ndjson", json_lines()),
}
MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    lambda draw, line: line[: draw.randrange(len(line))] + b"\n",
    lambda draw, line: inserted(draw, line, b'"'),
    lambda draw, line: inserted(draw, line, b","),
    lambda draw, line: inserted(draw, line, b";"),
    lambda draw, line: inserted(draw, line, b"\t"),
    lambda draw, line: inserted(draw, line, b"\r\n"),
    lambda draw, line: inserted(draw, line, b"\xff"),
    lambda draw, line: inserted(draw, line, b"\0"),
    lambda draw, line: inserted(draw, line, draw.randbytes(draw.randint(1, 6))),
    lambda draw, line: b'"' + line,
    lambda draw, line: line.rstrip(b"\r\n") + b'"\n',
    lambda draw, line: b"",
    lambda draw, line: b",,\n" + line,
    lambda draw, line: line + line,
]


def inserted(draw: random.Random, line: bytes, more: bytes) -> bytes:
    place = draw.randrange(len(line))
    return line[:place] + more + line[place:]


def outcome(path: Path) -> tuple[list[tuple[str, str]], list[str], str]:
    """Returns the rows that are read, the messages about bad rows, and the message that refuses the file."""
    good, bad = [], []
    try:
        for row in open_sources(DataConfig(dataset_name=str(path))).train.rows():
            if row.problem:
                bad.append(row.problem)
            elif isinstance(row.value, dict):
                good.append((row.value.get("text"), row.value.get("label")))
    except ConfigError as error:
        return good, bad, str(error)
    return good, bad, ""


def complaint(path: Path, lines: list[bytes], number: int, damaged: bytes) -> str:
    """Returns why the outcome of a file whose row `number` is damaged is wrong, or an empty string."""
    content = [*lines]
    content[number] = damaged
    path.write_bytes(b"".join(content))
    good, bad, refused = outcome(path)
    messages = [*bad, refused] if refused else bad
    if vague := [message for message in messages if str(path) not in message or not message.endswith(".")]:
        return f"{vague[0]!r} names no file or no remedy"
    if refused:
        return ""
    header = len(lines) - COUNT
    lost = [row for place, row in enumerate(texts(), header) if place != number and row not in good]
    # A damaged first line makes the first row the header, or another separator the likely one.
    return f"lost {lost[0]!r} although only {damaged!r} is damaged; bad: {bad}" if lost and number >= header else ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [pytest.param(NUMBER, marks=pytest.mark.long), NUMBER // 10])
def test_a_damaged_row_costs_no_other_one(tmp_path: Path, form: str, number: int) -> None:
    name, lines = FORMS[form]
    draw = random.Random(f"{SEED} {form}")
    found = []
    for case in range(number):
        place = draw.randrange(len(lines))
        damaged = draw.choice(MUTATIONS)(draw, lines[place].replace(b"\0", b""))
        if form == "utf-16":
            damaged = damaged.decode("cp1252", "replace").encode("utf-16-le")
        if why := complaint(tmp_path / f"{case}-{name}", lines, place, damaged):
            found.append(f"case {case}: {why}")
    assert not found, f"{len(found)} of {number}: " + "\n".join(found[:5])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [pytest.param(NUMBER, marks=pytest.mark.long), NUMBER // 10])
def test_rubbish_is_read_or_refused_with_a_remedy(tmp_path: Path, form: str, number: int) -> None:
    name, lines = FORMS[form]
    draw = random.Random(f"{SEED} {form} rubbish")
    for case in range(number):
        content = bytearray(b"".join(lines))
        for _ in range(draw.randint(1, 30)):
            start = draw.randrange(len(content))
            content[start : start + draw.randint(0, 9)] = draw.randbytes(draw.randint(0, 9))
        path = tmp_path / f"{case}-{name}"
        path.write_bytes(content)
        _, bad, refused = outcome(path)
        for message in [*bad, *([refused] if refused else [])]:
            assert message.startswith(str(path)), case
            assert message.endswith("."), case
