"""Generators of fuzz cases: each draws one case of bad input by changing valid input."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.config import Config
from sansgpu.config.section import all_keys
from tests.hostile.fuzz.bases import Bases, copy, tiny_config, yaml_text
from tests.hostile.fuzz.files import completions, ggufs, lessons, model_folders, rows, run_folders, tokenizers, writes
from tests.hostile.fuzz.harness import Case
from tests.hostile.fuzz.odd_folders import folders, templates, weights
from tests.hostile.fuzz.values import NOT_UTF8, NUMBERS, TEXTS, changed, damaged, dumped, odd
from tests.processes import settings

FAST = ["--set", "training.timeout_seconds=3", "--set", "training.kernels=torch"]
# All keys except the cache folder (a new cache makes a case slow) and the kernels (FAST sets them).
KEYS = [key for key, _ in all_keys(Config) if key not in ("data.cache_dir", "training.kernels")]
_MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i} {{k{i}: 1, <<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)
TEXT_FILES = [  # (name, content) of invalid configuration files
    ("a.yaml", "model: " + "[" * 500 + "]" * 500), ("a.yaml", "{" * 3000), ("a.yaml", "- " * 3000),
    ("a.yaml", "model: {d_model: !!int abc}"), ("a.yaml", "training: {until: !!timestamp x}"),
    ("a.yaml", "training: {until: 2025-02-30}"), ("a.yaml", "a: &a [*a]"), ("a.yaml", _MERGES),
    ("a.yaml", "model: !!python/object/apply:os.system [id]"), ("a.yaml", "model: {d_model: " + "9" * 5000 + "}"),
    ("a.yaml", "? [a]\n: 1"), ("a.yaml", "on: off"), ("a.yaml", "%YAML 9.9\n---\na: 1"), ("a.yaml", "--- 1\n--- 2"),
    ("a.yaml", "a: " + "1" + ":10" * 3000), ("a.yaml", "\t"), ("a.yaml", "'"), ("a.yaml", "a: 1\n b: 2"),
    ("a.toml", "a = " + "[" * 500), ("a.toml", ".".join("a" * 5000) + " = 1"), ("a.toml", "a = 9" + "9" * 5000),
    ("a.toml", "a = 2025-02-30"), ("a.toml", "[model]\n[model]"), ("a.toml", "a = 1\na = 2"), ("a.toml", "a = nan"),
    ("a.json", "[" * 50000), ("a.json", '{"a":' * 500 + "1" + "}" * 500), ("a.json", '{"model": 1, "model": 2}'),
    ("a.json", '{"data": {"dataset_name": "\\ud800"}}'), ("a.json", '{"training": {"learning_rate": 1e999}}'),
    ("a.json", ""), ("a.json", "null x"), ("a.ini", "a=1"), ("a.YAML", "a: 1"), ("a.yaml", "x" * 300_000),
]  # fmt: skip

Generator = Callable[[random.Random, Bases], Case]


def _toml(values: dict[str, Any]) -> str:
    """Formats sections as TOML, without top-level nulls, which TOML lacks."""
    top = [(k, v) for k, v in values.items() if not isinstance(v, dict)]
    sections = [(k, v) for k, v in values.items() if isinstance(v, dict)]
    lines = [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in top if v is not None]
    for name, section in sections:
        lines += [f"[{json.dumps(name)}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in section.items())]
    return "\n".join(lines)


def configuration(draw: random.Random, bases: Bases) -> Case:
    """Draws a configuration file with odd values, odd text or damage."""
    how = draw.random()
    if how < 0.2:
        name, text = draw.choice(TEXT_FILES)
        return Case(["train", name, "--dry-run"], writes(name, text), (2,))
    if how < 0.25:
        name = draw.choice(("a.yaml", "a.toml", "a.json"))
        make: Callable[[Path], object] = draw.choice(
            [
                lambda here: os.mkfifo(here / name),
                lambda here: (here / name).symlink_to("/dev/zero"),
                lambda here: (here / name).symlink_to(name),
                lambda here: (here / name).mkdir(),
            ]
        )
        return Case(["train", name, "--dry-run"], make, (2,))
    values: dict[str, Any] = tiny_config(bases.corpus)
    if draw.random() < 0.3:
        values["task"] = "graph"
        values["data"] = {"dataset_name": str(bases.graph), "vocab_size": 300, "validation_split": 0.2}
    if how < 0.4:
        text = damaged(yaml_text(values).encode(), draw)
        command = ["train", "a.yaml", "--dry-run", *_small_data(text.decode(errors="replace"), bases)]
        return Case(command, writes("a.yaml", text))
    if how < 0.5:
        values = changed(values, draw)
    else:
        for key in draw.sample(KEYS, draw.choice((1, 1, 2, 4))):
            section, _, name = key.rpartition(".")
            inner = values.setdefault(section, {}) if section else values
            if isinstance(inner, dict):
                inner[name] = odd(draw)
    name, text = draw.choice([("a.json", dumped(values)), ("a.yaml", dumped(values)), ("a.toml", "")])
    if name == "a.toml":
        text = _toml(values) if isinstance(values, dict) else "a = 1"
    command = ["plan", name] if draw.random() < 0.05 else ["train", name, "--dry-run"]
    return Case([*command, *_small_data(text, bases)], writes(name, text))


def _small_data(text: str, bases: Bases) -> list[str]:
    """Returns options that set a small corpus unless the file names a dataset; the default one takes too long."""
    return [] if "dataset_name" in text else ["--set", f"data.dataset_name={bases.corpus}"]


# Per command: fixed arguments, and options to fuzz with the kind of their values. Output stays in the case's folder.
_PATHS = ["~nosuchuser/x", NOT_UTF8, "", ".", "..", "x" * 300, "link", "a/b/c", "a\nb", "\x1b[31m", "file", "pipe"]
_COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "train": (["--dry-run"], {
        "--max-steps": "number", "--batch-size": "number", "--seq-len": "number", "--target-device": "text",
        "--prefetch": "number", "--seed": "number", "--until": "text", "--resume": "text", "--output-dir": "path",
        "--set": "setting", "--processes": "number", "-f": "path"}),
    "generate": (["RUN", "--max-new-tokens", "2"], {
        "--prompt": "text", "--max-new-tokens": "number", "--temperature": "number", "--top-k": "number",
        "--top-p": "number", "--seed": "number", "--snapshot": "text"}),
    "distill": (["FINAL", "--data", "DATA", "--output", "lessons", "--max-length", "16", "--top-k", "2"], {
        "--data": "path", "--output": "path", "--top-k": "number", "--max-length": "number", "--task": "text",
        "--text-column": "text"}),
    "eval": (["RUN"], {"--data": "path", "--snapshot": "text", "--window": "number", "--limit": "number"}),
    "report": (["RUN"], {"--output": "path", "--format": "text"}),
    "runs": ([], {"": "path"}),
    "snapshots list": (["RUN"], {"": "path"}),
    "snapshots show": (["RUN"], {"--snapshot": "text"}),
    "snapshots prune": (["COPY"], {"--keep-last": "number"}),
    "snapshots fork": (["RUN"], {"--output-dir": "path", "--snapshot": "text"}),
    "export": (["RUN"], {"--format": "text", "--output": "path", "--snapshot": "text"}),
    "tokenizer train": (["DATA", "--output", "t"], {
        "--vocab-size": "number", "--sample-mb": "number", "--output": "path"}),
    "tokenizer encode": (["FINAL"], {"--text": "text"}),
    "k8s": (["--nodes", "1", "--cpus", "2", "--memory", "4Gi", "--pvc", "p", "--image", "i:1"], {
        "--nodes": "number", "--cpus": "number", "--memory": "text", "--pvc": "text", "--create-pvc": "text",
        "--image": "text", "--namespace": "text", "--name": "text", "--node-selector": "text",
        "--processes-per-node": "number"}),
    "slurm": (["tiny", "--nodes", "1"], {
        "--nodes": "number", "--cpus": "number", "--memory": "text", "--time": "text", "--partition": "text",
        "--account": "text", "--name": "text", "--processes-per-node": "number", "--output-dir": "path"}),
    "init": (["a.yaml", "--text", "DATA", "--yes"], {
        "--text": "path", "--task": "text", "--model": "path", "--hours": "number", "--cores": "number",
        "--memory": "text"}),
    "chat": (["FINAL", "--prompt", "hi", "--max-new-tokens", "2"], {"--system": "text", "--temperature": "number"}),
    "predict": (["CLASSIFIER", "--text", "q"], {
        "--text": "text", "--text-pair": "text", "--question": "text", "--output": "path"}),
    "embed": (["ENCODER", "--data", "DATA", "--output", "v.npy"], {
        "--output": "path", "--data": "path", "--text-column": "text"}),
    "search": (["ENCODER", "docs", "words"], {"--top-k": "number", "": "path"}),
}  # fmt: skip


def flags(draw: random.Random, bases: Bases) -> Case:
    """Draws a command with odd values of one or two options."""
    command = draw.choice(list(_COMMANDS))
    fixed, options = _COMMANDS[command]
    places_of = {
        "RUN": str(bases.run), "FINAL": str(bases.final), "DATA": str(bases.corpus), "ENCODER": str(bases.encoder),
        "COPY": "copy", "CLASSIFIER": str(bases.trained["classify"]),
    }  # fmt: skip
    arguments = [*command.split(), *(places_of.get(part, part) for part in fixed)]
    if command == "train":
        arguments += [*settings(data__dataset_name=bases.corpus, training__max_steps=2), *FAST]
    if command == "report":
        arguments += ["--output", "page.html"]
    if command == "export":
        arguments += ["--output", "exported"]
    for option in draw.sample(list(options), min(len(options), draw.choice((1, 1, 2)))):
        kind = options[option]
        value = {
            "number": lambda: draw.choice(NUMBERS),
            "text": lambda: draw.choice([*TEXTS, *NUMBERS]),
            "path": lambda: draw.choice(_PATHS),
            "setting": lambda: f"{draw.choice(KEYS)}={draw.choice([*NUMBERS, *TEXTS])}",
        }[kind]()
        # `--option=value` is one argument, so that a value may begin with a dash.
        arguments += [value] if not option else [option, value] if option == "-f" else [f"{option}={value}"]

    def prepare(here: Path) -> None:
        (here / "file").write_text("text")
        (here / "docs").mkdir()
        (here / "docs/a.md").write_text("A text of some words to find, which is long enough to be a passage.")
        (here / "link").symlink_to("nowhere")
        os.mkfifo(here / "pipe")
        if "copy" in arguments:
            copy(bases.run, here / "copy")

    return Case(arguments, prepare)


_VARIABLES = {
    "SANSGPU_CACHE": ["", "/dev/null", "/dev/null/x", "x" * 300, "relative", "file", "\x1b[31m", "~nosuchuser/x"],
    "XDG_CACHE_HOME": ["/dev/null", "", "x" * 300],
    "HOME": ["", "/dev/null", "/nonexistent"],
    "TMPDIR": ["/nonexistent", "/dev/null", ""],
    "WORLD_SIZE": ["abc", "-1", "0", "2", "²", "9" * 30, "1.5", " 2", ""],
    "OMPI_COMM_WORLD_SIZE": ["abc", "2", "²", "9" * 30],
    "PMI_SIZE": ["abc", "2", "-3"],
    "SLURM_STEP_NUM_TASKS": ["abc", "2", "2(x3)"],
    "SLURM_NTASKS": ["abc", "9" * 30, "²"],
    "OMP_NUM_THREADS": ["abc", "0", "-1", "9" * 12, "100000", "²", "2,x", ""],
    "CUDA_VISIBLE_DEVICES": ["abc", "-1", "9" * 30],
    "SANSGPU_ALLOCATOR": ["", "abc", "SYSTEM", "\x1b[31m", "x" * 300],
    "SANSGPU_ISA": ["", "abc", "AVX2", "amx,avx2", "\x1b[31m", "x" * 300],
    "COLUMNS": ["abc", "0", "-5", "1", "9" * 12],
    "TERM": ["", "nonsense", "x" * 300],
    "PYTHONIOENCODING": ["ascii", "latin-1", "utf-16"],
    "LC_ALL": ["C", "nonsense", "tr_TR.UTF-8"],
    "HF_HOME": ["/dev/null", "/nonexistent/x"],
    "GOMP_SPINCOUNT": ["abc", "-1"],
    "CUBLAS_WORKSPACE_CONFIG": ["abc"],
    "NO_COLOR": ["", "1"],
}
_LAUNCHED = {
    "RANK": "abc -1 0 5 ²",
    "LOCAL_RANK": "abc -1 9",
    "MASTER_PORT": "abc 0 70000 -1 29555",
    "LOCAL_WORLD_SIZE": "abc 0 2",
}


def variables(draw: random.Random, bases: Bases) -> Case:
    """Draws an odd value of an environment variable that sansgpu or a library reads."""
    name = draw.choice(list(_VARIABLES))
    chosen = {name: draw.choice(_VARIABLES[name])}
    if draw.random() < 0.3:
        chosen = {"WORLD_SIZE": "2", "RANK": "0"}
        for key in draw.sample(list(_LAUNCHED), draw.choice((1, 2))):
            chosen[key] = draw.choice(_LAUNCHED[key].split())
    train = [
        "train",
        *settings(data__dataset_name=bases.corpus, training__max_steps=2, training__threads="auto"),
        *FAST,
        "--dry-run",
    ]
    commands = [train, train, ["runs", str(bases.run)], ["--version"], ["snapshots", "list", str(bases.run)]]
    codes = (0, 1, 2) if "WORLD_SIZE" in chosen else (0, 2)  # 1: the other rank never joins
    return Case(draw.choice(commands), writes("file", "x"), codes, chosen, apart=True)


_LETTERS = "Größe, naïve, Łódź, 東京, \u2028, 🙂, \ufeff, \x85"


def encodings(draw: random.Random, bases: Bases) -> Case:
    """Draws a command that prints text which the encoding of the terminal lacks."""
    chosen = draw.choice([{"PYTHONIOENCODING": name} for name in ("ascii", "latin-1", "cp1252", "cp437")])
    chosen = draw.choice([chosen, chosen, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
    train = ["train", *settings(data__dataset_name="letters.txt", training__max_steps=2, data__max_length=16), *FAST]
    command = draw.choice(
        [
            [*train, "--dry-run"],
            [*train, "--output-dir", _LETTERS],
            [*train, "--headless", "--output-dir", "run"],
            ["generate", str(bases.run), "--prompt", _LETTERS, "--max-new-tokens", "4"],
            ["generate", str(bases.final), "--prompt", _LETTERS, "--max-new-tokens", "4", "--json"],
            ["chat", str(bases.decoder), "--prompt", _LETTERS, "--max-new-tokens", "4"],
            ["search", str(bases.encoder), "letters.txt", _LETTERS],
            ["tokenizer", "encode", str(bases.final), "--text", _LETTERS],
            ["eval", str(bases.run), "--data", "letters.txt"],
            ["report", str(bases.run), "--output", "page.html"],
            ["runs", str(bases.run.parent)],
            ["doctor"],
            ["train", _LETTERS],
        ]
    )
    letters = writes("letters.txt", f"{_LETTERS} words to read.\n" * 200)
    return Case(command, letters, (0, 2), chosen, apart="LC_ALL" in chosen)


# The generator of each kind and its number of cases in a thousand.
KINDS: dict[str, tuple[Generator, int]] = {
    "configuration": (configuration, 150),
    "flags": (flags, 110),
    "rows": (rows, 130),
    "tokenizers": (tokenizers, 80),
    "model folders": (model_folders, 80),
    "GGUF files": (ggufs, 80),
    "run folders": (run_folders, 140),
    "variables": (variables, 40),
    "lessons": (lessons, 40),
    "completions": (completions, 40),
    "folders": (folders, 25),
    "weights": (weights, 35),
    "templates": (templates, 20),
    "encodings": (encodings, 30),
}


def cases(bases: Bases, seed: int, scale: float = 1.0) -> list[tuple[str, Case]]:
    """Returns named cases of all kinds, which depend only on the seed; a `scale` of 1 gives a thousand."""
    found = []
    for kind, (generate, many) in KINDS.items():
        for number in range(max(1, round(many * scale))):
            draw = random.Random(f"{seed} {kind} {number}")
            found.append((f"{kind} {number}", generate(draw, bases)))
    return found
