"""The settings of the package's tasks. They stand here because a configuration is validated without importing torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sansgpu.config.architectures import ARCHITECTURES, architecture_name
from sansgpu.config.metrics import (
    CLASS_METRICS,
    EMBEDDING_METRICS,
    MASKED_METRICS,
    QUESTION_METRICS,
    TAG_METRICS,
    TEXT_METRICS,
)
from sansgpu.config.model import ModelConfig
from sansgpu.config.task_settings import PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, CardText, TaskSettings, Values

LORA_LEARNING_RATE = 2e-4  # ten times that of full fine-tuning, because the low-rank matrices start at zero
# Fine-tuning: small steps, no weight decay, AdamW as in pretraining, examples at full length.
_FINE_TUNED: Values = {
    "lr_scheduler": "linear",
    "warmup_steps": 10,
    "window_warmup_ratio": 0.0,
    "optimizer": "adamw",
    "weight_decay": 0.0,
    "beta2": 0.999,
}
# Few-shot classification: a run of seconds, evaluated at its end. Each epoch has few steps, because rows are few.
_FEW_SHOT: Values = {
    "learning_rate": 5e-5,
    "warmup_steps": 2,
    "gradient_accumulation_steps": 32,
    "num_epochs": 20,
    "eval_steps": 0,
}
_GRAPH_DATA: Values = {"dataset_name": PYTHON_STDLIB_GRAPH, "doc_stride": 0}
# Keys that have an effect only with fusion, an entity embedding or leaves.
_FUSION_KEYS = ("model.relation_rank", "model.relation_dropout")
_ENTITY_KEYS = ("model.entity_rank", "training.entity_weight", "data.entity_query_ratio", "data.kge_triples")
_LEAF_KEYS = (
    "model.n_relations", "model.slot_embedding", "model.fusion", *_FUSION_KEYS, "training.mnm_weight",
    "training.mnm_ramp_steps", "training.mnm_reduction", "data.triples", "data.inverse_relations",
    "data.leaf_mask_ratio", "data.min_leaf_groups", "data.long_tails", "model.n_entities", *_ENTITY_KEYS,
)  # fmt: skip


def _graph_problems(config: Any) -> Iterator[str]:
    """Yields a clause for each problem of task graph without a pretrained model."""
    model, data = config.model, config.data
    if model.activation not in ("gelu", "relu"):
        yield f"model.activation {model.activation} is only for decoders; set gelu or relu for a graph encoder"
    if data.dataset_name == PYTHON_STDLIB:
        yield "data.dataset_name python-stdlib has no triples; use python-stdlib-graph, or leave it out"
    if data.inverse_relations and data.dataset_name == PYTHON_STDLIB_GRAPH:
        yield "data.inverse_relations has no effect for python-stdlib-graph, whose tails have no text; leave it out"
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
    yield from _window_problems(config)


def _masking_problems(config: Any) -> Iterator[str]:
    """Yields a clause if nothing would be masked."""
    data, training = config.data, config.training
    if config.roots <= 2:
        yield f"data.max_length {config.roots} leaves no room for text between [CLS] and [SEP]; raise it"
    leaves = config.leaf_slots and (data.leaf_mask_ratio or data.min_leaf_groups) and training.mnm_weight
    has_queries = data.entity_query_ratio or data.kge_triples
    queries = config.leaf_slots and config.model.n_entities and has_queries and training.entity_weight
    if not (data.mask_ratio and training.mlm_weight) and not leaves and not queries:
        yield "the loss has no terms; raise data.mask_ratio or data.leaf_mask_ratio, and set its weight above 0"


def _window_problems(config: Any) -> Iterator[str]:
    """Yields a clause if examples are longer than the model's context."""
    if config.roots > config.model.max_seq_len:
        yield (
            f"data.max_length {config.roots} is longer than model.max_seq_len {config.model.max_seq_len}; "
            "lower it or raise model.max_seq_len"
        )


