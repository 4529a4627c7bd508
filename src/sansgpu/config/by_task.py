"""Defaults and available configuration keys of each kind of run."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

# Each task is a kind of run. `masked` is task graph with `model.name_or_path`: it fine-tunes a Hugging Face encoder on
# text without triples.
KINDS = PRETRAIN, GRAPH, MASKED, SFT, QA = "pretrain", "graph", "masked", "sft", "qa"
FINE_TUNING = (MASKED, SFT, QA)
VARIABLE_LENGTH = (GRAPH, *FINE_TUNING)  # kinds whose examples differ in length
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
# Built-in datasets, made from the standard library: texts, triples, conversations.
PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT = (
    "python-stdlib", "python-stdlib-graph", "python-stdlib-chat",
)  # fmt: skip
SIMPLE_TEMPLATE = "simple"  # the built-in chat template
# Values that name something built in, in keys that otherwise take a path.
BUILT_IN_NAMES = (PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT, SIMPLE_TEMPLATE, "bpe", "char")
_GRAPH_DATA: Values = {"dataset_name": PYTHON_STDLIB_GRAPH, "doc_stride": 0}
DEFAULTS: dict[str, dict[str, Values]] = {
    PRETRAIN: {},
    GRAPH: {
        "model": {"activation": "gelu", "max_seq_len": 128, "dropout": 0.1, "attention_dropout": 0.1},
        "training": {"window_warmup_ratio": 0.0, "lr_scheduler": "linear", "optimizer": "muon"},  # at every batch size
        "data": _GRAPH_DATA,
    },
    MASKED: {"training": {**_FINE_TUNED, "learning_rate": 5e-5}, "data": {**_GRAPH_DATA, "max_length": 128}},
    SFT: {"training": {**_FINE_TUNED, "learning_rate": 2e-5}, "data": {"max_length": 1024}},
    QA: {"training": {**_FINE_TUNED, "learning_rate": 3e-5}, "data": {"max_length": 384}},
}

_KEYS: dict[tuple[str, ...], str] = {  # keys that only some kinds have
    (PRETRAIN,): """
        model.n_kv_heads model.pre_norm model.tie_embeddings model.rope_theta
        model.architecture model.norm model.bias model.positions model.qk_norm
        training.window_warmup_ratio
    """,
    (PRETRAIN, GRAPH): """
        model.vocab_size model.d_model model.n_heads model.n_layers model.d_ff model.max_seq_len
        model.dropout model.attention_dropout model.activation
        data.tokenizer data.vocab_size data.tokenizer_sample_mb
    """,
    (PRETRAIN, GRAPH, MASKED): "data.text_column",
    (PRETRAIN, SFT): "training.label_smoothing training.z_loss training.sample_tokens training.sample_prompt",
    (GRAPH,): """
        model.leaves model.n_relations model.n_entities model.entity_rank
        model.position model.slot_embedding model.decay model.decay_base model.fusion
        model.relation_rank model.relation_dropout model.embedding_norm
        training.mlm_weight training.mnm_weight training.mnm_ramp_steps training.mnm_reduction training.sbo_weight
        training.entity_weight data.entity_query_ratio data.kge_triples data.long_tails
        data.triples data.inverse_relations data.leaf_mask_ratio data.min_leaf_groups
    """,
    (GRAPH, MASKED): "data.mask_ratio data.max_span",
    (GRAPH, MASKED, QA): "data.doc_stride",
    (PRETRAIN, MASKED, SFT, QA): "data.pack_sequences",
    FINE_TUNING: "model.name_or_path model.revision model.trust_remote_code",
    VARIABLE_LENGTH: "data.on_bad_row",
    (SFT, QA): """
        model.adapter model.lora_rank model.lora_alpha model.lora_dropout model.lora_targets model.merge_adapter
    """,
    (SFT,): "data.long_rows data.chat_template",
    (QA,): """
        data.n_best_size data.max_answer_length data.null_answers data.null_score_diff_threshold
    """,
}
_KINDS_OF_KEY = {key: kinds for kinds, keys in _KEYS.items() for key in keys.split()}


def kind_of(task: str, name_or_path: str | None) -> str:
    """Returns the task, or `masked` for task graph with a pretrained model."""
    return MASKED if task == GRAPH and name_or_path is not None else task


def with_defaults(task: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns `values` with the defaults of their kind of run for missing keys.

    Sections may be mappings or schema objects. Any other section is returned unchanged, for validation to reject.
    """
    given, model = {**values}, as_values(values.get("model"))
    for section, defaults in DEFAULTS.get(kind_of(task, model.get("name_or_path")), {}).items():
        if not is_section(given.get(section)):
            continue
        own = as_values(given.get(section))
        if section == "training" and task == SFT and model.get("adapter", "none") != "none":
            defaults = {**defaults, "learning_rate": LORA_LEARNING_RATE}
        given[section] = {**defaults, **own}
    return given


def is_section(value: Any) -> bool:
    """Returns True for a mapping, a schema object or None, which is an empty section."""
    return value is None or isinstance(value, dict) or hasattr(value, "model_dump")


def as_values(section: Any) -> Values:
    """Returns the keys that were set explicitly in a section: a mapping or a schema object."""
    if section is None:
        return {}
    if hasattr(section, "model_dump"):
        return dict(section.model_dump(exclude_unset=True))
    return dict(section) if isinstance(section, dict) else {}


def default_of(kind: str, section: str, key: str, otherwise: Any) -> Any:
    """Returns the default of a key for `kind`, or the schema's default `otherwise`."""
    return DEFAULTS[kind].get(section, {}).get(key, otherwise)


def label(kind: str) -> str:
    """Returns the configuration that selects a kind of run, for messages."""
    return f"{GRAPH} with model.name_or_path" if kind == MASKED else kind


def labels(kinds: tuple[str, ...], here: str) -> str:
    """Joins the labels of several kinds, for a message about a run of kind `here`."""
    names = [label(kind) if GRAPH in (here, *kinds) else label(kind).split(" ")[0] for kind in kinds]
    return " and ".join(name for name in names if name != label(MASKED) or GRAPH not in kinds)


def kinds_with(key: str) -> tuple[str, ...]:
    """Returns the kinds of runs that use `section.key`."""
    return _KINDS_OF_KEY.get(key, KINDS)
