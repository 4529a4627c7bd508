"""Hugging Face's Trainer on the same rows in the same order: `python -m benchmarks.fine_tuning_peer JOB.json`.

Prints one JSON line. Rows are tokenised and masked by our code, so that only the training is compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, SequentialSampler
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from sansgpu.config import Config, load_config
from sansgpu.data.batch import IGNORE
from sansgpu.data.order import batch_indices
from sansgpu.data.sequences import Sequences
from sansgpu.machine.memory import effective_batch
from sansgpu.tasks import TASKS

Row = dict[str, list[int]]


def batches(overrides: list[str], steps: int, cache: Path) -> tuple[Config, Any, list[Sequences]]:
    """The configuration, its tokenizer, and the batches that our run of it learns from."""
    config, _ = load_config(None, overrides)
    config, corpus = TASKS[config.task].prepare(config, cache, lambda *_: None)
    training, rows = config.training, effective_batch(config.training)
    numbers = [batch_indices(training.seed, step, len(corpus.train), rows) for step in range(steps)]
    return config, corpus.tokenizer, [corpus.train.batch(chosen) for chosen in numbers]


def rows_of(batch: Sequences) -> Iterator[Row]:
    """Each example as transformers has it: labels that the model itself shifts, or places of the answer."""
    start = 0
    for number, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[start : start + length].tolist()
        row: Row = {"input_ids": tokens, "attention_mask": [1] * length}
        if batch.targets.ndim == 2:
            row["start_positions"], row["end_positions"] = batch.targets[number].tolist()
        else:
            targets = batch.targets[start : start + length].tolist()
            told = targets[-1] if targets[-1] != IGNORE else 0  # ours leaves out the last token, which is only told
            row = {"input_ids": [*tokens, told], "attention_mask": [1] * (length + 1), "labels": [IGNORE, *targets]}
        if batch.types is not None:
            row["token_type_ids"] = batch.types[start : start + length].tolist()
        start += length
        yield row


class InOrder(Trainer):
    """Takes rows in their order, and notes when each step ends and its loss."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Watch(TrainerCallback):
    """Seconds and losses of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """It is over."""
        self.seconds.append(time.perf_counter() - self._start)

    def on_log(self, *_: Any, **given: Any) -> None:
        """Its loss."""
        if "loss" in given["logs"]:
            self.losses.append(float(given["logs"]["loss"]))


class Rows(Dataset[Row]):
    """A list as a dataset."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def load_model(config: Config) -> Any:
    """The model as transformers and peft have it."""
    kind = transformers.AutoModelForCausalLM if config.task == "sft" else transformers.AutoModelForQuestionAnswering
    model: Any = kind.from_pretrained(str(config.model.name_or_path), dtype=torch.float32)
    if config.model.adapter != "none":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=config.model.lora_rank, lora_alpha=int(config.model.lora_alpha), target_modules="all-linear"
        )
        model = get_peft_model(model, lora)
    return model


def train(
    config: Config, tokenizer: Any, given: list[Sequences], micro_batch: int, accumulation: int, model: Any = None
) -> tuple[list[float], list[float]]:
    """(seconds, loss) of each step."""
    watch, training = Watch(), config.training
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=training.precision == "bf16",
            max_steps=len(given),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=training.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=training.weight_decay,
            adam_beta1=training.beta1,
            adam_beta2=training.beta2,
            adam_epsilon=1e-8,
            max_grad_norm=training.max_grad_norm,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_drop_last=False,
        )
        trainer = InOrder(
            model if model is not None else load_model(config),
            arguments,
            train_dataset=Rows([row for batch in given for row in rows_of(batch)]),
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
            callbacks=[watch],
        )
        trainer.train()
    return watch.seconds, watch.losses


def main() -> None:
    """Run one job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    config, tokenizer, given = batches(job["overrides"], job["steps"], Path(job["cache"]))
    size = int(config.training.batch_size)
    seconds, losses = train(config, tokenizer, given, size, config.training.gradient_accumulation_steps)
    tokens = [batch.token_count() for batch in given]
    print(json.dumps({"event": "result", "step_seconds": seconds, "losses": losses, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
