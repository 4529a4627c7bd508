"""What differs between kinds of runs: the defaults of some keys, and which keys they have at all."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

# A task is a kind of run. `masked` is task graph where it goes on from a Hugging Face encoder, on text alone.
KINDS = PRETRAIN, GRAPH, MASKED, SFT, QA = "pretrain", "graph", "masked", "sft", "qa"
FINE_TUNING = (MASKED, SFT, QA)
RAGGED = (GRAPH, *FINE_TUNING)  # whose examples have lengths of their own
LORA_LEARNING_RATE = 2e-4  # low-rank matrices begin at zero, and take ten times the rate of whole ones

# Of a model that is trained already: small steps, no weight decay, AdamW as it was trained with, whole examples.
_FINE_TUNED: Values = {
    "lr_scheduler": "linear",
    "warmup_steps": 10,
    "window_warmup_ratio": 0.0,
    "optimizer": "adamw",
    "weight_decay": 0.0,
    "beta2": 0.999,
}
# Data that every machine has: texts, triples, conversations.
PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT = (
    "python-stdlib", "python-stdlib-graph", "python-stdlib-chat",
)  # fmt: skip
SIMPLE_TEMPLATE = "simple"  # the chat template that is ours
# Values of keys that else name files.
BUILT_IN_NAMES = (PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT, SIMPLE_TEMPLATE, "bpe", "char")
_GRAPH_DATA: Values = {"dataset_name": PYTHON_STDLIB_GRAPH, "doc_stride": 0}
DEFAULTS: dict[str, dict[str, Values]] = {
    PRETRAIN: {},
    GRAPH: {
        "model": {"activation": "gelu", "max_seq_len": 128, "dropout": 0.1, "attention_dropout": 0.1},
        "training": {"window_warmup_ratio": 0.0, "lr_scheduler": "linear", "optimizer": "muon"},  # whatever the batch
        "data": _GRAPH_DATA,
    },
    MASKED: {"training": {**_FINE_TUNED, "learning_rate": 5e-5}, "data": {**_GRAPH_DATA, "max_length": 128}},
    SFT: {"training": {**_FINE_TUNED, "learning_rate": 2e-5}, "data": {"max_length": 1024}},
    QA: {"training": {**_FINE_TUNED, "learning_rate": 3e-5}, "data": {"max_length": 384}},
}

_KEYS: dict[tuple[str, ...], str] = {  # that not every kind has
    (PRETRAIN,): """
        model.n_kv_heads model.pre_norm model.tie_embeddings model.rope_theta
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
    RAGGED: "data.on_bad_row",
    (SFT, QA): """
        model.adapter model.lora_rank model.lora_alpha model.lora_dropout model.lora_targets model.merge_adapter
    """,
    (SFT,): "data.long_rows data.chat_template",
    (QA,): """
        data.n_best_size data.max_answer_length data.null_answers data.null_score_diff_threshold
    """,
}
_ONLY = {key: kinds for kinds, keys in _KEYS.items() for key in keys.split()}


def kind_of(task: str, name_or_path: str | None) -> str:
    """What is made of a run: the task, or `masked` where task graph goes on from a model."""
    return MASKED if task == GRAPH and name_or_path is not None else task


def with_defaults(task: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the defaults of their kind where nothing is given. Sections may be objects of the schema.

    A section that is no mapping stays as it is, for the schema to refuse.
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
    """Whether this can be a section: keys and values, an object of the schema, or nothing, which gives no keys."""
    return value is None or isinstance(value, dict) or hasattr(value, "model_dump")


def as_values(section: Any) -> Values:
    """A section of a file, or an object of the schema, as the keys that were given."""
    if section is None:
        return {}
    if hasattr(section, "model_dump"):
        return dict(section.model_dump(exclude_unset=True))
    return dict(section) if isinstance(section, dict) else {}


def default_of(kind: str, section: str, key: str, otherwise: Any) -> Any:
    """What a key is in `kind` where nothing is given; `otherwise` is the schema's default."""
    return DEFAULTS[kind].get(section, {}).get(key, otherwise)


def label(kind: str) -> str:
    """A kind of run, as a person asks for it."""
    return f"{GRAPH} with model.name_or_path" if kind == MASKED else kind


def labels(kinds: tuple[str, ...], here: str) -> str:
    """Several kinds, as a person who has a run of kind `here` asks for them."""
    names = [label(kind) if GRAPH in (here, *kinds) else label(kind).split(" ")[0] for kind in kinds]
    return " and ".join(name for name in names if name != label(MASKED) or GRAPH not in kinds)


def kinds_with(key: str) -> tuple[str, ...]:
    """The kinds of runs in which `section.key` acts."""
    return _ONLY.get(key, KINDS)
