"""The settings of a task: the keys that act, their defaults, problems, metrics and model card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sansgpu.config.metrics import Metric

Values = dict[str, Any]

# Built-in datasets, made from the standard library: texts, triples, conversations.
PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT = (
    "python-stdlib", "python-stdlib-graph", "python-stdlib-chat",
)  # fmt: skip
SIMPLE_TEMPLATE = "simple"  # the built-in chat template
# Values that name something built in, in keys that otherwise take a path.
BUILT_IN_NAMES = (PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT, SIMPLE_TEMPLATE, "bpe", "char")

# Keys that have an effect only in tasks that name their group. All other keys act in every task.
KEY_GROUPS = {
    "decoder": """
        model.n_kv_heads model.pre_norm model.tie_embeddings model.rope_theta
        model.architecture model.norm model.bias model.positions model.qk_norm
        training.window_warmup_ratio
    """,
    "from scratch": """
        model.vocab_size model.d_model model.n_heads model.n_layers model.d_ff model.max_seq_len
        model.dropout model.attention_dropout model.activation
        data.tokenizer data.vocab_size data.tokenizer_sample_mb
    """,
    "texts": "data.text_column",
    "text generation": "training.label_smoothing training.z_loss training.sample_tokens training.sample_prompt",
    "graph": """
        model.leaves model.n_relations model.n_entities model.entity_rank
        model.position model.slot_embedding model.decay model.decay_base model.fusion
        model.relation_rank model.relation_dropout model.embedding_norm
        training.mlm_weight training.mnm_weight training.mnm_ramp_steps training.mnm_reduction training.sbo_weight
        training.entity_weight data.entity_query_ratio data.kge_triples data.long_tails
        data.triples data.inverse_relations data.leaf_mask_ratio data.min_leaf_groups
    """,
    "masking": "data.mask_ratio data.max_span",
    "windows": "data.doc_stride",
    "packing": "data.pack_sequences",
    "pretrained": "model.name_or_path model.revision model.trust_remote_code",
    "rows": "data.on_bad_row",
    "adapter": """
        model.adapter model.lora_rank model.lora_alpha model.lora_dropout model.lora_targets model.base_precision
        model.merge_adapter
    """,
    "conversations": "data.long_rows data.chat_template",
    "labels": "data.labels",
    "tags": "data.tag_column",
    "embeddings": """
        data.text_column data.text_pair_column data.label_column data.score_scale
        model.pooling training.embedding_loss training.matryoshka_dims
    """,
    "answers": """
        data.n_best_size data.max_answer_length data.null_answers data.null_score_diff_threshold
    """,
    "labeled texts": """
        data.text_column data.text_pair_column data.label_column data.label_kind data.class_weights
        training.label_smoothing training.few_shot
    """,
    "few-shot": "data.text_column data.label_column data.label_kind model.pooling training.few_shot",
}
_GROUPED = frozenset(key for keys in KEY_GROUPS.values() for key in keys.split())


def _no_problems(config: Any) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True)
class CardText:
    """Describes the models of a task in their model cards."""

    description: str  # completes "This is ..."
    pipeline_tag: str = ""  # pipeline tag of the Hugging Face Hub
    auto_class: str = ""  # suffix of the `AutoModelFor` class; "": transformers cannot load the model
    command: str = ""  # sansgpu command that uses the model, with the placeholder `MODEL`
    layout: str = ""  # layout of the weights of a model trained from scratch
    note: str = ""  # a sentence about its use
    library: str = ""  # Python library that loads the model, if it is not transformers


@dataclass(frozen=True)
class TaskSettings:
    """Declares a task's configuration, metrics and model card."""

    task: str  # value of the key `task`
    key_groups: tuple[str, ...]  # those of KEY_GROUPS that act
    defaults: Mapping[str, Values] = field(default_factory=dict)  # by section, where they differ from the schema's
    adapter_defaults: Mapping[str, Values] = field(default_factory=dict)  # in addition, with model.adapter
    problems: Callable[[Any], Iterable[str]] = _no_problems  # yields a clause for each inconsistency of a Config
    label: str = ""  # the configuration that selects the task, for messages. Default: `task`
    with_pretrained: str | None = None  # kind that replaces this one if model.name_or_path is set
    with_few_shot: str | None = None  # kind that replaces this one if training.few_shot is true
    varying_length: bool = True  # False if all examples are windows of equal length
    has_leaves: bool = False  # True if the tokens of an example have leaf slots
    metrics: tuple[Metric, ...] = ()  # all but the loss, in the order shown, with those of kinds that replace this one
    card: Callable[[Values], CardText] | None = None  # makes the card text from the section `model`

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(key for group in self.key_groups for key in KEY_GROUPS[group].split())

    def acts(self, key: str) -> bool:
        """Returns whether `section.key` has an effect."""
        return key not in _GROUPED or key in self.keys

    def default(self, section: str, key: str, otherwise: Any) -> Any:
        """Returns the default of a key, or the schema's default `otherwise`."""
        return self.defaults.get(section, {}).get(key, otherwise)

    @property
    def fine_tunes(self) -> bool:
        return "pretrained" in self.key_groups

    @property
    def shown(self) -> str:
        return self.label or self.task
