"""Renders README.md of a trained model as a Hugging Face model card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from sansgpu.config import ARITHMETIC, PYTHON_STDLIB, PYTHON_STDLIB_CHAT, PYTHON_STDLIB_GRAPH, CardText
from sansgpu.config.paths import local_path
from sansgpu.config.tasks import LOSS
from sansgpu.config.wording import counted, duration
from sansgpu.data.formats.names import SUFFIXES
from sansgpu.events.escape import as_code, as_text
from sansgpu.events.event import Event
from sansgpu.views.page import templates
from sansgpu.views.record import RunRecord
from sansgpu.views.results import energy_words, evaluation_words, parameter_words, ran_on, reported_metrics, summarize
from sansgpu.views.tables import storage

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE = re.compile(rf"({'|'.join(map(re.escape, SUFFIXES))})(\.gz)?$")
_SENTENCE_CODE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("MODEL")
vectors = model.encode(["A text.", "Another text."])
```"""
_FEW_SHOT_CODE = """```python
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig

vectors = SentenceTransformer("MODEL").encode(["A text.", "Another text."], normalize_embeddings=True)
head, names = load_file("MODEL/head.safetensors"), AutoConfig.from_pretrained("MODEL").id2label
logits = vectors @ head["weight"].T + head["bias"]
labels = [names[number] for number in logits.argmax(1)]
```"""
_OWN = {PYTHON_STDLIB: "The source of Python's standard library",
        PYTHON_STDLIB_CHAT: "Questions and answers made from the docstrings of Python's standard library",
        ARITHMETIC: "Sums of two numbers",
        PYTHON_STDLIB_GRAPH: "The source of Python's standard library and the triples in it"}  # fmt: skip


@dataclass(frozen=True)
class _Model:
    """The model that a card describes."""

    record: RunRecord
    step: int | None  # step of the snapshot; None: the last
    adapter: bool  # True for an adapter that was not merged
    gguf: str | None  # the name of a GGUF file

    @cached_property
    def text(self) -> CardText:
        """The model text that the task declares. A class outside the package may declare only its name."""
        settings = self.record.settings
        if settings.card is None:
            return CardText(f"a model trained with the task {as_code(settings.task)}")
        return settings.card(self.record.section("model"))

    @property
    def base(self) -> str | None:
        return self.record.section("model").get("name_or_path") if self.record.settings.fine_tunes else None

    @property
    def data(self) -> str:
        return str(self.record.section("data").get("dataset_name"))

    @property
    def evaluation(self) -> Event | None:
        found = [e for e in self.record.evaluations if self.step is None or e["step"] == self.step]
        return found[-1] if found else None

    @property
    def batches(self) -> int | None:
        """The number of evaluated batches; None: all."""
        return self.record.section("training").get("eval_batches")

    @property
    def steps(self) -> int:
        return self.record.step if self.step is None else self.step

    @property
    def tokens(self) -> int | None:
        """The training tokens according to the last step event."""
        return next((e.get("tokens") for e in reversed(self.record.steps) if e["step"] <= self.steps), None)


def model_card(record: RunRecord, step: int | None = None, adapter: bool = False, gguf: str | None = None) -> str:
    """Returns the card of a run's final model, or of the snapshot at `step`, or of its separate `adapter`.

    `gguf` is the name of the model's file if it was exported for llama.cpp instead of as a Hugging Face folder. Data
    and models are named by their Hub names, or by a file or folder name without its path.
    """
    model = _Model(record, step, adapter, gguf)
    part = record.section("data").get("dataset_config")
    shown = _OWN.get(model.data, as_code(_shown(model.data)) + (f" ({as_text(part)})" if part else ""))
    evaluation = model.evaluation
    return (
        templates()
        .get_template("model_card.md")
        .render(
            front=_front_matter(model).to_yaml(),
            model=model,
            name=as_text(record.name),
            device="GPU" if _on_gpu(record) else "CPU",
            base=as_code(_shown(model.base)) if model.base else None,
            facts=_facts(model),
            code=_loading_code(model),
            command="" if gguf and adapter else model.text.command.replace("MODEL", gguf or "MODEL"),
            data=shown,
            train_tokens=record.start.get("train_tokens"),
            procedure=_procedure(model),
            machine=_machine(record),
            evaluation=evaluation_words(record, evaluation) if evaluation else [],
            versions=_versions(record),
        )
    )


def _front_matter(model: _Model) -> ModelCardData:
    base = model.base if model.base and _is_on_hub(model.base) else None
    task, results = str(model.record.config.get("task")), _results(model)
    return ModelCardData(
        library_name=_library(model),
        pipeline_tag=model.text.pipeline_tag or None,
        base_model=base,
        base_model_relation=("adapter" if model.adapter else "finetune") if base else None,
        tags=[
            "sansgpu",
            *([] if _on_gpu(model.record) else ["cpu"]),
            task,
            *(["lora"] if model.adapter else []),
            *(["gguf"] if model.gguf else []),
        ],
        datasets=[model.data] if _is_on_hub(model.data) else None,
        model_name=model.record.name if results else None,
        eval_results=results or None,
    )


def _library(model: _Model) -> str:
    if model.gguf:
        return "gguf"
    if model.adapter:
        return "peft"
    return model.text.library or ("transformers" if model.text.auto_class else "sansgpu")