def fine_tuning_problems(config: Any, data: str = "rows") -> Iterator[str]:
    """Yields a clause if the pretrained model or the `data` are missing."""
    if config.model.name_or_path is None:
        yield f"task {config.task} fine-tunes a pretrained model; set model.name_or_path"
    if config.data.dataset_name == config.settings.default("data", "dataset_name", PYTHON_STDLIB):
        yield f"task {config.task} needs {data}; set data.dataset_name"


def _masked_lm_problems(config: Any) -> Iterator[str]:
    yield from _masking_problems(config)
    yield from fine_tuning_problems(config, "texts")


def _label_problems(config: Any) -> Iterator[str]:
    """Yields a clause for each problem of task classify."""
    yield from fine_tuning_problems(config)
    if config.data.label_kind in ("multiple", "regression"):
        keys = ("data.class_weights", "training.label_smoothing")
        yield from config.without_effect(keys, f"data.label_kind is {config.data.label_kind}")
    if config.data.label_kind != "regression":
        yield from _repeated_labels(config, "labels", 1 if config.data.label_kind == "multiple" else 2)


def _few_shot_problems(config: Any) -> Iterator[str]:
    """Yields a clause for each problem of task classify with training.few_shot."""
    yield from fine_tuning_problems(config)
    if config.data.label_kind in ("multiple", "regression"):
        yield (
            f"training.few_shot needs rows with one label each, but data.label_kind is {config.data.label_kind}; leave "
            "out training.few_shot, or set data.label_kind to single"
        )
    if config.model.merge_adapter is False:
        yield "training.few_shot fits a classifier to the merged model; set model.merge_adapter to true"
    if config.model.base_precision in ("int8", "int4"):
        yield "training.few_shot fits a classifier to the merged model; set model.base_precision to auto or bf16"
    yield from _repeated_labels(config, "labels", 2)


def _tag_problems(config: Any) -> Iterator[str]:
    """Yields a clause for each problem of task tokens."""
    yield from fine_tuning_problems(config)
    yield from _repeated_labels(config, "tags", 2)


def _repeated_labels(config: Any, what: str, least: int) -> Iterator[str]:
    """Yields a clause if data.labels names a label twice, or fewer than `least`."""
    labels = config.data.labels
    if labels is not None and len(set(labels)) < max(least, len(labels)):
        yield f"data.labels needs two {what} or more, each once; add the others, or leave it out"


_EVALUATE_TEXTS = "sansgpu eval MODEL --data TEXTS"
_CHAT = 'sansgpu chat MODEL --prompt "Hello!"'
_CLASSIFY = 'sansgpu predict MODEL --text "I liked it."'
_FIND = 'sansgpu predict MODEL --text "Ada Lovelace lived in London."'
_EMBED = "sansgpu embed MODEL --data TEXTS --output vectors.npy"
_ANSWER = 'sansgpu predict MODEL --question "Who wrote it?" --context "It was written by Ada."'


def _decoder_card(model: Values) -> CardText:
    return CardText(
        "a decoder that continues text, trained from scratch",
        "text-generation",
        "CausalLM",
        'sansgpu generate MODEL --prompt "Once"',
        ARCHITECTURES[str(architecture_name(model))].title,
        "In training, every document starts with the end-of-text token, so start prompts with `tokenizer.bos_token`.",
    )


def _graph_card(model: Values) -> CardText:
    if ModelConfig.model_validate(model).is_plain_bert:
        text = "an encoder of text, trained from scratch on masked tokens"
        return CardText(text, "fill-mask", "MaskedLM", _EVALUATE_TEXTS, "BERT")
    text = "an encoder of texts and triples, trained from scratch on masked tokens and leaves"
    return CardText(text, "feature-extraction", "", _EVALUATE_TEXTS, "sansgpu's own")


