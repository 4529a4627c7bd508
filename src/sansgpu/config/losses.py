"""The sections of a configuration that choose a loss: `training.preference`, `grpo` and `distillation`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sansgpu.config.section import Section
from sansgpu.config.tasks import ANSWER_REWARD, is_outside

PreferenceLoss = Literal["dpo", "dpo_norm", "ipo", "simpo", "orpo", "kto"]


# For simpo, the lower end of the range in its paper; for dpo_norm, the value of Tülu 3. The others have 0.1.
_DEFAULT_BETA: dict[PreferenceLoss, float] = {"simpo": 2.0, "dpo_norm": 5.0}


_KEYS_OF_LOSSES: dict[str, tuple[PreferenceLoss, ...]] = {
    "label_smoothing": ("dpo", "dpo_norm", "simpo"),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


class PreferenceConfig(Section):
    """The loss of task preference."""

    loss: PreferenceLoss = Field(
        "dpo",
        description="dpo: raise the probability of the chosen answer over the rejected one, relative to the reference "
        "model (the model before training); dpo_norm: DPO with log-probabilities per token; ipo: push the difference "
        "per token toward a margin of 1 / (2 beta); simpo: no reference model; orpo: no reference model, and adds the "
        "usual loss on the chosen answer; kto: learn from single answers rated good or bad",
    )
    beta: float | None = Field(
        None,
        gt=0,
        description="scale of the rewards; dpo, dpo_norm, ipo, kto: larger values keep the model closer to the "
        "reference model; orpo: weight of the odds ratio loss. Default: 0.1; simpo: 2; dpo_norm: 5",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="dpo, dpo_norm, simpo: assumed fraction of pairs whose chosen and rejected answers are swapped",
    )
    gamma: float = Field(
        1.0, ge=0, description="simpo: target margin between the rewards of the chosen and the rejected answer"
    )
    desirable_weight: float = Field(1.0, gt=0, description="kto: loss weight of good answers")
    undesirable_weight: float = Field(1.0, gt=0, description="kto: loss weight of bad answers")

    @model_validator(mode="after")
    def _only_keys_of_the_loss(self) -> PreferenceConfig:
        for key, losses in _KEYS_OF_LOSSES.items():
            if self.loss not in losses and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} has no effect with loss {self.loss}, only with {' and '.join(losses)}; remove it"
                )
        return self

    @property
    def scale(self) -> float:
        """`beta`, or the loss's default."""
        return _DEFAULT_BETA.get(self.loss, 0.1) if self.beta is None else self.beta

    @property
    def needs_reference(self) -> bool:
        """Returns True if the loss compares with the log-probabilities of the model before training."""
        return self.loss in ("dpo", "dpo_norm", "ipo", "kto")


REWARD_NAME = rf"^({ANSWER_REWARD}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"


class GRPOConfig(Section):
    """The reward and the loss of task grpo."""

    reward: str = Field(
        ANSWER_REWARD,
        pattern=REWARD_NAME,
        description="answer: 1 if a completion ends with the row's `answer`, otherwise 0; otherwise a Python function, "
        "`package.module:function`, which gets prompts, completions and the other columns of the rows as lists, and "
        "returns a list of numbers",
    )
    group_size: int = Field(
        8, ge=2, description="completions of each prompt; each is rewarded relative to the others of its prompt"
    )
    max_completion_length: int = Field(256, ge=1, description="maximum tokens of a completion")
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
    )

    @property
    def reward_function(self) -> str | None:
        """Returns the Python function of the user that computes rewards, or None if the reward is built in."""
        return self.reward if is_outside(self.reward) else None


class DistillationConfig(Section):
    """Learning from a teacher's predictions."""

    teacher: str | None = Field(
        None,
        description="folder written by `sansgpu distill`, with the training text and the teacher's prediction of each "
        "token",
    )
    weight: float = Field(
        0.5,
        ge=0,
        le=1,
        description="weight of the KL divergence from the teacher; the cross-entropy loss has the weight 1 - weight",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="softmax temperature T of teacher and student in the KL divergence, which is multiplied by T^2",
    )
    token_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="task pretrain: share of the tokens of a micro-batch that the loss includes: those with the "
        "largest excess loss, which is the student's cross-entropy minus the teacher's (Rho-1)",
    )

    @model_validator(mode="after")
    def _only_keys_with_an_effect(self) -> DistillationConfig:
        for key in ("weight", "temperature", "token_share"):
            if self.teacher is None and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect without a teacher; set teacher to a folder, or remove it")
        if self.weight == 0 and not self.selects_tokens:
            raise ValueError(
                "weight is 0, with which the teacher has an effect only if it selects tokens; raise weight, or lower "
                "token_share"
            )
        if self.weight == 0 and self.temperature != type(self).model_fields["temperature"].default:
            raise ValueError("temperature has no effect with weight 0; remove it")
        return self

    @property
    def selects_tokens(self) -> bool:
        """Returns True if the loss includes only some of the tokens."""
        return self.token_share < 1
