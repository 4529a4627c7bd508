"""Trains with TRL's GRPOTrainer on completions that sansgpu has generated.

    python -m benchmarks.fine_tuning.grpo_peer JOB

JOB is the same as in grpo_steps.py, which must have run before. TRL tokenizes the prompts, and computes rewards,
advantages, the reference, losses and updates.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.fine_tuning.grpo_steps import ADAPTER, COMPLETIONS
from benchmarks.fine_tuning.peer_trainer import say, trainer_arguments
from sansgpu.config import Config, load_config
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of

Step = dict[str, list[Any]]


class Prepared(GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer that gets its completions from a list instead of generating them."""

    given: list[Step]
    done = 0

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        step = self.given[self.done]
        if [list(ids) for ids in prompt_ids] != step["prompt_ids"]:
            raise ValueError("TRL has tokenized the prompts differently, or in a different order")
        Prepared.done += 1
        return step["completion_ids"], None

    def rewards(self, prompts: list[Any], **_: Any) -> list[float]:
        rewards: list[float] = self.given[self.done - 1]["rewards"]
        return rewards


class Logs(TrainerCallback):
    """Records what is logged in every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, *_: Any, **given: Any) -> None:
        if "loss" in given["logs"]:
            self.steps.append(given["logs"])


def model_of(config: Config, folder: Path) -> Any:
    """Loads the model in fp32, and adds the same adapter as sansgpu."""
    plain = config.model.model_copy(update={"adapter": "none"})
    model = load_pretrained(plain, Head("causal"), config.training.seed).float()
    if config.model.adapter == "none":
        return model
    from peft import LoraConfig, get_peft_model

    settings = config.model
    lora = LoraConfig(r=settings.lora_rank, lora_alpha=int(settings.lora_alpha), target_modules="all-linear")
    adapted: Any = get_peft_model(model, lora)
    weights = load_file(folder / ADAPTER)
    found = adapted.base_model.model.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys, found.unexpected_keys
    return adapted


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    config, _ = load_config(None, job["overrides"])
    grpo, folder = config.training.grpo, Path(job["folder"])
    given: list[Step] = json.loads((folder / COMPLETIONS).read_text(encoding="utf-8"))
    Prepared.given = given
    prompts = [prompt for step in given for prompt in step["prompts"][:: grpo.group_size]]
    logs = Logs()
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output,
            **trainer_arguments(config, len(given)),
            per_device_train_batch_size=len(given[0]["prompts"]),
            gradient_accumulation_steps=1,
            num_generations=grpo.group_size,
            max_completion_length=grpo.max_completion_length,
            temperature=grpo.temperature,
            beta=grpo.beta,
            scale_rewards=grpo.scale_rewards,
            shuffle_dataset=False,
            gradient_checkpointing=False,
        )

        def reward(prompts: list[Any], **columns: Any) -> list[float]:
            return trainer.rewards(prompts)

        trainer = Prepared(
            model_of(config, folder),
            reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=load_tokenizer_of(config.model),
            callbacks=[logs],
        )
        trainer.train()
    names = {"losses": "loss", "grad_norms": "grad_norm", "rewards": "reward"}
    say({"event": "result", **{ours: [float(step[theirs]) for step in logs.steps] for ours, theirs in names.items()}})


if __name__ == "__main__":
    main()
