"""Tiny models and rows for the tests of fine-tuning."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tools.tiny_model import make_folder

from tests.processes import write_rows

NAMES = "red blue green fast slow old new warm cold loud quiet light dark round flat sweet"
WORDS = tuple(NAMES.split())


@lru_cache(maxsize=32)
def model_folder(architecture: str, **changes: Any) -> Path:
    """Returns a folder with a tiny random model, built once per test session."""
    return make_folder(Path(mkdtemp(prefix=f"tiny-{architecture}-")), architecture, **changes)


def sentence(random_: random.Random, words: int) -> str:
    return " ".join(random_.choice(WORDS) for _ in range(words))


def chat_rows(path: Path, count: int = 24, seed: int = 0) -> Path:
    """Writes rows for task sft in several formats, e.g. chats of one to three exchanges, with different lengths."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        if number % 3 == 0:
            turns = [
                {"role": role, "content": sentence(draw, draw.randint(1, 12))}
                for _ in range(draw.randint(1, 3))
                for role in ("user", "assistant")
            ]
            rows.append({"messages": turns})
        elif number % 3 == 1:
            rows.append({"instruction": sentence(draw, 4), "input": "", "output": sentence(draw, draw.randint(1, 20))})
        else:
            rows.append({"prompt": sentence(draw, 3), "completion": sentence(draw, draw.randint(1, 9))})
    return write_rows(path, rows)


def squad(path: Path, paragraphs: int = 8, words: int = 60, impossible: bool = False, seed: int = 0) -> Path:
    """Writes questions in SQuAD's nested JSON. The answer is always "brown".

    `impossible` adds a question without an answer to each paragraph.
    """
    draw, articles = random.Random(seed), []
    for number in range(paragraphs):
        context = sentence(draw, words) + f". The fox{number} is brown. " + sentence(draw, draw.randint(1, words))
        start = context.index("brown")
        qas: list[dict[str, Any]] = [
            {
                "id": f"q{number}",
                "question": f"Which colour has the fox{number}?",
                "answers": [{"text": "brown", "answer_start": start}],
            }
        ]
        if impossible:
            qas.append({"id": f"n{number}", "question": "Who sang?", "answers": [], "is_impossible": True})
        articles.append({"title": str(number), "paragraphs": [{"context": context, "qas": qas}]})
    path.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return path


def labeled_rows(path: Path, kind: str = "single", count: int = 48, pairs: bool = False, seed: int = 0) -> Path:
    """Writes labeled texts, which are "warm" if they contain the word red and otherwise "cold".

    `kind` is a value of data.label_kind. "multiple" lists which of three words occur; "regression" counts red.
    """
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words = sentence(draw, draw.randint(1, 20)).split()
        chosen = [word for word in WORDS[:3] if draw.random() < 0.5]
        text = " ".join([*words, *chosen])
        label: object = "warm" if "red" in words or "red" in chosen else "cold"
        if kind == "multiple":
            label = [word for word in WORDS[:3] if word in text.split()]
        elif kind == "regression":
            label = text.split().count("red") + 0.5
        rows.append({"text": text, **({"text_pair": sentence(draw, 5)} if pairs else {}), "label": label})
    return write_rows(path, rows)


def conll(path: Path, sentences: int = 40, longest: int = 20, seed: int = 0) -> Path:
    """Writes CoNLL sentences. Capitalized words are names: persons have two words, places one."""
    draw, lines = random.Random(seed), []
    for _ in range(sentences):
        tags = [(word, "O") for word in sentence(draw, draw.randint(1, longest)).split()]
        person = [(draw.choice(("Ada", "Amy")), "B-person"), (draw.choice(("Zed", "Zoe")), "I-person")]
        place = [(draw.choice(("Rome", "Riga")), "B-place")]
        for words in (person, place)[draw.randint(0, 1) :]:
            tags = [*words, *tags] if draw.random() < 0.5 else [*tags, *words]
        lines.append("".join(f"{word} {tag}\n" for word, tag in tags))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def tagged_rows(count: int = 12, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the same sentences as rows with `tokens` and `tags`, and with `text` and `spans`."""
    draw, rows, spans = random.Random(seed), list[dict[str, Any]](), list[dict[str, Any]]()
    for _ in range(count):
        before, after = sentence(draw, draw.randint(1, 9)), sentence(draw, draw.randint(1, 9))
        counts = len(before.split()), len(after.split())
        tags = ["O"] * counts[0] + ["B-person", "I-person"] + ["O"] * counts[1]
        rows.append({"tokens": f"{before} Ada Zed {after}".split(), "tags": tags})
        span = {"start": len(before) + 1, "end": len(before) + 8, "label": "person"}
        spans.append({"text": f"{before} Ada Zed {after}", "spans": [span]})
    return rows, spans


def preference_rows(path: Path, count: int = 24, rated: bool = False, seed: int = 0) -> Path:
    """Writes preference pairs, or with `rated` single rated answers. Good answers end in blue, bad ones in red."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        turns = [{"role": "user", "content": sentence(draw, draw.randint(1, 12))}]
        if number % 2:
            answer = {"role": "assistant", "content": sentence(draw, 3)}
            turns += [answer, {"role": "user", "content": sentence(draw, draw.randint(1, 5))}]
        good, bad = (sentence(draw, draw.randint(1, 9)).replace("red", "old") + end for end in (" blue", " red red"))
        if rated:
            content = good if number % 3 else bad
            rows.append({"messages": [*turns, {"role": "assistant", "content": content}], "label": content == good})
        else:
            rows.append({"prompt": turns, "chosen": good, "rejected": bad})
    return write_rows(path, rows)


def prompt_rows(path: Path, count: int = 24, seed: int = 0) -> Path:
    """Writes prompts for task grpo, as text and as conversations, with answers of one word."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        prompt = sentence(draw, draw.randint(1, 12))
        turns = [{"role": "user", "content": prompt}]
        rows.append({"prompt": turns if number % 2 else prompt, "answer": draw.choice(WORDS), "number": number})
    return write_rows(path, rows)