def _on_gpu(record: RunRecord) -> bool:
    return record.environment.get("device") == "cuda"


def _is_on_hub(name: str) -> bool:
    """Returns True for a Hub name, which is neither a built-in dataset nor a file or folder."""
    is_name = name not in _OWN and _HUB_NAME.fullmatch(name) and not _FILE.search(name)
    return bool(is_name) and not local_path(name).exists()


def _shown(name: str) -> str:
    return name if _is_on_hub(name) else Path(name).name or "a local folder"


def _results(model: _Model) -> list[EvalResult]:
    """Returns the results in the Hub's format, or an empty list if the Hub does not know the task."""
    evaluation, own = model.evaluation, model.record.config["data"].get("validation_name")
    if evaluation is None or not model.text.pipeline_tag:
        return []
    has_loss = model.record.settings.main_metric == LOSS and evaluation["loss"] is not None
    loss = [(LOSS, evaluation["loss"])] if has_loss else []
    return [
        EvalResult(
            task_type=model.text.pipeline_tag,
            dataset_type=_shown(own or model.data),
            dataset_name=_shown(own) if own else f"{_shown(model.data)} (validation split)",
            metric_type=metric.name,
            metric_value=round(value, 5),
            metric_name=metric.title,
        )
        for metric, value in (*loss, *reported_metrics(model.record, evaluation))
    ]


def _facts(card: _Model) -> dict[str, str]:
    model, start = card.record.section("model"), card.record.start
    vocabulary = f"{start['vocab_size']:,} tokens" if start.get("vocab_size") else ""
    found = {
        "parameters": parameter_words(summarize(card.record)) or "",
        "context": f"{start['window']:,} tokens in training" if start.get("window") else "",
        "vocabulary": vocabulary,
    }
    if card.text.layout:
        tokenizer = str(card.record.section("data").get("tokenizer"))
        shape = {"layers": "n_layers", "wide": "d_model", "heads": "n_heads"}
        found |= {
            "layout": card.text.layout,
            "shape": ", ".join(f"{model.get(key)} {what}" for what, key in shape.items()),
            "vocabulary": vocabulary + {"bpe": ", byte-level BPE", "char": ", characters"}.get(tokenizer, ""),
        }
    return {name: words for name, words in found.items() if words}  # a task's `layout` may use Markdown


def _loading_code(model: _Model) -> str:
    """Returns Markdown with code or commands that load the model, or "" if nothing but sansgpu can."""
    if model.gguf:
        base = "-m BASE.gguf --lora " if model.adapter else "-m "
        lines = [f"llama-cli {base}{model.gguf}"] + ([] if model.adapter else ["ollama run hf.co/MODEL"])
        return "\n".join(["```", *lines, "```"])
    if model.text.library == "sentence-transformers" and not model.adapter:
        return _FEW_SHOT_CODE if model.text.pipeline_tag == "text-classification" else _SENTENCE_CODE
    if not model.text.auto_class:
        return ""
    name = ("AutoPeftModelFor" if model.adapter else "AutoModelFor") + model.text.auto_class
    apart = [f"from peft import {name}", "from transformers import AutoTokenizer"]
    lines = apart if model.adapter else [f"from transformers import {name}, AutoTokenizer"]
    load = [f'{what}.from_pretrained("MODEL")' for what in (f"model = {name}", "tokenizer = AutoTokenizer")]
    return "\n".join(["```python", *lines, "", *load, "```"])


def _procedure(model: _Model) -> dict[str, str]:
    start, training, settings = model.record.start, model.record.section("training"), model.record.section("model")
    adapter = settings.get("adapter", "none")
    ratio = training.get("warmup_ratio")
    adapter_words = f"{adapter}, rank {settings.get('lora_rank')}"
    if adapter == "continue":
        adapter_words = f"trained further from {_shown(str(settings.get('name_or_path')))}"
    found = {
        "steps": f"{model.steps:,}",
        "training tokens": f"{model.tokens:,}" if model.tokens else "",
        "tokens per step": f"{start['tokens_per_step']:,}" if start.get("tokens_per_step") else "",
        "optimizer": f"{training.get('optimizer')}, weight decay {training.get('weight_decay')}",
        "learning rate": f"{training.get('learning_rate')} peak, {training.get('lr_scheduler')} schedule, "
        + (counted(training.get("warmup_steps") or 0, "warmup step") if ratio is None else f"{ratio:.0%} warmup"),
        "adapter": "" if adapter == "none" else adapter_words + ("" if model.adapter else ", merged into the model"),
        "precision": str(start.get("precision", "")),
        "seed": str(training.get("seed")),
    }
    return {name: as_text(words) for name, words in found.items() if words}


def _machine(record: RunRecord) -> dict[str, str]:
    known, found = record.environment, summarize(record)
    rows = {
        "ran on": ran_on(record),
        "instruction set": str(known.get("isa", "")),
        "memory": storage(known["memory_bytes"]) if known.get("memory_bytes") else "",
        "total time": duration(record.seconds),
        "processor energy": energy_words(found) or "",
    }
    return {key: as_text(words) for key, words in rows.items() if words}


def _versions(record: RunRecord) -> str:
    known = record.environment
    packages = {**{key: known.get(key) for key in ("sansgpu", "python")}, **(known.get("packages") or {})}
    return as_text(", ".join(f"{name} {version}" for name, version in packages.items() if version))
