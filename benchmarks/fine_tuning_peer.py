"""Trains with Hugging Face's Trainer on the same rows in the same order: `python -m benchmarks.fine_tuning_peer JOB`.

Prints JSON lines. Rows are tokenized and masked by sansgpu, so that only the training is compared. A job with `steps`
measures step times; one without trains question answering and evaluates after every epoch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from sansgpu.config import Config, load_config
from sansgpu.data.answers import AnswerRules, best_answers, exact_match_f1
from sansgpu.data.batch import IGNORE
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.sequences import PackedSequences
from sansgpu.machine.memory import effective_batch
from sansgpu.tasks import task_of
from sansgpu.tasks.qa import QuestionCorpus, TokenizedQuestions

Row = dict[str, Any]  # lists of integers; a label may be a number


def batches(overrides: list[str], steps: int, cache: Path) -> tuple[Config, Any, list[PackedSequences]]:
    """Returns the configuration, its tokenizer and the batches that a sansgpu run of it trains on."""
    config, _ = load_config(None, overrides)
    config, corpus = task_of(config).prepare(config, cache, lambda *_: None)
    training, rows = config.training, effective_batch(config.training)
    numbers = [batch_indices(training.seed, step, len(corpus.train), rows) for step in range(steps)]
    return config, corpus.tokenizer, [corpus.train.batch(chosen) for chosen in numbers]


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
            last = targets[-1] if targets[-1] != IGNORE else 0  # sansgpu omits the last token, which is only a target
            row = {"input_ids": [*tokens, last], "attention_mask": [1] * (length + 1), "labels": [IGNORE, *targets]}
        if batch.types is not None:
            row["token_type_ids"] = batch.types[start : start + length].tolist()
        start += length
        yield row


class InOrder(Trainer):
    """A Trainer without shuffling."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


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


class Rows(Dataset[Row]):
    """A list as a dataset."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def load_model(config: Config) -> Any:
    """Returns the model with transformers and peft."""
    kind = transformers.AutoModelForCausalLM if config.task == "sft" else transformers.AutoModelForQuestionAnswering
    model: Any = kind.from_pretrained(str(config.model.name_or_path), dtype=torch.float32)
    if config.model.adapter != "none":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=config.model.lora_rank, lora_alpha=int(config.model.lora_alpha), target_modules="all-linear"
        )
        model = get_peft_model(model, lora)
    return model


def trainer_arguments(config: Config, folder: str, **more: Any) -> TrainingArguments:
    """Returns the arguments common to all Trainers here."""
    training = config.training
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        bf16=training.precision == "bf16",
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.beta1,
        adam_beta2=training.beta2,
        adam_epsilon=1e-8,
        max_grad_norm=training.max_grad_norm,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=False,
        **more,
    )


def train(
    config: Config, tokenizer: Any, given: list[PackedSequences], micro_batch: int, accumulation: int, model: Any = None
) -> tuple[list[float], list[float]]:
    """Trains on the batches `given` and returns the seconds and the losses of the steps."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(
            config,
            folder,
            max_steps=len(given),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            lr_scheduler_type="constant",
            logging_steps=1,
        )
        trainer = InOrder(
            model if model is not None else load_model(config),
            arguments,
            train_dataset=Rows([row for batch in given for row in rows_of(batch, config.task)]),
            data_collator=(DataCollatorWithPadding if config.task == "classify" else DataCollatorForSeq2Seq)(
                tokenizer, padding=True
            ),
            callbacks=[watch],
        )
        trainer.train()
    return watch.seconds, watch.losses


class Shuffled(Sampler[int]):
    """Examples in the order of sansgpu's runs, with a new permutation per epoch."""

    def __init__(self, seed: int, examples: int, batch_size: int) -> None:
        self._seed, self._examples, self._batch_size = seed, examples, batch_size
        self._epoch = 0

    def __len__(self) -> int:
        return self._examples

    def __iter__(self) -> Iterator[int]:
        steps = steps_per_epoch(self._examples, self._batch_size)
        first, self._epoch = self._epoch * steps, self._epoch + 1
        for step in range(first, first + steps):
            yield from batch_indices(self._seed, step, self._examples, self._batch_size).tolist()


class Answering(Trainer):
    """Trains question answering and prints exact match and F1 on held-out questions after every epoch."""

    def __init__(self, config: Config, corpus: QuestionCorpus, arguments: TrainingArguments) -> None:
        self._config, self._held = config, corpus.validation
        self._watch = Epochs()
        train, held = (Rows(list(rows_of(part.batch(np.arange(len(part)))))) for part in (corpus.train, self._held))
        collator = DataCollatorForSeq2Seq(corpus.tokenizer, padding=True)
        model = load_model(config)
        super().__init__(model, arguments, collator, train, held, callbacks=[self._watch])

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        training = self._config.training
        return Shuffled(training.seed, len(self.train_dataset), effective_batch(training))  # type: ignore[arg-type]

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Prints loss, exact match, F1 and the training seconds so far as a JSON line."""
        found: Any = self.predict(self.eval_dataset)  # type: ignore[arg-type]
        scores = answers_score(self._config, self._held, list(zip(*found.predictions[:2], strict=True)))
        scores["loss"] = found.metrics["test_loss"]
        say({"event": "eval", "step": self.state.global_step, "seconds": self._watch.seconds, **scores})
        return scores


class Epochs(TrainerCallback):
    """Measures the seconds within epochs, without the evaluations between them."""

    seconds = 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds += time.perf_counter() - self._start


def answers_score(
    config: Config, asked: TokenizedQuestions, logits: list[tuple[np.ndarray, np.ndarray]]
) -> dict[str, float]:
    """Returns exact match and F1 of the answers from each window's logits, selected like in transformers' run_qa.py."""
    data = config.data
    rules = AnswerRules(data.n_best_size, data.max_answer_length, data.null_score_diff_threshold)
    answers = {}
    for question, numbers in zip(asked.questions, asked.by_question(), strict=True):
        windows, scores = [asked.windows[n] for n in numbers], [logits[n] for n in numbers]
        answers[question.id] = best_answers(question, windows, scores, rules, bool(data.null_answers)).text
    return exact_match_f1(asked.questions, answers)


def learn_answers(config: Config, corpus: QuestionCorpus) -> None:
    """Trains for all epochs and prints the results as JSON lines."""
    training = config.training
    steps = steps_per_epoch(len(corpus.train), effective_batch(training))
    say({"event": "start", "steps_per_epoch": steps, "epoch_tokens": corpus.train_tokens})
    transformers.set_seed(training.seed)  # before the head is initialized
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(
            config,
            folder,
            num_train_epochs=training.num_epochs,
            per_device_train_batch_size=int(training.batch_size),
            per_device_eval_batch_size=int(training.batch_size),
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            lr_scheduler_type=training.lr_scheduler,
            warmup_steps=training.warmup_steps,
            seed=training.seed,
            logging_strategy="no",
            eval_strategy="epoch",
        )
        Answering(config, corpus, arguments).train()


def say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    if "steps" not in job:
        config, _ = load_config(None, job["overrides"])
        learn_answers(*task_of(config).prepare(config, Path(job["cache"]), lambda *_: None))
        return
    config, tokenizer, given = batches(job["overrides"], job["steps"], Path(job["cache"]))
    size = int(config.training.batch_size)
    seconds, losses = train(config, tokenizer, given, size, config.training.gradient_accumulation_steps)
    tokens = [batch.token_count() for batch in given]
    say({"event": "result", "step_seconds": seconds, "losses": losses, "tokens": tokens})


if __name__ == "__main__":
    main()
