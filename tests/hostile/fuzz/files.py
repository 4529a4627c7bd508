"""Generates fuzz cases with bad data files, tokenizers, models and run folders."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from sansgpu.tasks.configuration import load_config
from tests.hostile.fuzz.bases import Bases, copy, member
from tests.hostile.fuzz.harness import Case
from tests.hostile.fuzz.values import NUMBERS, changed, damaged, dumped, odd, places
from tests.processes import as_options, settings


def writes(name: str, content: bytes | str) -> Callable[[Path], object]:
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda here: (here / name).write_bytes(data)


def rows(draw: random.Random, bases: Bases) -> Case:
    """Draws a data file for any task, in any format, with odd values or damaged bytes."""
    task = draw.choice(
        (
            "pretrain",
            "pretrain",
            "graph",
            "sft",
            "preference",
            "grpo",
            "qa",
            "classify",
            "classify",
            "tokens",
            "tokens",
            "embed",
        )
    )
    if task == "qa":
        name, content = "data.json", dumped(changed(json.loads(bases.questions.read_text()), draw)).encode()
    elif task == "tokens" and draw.random() < 0.4:
        name, content = "data.conll", damaged(bases.tags.read_bytes(), draw)
    else:
        found = [json.loads(line) for line in draw.choice(bases.rows[task]).read_text().splitlines()]
        for _ in range(draw.choice((1, 3, 10))):
            number = draw.randrange(len(found))
            found[number] = changed(found[number], draw) if draw.random() < 0.9 else odd(draw)
        name, content = _form(draw, found, task)
    if draw.random() < 0.3:
        content = damaged(content, draw)
    if draw.random() < 0.15:
        name, content = name + ".gz", gzip.compress(content)
        content = damaged(content, draw) if draw.random() < 0.5 else content
    return Case(_command(draw, bases, task, name), writes(name, content))


def _command(draw: random.Random, bases: Bases, task: str, name: str) -> list[str]:
    """Returns a command that trains on the data file or predicts its rows."""
    model = bases.trained.get(task)
    if model and draw.random() < 0.3:
        verb = "embed" if task == "embed" else "predict"
        return [verb, str(model), "--data", name, "--output", "out.npy" if verb == "embed" else "out.jsonl"]
    if task in ("pretrain", "graph"):
        chosen = settings(data__dataset_name=name, training__max_steps=2)
        graph = ("task=graph", "model.activation=gelu", "data.validation_split=0.2") if task == "graph" else ()
        return ["train", *chosen, *as_options(graph), "--dry-run"]
    folder = bases.decoder if task in ("sft", "preference", "grpo") else bases.encoder
    chosen = [f"task={task}", f"model.name_or_path={folder}", f"data.dataset_name={name}", "training.batch_size=1"]
    chosen += ["training.max_steps=2", "data.max_length=48"]
    own = {
        "sft": "data.chat_template=simple",
        "preference": "training.preference.loss=kto",
        "grpo": "training.grpo.max_completion_length=8",
        "qa": "data.doc_stride=16",
        "tokens": "data.doc_stride=16",
    }
    chosen += [own[task]] if task in own else []
    return ["train", *as_options(chosen), "--dry-run"]


def _form(draw: random.Random, found: list[Any], task: str) -> tuple[str, bytes]:
    """Returns the name and content of a file with these rows."""
    form = draw.choice(
        ("jsonl", "jsonl", "json", "csv", "tsv", "parquet", "txt") if task == "pretrain" else ("jsonl", "jsonl", "json")
    )
    lines = "".join(dumped(row) + "\n" for row in found)
    if form == "json":
        return "data.json", dumped(found).encode()
    if form == "csv":
        cells = [row.get("text") if isinstance(row, dict) else row for row in found]
        csv = "text\n" + "".join(f"{json.dumps(cell)}\n" for cell in cells)
        return "data.csv", csv.encode()
    if form == "tsv":
        cells = [row.get("text") if isinstance(row, dict) else row for row in found]
        tsv = "text\tnumber\n" + "".join(f"{cell}\t{number}\n" for number, cell in enumerate(cells))
        return draw.choice(("data.tsv", "data.csv")), damaged(tsv.encode("utf-8", "surrogatepass"), draw)
    if form == "parquet":
        table = pyarrow.table({draw.choice(("text", "other")): [str(len(lines)), "words " * 50] * 40})
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table, buffer)
        return "data.parquet", damaged(buffer.getvalue(), draw)
    if form == "txt":
        return draw.choice(("data.txt", "data.md", "data.py")), damaged(lines.encode(), draw)
    return "data.jsonl", lines.encode()


def tokenizers(draw: random.Random, bases: Bases) -> Case:
    """Draws a tokenizer.json with an odd value or damaged bytes."""
    source = draw.choice((bases.tokenizer, bases.decoder / "tokenizer.json", bases.encoder / "tokenizer.json"))
    content = source.read_bytes()
    if draw.random() < 0.7:
        content = dumped(_changed_shallow(json.loads(content), draw)).encode()
    else:
        content = damaged(content, draw)
    return Case(
        ["tokenizer", "encode", "tokenizer.json", "--text", "the model 12 ½"], writes("tokenizer.json", content)
    )


def _changed_shallow(value: Any, draw: random.Random) -> Any:
    """Replaces a random value outside vocabularies and merges, which make up most of a tokenizer."""
    short = [place for place in places(value) if "vocab" not in place[:-1] and "merges" not in place[:-1]]
    *path, last = draw.choice(short)
    inner = value
    for key in path:
        inner = inner[key]
    inner[last] = odd(draw)
    return value


def model_folders(draw: random.Random, bases: Bases) -> Case:
    """Draws a Hugging Face folder of some family in which one file is changed or damaged."""
    source = draw.choice((bases.final, bases.decoder, *bases.families.values()))
    seed = draw.randrange(2**32)
    command = draw.choice(
        [
            ["generate", "model", "--prompt", "the", "--max-new-tokens", "2"],
            ["eval", "model", "--data", str(bases.corpus)],
            ["export", "model", "--format", "gguf", "--output", "model.gguf"],
        ]
    )

    def prepare(here: Path) -> None:
        again = random.Random(seed)
        folder = copy(source, here / "model")
        file = member(again, folder, (".json", ".safetensors"))
        if file.suffix == ".json" and again.random() < 0.7:
            file.write_text(dumped(_changed_shallow(json.loads(file.read_text()), again)))
        elif again.random() < 0.1:
            file.unlink()
            os.mkfifo(file)
        else:
            head = again.random() < 0.7 and file.suffix == ".safetensors"
            content = file.read_bytes()
            size = 8 + int.from_bytes(content[:8], "little") if head else len(content)
            file.write_bytes(damaged(content[:size], again) + content[size:])

    return Case(command, prepare, (0, 1, 2))


def lessons(draw: random.Random, bases: Bases) -> Case:
    """Draws `distill` output with one changed or damaged file, and a command that resumes it or trains on it."""
    seed = draw.randrange(2**32)
    complete = ["distill", str(bases.final), "--data", str(bases.texts), "--max-length", "16", "--top-k", "4"]
    small = {"d_model": 32, "n_heads": 2, "n_layers": 1, "d_ff": 64, "max_seq_len": 32}
    chosen = ["training.distillation.teacher=lessons", "training.max_steps=2", "training.kernels=torch"]
    chosen += [f"model.{key}={value}" for key, value in small.items()]
    train = ["train", *as_options(chosen), "--dry-run"]
    command = draw.choice([[*complete, "--output", "lessons"], train])

    def prepare(here: Path) -> None:
        again = random.Random(seed)
        folder = copy(bases.lessons, here / "lessons")
        file = folder / "MANIFEST.json"
        if again.random() < 0.7:
            content = dumped(changed(json.loads(file.read_text()), again)).encode()
        else:
            file = member(again, folder, (".json", ".npy", ".bin"))
            content = damaged(file.read_bytes(), again)
        file.write_bytes(content)
        if file.suffix == ".npy" and again.random() < 0.7:  # the manifest often gets the hash of the damaged file
            manifest = folder / "MANIFEST.json"
            values = json.loads(manifest.read_text())
            values["files"][file.name] = hashlib.sha256(content).hexdigest()
            manifest.write_text(json.dumps(values))

    return Case(command, prepare)


def completions(draw: random.Random, bases: Bases) -> Case:
    """Draws a `generate --data` command with odd prompts, odd flags or the odd state of an interrupted command."""
    model = draw.choice((bases.final, bases.decoder))
    command = ["generate", str(model), "--data", "prompts.jsonl", "--output", "out.jsonl", "--max-new-tokens", "2"]
    flags = {"--batch-size": NUMBERS, "--max-new-tokens": NUMBERS[:6], "--temperature": NUMBERS, "--top-p": NUMBERS}
    for name in draw.sample(list(flags), draw.choice((0, 0, 1, 2))):
        command.append(f"{name}={draw.choice(flags[name])}")
    found = [json.loads(line) for line in bases.prompts.read_text().splitlines()]
    if draw.random() < 0.7:
        number = draw.randrange(len(found))
        found[number] = changed(found[number], draw)
    lines = "".join(dumped(row) + "\n" for row in found).encode("utf-8", "surrogatepass")
    content = damaged(lines, draw) if draw.random() < 0.2 else lines
    state = draw.choice((None, None, dumped(odd(draw)), dumped({"fingerprint": odd(draw)}), "{"))

    def prepare(here: Path) -> None:
        (here / "prompts.jsonl").write_bytes(content)
        if state is not None:
            (here / "out.jsonl.request").write_bytes(state.encode("utf-8", "surrogatepass"))
            (here / "out.jsonl.partial").write_text('{"prompt": "red", "compl')

    return Case(command, prepare)


_GGUF_COMMAND = ["generate", "m.gguf", "--prompt", "the", "--max-new-tokens", "2"]
_GGUF_INTEGER = re.compile(rb"\w+\.[\w.]+\x04\0\0\0")  # a key and its type, uint32; its value comes next


def ggufs(draw: random.Random, bases: Bases) -> Case:
    """Draws a GGUF file with a damaged header, an odd 64-bit number in the header, or an odd value of a key."""
    content = bytearray(bases.gguf.read_bytes())
    if draw.random() < 0.4:
        settings_at = [match.end() for match in _GGUF_INTEGER.finditer(content)]
        at = draw.choice(settings_at)
        content[at : at + 4] = draw.choice((0, 1, 7, 3, 2**16, 2**31, 2**32 - 1)).to_bytes(4, "little")
        return Case(_GGUF_COMMAND, writes("m.gguf", bytes(content)), (0, 1, 2))
    head = 1 << draw.choice((5, 8, 11))
    if draw.random() < 0.4:
        at = draw.randrange(0, head)
        content[at : at + 8] = draw.choice((2**64 - 1, 2**63, 2**40, 2**31, 0)).to_bytes(8, "little")
        data = bytes(content)
    else:
        data = damaged(bytes(content[:head]), draw) + bytes(content[head:])
    return Case(_GGUF_COMMAND, writes("m.gguf", data), (0, 1, 2))


_READERS = (
    ["report", "run"], ["runs", "."], ["runs", ".", "--json"], ["snapshots", "list", "run"],
    ["snapshots", "list", "run", "--json"],
    ["snapshots", "show", "run"], ["snapshots", "verify", "run"], ["generate", "run", "--max-new-tokens", "2"],
    ["train", "--resume", "latest", "--output-dir", "run", "--dry-run"],
    ["snapshots", "fork", "run", "--output-dir", "forked"],
)  # fmt: skip
RECORDS = ("metrics.jsonl", "environment.json", "config.yaml", "state.json", "MANIFEST.json")


def run_folders(draw: random.Random, bases: Bases) -> Case:
    """Draws a run folder in which one file has odd values, is damaged or is a pipe."""
    command, seed = draw.choice(_READERS), draw.randrange(2**32)

    def prepare(here: Path) -> None:
        again = random.Random(seed)
        folder = copy(bases.run, here / "run")
        file = member(again, folder, (again.choice(RECORDS),))
        if again.random() < 0.15:
            file.write_bytes(damaged(file.read_bytes(), again))
        elif again.random() < 0.05:
            file.unlink()
            os.mkfifo(file)
        elif file.suffix == ".jsonl":
            lines = file.read_text().splitlines()
            number = again.randrange(len(lines))
            lines[number] = dumped(changed(json.loads(lines[number]), again))
            file.write_text("".join(line + "\n" for line in lines))
        elif file.suffix == ".yaml":
            config, _ = load_config(file)
            file.write_text(dumped(changed(config.model_dump(mode="json", exclude_defaults=True), again)))
        else:
            file.write_text(dumped(changed(json.loads(file.read_text()), again)))
        if (
            file.name == "state.json" and file.is_file() and again.random() < 0.7
        ):  # with a matching hash, so that the odd values are read
            manifest = file.with_name("MANIFEST.json")
            values = json.loads(manifest.read_text())
            values["files"]["state.json"] = hashlib.sha256(file.read_bytes()).hexdigest()
            manifest.write_text(json.dumps(values))

    codes = (0, 1, 2) if "verify" in command or "fork" in command else (0, 2)  # a pipe cannot be copied
    return Case(command, prepare, codes)
