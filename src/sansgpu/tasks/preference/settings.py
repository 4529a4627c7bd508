"""The settings of task preference: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from sansgpu.config.tasks import CardText, Metric, Purpose, TaskSettings, Values, Variant, share
from sansgpu.tasks.settings import CHAT, FINE_TUNED, SMALL_CHAT_MODEL, fine_tuning_problems

# Defaults: a lower learning rate than in supervised fine-tuning, which usually comes before.
_PREFERENCE: Values = {**FINE_TUNED, "learning_rate": 1e-6}
PREFERENCE_LORA_LEARNING_RATE = 1e-5


PREFERENCE_KEYS = (
    "training.preference",
)  # fmt: skip


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
        ("samples", "packing", "pretrained", "rows", "adapter", "conversations"),
        own_keys=PREFERENCE_KEYS,
        implementation=implementation,
        kind=kind,
        variants=variants,
        defaults={"training": _PREFERENCE, "data": {"max_length": 1024, "validation_split": 0.1}},
        adapter_defaults={"training": {"learning_rate": PREFERENCE_LORA_LEARNING_RATE}},
        problems=fine_tuning_problems,
        rows="preferences",
        label=label,
        description="tune a chat model on preferences between answers",
        purpose=Purpose(
            "chat, tuned on preferences between answers",
            "chosen and rejected answers",
            SMALL_CHAT_MODEL,
            is_decoder=True,
        ),
        metrics=PREFERENCE_METRICS,
        card=lambda model: CardText(
            "a decoder tuned on preferences between answers", "text-generation", "CausalLM", CHAT
        ),
    )


KTO = _declared("sansgpu.tasks.preference.task:KTO", kind="kto", label="preference with training.preference.loss kto")
SETTINGS = _declared("sansgpu.tasks.preference.task:Preference", (Variant("training.preference.loss", "kto", KTO),))
