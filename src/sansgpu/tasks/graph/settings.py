"""The settings of task graph: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from sansgpu.config.data import DataConfig
from sansgpu.config.model import ModelConfig
from sansgpu.config.parse import Values
from sansgpu.config.paths import PYTHON_STDLIB, PYTHON_STDLIB_GRAPH
from sansgpu.config.schema import Config
from sansgpu.config.section import CHANGEABLE, CHANGES_LOSS, also_named
from sansgpu.config.tasks import CardText, Metric, TaskSettings, Variant, interval
from sansgpu.config.training import TrainingConfig
from sansgpu.tasks.settings import FINE_TUNED, fine_tuning_problems, window_problems

DEFAULT_LEAVES = 3  # leaf slots per token assumed until the data is read
MAX_LEAVES = 64
_COMMAND = "sansgpu eval MODEL --data TEXTS"
_GRAPH_DATA: Values = {"dataset_name": PYTHON_STDLIB_GRAPH, "doc_stride": 0}

# Keys that only have an effect with relation fusion, entity embeddings or leaves.
_FUSION_KEYS = ("model.relation_rank", "model.relation_dropout")
_ENTITY_KEYS = ("model.entity_rank", "training.entity_weight", "data.entity_query_ratio", "data.kge_triples")
_LEAF_KEYS = (
    "model.n_relations", "model.slot_embedding", "model.fusion", *_FUSION_KEYS, "training.mnm_weight",
    "training.mnm_ramp_steps", "training.mnm_reduction", "data.triples", "data.inverse_relations",
    "data.leaf_mask_ratio", "data.min_leaf_groups", "data.long_tails", "model.n_entities", *_ENTITY_KEYS,
)  # fmt: skip


class MaskedDataConfig(DataConfig):
    """The section `data` of encoders that learn masked tokens."""

    mask_ratio: float = Field(
        0.15,
        ge=0,
        lt=1,
        description="fraction of text tokens that are masked and predicted",
        json_schema_extra=also_named("mlm_probability"),
    )
    max_span: int | None = Field(
        None,
        ge=1,
        description="maximum length of a masked span in tokens; 1: mask single tokens. Default: model.leaves",
    )


class GraphDataConfig(MaskedDataConfig):
    """The section `data` of task graph."""

    triples: Literal["all", "first"] = Field(
        "all",
        description="what to do with several triples of the same head, since a window can contain only one of them; "
        "all: repeat the window for each triple; first: drop the others and report their number",
    )
    inverse_relations: bool = Field(
        False, description="also train on the inverse of each triple whose tail has a text in the data"
    )
    leaf_mask_ratio: float = Field(0.15, ge=0, le=1, description="fraction of triples whose tails are masked")
    min_leaf_groups: Literal[0, 1] = Field(
        0, description="minimum number of masked tails in each window that contains a tail"
    )
    entity_query_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="fraction of a knowledge graph's triples, resampled in each epoch, for which the model "
        "predicts the tail among all entities; the other triples show or mask the tail's tokens",
    )
    kge_triples: int = Field(
        4,
        ge=0,
        description="number of triples sampled per example for knowledge graph embedding, i.e. to predict the tail "
        "only from the embeddings of head and relation",
    )
    long_tails: Literal["refuse", "drop"] = Field(
        "refuse",
        description="what to do with training triples whose tail has more tokens than model.leaves; refuse: stop if "
        "they are more than 1% of all triples; drop: drop them and report their number",
        json_schema_extra=CHANGEABLE,
    )


class GraphTrainingConfig(TrainingConfig):
    """The section `training` of task graph."""

    mlm_weight: float = Field(
        1.0, ge=0, description="loss weight of masked text tokens", json_schema_extra=CHANGES_LOSS
    )
    mnm_weight: float = Field(1.0, ge=0, description="loss weight of masked leaves", json_schema_extra=CHANGES_LOSS)
    mnm_ramp_steps: int = Field(0, ge=0, description="steps in which mnm_weight rises from 0 to its value")
    mnm_reduction: Literal["separate", "pooled"] = Field(
        "separate",
        description="separate: add the mean loss over masked tokens to the mean loss over masked leaves; pooled: one "
        "mean over both",
    )
    entity_weight: float = Field(1.0, ge=0, description="loss weight of predicting a triple's tail among all entities")
    sbo_weight: float = Field(
        0.0,
        ge=0,
        description="loss weight of the span boundary objective (SpanBERT), which predicts masked spans from the "
        "tokens at their boundaries; 0: off",
    )


class GraphModelConfig(ModelConfig):
    """The section `model` of task graph."""

    leaves: int | None = Field(
        None,
        ge=0,
        le=MAX_LEAVES,
        description="leaf slots per text token, each for one token of a triple's tail; 0: train on text without "
        "triples. Default: enough for 99% of the tails in the data",
    )
    n_relations: int | None = Field(
        None, ge=1, description="number of relation embeddings. Default: the number of relations in the data"
    )
    n_entities: int | None = Field(
        None,
        ge=0,
        description="number of entity embeddings, which serve to predict a tail as a whole; 0: predict tails token by "
        "token. Default: the number of entities in a knowledge graph, 0 for documents",
    )
    entity_rank: int = Field(64, ge=1, description="dimension of the entity embeddings")
    position_embedding: Literal["none", "learned", "sinusoidal"] = Field(
        "none",
        description="position embedding; none: only the attention decay encodes the order of tokens, as in the paper "
        "(GraphMERT)",
    )
    slot_embedding: bool = Field(
        False,
        description="add an embedding of the leaf slot's number. Without it, as in the paper, the masked first and "
        "last tokens of a tail look the same to the model",
    )
    decay: Literal["multiply_logits", "additive_log", "none"] = Field(
        "multiply_logits",
        description="how attention decays with distance in the graph; multiply_logits: multiply the attention logits "
        "by the decay, as in the paper; additive_log: add the log of the decay to the logits, which lowers the "
        "attention to distant nodes",
    )
    decay_base: float = Field(
        0.6,
        gt=0,
        lt=1,
        description="base of the decay at distance d, decay_base ** GELU(sqrt(d + 1) - p), where p is learned",
    )
    fusion: Literal["hgat", "none"] = Field(
        "hgat",
        description="hgat: fuse the embeddings of a triple's head and relation into those of its tail, as in the paper",
    )
    relation_rank: int | None = Field(
        None,
        ge=1,
        description="rank of the relation matrices, for a low-rank factorization. Default: full d_model x d_model "
        "matrices",
    )
    relation_dropout: float = Field(0.3, ge=0, lt=1, description="dropout on relation matrices and vectors")
    embedding_norm: bool = Field(False, description="normalize embeddings before the first block, as BERT does")

    @property
    def leaf_slots(self) -> int:
        """Leaf slots per token, or a default before the data is known."""
        return DEFAULT_LEAVES if self.leaves is None else self.leaves

    @property
    def is_plain_bert(self) -> bool:
        """Returns True if a graph encoder is exactly BERT: text only, embedding norm and learned positions."""
        return (
            self.leaves == 0 and self.decay == "none" and self.position_embedding == "learned" and self.embedding_norm
        )

    def inconsistencies(self) -> Iterator[str]:
        yield from super().inconsistencies()
        if self.n_entities and self.d_model % 2:
            yield f"d_model {self.d_model} is odd, but entity embeddings need an even number"


def max_span(config: Config) -> int:
    """Returns the longest masked span in tokens."""
    return MaskedDataConfig.of(config).max_span or config.leaf_slots or 1


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
    if GraphModelConfig.model_validate(model).is_plain_bert:
        text = "an encoder of text, trained from scratch on masked tokens"
        return CardText(text, "fill-mask", "MaskedLM", _COMMAND, "BERT")
    text = "an encoder of text and triples, trained from scratch on masked tokens and leaves"
    return CardText(text, "feature-extraction", "", _COMMAND, "sansgpu's own")


MASKED = TaskSettings(
    "graph",
    ("texts", "windows", "packing", "pretrained", "rows"),
    sections=(MaskedDataConfig,),
    implementation="sansgpu.tasks.graph.masked_lm:MaskedLM",
    kind="masked",
    defaults={"training": {**FINE_TUNED, "learning_rate": 5e-5}, "data": {**_GRAPH_DATA, "max_length": 128}},
    problems=_masked_lm_problems,
    rows="graphs",
    label="graph with model.name_or_path",
    metrics=MASKED_METRICS,
    card=lambda model: CardText(
        "an encoder fine-tuned with masked language modeling", "fill-mask", "MaskedLM", _COMMAND
    ),
)

SETTINGS = TaskSettings(
    "graph",
    ("from scratch", "texts", "windows", "rows"),
    implementation="sansgpu.tasks.graph.task:Graph",
    description="train an encoder with masked language modeling, on text and the triples of a knowledge graph, or on "
    "text alone",
    sections=(GraphModelConfig, GraphTrainingConfig, GraphDataConfig),
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
    leaf_slots=lambda config: GraphModelConfig.of(config).leaf_slots,
    metrics=MASKED_METRICS,
    card=_graph_card,
)
