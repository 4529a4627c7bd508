"""Tries the commands of sansgpu on a tiny random model of a family, and compares their results with transformers'.

Each trial either works, or is refused with one sentence. Everything else is a `TrialError`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from benchmarks.ours import overrides

from sansgpu.models.family import Family
from tools.foreign_gguf import write_foreign_gguf
from tools.outcome import json_lines
from tools.tiny_model import make_folder

STEPS, LENGTH, WINDOW, NEW_TOKENS = 2, 96, 64, 12
TASKS = ("pretrain", "sft", "preference", "grpo", "qa", "classify", "tokens", "embed")
TRIALS = (*TASKS, "batched", "GGUF export", "GGUF import", "ONNX")
ADAPTED = ("sft", "preference", "grpo", "embed")  # trained with LoRA; the other tasks train all weights
LOSS_TOLERANCE, SCORE_TOLERANCE = 1e-4, 1e-3
GRPO = {"reward": f"{__name__}:letters", "group_size": 2, "max_completion_length": NEW_TOKENS}
PROMPTS = ("the red fox", "def add(a, b):\n    return", "import os\nfor name in")
TRAINING: dict[str, object] = {
    "training.batch_size": 4, "training.gradient_accumulation_steps": 1, "training.warmup_steps": 0,
    "training.precision": "fp32", "training.threads": 1, "training.report_to": "none", "device": "cpu",
}  # fmt: skip
Refusals = dict[str, str]  # trial -> error message

Fused = Literal["yes", "partly", "no"]


class TrialError(Exception):
    """A command ended with a traceback or several sentences, or its result differs from that of transformers."""


@dataclass(frozen=True)
class Support:
    """The features that work with a family, and the error messages of those that do not."""

    tasks: tuple[str, ...]
    packed: bool  # several examples share a row
    fused: Fused  # yes: our kernels compute whole blocks; partly: attention and linear layers
    batched: bool  # several prompts are completed together
    gguf_export: bool
    gguf_import: bool
    onnx: bool
    refusals: Refusals


@dataclass(frozen=True)
class Outcome:
    """The output of a command, and its error message if it was refused."""

    out: str
    err: str
    refusal: str | None


def sansgpu(*arguments: object) -> Outcome:
    """Runs a command in this process. Raises TrialError unless it works or is refused with one sentence."""
    from sansgpu.cli import run

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([*map(str, arguments)])
    said, shown = err.getvalue(), " ".join(map(str, arguments))
    sentences = [line.removeprefix("sansgpu: ") for line in said.splitlines() if line.startswith("sansgpu: ")]
    is_refused = code == 2 and len(sentences) == 1 and sentences[0].endswith(".") and "Traceback" not in said
    if code != 0 and not is_refused:
        raise TrialError(f"sansgpu {shown} ended with exit code {code}: {said[-2000:]}")
    return Outcome(out.getvalue(), said, sentences[0] if code else None)


def try_family(family: Family, home: Path) -> Support:
    """Tries all features with a family, in the folder `home`. Raises TrialError if a command misbehaves."""
    home.mkdir(parents=True, exist_ok=True)
    trials = _Trials(family, home)
    runs = {task: home / task for task in TASKS if trials.works(task, trials.train(task))}
    main = runs.get("sft") or runs["embed"]
    packed, fused = _decisions(main)
    if "sft" in runs:
        _require_equal_loss(main / "final", home)
    if "classify" in runs:
        _require_equal_scores(runs["classify"], home)
    batched = trials.generates_together(main)
    exported = trials.exports_gguf(main)
    return Support(
        tasks=tuple(runs),
        packed=packed,
        fused=fused,
        batched=batched,
        gguf_export=exported,
        gguf_import=trials.imports_gguf(main if exported else None),
        onnx=trials.works("ONNX", sansgpu("export", runs["embed"], "--format", "onnx")),
        refusals=trials.refusals,
    )


class _Trials:
    """Runs the trials of a family and collects the error messages of refused ones."""

    def __init__(self, family: Family, home: Path) -> None:
        self.family, self.home, self.refusals = family, home, Refusals()
        self.model = make_folder(home / "model", family.model_type, initializer_range=0.1, **family.tiny_exported)
        for task in TASKS:
            write_rows(home / f"{task}.jsonl", rows_of(task))
        write_rows(home / "prompts.jsonl", ({"text": prompt} for prompt in PROMPTS))
        (home / "notes.txt").write_text("A run reads its rows, learns and is saved. " * 20, encoding="utf-8")

    def works(self, trial: str, outcome: Outcome) -> bool:
        if outcome.refusal is not None:
            self.refusals[trial] = self._template(outcome.refusal)
        return outcome.refusal is None

    def _template(self, refusal: str) -> str:
        """Replaces paths and the names of this family by placeholders, so that families can share an error message."""
        refusal = re.sub(rf"{re.escape(str(self.home))}/(?:{'|'.join(TASKS)})\b(?!\.)", "RUN", refusal)
        refusal = refusal.replace(str(self.model), "MODEL").replace(str(self.home / "foreign.gguf"), "FILE.gguf")
        known = "|".join(map(re.escape, (self.family.model_type, self.family.llama_cpp_name)))
        refusal = re.sub(r"\b[A-Z]\w+ForQuestionAnswering", "NAMEForQuestionAnswering", refusal)
        return re.sub(rf'(architecture (?:is )?"?)(?:{known})\b', r"\1NAME", refusal)

    def train(self, task: str) -> Outcome:
        settings: dict[str, object] = {
            **TRAINING, "task": task, "data.dataset_name": self.home / f"{task}.jsonl", "training.max_steps": STEPS,
        }  # fmt: skip
        if task == "pretrain":
            sizes = {"d_model": 32, "n_heads": 2, "n_layers": 2, "d_ff": 48, "max_seq_len": 32}
            settings |= {"model.architecture": self.family.model_type, "data.vocab_size": 300}
            settings |= {f"model.{key}": size for key, size in sizes.items()}
        else:
            settings |= {"model.name_or_path": self.model, "data.max_length": LENGTH}
        if task in ADAPTED:
            settings["model.adapter"] = "lora"
        if task == "grpo":
            settings |= {f"training.grpo.{key}": value for key, value in GRPO.items()}
        if task in ("sft", "preference") and self.family.is_encoder:
            settings["data.chat_template"] = "simple"
        if task in ("qa", "tokens"):
            settings["data.doc_stride"] = 16
        return sansgpu("train", *overrides(settings), "--output-dir", self.home / task)

    def generates_together(self, run: Path) -> bool:
        """Completes prompts in a batch and one at a time, and requires equal texts. Returns True if it batched them."""
        texts, common = [], ("--data", self.home / "prompts.jsonl", "--temperature", 0, "--max-new-tokens", NEW_TOKENS)
        for name, more in {"together": (), "alone": ("--batch-size", 1)}.items():
            file = self.home / f"{name}.jsonl"
            outcome = sansgpu("generate", run, *common, "--output", file, *more)
            if not self.works("batched", outcome):
                return False
            texts.append([row["completion"] for row in json_lines(file)])
        if texts[0] != texts[1]:
            raise TrialError(f"{run}: prompts completed in a batch give different texts than one at a time: {texts}")
        return "completed one at a time" not in outcome.err

    def exports_gguf(self, run: Path) -> bool:
        options = ("--format", "gguf", "--type", "f32", "--output", self.home / "exported.gguf")
        return self.works("GGUF export", sansgpu("export", run, *options))

    def imports_gguf(self, run: Path | None) -> bool:
        """Evaluates the GGUF file exported from `run`, or without a run a file like those of llama.cpp's converter."""
        file, original = (
            (self.home / "exported.gguf", run / "final") if run else (self.home / "foreign.gguf", self.model)
        )
        if run is None:
            write_foreign_gguf(file, self.model, self.family.llama_cpp_name)
        loss = _loss_of(file, self.home)
        if isinstance(loss, Outcome):
            return self.works("GGUF import", loss)
        _require_equal(f"the loss of {file}", loss, _transformers_loss(original, self.home), LOSS_TOLERANCE)
        return True


