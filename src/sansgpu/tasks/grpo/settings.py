"""The settings of task grpo: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from sansgpu.config.paths import ARITHMETIC
from sansgpu.config.section import CHANGES_LOSS, FIXED, Section, also_named, runs_code
from sansgpu.config.tasks import CODE_NAME, CardText, Metric, Purpose, TaskSettings, interval, is_outside, share
from sansgpu.config.training import TrainingConfig
from sansgpu.tasks.settings import CHAT_COMMAND, FINE_TUNED, SMALL_CHAT_MODEL, fine_tuning_problems

REWARD_INTERVAL = "reward_interval"
REWARD = Metric("reward", better="higher", short="reward")
ANSWER_REWARD = "answer"  # the built-in value of training.grpo.reward
REWARD_NAME = rf"^({ANSWER_REWARD}|{CODE_NAME})$"


class GRPOConfig(Section):
    """The reward and the loss of task grpo."""

    reward: str = Field(
        ANSWER_REWARD,
        pattern=REWARD_NAME,
        description="answer: 1 if a completion ends with the row's `answer`, otherwise 0; otherwise a Python function, "
        "`package.module:function`, which gets prompts, completions and the other columns of the rows as lists, and "
        "returns a list of numbers",
        json_schema_extra=CHANGES_LOSS | runs_code("reward") | also_named("reward_funcs"),
    )
    group_size: int = Field(
        8,
        ge=2,
        description="completions of each prompt; each is rewarded relative to the others of its prompt",
        json_schema_extra=FIXED | also_named("num_generations"),
    )
    max_completion_length: int = Field(
        256, ge=1, description="maximum tokens of a completion", json_schema_extra=CHANGES_LOSS
    )
    temperature: float = Field(1.0, ge=0.01, description="temperature at which completions are sampled in training")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="standard deviation that rewards are divided by; group: of the completions of a prompt; batch: of "
        "all completions of a step; none: rewards are not divided",
    )
    beta: float = Field(
        0.0,
        ge=0,
        description="weight of the KL divergence from the reference model, which is the model without its adapter; "
        "0: no reference model",
        json_schema_extra=also_named("beta_kl"),
    )

    @property
    def reward_function(self) -> str | None:
        """Returns the Python function of the user that computes rewards, or None if the reward is built in."""
        return self.reward if is_outside(self.reward) else None


class GRPOTrainingConfig(TrainingConfig):
    """The section `training` of task grpo."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig, description="reward and loss of task grpo")


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
    ("samples", "packing", "pretrained", "rows", "adapter", "trained layers", "chat template"),
    sections=(GRPOTrainingConfig,),
    implementation="sansgpu.tasks.grpo.task:GRPO",
    description="reinforcement learning with verifiers of the answers",
    purpose=Purpose(
        "An assistant with checked answers",
        "chat, trained on prompts whose answers can be checked",
        "prompts with the right answers",
        SMALL_CHAT_MODEL,
        built_in=ARITHMETIC,
        batch=64,
        is_decoder=True,
    ),
    defaults={
        "training": {**FINE_TUNED, "learning_rate": 1e-6, "gradient_accumulation_steps": 64},
        "data": {"max_length": 512, "validation_split": 0.1},
    },
    adapter_defaults={"training": {"learning_rate": 1e-5}},
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
        "a decoder trained with reinforcement learning on verifiable answers",
        "text-generation",
        "CausalLM",
        CHAT_COMMAND,
    ),
)
