"""Trains with Hugging Face's Trainer on the same rows in the same order.

    python -m benchmarks.fine_tuning.trainer_peer JOB

JOB is a JSON file with `overrides` (settings of sansgpu), `threads`, `cache` (a folder) and optionally `steps` and
`folder` (for the trained model). Prints a JSON line. sansgpu tokenizes and masks the rows, so that only the training is
compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, SequentialSampler
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer, TrainingArguments

from benchmarks.fine_tuning.peer_trainer import Watch, say, trainer_arguments
from sansgpu.config import Config, load_config
from sansgpu.data.batch import IGNORE
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.sequences import PackedSequences
from sansgpu.machine.memory import effective_batch
from sansgpu.models.huggingface.pretrained import AUTO_CLASSES
from sansgpu.tasks.registry import task_of
from sansgpu.train.schedule import total_steps

Row = dict[str, Any]  # lists of integers; a label may be a number


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
            trainer.save_model(save)
            tokenizer.save_pretrained(save)
    return watch


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    config, tokenizer, given = batches(job["overrides"], job.get("steps"), Path(job["cache"]))
    save, size = job.get("folder"), int(config.training.batch_size)
    if config.task == "embed":
        from benchmarks.fine_tuning.embedding_peer import train as train_embedding  # imports Sentence Transformers

        watch = train_embedding(config, given, save)
    else:
        watch = train(config, tokenizer, given, size, config.training.gradient_accumulation_steps, save=save)
    tokens = [batch.token_count() for batch in given]
    say({"event": "result", "step_seconds": watch.seconds, "losses": watch.losses, "tokens": tokens})


if __name__ == "__main__":
    main()