SETTINGS = {
    "pretrain": TaskSettings(
        "pretrain",
        ("decoder", "from scratch", "texts", "text generation", "packing"),
        problems=_window_problems,
        varying_length=False,
        metrics=TEXT_METRICS,
        card=_decoder_card,
    ),
    "graph": TaskSettings(
        "graph",
        ("from scratch", "texts", "graph", "masking", "windows", "rows"),
        defaults={
            "model": {"activation": "gelu", "max_seq_len": 128, "dropout": 0.1, "attention_dropout": 0.1},
            "training": {"window_warmup_ratio": 0.0, "lr_scheduler": "linear", "optimizer": "muon"},
            "data": _GRAPH_DATA,
        },
        problems=_graph_problems,
        with_pretrained="masked",
        has_leaves=True,
        metrics=MASKED_METRICS,
        card=_graph_card,
    ),
    "masked": TaskSettings(
        "graph",
        ("texts", "masking", "windows", "packing", "pretrained", "rows"),
        defaults={"training": {**_FINE_TUNED, "learning_rate": 5e-5}, "data": {**_GRAPH_DATA, "max_length": 128}},
        problems=_masked_lm_problems,
        label="graph with model.name_or_path",
        metrics=MASKED_METRICS,
        card=lambda model: CardText("an encoder fine-tuned on masked text", "fill-mask", "MaskedLM", _EVALUATE_TEXTS),
    ),
    "sft": TaskSettings(
        "sft",
        ("text generation", "packing", "pretrained", "rows", "adapter", "conversations"),
        defaults={"training": {**_FINE_TUNED, "learning_rate": 2e-5}, "data": {"max_length": 1024}},
        adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
        problems=fine_tuning_problems,
        metrics=TEXT_METRICS,
        card=lambda model: CardText("a decoder fine-tuned on conversations", "text-generation", "CausalLM", _CHAT),
    ),
    "qa": TaskSettings(
        "qa",
        ("windows", "packing", "pretrained", "rows", "adapter", "answers"),
        defaults={"training": {**_FINE_TUNED, "learning_rate": 3e-5}, "data": {"max_length": 384}},
        problems=fine_tuning_problems,
        metrics=QUESTION_METRICS,
        card=lambda model: CardText(
            "an encoder fine-tuned for extractive question answering",
            "question-answering",
            "QuestionAnswering",
            _ANSWER,
        ),
    ),
    "classify": TaskSettings(
        "classify",
        ("packing", "pretrained", "rows", "adapter", "labels", "labeled texts"),
        defaults={
            "training": {**_FINE_TUNED, "learning_rate": 3e-5},
            "data": {"max_length": 256, "validation_split": 0.1},
        },
        problems=_label_problems,
        with_few_shot="few_shot",
        metrics=CLASS_METRICS,
        card=lambda model: CardText(
            "an encoder fine-tuned to classify texts", "text-classification", "SequenceClassification", _CLASSIFY
        ),
    ),
    "few_shot": TaskSettings(
        "classify",
        ("packing", "pretrained", "rows", "adapter", "labels", "few-shot"),
        defaults={
            "training": {**_FINE_TUNED, **_FEW_SHOT},
            "data": {"max_length": 256, "validation_split": 0.1},
        },
        adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
        problems=_few_shot_problems,
        label="classify with training.few_shot",
        metrics=CLASS_METRICS,
        card=lambda model: CardText(
            "a classifier of texts, fine-tuned on pairs of labeled examples",
            "text-classification",
            command=_CLASSIFY,
            library="sentence-transformers",
        ),
    ),
    "tokens": TaskSettings(
        "tokens",
        ("windows", "packing", "pretrained", "rows", "adapter", "labels", "tags"),
        defaults={
            "training": {**_FINE_TUNED, "learning_rate": 5e-5},
            "data": {"max_length": 128, "doc_stride": 32, "validation_split": 0.1},
        },
        adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
        problems=_tag_problems,
        metrics=TAG_METRICS,
        card=lambda model: CardText(
            "an encoder fine-tuned to tag words", "token-classification", "TokenClassification", _FIND
        ),
    ),
    "embed": TaskSettings(
        "embed",
        ("packing", "pretrained", "rows", "adapter", "embeddings"),
        defaults={"training": {**_FINE_TUNED, "learning_rate": 2e-5}, "data": {"validation_split": 0.05}},
        adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
        problems=fine_tuning_problems,
        metrics=EMBEDDING_METRICS,
        card=lambda model: CardText(
            "a model that turns texts into vectors, so that texts of similar meaning have similar vectors",
            "sentence-similarity",
            "FeatureExtraction",
            _EMBED,
            library="sentence-transformers",
        ),
    ),
}
