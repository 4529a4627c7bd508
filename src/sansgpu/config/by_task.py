"""What differs between tasks: the defaults of some keys, and which keys a task has at all."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

TASKS = PRETRAIN, SFT, QA = "pretrain", "sft", "qa"
FINE_TUNING = (SFT, QA)
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
DEFAULTS: dict[str, dict[str, Values]] = {
    PRETRAIN: {},
    SFT: {"training": {**_FINE_TUNED, "learning_rate": 2e-5}, "data": {"max_length": 1024}},
    QA: {"training": {**_FINE_TUNED, "learning_rate": 3e-5}, "data": {"max_length": 384}},
}

_KEYS: dict[tuple[str, ...], str] = {  # that not every task has
    (PRETRAIN,): """
        model.vocab_size model.d_model model.n_heads model.n_kv_heads model.n_layers model.d_ff model.max_seq_len
        model.dropout model.attention_dropout model.activation model.pre_norm model.tie_embeddings model.rope_theta
        training.window_warmup_ratio
        data.text_column data.tokenizer data.vocab_size data.tokenizer_sample_mb
    """,
    (PRETRAIN, SFT): "training.label_smoothing training.z_loss training.sample_tokens training.sample_prompt",
    FINE_TUNING: """
        model.name_or_path model.revision model.trust_remote_code model.adapter model.lora_rank model.lora_alpha
        model.lora_dropout model.lora_targets model.merge_adapter data.on_bad_row
    """,
    (SFT,): "data.long_rows data.chat_template",
    (QA,): """
        data.doc_stride data.n_best_size data.max_answer_length data.null_answers data.null_score_diff_threshold
    """,
}
_ONLY = {key: tasks for tasks, keys in _KEYS.items() for key in keys.split()}


def with_defaults(task: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the task's own defaults where nothing is given. Sections may be objects of the schema."""
    given = {**values}
    for section, defaults in DEFAULTS.get(task, {}).items():
        own = as_values(given.get(section))
        if section == "training" and task == SFT and as_values(given.get("model")).get("adapter", "none") != "none":
            defaults = {**defaults, "learning_rate": LORA_LEARNING_RATE}
        given[section] = {**defaults, **own}
    return given


def as_values(section: Any) -> Values:
    """A section of a file, or an object of the schema, as the keys that were given."""
    if section is None:
        return {}
    if hasattr(section, "model_dump"):
        return dict(section.model_dump(exclude_unset=True))
    return dict(section) if isinstance(section, dict) else {}


def default_of(task: str, section: str, key: str, otherwise: Any) -> Any:
    """What a key is in `task` where nothing is given; `otherwise` is the schema's default."""
    return DEFAULTS[task].get(section, {}).get(key, otherwise)


def tasks_with(key: str) -> tuple[str, ...]:
    """The tasks in which `section.key` acts."""
    return _ONLY.get(key, TASKS)
