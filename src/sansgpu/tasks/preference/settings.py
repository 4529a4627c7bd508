"""The settings of task preference: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sansgpu.config.section import CHANGES_LOSS, FIXED, Section, also_named
from sansgpu.config.tasks import CardText, Metric, Purpose, TaskSettings, Variant, share
from sansgpu.config.training import TrainingConfig
from sansgpu.tasks.settings import CHAT_COMMAND, FINE_TUNED, SMALL_CHAT_MODEL, fine_tuning_problems

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
        json_schema_extra=FIXED | CHANGES_LOSS | also_named("loss_type", "pref_loss"),
    )
    beta: float | None = Field(
        None,
        gt=0,
        description="scale of the rewards; dpo, dpo_norm, ipo, kto: larger values keep the model closer to the "
        "reference model; orpo: weight of the odds ratio loss. Default: 0.1; simpo: 2; dpo_norm: 5",
        json_schema_extra=CHANGES_LOSS | also_named("pref_beta"),
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="dpo, dpo_norm, simpo: assumed fraction of pairs whose chosen and rejected answers are swapped",
        json_schema_extra=CHANGES_LOSS,
    )
    gamma: float = Field(
        1.0,
        ge=0,
        description="simpo: target margin between the rewards of the chosen and the rejected answer",
        json_schema_extra=CHANGES_LOSS,
    )
    desirable_weight: float = Field(
        1.0, gt=0, description="kto: loss weight of good answers", json_schema_extra=CHANGES_LOSS
    )
    undesirable_weight: float = Field(
        1.0, gt=0, description="kto: loss weight of bad answers", json_schema_extra=CHANGES_LOSS
    )

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


class PreferenceTrainingConfig(TrainingConfig):
    """The section `training` of task preference."""

    preference: PreferenceConfig = Field(default_factory=PreferenceConfig, description="loss of task preference")


PREFERENCE_METRICS = (
    share("accuracy", short="accuracy"),
    Metric("margin", "reward margin", better="higher"),
    Metric("chosen_reward", "chosen", within="margin", better="higher"),
    Metric("rejected_reward", "rejected", within="margin"),
    Metric("nll", "loss per token of the chosen answers", unit="nats"),
    Metric("kl", "KL divergence", unit="nats"),
    Metric("examples", form="{:,.0f}", text="{value} {label}", reported=False),
)


def _declared(implementation: str, variants: tuple[Variant, ...] = (), kind: str = "", label: str = "") -> TaskSettings:
    return TaskSettings(
        "preference",
        (
            "samples",
            "packing",
            "pretrained",
            "rows",
            "adapter",
            "trained layers",
            "kept activations",
            "chat template",
            "long rows",
        ),
        sections=(PreferenceTrainingConfig,),
        implementation=implementation,
        kind=kind,
        variants=variants,
        defaults={
            # Lower than in supervised fine-tuning, which usually comes before.
            "training": {**FINE_TUNED, "learning_rate": 1e-6},
            "data": {"max_length": 1024, "validation_split": 0.1},
        },
        adapter_defaults={"training": {"learning_rate": 1e-5}},
        problems=fine_tuning_problems,
        rows="preferences",
        label=label,
        description="tune a chat model on preferences between answers",
        purpose=Purpose(
            "An assistant that people prefer",
            "chat, tuned on preferences between answers",
            "chosen and rejected answers",
            SMALL_CHAT_MODEL,
            is_decoder=True,
        ),
        metrics=PREFERENCE_METRICS,
        card=lambda model: CardText(
            "a decoder tuned on preferences between answers", "text-generation", "CausalLM", CHAT_COMMAND
        ),
    )


KTO = _declared("sansgpu.tasks.preference.task:KTO", kind="kto", label="preference with training.preference.loss kto")
SETTINGS = _declared("sansgpu.tasks.preference.task:Preference", (Variant("training.preference.loss", "kto", KTO),))
