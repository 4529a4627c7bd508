"""The settings of task graph: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sansgpu.config.model import ModelConfig
from sansgpu.config.tasks import (
    PYTHON_STDLIB,
    PYTHON_STDLIB_GRAPH,
    CardText,
    Metric,
    TaskSettings,
    Values,
    Variant,
    interval,
)
from sansgpu.tasks.settings import EVALUATE_TEXTS, FINE_TUNED, fine_tuning_problems, window_problems

_GRAPH_DATA: Values = {"dataset_name": PYTHON_STDLIB_GRAPH, "doc_stride": 0}

# Keys that only have an effect with relation fusion, entity embeddings or leaves.
_FUSION_KEYS = ("model.relation_rank", "model.relation_dropout")
_ENTITY_KEYS = ("model.entity_rank", "training.entity_weight", "data.entity_query_ratio", "data.kge_triples")
_LEAF_KEYS = (
    "model.n_relations", "model.slot_embedding", "model.fusion", *_FUSION_KEYS, "training.mnm_weight",
    "training.mnm_ramp_steps", "training.mnm_reduction", "data.triples", "data.inverse_relations",
    "data.leaf_mask_ratio", "data.min_leaf_groups", "data.long_tails", "model.n_entities", *_ENTITY_KEYS,
)  # fmt: skip


GRAPH_KEYS = (
    "model.leaves", "model.n_relations", "model.n_entities", "model.entity_rank", "model.position",
    "model.slot_embedding", "model.decay", "model.decay_base", "model.fusion", "model.relation_rank",
    "model.relation_dropout", "model.embedding_norm", "training.mlm_weight", "training.mnm_weight",
    "training.mnm_ramp_steps", "training.mnm_reduction", "training.sbo_weight", "training.entity_weight",
    "data.entity_query_ratio", "data.kge_triples", "data.long_tails", "data.triples", "data.inverse_relations",
    "data.leaf_mask_ratio", "data.min_leaf_groups",
)  # fmt: skip


def accuracy(
    stem: str, target: str, targets: str, short: str = "", remedies: tuple[str, ...] = ()
) -> tuple[Metric, ...]:
    """Describes `stem`_acc, the share of correct targets, and the metrics that the terminal shows next to it."""
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
        interval(f"{stem}_interval", name),
        Metric(f"{stem}_majority_acc", "", "{:.1%}", "majority baseline: {value}", within=name, reported=False),
    )


def _ranking(side: str, prefix: str, label: str, short: str = "") -> tuple[Metric, ...]:
    """Describes the filtered mean reciprocal rank of the true tails or heads of sampled triples."""
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


def _graph_problems(config: Any) -> Iterator[str]:
    """Yields a message for each invalid setting of task graph without a pretrained model."""
    model, data = config.model, config.data
    if model.activation not in ("gelu", "relu"):
        yield f"model.activation {model.activation} is only for decoders; set it to gelu or relu"
    if data.dataset_name == PYTHON_STDLIB:
        yield "data.dataset_name python-stdlib has no triples; set it to python-stdlib-graph"
    if data.inverse_relations and data.dataset_name == PYTHON_STDLIB_GRAPH:
        yield "data.inverse_relations has no effect for python-stdlib-graph, whose tails have no text; remove it"
    without = {
        "model.leaves is 0": (model.leaves == 0, _LEAF_KEYS),
        "model.n_entities is 0": (model.n_entities == 0, _ENTITY_KEYS),
        "model.fusion is none": (model.fusion == "none", _FUSION_KEYS),
        "model.decay is none": (model.decay == "none", ("model.decay_base",)),
    }
    for reason, (missing, keys) in without.items():
        if missing:
            yield from config.without_effect(keys, reason)
    yield from _masking_problems(config)
    yield from window_problems(config)


def _masking_problems(config: Any) -> Iterator[str]:
    """Yields a message if the settings mask nothing."""
    data, training = config.data, config.training
    if config.roots <= 2:
        yield f"data.max_length {config.roots} leaves no room for text between the tokens [CLS] and [SEP]; raise it"
    leaves = config.leaf_slots and (data.leaf_mask_ratio or data.min_leaf_groups) and training.mnm_weight
    has_queries = data.entity_query_ratio or data.kge_triples
    queries = config.leaf_slots and config.model.n_entities and has_queries and training.entity_weight
    if not (data.mask_ratio and training.mlm_weight) and not leaves and not queries:
        yield (
            "there is nothing to predict; raise data.mask_ratio or data.leaf_mask_ratio, and set the weight of its "
            "loss above 0"
        )


def _masked_lm_problems(config: Any) -> Iterator[str]:
    yield from _masking_problems(config)
    yield from fine_tuning_problems(config, "texts")


def _graph_card(model: Values) -> CardText:
    if ModelConfig.model_validate(model).is_plain_bert:
        text = "an encoder of text, trained from scratch on masked tokens"
        return CardText(text, "fill-mask", "MaskedLM", EVALUATE_TEXTS, "BERT")
    text = "an encoder of text and triples, trained from scratch on masked tokens and leaves"
    return CardText(text, "feature-extraction", "", EVALUATE_TEXTS, "sansgpu's own")


MASKED = TaskSettings(
    "graph",
    ("texts", "masking", "windows", "packing", "pretrained", "rows"),
    implementation="sansgpu.tasks.graph.masked_lm:MaskedLM",
    kind="masked",
    defaults={"training": {**FINE_TUNED, "learning_rate": 5e-5}, "data": {**_GRAPH_DATA, "max_length": 128}},
    problems=_masked_lm_problems,
    rows="graphs",
    label="graph with model.name_or_path",
    metrics=MASKED_METRICS,
    card=lambda model: CardText(
        "an encoder fine-tuned with masked language modeling", "fill-mask", "MaskedLM", EVALUATE_TEXTS
    ),
)

SETTINGS = TaskSettings(
    "graph",
    ("from scratch", "texts", "masking", "windows", "rows"),
    implementation="sansgpu.tasks.graph.task:Graph",
    description="train an encoder with masked language modeling, on text and the triples of a knowledge graph, or on "
    "text alone",
    own_keys=GRAPH_KEYS,
    variants=(Variant("model.name_or_path", None, MASKED),),
    defaults={
        "model": {"activation": "gelu", "max_seq_len": 128, "dropout": 0.1, "attention_dropout": 0.1},
        "training": {
            "window_warmup_ratio": 0.0,
            "lr_scheduler": "linear",
            "warmup_steps": 50,
            "optimizer": "muon",
            "muon_momentum_start": 0.95,
            "muon_embedding_rate": 1.0,
        },
        "data": _GRAPH_DATA,
    },
    problems=_graph_problems,
    rows="graphs",
    has_leaves=True,
    metrics=MASKED_METRICS,
    card=_graph_card,
)
