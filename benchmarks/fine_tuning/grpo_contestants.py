"""Trains with task grpo, or with TRL's GRPOTrainer, for benchmarks.fine_tuning.grpo.

    python -m benchmarks.fine_tuning.grpo_contestants "sansgpu"|"TRL GRPOTrainer" JOB

JOB is a JSON file with `overrides` (settings of sansgpu), `threads`, `steps` and `folder`. sansgpu runs first: it
generates all completions before the first step, and writes them and the initial weights of the adapter to the folder.
TRL trains on the same: it tokenizes the prompts, and computes rewards, advantages, the reference, losses and updates.
Each prints a JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from benchmarks.contest import read_job
from benchmarks.fine_tuning.trainer_peer import report, trainer_arguments
from sansgpu.config import Config
from sansgpu.kernels.library import load_kernels_and_allocators
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.grpo.batch import Completions
from sansgpu.tasks.grpo.losses import advantages
from sansgpu.tasks.grpo.settings import GRPOTrainingConfig
from sansgpu.tasks.grpo.task import GRPO
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step

ADAPTER, COMPLETIONS = "adapter.safetensors", "completions.json"

Step = dict[str, list[Any]]


def completed(task: GRPO, step: int) -> Step:
    """Completes the prompts of a step with the current weights."""
    grpo, batch = GRPOTrainingConfig.of(task.config).grpo, task.batch(step)
    questions = [question for question in batch.questions for _ in range(grpo.group_size)]  # type: ignore[attr-defined]
    found = task.objective.rollout(questions, Sampling(grpo.temperature, seed=step))
    return {
        "prompts": [question.prompt for question in questions],
        "prompt_ids": [question.ids.tolist() for question in questions],
        "completion_ids": [one.ids for one in found],
        "rewards": [one.reward for one in found],
    }


def batch_of(given: Step, group_size: int, scale: Any) -> Completions:
    rewards = torch.tensor(given["rewards"], dtype=torch.float64).view(-1, group_size)
    prompts = [torch.tensor(ids).numpy() for ids in given["prompt_ids"]]
    return Completions.with_advantages(prompts, given["completion_ids"], advantages(rewards, scale).flatten())


def run_ours(job: dict[str, Any]) -> None:
    device, folder = torch.device("cpu"), Path(job["folder"])
    kernels = load_kernels_and_allocators("auto", device, True, print)
    config, _ = load_config(None, job["overrides"])
    config, corpus = GRPO.prepare(config, folder, lambda *_: None)
    task = GRPO(config, corpus, effective_batch(config.training))
    steps = [completed(task, step) for step in range(job["steps"])]
    (folder / COMPLETIONS).write_text(json.dumps(steps), encoding="utf-8")
    if config.model.adapter != "none":
        trained = {name: p.detach().clone() for name, p in task.model.named_parameters() if p.requires_grad}
        save_file(trained, folder / ADAPTER)
    size = config.training.batch_size
    assert isinstance(size, int)
    state = TrainState.create(task.model, config.training, Execution(size, device=device, kernels=kernels))
    losses, norms, grpo = [], [], GRPOTrainingConfig.of(config).grpo
    for given in steps:
        batch = batch_of(given, grpo.group_size, grpo.scale_rewards)
        result = train_step(state, task, batch, config.training.learning_rate)
        state.progress.step += 1
        losses.append(result.loss_sum / result.targets)
        norms.append(result.grad_norm)
    rewards = [sum(given["rewards"]) / len(given["rewards"]) for given in steps]
    report({"losses": losses, "grad_norms": norms, "rewards": rewards})


class Logs(TrainerCallback):
    """Records what is logged in every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, *_: Any, **given: Any) -> None:
        if "loss" in given["logs"]:
            self.steps.append(given["logs"])


def adapted_model(config: Config, folder: Path) -> Any:
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


def run_trl(job: dict[str, Any]) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config, _ = load_config(None, job["overrides"])
    grpo, folder = GRPOTrainingConfig.of(config).grpo, Path(job["folder"])
    given: list[Step] = json.loads((folder / COMPLETIONS).read_text(encoding="utf-8"))
    prompts = [prompt for step in given for prompt in step["prompts"][:: grpo.group_size]]
    logs, generated = Logs(), iter(given)
    current: Step = {}

    class Prepared(GRPOTrainer):  # type: ignore[misc]
        """A GRPOTrainer that gets its completions from a list instead of generating them."""

        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            current.update(next(generated))
            if [list(ids) for ids in prompt_ids] != current["prompt_ids"]:
                raise ValueError("TRL has tokenized the prompts differently, or in a different order")
            return current["completion_ids"], None

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
        trainer = Prepared(
            adapted_model(config, folder),
            lambda *_, **__: current["rewards"],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=load_tokenizer_of(config.model),
            callbacks=[logs],
        )
        trainer.train()
    names = {"losses": "loss", "grad_norms": "grad_norm", "rewards": "reward"}
    report({ours: [float(step[theirs]) for step in logs.steps] for ours, theirs in names.items()})


CONTESTANTS = {"sansgpu": run_ours, "TRL GRPOTrainer": run_trl}


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    CONTESTANTS[sys.argv[1]](job)


if __name__ == "__main__":
    main()
