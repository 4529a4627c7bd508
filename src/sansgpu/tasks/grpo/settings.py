"""The settings of task grpo: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sansgpu.config.tasks import ARITHMETIC, CardText, Metric, Purpose, TaskSettings, interval, share
from sansgpu.tasks.settings import CHAT, FINE_TUNED, SMALL_CHAT_MODEL, fine_tuning_problems

LEARNING_RATE, LORA_LEARNING_RATE = 1e-6, 1e-5
REWARD_INTERVAL = "reward_interval"
REWARD = Metric("reward", better="higher", short="reward")


def _grpo_problems(config: Any) -> Iterator[str]:
    yield from fine_tuning_problems(config)
    training, grpo = config.training, config.training.grpo
    size = 1 if training.batch_size == "auto" else training.batch_size
    completions = size * training.gradient_accumulation_steps
    if completions % grpo.group_size:
        yield (
            f"a step has {completions} completions (training.batch_size x training.gradient_accumulation_steps), which "
            f"is not a multiple of training.grpo.group_size {grpo.group_size}; change one of them"
        )
    if config.data.max_length is not None and grpo.max_completion_length >= config.data.max_length:
        yield (
            f"training.grpo.max_completion_length {grpo.max_completion_length} leaves no room for a prompt within "
            f"data.max_length {config.data.max_length}, which is the maximum of both together; change one of them"
        )
    if grpo.beta and config.model.adapter == "none":
        yield (
            "training.grpo.beta needs an adapter, because the reference model is the model without it; set "
            "model.adapter to lora, or training.grpo.beta to 0"
        )
    if training.sharding == "full":
        yield (
            "training.sharding full splits the weights over the processes, but task grpo generates text with all of "
            "them; set it to none or optimizer"
        )


SETTINGS = TaskSettings(
    "grpo",
    ("samples", "packing", "pretrained", "rows", "adapter"),
    own_keys=("training.grpo", "data.chat_template", "data.parse_special_tokens"),
    implementation="sansgpu.tasks.grpo.task:GRPO",
    description="reinforcement learning with verifiers of the answers",
    purpose=Purpose(
        "chat, trained on prompts whose answers can be checked",
        "prompts with the right answers",
        SMALL_CHAT_MODEL,
        built_in=ARITHMETIC,
        batch=64,
        is_decoder=True,
    ),
    defaults={
        "training": {**FINE_TUNED, "learning_rate": LEARNING_RATE, "gradient_accumulation_steps": 64},
        "data": {"max_length": 512, "validation_split": 0.1},
    },
    adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
    problems=_grpo_problems,
    rows="prompts",
    generates=True,
    metrics=(
        REWARD,
        interval(REWARD_INTERVAL, REWARD.name, "{0[0]:.4f} to {0[1]:.4f}"),
        share("equal_rewards", "prompts without different rewards", short="equal"),
        Metric("completion_length", "completion", "{:.1f}", unit="tokens", short="tokens"),
        share("truncated", "truncated completions"),
        Metric("kl", "KL divergence from the reference", unit="nats", short="KL"),
        Metric("prompts", form="{:,.0f}", text="{value} {label}", reported=False),
    ),
    main_metric=REWARD,
    card=lambda model: CardText(
        "a decoder trained with reinforcement learning on verifiable answers", "text-generation", "CausalLM", CHAT
    ),
)
