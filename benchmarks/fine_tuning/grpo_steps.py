"""Trains with task grpo on completions that it generates before the first step.

    python -m benchmarks.fine_tuning.grpo_steps JOB

JOB is a JSON file with `overrides` (settings of sansgpu), `threads`, `steps` and `folder`. Writes the completions and
the initial weights of the adapter to the folder, for a peer that trains on the same. Prints a JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.fine_tuning.peer_trainer import say
from sansgpu.config import load_config
from sansgpu.kernels.library import load_kernels_and_allocators
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.models.generation.sampling import Sampling
from sansgpu.tasks.grpo.batch import Completions
from sansgpu.tasks.grpo.losses import advantages
from sansgpu.tasks.grpo.task import GRPO
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step

ADAPTER, COMPLETIONS = "adapter.safetensors", "completions.json"


def completed(task: GRPO, step: int) -> dict[str, list[Any]]:
    """Completes the prompts of a step with the current weights."""
    grpo, batch = task.config.training.grpo, task.batch(step)
    questions = [question for question in batch.questions for _ in range(grpo.group_size)]  # type: ignore[attr-defined]
    found = task.objective.rollout(questions, Sampling(grpo.temperature, seed=step))
    return {
        "prompts": [question.prompt for question in questions],
        "prompt_ids": [question.ids.tolist() for question in questions],
        "completion_ids": [one.ids for one in found],
        "rewards": [one.reward for one in found],
    }


def batch_of(given: dict[str, list[Any]], group_size: int, scale: Any) -> Completions:
    rewards = torch.tensor(given["rewards"], dtype=torch.float64).view(-1, group_size)
    prompts = [torch.tensor(ids).numpy() for ids in given["prompt_ids"]]
    return Completions.with_advantages(prompts, given["completion_ids"], advantages(rewards, scale).flatten())


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
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
    losses, norms = [], []
    for given in steps:
        batch = batch_of(given, config.training.grpo.group_size, config.training.grpo.scale_rewards)
        result = train_step(state, task, batch, config.training.learning_rate)
        state.progress.step += 1
        losses.append(result.loss_sum / result.targets)
        norms.append(result.grad_norm)
    rewards = [sum(given["rewards"]) / len(given["rewards"]) for given in steps]
    say({"event": "result", "losses": losses, "grad_norms": norms, "rewards": rewards})


if __name__ == "__main__":
    main()
