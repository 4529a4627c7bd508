"""The metrics of a task: their names in events, and how reports and the terminal show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """A metric in the eval events of a task. With the defaults, it is shown as a plain number."""

    name: str  # key in events
    label: str = ""  # default: the name in words
    form: str = "{:.4f}"  # format of the value in the terminal and the live view
    text: str = "{label} {value}"  # template of the terminal; may name other keys of the event; "": not shown there
    within: str = ""  # name of the metric in whose parentheses the terminal shows this one
    unit: str = ""  # unit of the values in reports
    scale: float = 1.0  # factor from the value in events to the unit
    better: Literal["lower", "higher"] = "lower"
    short: str = ""  # label of the current value in step lines and the live view; "": not shown there
    reported: bool = True  # whether reports, plots and model cards show it
    plotted: bool = True  # False if its curve has the shape of the loss
    baseline: str = ""  # name of the metric that a predictor without a model reaches
    remedies: tuple[str, ...] = ()  # keys to double if the metric stays near its baseline

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))

    @property
    def title(self) -> str:
        """The label for reports, with the unit if it is per cent."""
        return f"{self.label} (%)" if self.unit == "%" else self.label

    def number(self, value: Any) -> float | None:
        """Converts a value of an event to the metric's unit. Returns None if it is not a number."""
        return self.scale * value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def words(self, event: Mapping[str, Any]) -> str:
        """Returns the text of an event's value for the terminal."""
        if event[self.name] is None:
            return f"{self.label} not finite"
        return self.text.format(**{**event, "label": self.label, "value": self.form.format(event[self.name])})


def percentage(name: str, label: str, short: str = "") -> Metric:
    """Describes a score that events record in per cent."""
    return Metric(name, label, "{:.2f} %", unit="%", better="higher", short=short)


def _interval(name: str, within: str) -> Metric:
    return Metric(name, "95 % interval", "{0[0]:.1%} to {0[1]:.1%}", within=within, reported=False)


def accuracy(
    stem: str, target: str, targets: str, short: str = "", remedies: tuple[str, ...] = ()
) -> tuple[Metric, ...]:
    """Describes `stem`_acc, the share of correct targets, and the metrics that the terminal shows beside it."""
    name, right = f"{stem}_acc", f"{{value}} of {{{stem}_count:,.0f}} {targets} correct"
    return (
        Metric(f"{stem}_loss", f"{target} loss", text="loss {value}", within=name, unit="nats"),
        Metric(
            name,
            f"{target} accuracy",
            "{:.1%}",
            right,
            unit="%",
            scale=100.0,
            better="higher",
            short=short,
            baseline=f"{stem}_majority_acc",
            remedies=("training.learning_rate", *remedies),
        ),
        Metric(f"{stem}_hits", text="", reported=False),
        Metric(f"{stem}_count", text="", reported=False),
        _interval(f"{stem}_interval", name),
        Metric(f"{stem}_majority_acc", "", "{:.1%}", "majority baseline: {value}", within=name, reported=False),
    )


LOSS = Metric("loss")  # every task has it
BITS_PER_BYTE = Metric("bits_per_byte", text="{value} {label}", short="bits per byte")  # comparable across vocabularies
TEXT_METRICS = (
    Metric("perplexity", form="{:.2f}", plotted=False),
    BITS_PER_BYTE,
    Metric("kl", "KL divergence from the teacher", short="KL"),  # in training, with training.distillation
)


def _ranking(side: str, prefix: str, label: str, short: str = "") -> tuple[Metric, ...]:
    """Describes the mean reciprocal rank of the true tails or heads of sampled triples, other true ones left out."""
    mrr, frequency = f"{prefix}mrr", f"{prefix}relation_frequency_mrr"
    return (
        Metric(
            mrr,
            label,
            "{:.3f}",
            f"filtered MRR {{value}} of {{{prefix}queries:,.0f}} {side}s of the validation split",
            better="higher",
            short=short,
            baseline=frequency,
            remedies=("training.learning_rate", "training.entity_weight", "data.kge_triples"),
        ),
        Metric(
            f"{prefix}hits_at_1",
            "Hits@1" if side == "tail" else f"Hits@1 of {side}s",
            "{:.1%}",
            "Hits@1 {value}",
            within=mrr,
            unit="%",
            scale=100.0,
            better="higher",
        ),
        Metric(frequency, "", "{:.3f}", "ranked by frequency: {value}", within=mrr, reported=False),
        Metric(f"{prefix}queries", text="", reported=False),
    )


MASKED_METRICS = (
    *_ranking("tail", "", "filtered MRR", "MRR"),
    *_ranking("head", "head_", "filtered MRR of heads"),
    *accuracy("mlm", "masked token", "masked tokens", "masked tokens", ("training.mlm_weight",)),
    *accuracy("mnm", "masked leaf", "masked leaves", "masked leaves", ("training.mnm_weight",)),
    *accuracy("entity", "entity", "unfiltered entity queries"),
    *accuracy("tail", "whole tail", "whole tails"),
)
EMBEDDING_METRICS = (
    Metric("spearman", "Spearman correlation", better="higher", short="Spearman"),
    Metric("pearson", "Pearson correlation", better="higher"),
    Metric("mrr", "MRR", better="higher", short="MRR"),
    Metric("ndcg_at_10", "NDCG@10", better="higher"),
    Metric("rows", form="{:,.0f}", text="{value} {label}", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
)
QUESTION_METRICS = (
    percentage("exact_match", "exact match", "exact match"),
    percentage("f1", "F1", "F1"),
    Metric("questions", form="{:.0f}", text="{value} {label}", reported=False),
    Metric("answerable", form="{:.0f}", text="{value} {label}", reported=False),
    Metric("unanswerable", form="{:.0f}", text="{value} not", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
    percentage("no_answer_exact_match", "no answer exact match"),
    percentage("has_answer_exact_match", "has answer exact match"),
    percentage("has_answer_f1", "has answer F1"),
)


def _share(name: str, label: str = "", short: str = "", within: str = "") -> Metric:
    """Describes a score between 0 and 1 that is shown in per cent."""
    return Metric(name, label, "{:.1%}", unit="%", scale=100.0, better="higher", short=short, within=within)


CLASS_METRICS = (
    _share("accuracy", short="accuracy"),
    _interval("accuracy_interval", "accuracy"),
    _share("macro_f1", "macro F1"),
    _share("micro_f1", "micro F1"),
    Metric("matthews", "Matthews correlation", better="higher"),
    Metric("spearman", "Spearman correlation", better="higher", short="Spearman"),
    Metric("pearson", "Pearson correlation", better="higher"),
    Metric("rows", form="{:,.0f}", text="{value} {label}", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
)
TAG_METRICS = (
    _share("entity_f1", "entity F1", "entity F1"),
    _share("entity_precision", "precision", within="entity_f1"),
    _share("entity_recall", "recall", within="entity_f1"),
    _share("accuracy", "accuracy"),
    Metric("words", form="{:,.0f}", text="{value} {label}", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
)
PREFERENCE_METRICS = (
    _share("accuracy", short="accuracy"),
    Metric("margin", "reward margin", better="higher"),
    Metric("chosen_reward", "chosen", within="margin", better="higher"),
    Metric("rejected_reward", "rejected", within="margin"),
    Metric("nll", "loss of the chosen answers per token", unit="nats"),
    Metric("kl", "KL divergence", unit="nats"),
    Metric("examples", form="{:,.0f}", text="{value} {label}", reported=False),
)
