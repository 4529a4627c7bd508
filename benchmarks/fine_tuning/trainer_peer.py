"""Trains with Hugging Face's Trainer, or Sentence Transformers', on the same rows in the same order.

    python -m benchmarks.fine_tuning.trainer_peer JOB

JOB is a JSON file with `overrides` (settings of sansgpu), `threads`, `cache` (a folder) and optionally `steps` and
`folder` (for the trained model). Prints a JSON line. sansgpu tokenizes and masks the rows, so that only the training is
compared, except that Sentence Transformers tokenizes and pads texts when a batch is drawn.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, SequentialSampler
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from benchmarks.contest import read_job
from sansgpu.config import Config
from sansgpu.data.batch import IGNORE
from sansgpu.data.forms.pairs import read_text_rows
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.row_report import RowReport
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.sources import open_sources
from sansgpu.data.tables import Columns
from sansgpu.machine.memory import effective_batch
from sansgpu.models.huggingface.pretrained import AUTO_CLASSES
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.embed.groups import TextGroups
from sansgpu.tasks.embed.settings import EmbeddingDataConfig, EmbeddingTrainingConfig
from sansgpu.tasks.registry import task_of
from sansgpu.train.schedule import total_steps

Row = dict[str, Any]  # lists of integers; a label may be a number


class Watch(TrainerCallback):
    """Records seconds and losses of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    def on_log(self, *_: Any, **given: Any) -> None:
        if "loss" in given["logs"]:
            self.losses.append(float(given["logs"]["loss"]))


def trainer_arguments(config: Config, steps: int) -> dict[str, Any]:
    """Returns the arguments that all Trainers of the benchmarks have in common, except `output_dir`."""
    training = config.training
    return {
        "max_steps": steps,
        "use_cpu": True,
        "bf16": training.precision == "bf16",
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.beta1,
        "adam_beta2": training.beta2,
        "adam_epsilon": 1e-8,
        "max_grad_norm": training.max_grad_norm,
        "seed": training.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def report(result: dict[str, Any]) -> None:
    print(json.dumps({"event": "result", **result}), flush=True)


def batches(overrides: list[str], steps: int | None, cache: Path) -> tuple[Config, Any, list[Any]]:
    """Returns the configuration, the tokenizer, and the batches that sansgpu would train on.

    Returns the first `steps` batches, by default all.
    """
    config, _ = load_config(None, overrides)
    config, corpus = task_of(config).prepare(config, cache, lambda *_: None)
    training, rows, part = config.training, effective_batch(config.training), corpus.train
    steps = steps or total_steps(training, steps_per_epoch(len(part), rows), corpus.train_tokens)
    numbers = [batch_indices(training.seed, step, len(part), rows) for step in range(steps)]
    return config, corpus.tokenizer, [part.batch(chosen) for chosen in numbers]


def rows_of(batch: PackedSequences, task: str = "qa") -> Iterator[Row]:
    """Yields examples in transformers' format, with unshifted labels, the positions of the answer, or the classes."""
    start = 0
    for number, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[start : start + length].tolist()
        row: Row = {"input_ids": tokens, "attention_mask": [1] * length}
        if task == "classify":
            targets = batch.targets[number].tolist()
            row["labels"] = [float(value) for value in targets] if len(targets) > 1 else targets[0]
        elif task == "tokens":
            row["labels"] = batch.targets[start : start + length].tolist()
        elif batch.targets.ndim == 2:
            row["start_positions"], row["end_positions"] = batch.targets[number].tolist()
        else:
            targets = batch.targets[start : start + length].tolist()
            last = targets[-1] if targets[-1] != IGNORE else 0  # inputs lack the last token, which is only a target
            row = {"input_ids": [*tokens, last], "attention_mask": [1] * (length + 1), "labels": [IGNORE, *targets]}
        if batch.types is not None:
            row["token_type_ids"] = batch.types[start : start + length].tolist()
        start += length
        yield row


class InOrder(Trainer):
    """A Trainer without shuffling."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class MicroBatches(Dataset[list[Row]]):
    """A dataset of micro-batches, each a list of rows. The last batch of an epoch may have fewer rows."""

    def __init__(self, given: list[PackedSequences], task: str, micro_batch: int, accumulation: int) -> None:
        self._given, self._task, self._size, self._accumulation = given, task, micro_batch, accumulation

    def __len__(self) -> int:
        return len(self._given) * self._accumulation

    def __getitem__(self, index: int) -> list[Row]:
        batch, part = divmod(index, self._accumulation)
        return list(rows_of(self._given[batch], self._task))[part * self._size : (part + 1) * self._size]


def load_model(config: Config) -> Any:
    """Loads the model with transformers, and adds the adapter with peft if one is configured."""
    task_class: Any = task_of(config)
    name, head = str(config.model.name_or_path), task_class.objective_class.head_of(config)
    settings = transformers.AutoConfig.from_pretrained(name)
    head.set_labels(settings)
    loader: Any = getattr(transformers, AUTO_CLASSES[head.type])
    model = loader.from_pretrained(name, config=settings, dtype=torch.float32)
    if config.model.adapter != "none":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=config.model.lora_rank, lora_alpha=int(config.model.lora_alpha), target_modules="all-linear"
        )
        model = get_peft_model(model, lora)
    return model


def train(
    config: Config,
    tokenizer: Any,
    given: list[PackedSequences],
    micro_batch: int,
    accumulation: int,
    model: Any = None,
    save: str | None = None,
) -> Watch:
    """Trains on the batches `given`, writes the model to the folder `save`, and returns each step's time and loss."""
    collator = DataCollatorWithPadding if config.task == "classify" else DataCollatorForSeq2Seq
    pad, watch = collator(tokenizer, padding=True), Watch()
    transformers.set_seed(config.training.seed)  # before the head is initialized
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            **trainer_arguments(config, len(given)),
            per_device_train_batch_size=1,  # an item of the dataset is a whole micro-batch
            gradient_accumulation_steps=accumulation,
            remove_unused_columns=False,
        )
        trainer = InOrder(
            model if model is not None else load_model(config),
            arguments,
            train_dataset=MicroBatches(given, config.task, micro_batch, accumulation),
            data_collator=lambda items: pad(items[0]),
            callbacks=[watch],
        )
        trainer.train()
        if save is not None:
            if config.model.adapter != "none":
                adapted: Any = trainer.model
                trainer.model = adapted.merge_and_unload()
            trainer.save_model(save)
            tokenizer.save_pretrained(save)
    return watch


