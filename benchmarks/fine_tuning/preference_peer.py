"""Trains with TRL's DPOTrainer on the same pairs in the same order.

    python -m benchmarks.fine_tuning.preference_peer JOB

JOB is the same as in fine_tuning_peer.py. sansgpu tokenizes the pairs, so that only the training is compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer

from benchmarks.fine_tuning.peer_trainer import Watch, say, trainer_arguments
from benchmarks.fine_tuning.trainer_peer import batches, load_model
from sansgpu.tasks.preference.batch import AnswerPairs


def columns(given: list[AnswerPairs]) -> Dataset:
    """Returns the tokens of the pairs of all batches, in their order."""
    found: dict[str, list[list[int]]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for pair in (batch.rows(number, number + 1) for batch in given for number in range(len(batch))):
        prompt, chosen, rejected = pair.sizes[0].tolist()
        parts = pair.tokens.split([prompt, chosen - 1, rejected - 1])
        last: tuple[list[int], ...] = [], [int(pair.targets[chosen - 1])], [int(pair.targets[-1])]  # only targets
        for column, part, end in zip(found.values(), parts, last, strict=True):
            column.append([*part.tolist(), *end])
    return Dataset.from_dict(found)


class InOrder(DPOTrainer):  # type: ignore[misc]
    """A DPOTrainer without shuffling, whose dataset is already tokenized."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    config, tokenizer, given = batches(job["overrides"], job.get("steps"), Path(job["cache"]))
    training, watch = config.training, Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder,
            **trainer_arguments(config, len(given)),
            per_device_train_batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            beta=training.preference.scale,
            loss_type=[{"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "ipo": "ipo"}[training.preference.loss]],
            max_length=None,
            gradient_checkpointing=False,
        )
        trainer = InOrder(
            load_model(config),
            args=arguments,
            train_dataset=columns(given),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.train()
    say({"event": "result", "step_seconds": watch.seconds, "losses": watch.losses, "pairs": [len(b) for b in given]})


if __name__ == "__main__":
    main()
