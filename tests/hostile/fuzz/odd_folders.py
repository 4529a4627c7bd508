"""Generates fuzz cases with deep folders, names that are not UTF-8, odd weights and odd chat templates."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.hostile.fuzz.bases import Bases, copy
from tests.hostile.fuzz.harness import Case
from tests.hostile.fuzz.values import NOT_UTF8
from tests.processes import as_options, settings


def make_deep(folder: Path, levels: int) -> Path:
    """Creates folders nested `levels` deep, with a text file in the innermost."""
    folder.mkdir(exist_ok=True)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    file = os.open("a.txt", os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.write(file, b"red and blue\n" * 200)
    os.close(file)
    os.close(here)
    return folder


def delete_deep(folder: Path) -> None:
    """Deletes a folder of any depth; otherwise pytest's own cleanup would later fail with a RecursionError."""
    subprocess.run(["rm", "-rf", folder], check=True)


def with_hashes(snapshot: Path) -> None:
    """Writes the current hashes of a snapshot's files to its manifest."""
    file = snapshot / "MANIFEST.json"
    values = json.loads(file.read_text())
    files = {name: hashlib.sha256((snapshot / name).read_bytes()).hexdigest() for name in values["files"]}
    file.write_text(json.dumps({**values, "files": files}))


def folders(draw: random.Random, bases: Bases) -> Case:
    """Draws a deep folder, sometimes with a file name that is not UTF-8, as data or inside a run."""
    levels = draw.choice((30, 1500, 1500, 3000))
    places: dict[str, Callable[[Path], object]] = {
        "data": lambda here: make_deep(here / "data", levels),
        "run": lambda here: make_deep(copy(bases.run, here / "run") / draw_place, levels),
    }
    draw_place = draw.choice((".", "snapshots", "snapshots/step-000006", "snapshots/step-000003", "final", "tokenizer"))
    place = draw.choice(list(places))
    train = ["train", *settings(data__dataset_name="data", training__max_steps=2)]
    commands = {
        "data": (
            [*train, "--dry-run"], [*train, "--output-dir", "data/out"], ["runs", "data"],
            ["tokenizer", "train", "data", "--output", "t"], ["init", "a.yaml", "--text", "data", "--yes"],
            ["search", str(bases.trained["embed"]), "data", "red"], ["eval", str(bases.run), "--data", "data"],
        ),
        "run": (
            ["runs", "."], ["report", "run"], ["snapshots", "verify", "run"], ["snapshots", "list", "run"],
            ["snapshots", "prune", "run", "--keep-last", "1"], ["snapshots", "fork", "run", "--output-dir", "forked"],
            ["export", "run"], ["train", "--resume", "latest", "--output-dir", "run", "--max-steps", "8"],
        ),
    }  # fmt: skip
    named = draw.random() < 0.4

    def prepare(here: Path) -> None:
        places[place](here)
        if named:
            (here / place / f"{NOT_UTF8}.txt").write_text("green words\n" * 200)

    return Case(draw.choice(commands[place]), prepare, (0, 1, 2))


def weights(draw: random.Random, bases: Bases) -> Case:
    """Draws a run with an odd tensor in its weights or optimizer state, and with matching hashes."""
    seed = draw.randrange(2**32)
    commands = (
        ["generate", "run", "--prompt", "the", "--max-new-tokens", "3"],
        ["generate", "run/final", "--max-new-tokens", "3", "--temperature", "0"],
        ["eval", "run"], ["export", "run"], ["export", "run", "--format", "gguf", "--type", "q8_0"],
        ["train", "--resume", "latest", "--output-dir", "run", "--max-steps", "8"],
        ["train", "--resume", "latest", "--output-dir", "run", "--max-steps", "8"],
    )  # fmt: skip

    def prepare(here: Path) -> None:
        again = random.Random(seed)
        run = copy(bases.run, here / "run")
        moments = again.random() < 0.4
        for file in run.rglob("optimizer.safetensors" if moments else "model.safetensors"):
            tensors = load_file(file)
            name = again.choice(sorted(tensors))
            tensors[name] = _odd_tensor(tensors[name], random.Random(seed))
            if again.random() < 0.1:
                tensors["other." + name] = tensors.pop(name)
            save_file(tensors, file, {"format": "pt"})
        for manifest in run.rglob("MANIFEST.json"):
            with_hashes(manifest.parent)

    return Case(draw.choice(commands), prepare, (0, 1, 2))


def _odd_tensor(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Returns a copy with a different shape or dtype, or with infinite, NaN or huge values."""
    if (how := draw.random()) < 0.3:
        other = draw.choice((tensor[:1], tensor.flatten(), tensor[..., None], torch.zeros(0), torch.tensor(1.0)))
        return other.contiguous().clone()
    if how < 0.5:
        return tensor.to(draw.choice((torch.float8_e4m3fn, torch.int8, torch.float64, torch.bfloat16, torch.bool)))
    changed = tensor.clone()
    changed.view(-1)[: draw.choice((1, changed.numel()))] = draw.choice((torch.nan, torch.inf, -torch.inf, 3e38))
    return changed


def templates(draw: random.Random, bases: Bases) -> Case:
    """Draws a model with an odd chat template."""
    odd = (
        "", " \n", "hello", "{% for m in messages %}{% endfor %}", "{{ messages }}", "{{ x.y.z }}", "{% if %}", "{{",
        "\ud800", "{{ raise_exception('no') }}", "{{ 'a' * 100000000 }}", "{{ messages[99].content }}",
        "{% for i in range(100000000) %}a{% endfor %}", "{% include 'x' %}", "{{ ''.__class__.__mro__ }}",
        "{# " + "x" * 100_000 + " #}",
    )  # fmt: skip
    text, own = draw.choice(odd), draw.random() < 0.5
    rows = ["task=sft", "model.name_or_path=model", f"data.dataset_name={bases.rows['sft'][0]}", "data.max_length=48"]
    rows += ["training.max_steps=2", "training.batch_size=1", *([] if own else ["data.chat_template=t.jinja"])]
    train = ["train", *as_options(rows), "--dry-run"]
    chat = ["chat", "model", "--prompt", "hi", "--max-new-tokens", "2"]

    def prepare(here: Path) -> None:
        folder = copy(bases.decoder, here / "model")
        place = folder / "chat_template.jinja" if own else here / "t.jinja"
        place.write_bytes(text.encode("utf-8", "surrogatepass"))

    return Case(draw.choice((train, chat)), prepare, (0, 1, 2))