def columns(config: Config) -> dict[str, list[Any]]:
    """Reads the training rows: a column for each text, and one for the score if there is any."""
    rows = read_text_rows(open_sources(config.data).train.rows(), Columns.of(config.data), RowReport("fail"))
    texts = zip(*(row.texts for row in rows), strict=True)
    found: dict[str, list[Any]] = {f"text{number}": list(column) for number, column in enumerate(texts)}
    if (scale := EmbeddingDataConfig.of(config).score_scale) is not None:
        found["score"] = [row.score / scale for row in rows if row.score is not None]
    return found


def train_embedding(config: Config, given: list[TextGroups], save: str | None) -> Watch:
    """Trains on the rows of the batches `given`, writes the model to the folder `save`, and returns the step times."""
    from datasets import Dataset as Columns
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer import losses

    class InGivenOrder(DefaultBatchSampler):
        """Yields the row numbers of each batch, in sansgpu's order."""

        def __iter__(self) -> Iterator[list[int]]:
            return (batch.numbers.tolist() for batch in given)

        def __len__(self) -> int:
            return len(given)

    watch = Watch()
    transformers.set_seed(config.training.seed)
    model = SentenceTransformer(str(config.model.name_or_path), device="cpu")
    assert config.data.max_length is not None
    model.max_seq_length = config.data.max_length
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            **trainer_arguments(config, len(given)),
            per_device_train_batch_size=int(config.training.batch_size),
            batch_sampler=InGivenOrder,
        )
        scored = EmbeddingTrainingConfig.of(config).embedding_loss == "cosine"
        loss = losses.CosineSimilarityLoss(model) if scored else losses.MultipleNegativesRankingLoss(model)
        rows = Columns.from_dict(columns(config))
        SentenceTransformerTrainer(model, arguments, rows, loss=loss, callbacks=[watch]).train()
    if save is not None:
        model.save(save)
    return watch


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    config, tokenizer, given = batches(job["overrides"], job.get("steps"), Path(job["cache"]))
    save, size = job.get("folder"), int(config.training.batch_size)
    if config.task == "embed":
        watch = train_embedding(config, given, save)
    else:
        watch = train(config, tokenizer, given, size, config.training.gradient_accumulation_steps, save=save)
    tokens = [batch.token_count() for batch in given]
    report({"step_seconds": watch.seconds, "losses": watch.losses, "tokens": tokens})


if __name__ == "__main__":
    main()
