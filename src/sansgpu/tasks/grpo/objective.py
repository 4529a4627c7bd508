"""The objective of task grpo: a causal model and its loss on completions that it has generated."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from sansgpu.config import derive_seed
from sansgpu.config.model import ModelConfig
from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE, ExampleBatch
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import Memory
from sansgpu.models.costing import numbers_of
from sansgpu.models.generation.sampling import Sampling, reading
from sansgpu.models.huggingface.costs import PretrainedCosts
from sansgpu.models.huggingface.source import pretrained_config
from sansgpu.models.huggingface.tokenizer_files import load_chat_tokenizer
from sansgpu.tasks.fine_tuning import FineTuning
from sansgpu.tasks.grpo.batch import Completions, Prompts
from sansgpu.tasks.grpo.losses import advantages, kl_divergences, token_losses
from sansgpu.tasks.grpo.rewards import open_reward
from sansgpu.tasks.grpo.rollout import SLOTS, Rewarded, Rollout, generation_seconds
from sansgpu.tasks.grpo.settings import GRPOTrainingConfig
from sansgpu.tasks.task import StepSums, Sums


class GRPOObjective(FineTuning):
    """A causal model, its loss on completions, and once `open` was called, the means to generate and reward them."""

    head_type = "causal"
    rollout: Rollout

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.grpo = GRPOTrainingConfig.of(self.config).grpo
        self._step_sums = StepSums()

    def open(self, tokenizer: Any, reward: str) -> None:
        """Prepares for generating and rewarding completions. Raises ConfigError if the reward cannot be imported."""
        self.rollout = Rollout(self.unpadded, tokenizer, open_reward(reward), self.grpo.max_completion_length)

    def complete(self, batch: Any, group: Group) -> ExampleBatch:
        if not isinstance(batch, Prompts):  # random completions, to measure a training step
            completed: ExampleBatch = batch
            return completed
        size, seed = self.grpo.group_size, derive_seed(self.config.training.seed, "completions", batch.step)
        share = range(group.rank * len(batch) // group.size, (group.rank + 1) * len(batch) // group.size)
        own = [question for question in batch.questions[share.start : share.stop] for _ in range(size)]
        rewarded = self.rollout(own, Sampling(self.grpo.temperature, seed=seed), first=share.start * size)
        self._step_sums.add(_sums(rewarded, size))
        shared: list[Any] = [[one.ids, one.reward] for one in rewarded]
        every = [one for part in group.all_gather_object(shared) for one in part]
        rewards = torch.tensor([reward for _, reward in every], dtype=torch.float64).view(-1, size)
        prompts = [question.ids for question in batch.questions for _ in range(size)]
        found = advantages(rewards, self.grpo.scale_rewards).flatten()
        completions = Completions.with_advantages(prompts, [ids for ids, _ in every], found)
        return completions if self.grpo.beta else completions.with_advantage_only()

    def generation_seconds(self, completions: int, tokens: int) -> float:
        tokenizer = load_chat_tokenizer(self.config)
        longest = self.grpo.max_completion_length
        return generation_seconds(self.unpadded, tokenizer, completions, max(1, tokens - longest), longest)

    def summed_loss(self, batch: Any) -> torch.Tensor:
        is_target = batch.targets != IGNORE
        examples = torch.repeat_interleave(batch.lengths)[is_target]
        reference = self._reference_log_probabilities(batch, is_target) if self.grpo.beta else None
        policy = self._log_probabilities(batch, is_target)
        gains = batch.advantages[examples]
        if reference is not None:
            kl = kl_divergences(policy, reference)
            self._step_sums.add({"kl": float(kl.detach().sum()), "kl_tokens": float(len(kl))})
            gains = gains - self.grpo.beta * kl
        return token_losses(policy, gains).sum()

    def _log_probabilities(self, batch: Completions, is_target: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of the K targets, (K,) fp32, at the temperature of sampling."""
        inputs = self.unpadded.head_inputs(batch.tokens, batch.lengths)[is_target]
        targets, temperature = batch.targets[is_target], self.grpo.temperature
        return self.unpadded.target_log_probabilities(inputs, targets, temperature).float()

    def _reference_log_probabilities(self, batch: Completions, is_target: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities under the model without its adapter."""
        assert self._adapted is not None
        with torch.no_grad(), reading(self.model), self._adapted.disable_adapter():
            return self._log_probabilities(batch, is_target)

    def step_sums(self) -> Sums:
        return {**super().step_sums(), **self._step_sums.take()}

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        kl = {"kl": sums["kl"] / sums["kl_tokens"]} if sums.get("kl_tokens") else {}
        rewards = {**completion_metrics(sums), "equal_rewards": sums["equal"] / sums["groups"], **kl}
        return {**super().step_metrics(sums), **rewards}

    @classmethod
    def costs(cls, config: Config) -> PretrainedCosts:
        costs = super().costs(config)
        known = {one.name: getattr(costs, one.name) for one in fields(costs)}
        return GRPOCosts(**known, cached_values=_cached_values(config.model))


def _sums(rewarded: list[Rewarded], size: int) -> Sums:
    """Returns sums for the metrics of a step."""
    groups = [{one.reward for one in rewarded[start : start + size]} for start in range(0, len(rewarded), size)]
    equal = sum(len(rewards) == 1 for rewards in groups)
    return {**completion_sums(rewarded), "groups": float(len(groups)), "equal": float(equal)}


def completion_sums(rewarded: list[Rewarded]) -> Sums:
    """Returns sums for `completion_metrics`."""
    return {
        "completions": float(len(rewarded)),
        "reward": sum(one.reward for one in rewarded),
        "tokens": float(sum(len(one.ids) for one in rewarded)),
        "truncated": float(sum(one.is_truncated for one in rewarded)),
    }


def completion_metrics(sums: Sums) -> dict[str, Any]:
    """Returns means over completions."""
    count = sums["completions"]
    means = {"reward": "reward", "completion_length": "tokens", "truncated": "truncated"}
    return {name: sums[key] / count for name, key in means.items()}


def _cached_values(model: ModelConfig) -> int:
    """Returns the number of keys and values that the largest KV cache of a layer holds per token; 0 without one."""
    text: Any = pretrained_config(model).get_text_config()
    if not (heads := int(getattr(text, "num_attention_heads", 0))):
        return 0
    # Layers with sliding windows may have heads of another size.
    kinds = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    head_dims = [getattr(one, "head_dim", None) or one.hidden_size // heads for one in kinds]
    kv_heads = [getattr(one, "num_key_value_heads", None) or heads for one in kinds]
    return 2 * max(int(count) * int(dim) for count, dim in zip(kv_heads, head_dims, strict=True))


@dataclass(frozen=True)
class GRPOCosts(PretrainedCosts):
    """Adds the memory for generation to that of training."""

    cached_values: int = field(default=0, kw_only=True)  # in a layer's KV cache, per token

    def memory(self, execution: Execution) -> Memory:
        """Estimates the peak memory of a step. Generation and training do not need theirs at the same time."""
        memory = super().memory(execution)
        training = memory.gradients + memory.activations + memory.logits
        more = max(0, self._generation_bytes(execution) - training)
        return replace(memory, activations=memory.activations + more)

    def _generation_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the KV cache and of the packed copies of the weights."""
        shape, size = self.shape, execution.compute_dtype.itemsize
        cache = self.cached_values * shape.layers * SLOTS * self.window
        blocks = numbers_of(dict(shape.products)) * shape.layers - shape.quantized_blocks.count
        head = 0 if shape.quantized_tables.count else shape.outputs * shape.width
        codes = shape.quantized_blocks.bytes + shape.quantized_tables.bytes
        return size * (cache + blocks + head) + codes
