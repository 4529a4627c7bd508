"""Valid inputs of every kind, which the fuzz cases damage."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import transformers
import yaml
from tools.tiny_model import make_folder

from sansgpu.cli import run as cli
from tests.processes import TINY, settings, write_corpus, write_rows
from tests.tasks.folders import chat_rows, conll, labeled_rows, preference_rows, prompt_rows, squad, tagged_rows
from tests.tasks.graph.graphs import rows as graph_rows
from tests.tasks.texts import text_rows

FAMILIES = ("gpt2", "gemma3_text", "phi3", "qwen2_moe", "mamba", "lfm2")


@dataclass(frozen=True)
class Bases:
    """Paths of valid files and folders. The cases damage copies of them."""

    corpus: Path
    run: Path  # the folder of a pretraining run with snapshots, final/ and a report
    gguf: Path
    decoder: Path  # Hugging Face folder
    families: dict[str, Path]  # Hugging Face folders of decoders whose layers or caches differ from a Llama's
    encoder: Path  # Hugging Face folder
    questions: Path
    graph: Path
    tags: Path  # CoNLL columns
    rows: dict[str, list[Path]]  # JSONL files of each task
    trained: dict[str, Path]  # for each task, a Hugging Face folder with its head
    texts: Path
    lessons: Path  # folder with a teacher's predictions for the texts
    prompts: Path

    @property
    def final(self) -> Path:
        return self.run / "final"

    @property
    def tokenizer(self) -> Path:
        return self.final / "tokenizer.json"


def make_bases(home: Path) -> Bases:
    """Writes all valid inputs below `home`; training and exporting the tiny run takes about ten seconds."""
    home.mkdir(parents=True, exist_ok=True)
    corpus, run = write_corpus(home / "corpus.jsonl"), home / "run"
    chosen = {"data__dataset_name": corpus, "training__max_steps": 6, "training__sample_tokens": 4}
    chosen["training__kernels"] = "torch"
    if not run.exists():
        assert cli(["train", *settings(**chosen), "--output-dir", str(run)]) == 0
        assert cli(["export", str(run), "--format", "gguf", "--output", str(home / "model.gguf")]) == 0
    lessons = home / "lessons"
    texts = write_rows(home / "texts.jsonl", ({"text": f"red and blue {n} " * 9} for n in range(40)))
    prompts = write_rows(home / "prompts.jsonl", [{"prompt": "red"}, {"text": "blue", "id": 1}])
    if not lessons.exists():
        chosen = ["--data", str(texts), "--max-length", "16", "--top-k", "4"]
        assert cli(["distill", str(run / "final"), *chosen, "--output", str(lessons)]) == 0
    graph = write_rows(home / "graph.jsonl", graph_rows())
    tokens, spans = tagged_rows()
    rows = {
        "pretrain": [corpus],
        "graph": [graph],
        "sft": [chat_rows(home / "chats.jsonl")],
        "preference": [preference_rows(home / f"answers-{rated}.jsonl", rated=rated) for rated in (False, True)],
        "grpo": [prompt_rows(home / "prompts.jsonl")],
        "classify": [
            labeled_rows(home / f"{kind}.jsonl", kind, pairs=kind == "single")
            for kind in ("single", "multiple", "regression")
        ],
        "tokens": [write_rows(home / "tokens.jsonl", tokens), write_rows(home / "spans.jsonl", spans)],
        "embed": [text_rows(home / f"{form}.jsonl", form, 24) for form in ("pairs", "triplets", "scores", "labels")],
    }
    encoder = make_folder(home / "encoder", "bert")
    heads = {"classify": "ForSequenceClassification", "tokens": "ForTokenClassification"}
    return Bases(
        corpus=corpus,
        run=run,
        gguf=home / "model.gguf",
        decoder=make_folder(home / "decoder", "llama"),
        families={name: make_folder(home / name, name, vocabulary=300) for name in FAMILIES},
        encoder=encoder,
        questions=squad(home / "questions.json"),
        graph=graph,
        tags=conll(home / "tags.conll"),
        rows=rows,
        texts=texts,
        lessons=lessons,
        prompts=prompts,
        trained={"embed": encoder, **{task: _with_head(encoder, home / task, head) for task, head in heads.items()}},
    )


def _with_head(encoder: Path, folder: Path, head: str) -> Path:
    """Copies a model folder and adds a randomly initialized head for two labels."""
    shutil.copytree(encoder, folder)
    getattr(transformers, f"AutoModel{head}").from_pretrained(encoder).save_pretrained(folder)
    return folder


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
    """Draws a file whose name has one of these endings from a folder and its subfolders."""
    return draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(endings)))