def _decisions(run: Path) -> tuple[bool, Fused]:
    """Returns whether sansgpu packs examples for a run's model, and how much of the model its kernels compute."""
    from sansgpu.models.modules import blocks_of
    from sansgpu.train.loading import ModelRequest, open_model

    objective: Any = open_model(ModelRequest(str(run)), "evaluate", lambda message: None).objective
    packs = bool(objective.unpadded.packs)
    if any("no kernels for its attention" in note for note in objective.notes):
        return packs, "no"
    return packs, "partly" if getattr(blocks_of(objective.model)[0], "fused_as", None) is None else "yes"


def _loss_of(model: Path, home: Path) -> float | Outcome:
    """Returns the loss of a model on a text, or the command's outcome if it is refused."""
    outcome = sansgpu("eval", model, "--data", home / "notes.txt", "--window", WINDOW, "--json")
    return outcome if outcome.refusal else float(json.loads(outcome.out)["loss"])


@torch.no_grad()
def _transformers_loss(folder: Path, home: Path) -> float:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)((home / "notes.txt").read_text()).input_ids
    total = 0.0
    for first in range(0, len(ids) - 1, WINDOW):
        piece = torch.tensor([ids[first : first + WINDOW + 1]])
        logits = model(piece[:, :-1]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum"))
    return total / (len(ids) - 1)


def _require_equal_loss(final: Path, home: Path) -> None:
    loss = _loss_of(final, home)
    if isinstance(loss, Outcome):
        raise TrialError(f"{final} cannot be evaluated: {loss.refusal}")
    _require_equal(f"the loss of {final}", loss, _transformers_loss(final, home), LOSS_TOLERANCE)


@torch.no_grad()
def _require_equal_scores(run: Path, home: Path) -> None:
    """Compares the probabilities of labels, which `predict` computes of all rows together, with transformers'."""
    import transformers

    outcome = sansgpu("predict", run, "--data", home / "classify.jsonl", "--output", home / "labels.jsonl")
    if outcome.refusal:
        raise TrialError(f"{run} cannot predict: {outcome.refusal}")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    for row, predicted in zip(rows_of("classify"), json_lines(home / "labels.jsonl"), strict=True):
        inputs = tokenizer(row["text"], truncation=True, max_length=LENGTH, return_tensors="pt")
        scores = model(**inputs).logits[0].softmax(-1)
        for number, label in model.config.id2label.items():
            found, expected = predicted["scores"][label], float(scores[number])
            _require_equal(f"the score of {label} in {run}", found, expected, SCORE_TOLERANCE)


def _require_equal(what: str, found: float, expected: float, tolerance: float) -> None:
    if not abs(found - expected) <= tolerance * max(1.0, abs(expected)):
        raise TrialError(f"{what} is {found}, but transformers computes {expected}")


def letters(completions: list[str]) -> list[float]:
    """Rewards completions for letters, of which a random model writes different numbers."""
    return [float(sum(map(str.isalpha, completion))) for completion in completions]


def write_rows(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(task: str, count: int = 24) -> Iterator[dict[str, Any]]:
    """Yields rows of different lengths for a task."""
    for number in range(count):
        color, size = ("red", "blue")[number % 2], "very " * (number % 7)
        text = f"The {size}{color} fox number {number} runs home"
        match task:
            case "pretrain":
                yield {"text": f"{text}. " * 9}
            case "sft":
                yield {"prompt": f"Which color has fox {number}?", "completion": text}
            case "preference":
                yield {"prompt": f"Which color has fox {number}?", "chosen": text, "rejected": f"{size}no {number}"}
            case "grpo":
                yield {"prompt": f"Which color has fox {number}?"}
            case "qa":
                answers = {"text": [color], "answer_start": [text.index(color)]}
                yield {"id": str(number), "question": "Which color?", "context": text, "answers": answers}
            case "classify":
                yield {"text": text, "label": color}
            case "tokens":
                words = text.split()
                yield {"tokens": words, "tags": ["B-color" if word == color else "O" for word in words]}
            case "embed":
                yield {"anchor": text, "positive": f"Fox {number} is {size}{color}"}
