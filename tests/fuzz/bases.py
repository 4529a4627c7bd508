"""Valid inputs of every kind, which the cases damage."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml
from benchmarks.tiny_model import make_folder

from sansgpu.cli import run as cli
from tests.processes import TINY, settings, write_corpus
from tests.tasks.folders import chat_rows, squad
from tests.tasks.graphs import rows as graph_rows


@dataclass(frozen=True)
class Bases:
    """Valid files and folders."""

    corpus: Path
    run: Path  # of task pretrain, with snapshots, final/ and a report
    gguf: Path
    decoder: Path  # Hugging Face folders
    encoder: Path
    chats: Path
    questions: Path
    graph: Path

    @property
    def final(self) -> Path:
        return self.run / "final"

    @property
    def tokenizer(self) -> Path:
        return self.final / "tokenizer.json"


def make_bases(home: Path) -> Bases:
    """Trains and exports the tiny run, which takes about ten seconds."""
    home.mkdir(parents=True, exist_ok=True)
    corpus, run = write_corpus(home / "corpus.jsonl"), home / "run"
    chosen = {"data__dataset_name": corpus, "training__max_steps": 6, "training__sample_tokens": 4}
    chosen["training__kernels"] = "torch"
    if not run.exists():
        assert cli(["train", *settings(**chosen), "--output-dir", str(run)]) == 0
        assert cli(["export", str(run), "--format", "gguf", "--output", str(home / "model.gguf")]) == 0
    graph = home / "graph.jsonl"
    graph.write_text("".join(json.dumps(row) + "\n" for row in graph_rows()))
    return Bases(
        corpus=corpus,
        run=run,
        gguf=home / "model.gguf",
        decoder=make_folder(home / "decoder", "llama"),
        encoder=make_folder(home / "encoder", "bert"),
        chats=chat_rows(home / "chats.jsonl"),
        questions=squad(home / "questions.json"),
        graph=graph,
    )


def nested(values: dict[str, object]) -> dict[str, object]:
    """Converts `{"model.d_model": 32}` to nested sections."""
    found: dict[str, object] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[name] = value
    return found


def tiny_config(data: Path) -> dict[str, object]:
    """Returns the tiny run's configuration with the dataset `data`."""
    return nested({**TINY, "data.dataset_name": str(data), "training.max_steps": 2, "training.kernels": "torch"})


def yaml_text(values: object) -> str:
    return yaml.safe_dump(values)


def copy(source: Path, target: Path) -> Path:
    """Copies a file or folder."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
    return target


def member(draw: random.Random, folder: Path, endings: tuple[str, ...]) -> Path:
    """Draws a file below a folder with one of these suffixes."""
    return draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(endings)))
