"""The configuration schema: type, default and description of every key. Help, docs and errors are generated from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from sansgpu.config.by_task import (
    FINE_TUNING,
    GRAPH,
    MASKED,
    PRETRAIN,
    PYTHON_STDLIB,
    PYTHON_STDLIB_GRAPH,
    as_values,
    default_of,
    is_section,
    kind_of,
    kinds_with,
    label,
    labels,
    with_defaults,
)
from sansgpu.config.model import ModelConfig
from sansgpu.config.section import Section
from sansgpu.config.training import Device, TrainingConfig

# Keys of task graph that have an effect only with fusion, an entity embedding or leaves.
_FUSION_KEYS = ("model.relation_rank", "model.relation_dropout")
_ENTITY_KEYS = ("model.entity_rank", "training.entity_weight", "data.entity_query_ratio", "data.kge_triples")
_LEAF_KEYS = (
    "model.n_relations", "model.slot_embedding", "model.fusion", *_FUSION_KEYS, "training.mnm_weight",
    "training.mnm_ramp_steps", "training.mnm_reduction", "data.triples", "data.inverse_relations",
    "data.leaf_mask_ratio", "data.min_leaf_groups", "data.long_tails", "model.n_entities", *_ENTITY_KEYS,
)  # fmt: skip
TOP_LEVEL_KEYS = ("device", "force_cpu")  # keys of `training` that a file may also set at the top level
_SECTIONS = ("model", "training", "data")  # an empty one, e.g. `data:` alone, is null in YAML


class DataConfig(Section):
    """The data, and how it is tokenized, masked and split into windows."""

    dataset_name: str = Field(
        PYTHON_STDLIB,
        description="a Hugging Face dataset, a local file or folder, or the built-in `python-stdlib`, "
        "`python-stdlib-graph` or `python-stdlib-chat`",
    )
    dataset_config: str | None = Field(None, description="configuration of a Hugging Face dataset")
    validation_name: str | None = Field(None, description="validation dataset, with the same options as dataset_name")
    text_column: str | None = Field(
        None, description="column with the text. Default: `text`, `content` or the only column"
    )
    tokenizer: str = Field("bpe", description="bpe, char, a tokenizer.json or a Hugging Face tokenizer")
    vocab_size: int = Field(8192, ge=257, description="vocabulary size of a new bpe tokenizer")
    tokenizer_sample_mb: int = Field(32, ge=1, description="megabytes of text to train a new tokenizer on")
    max_length: int | None = Field(
        None,
        ge=2,
        description="tokens per window, without leaves; for sft and qa the longest example. Default: model.max_seq_len",
    )
    pack_sequences: bool = Field(
        True,
        description="pack several documents or examples into a window without padding; attention does not cross their "
        "boundaries",
    )
    long_rows: Literal["truncate", "drop"] = Field(
        "truncate", description="rows longer than max_length; truncate: keep the end; drop: leave them out"
    )
    chat_template: str | None = Field(
        None,
        description="file with a Jinja chat template, or `simple` for a built-in one. Default: the model's own "
        "template",
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail", description="fail: stop at the first invalid row; skip: leave invalid rows out and report their number"
    )
    triples: Literal["all", "first"] = Field(
        "all",
        description="heads with several triples, of which a window can contain only one; all: repeat the window for "
        "each triple; first: drop the others and report their number",
    )
    inverse_relations: bool = Field(
        False, description="also train on the inverse of each triple if the data has a text for its tail"
    )
    mask_ratio: float = Field(0.15, ge=0, lt=1, description="fraction of text tokens that are masked and predicted")
    max_span: int | None = Field(
        None, ge=1, description="longest masked span in tokens; 1: single tokens. Default: model.leaves"
    )
    leaf_mask_ratio: float = Field(0.15, ge=0, le=1, description="fraction of triples whose tails are masked")
    min_leaf_groups: Literal[0, 1] = Field(0, description="minimum number of masked tails per window that has a tail")
    entity_query_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="fraction of a knowledge graph's triples, drawn in each epoch, that predict the tail among all "
        "entities; the other triples show or mask the tail's tokens",
    )
    kge_triples: int = Field(
        4,
        ge=0,
        description="knowledge graph embedding: triples sampled per example whose tail is predicted only from the "
        "embeddings of head and relation, without text",
    )
    long_tails: Literal["refuse", "drop"] = Field(
        "refuse",
        description="training triples whose tail has more tokens than model.leaves; refuse: stop if they exceed 1 % of "
        "all; drop: leave them out and report their number",
    )
    doc_stride: int = Field(128, ge=0, description="tokens that consecutive windows of a long context share")
    n_best_size: int = Field(20, ge=1, description="number of best candidate answers to consider per question")
    max_answer_length: int = Field(30, ge=1, description="longest answer in tokens")
    null_answers: bool | None = Field(
        None, description="allow questions without an answer. Default: true if the training split has any"
    )
    null_score_diff_threshold: float = Field(
        0.0, description="predict no answer if its score exceeds the best answer's by more than this"
    )
    preprocessing_num_workers: int = Field(2, ge=1, description="tokenizer threads")
    cache_dir: str | None = Field(None, description="cache folder for tokenized data. Default: ~/.cache/sansgpu")
    validation_split: float = Field(
        0.01, gt=0, lt=1, description="fraction of tokens held out if the data has no validation split"
    )


class Config(Section):
    """The configuration of one run. A file may also set `TOP_LEVEL_KEYS` at the top level."""

    task: Literal["pretrain", "graph", "sft", "qa"] = Field(
        "pretrain",
        description="pretrain: train a decoder from scratch; graph: train an encoder of texts and triples, or of texts "
        "only; sft: supervised fine-tuning on conversations; qa: extractive question answering",
    )
    objective: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="`package.module:Class` that implements the task, a subclass of the built-in class",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @model_validator(mode="before")
    @classmethod
    def _move_top_level_device(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(sampling := values.get("sampling"), dict) and sampling.get("stream"):
            raise ValueError(
                "sampling.stream is not supported in training, because a streamed sample cannot be reproduced; "
                "remove it, and use `sansgpu generate` or `sansgpu chat` to stream"
            )
        values = {key: value for key, value in values.items() if value is not None or key not in _SECTIONS}
        top = {key: values[key] for key in TOP_LEVEL_KEYS if key in values}
        rest = {key: value for key, value in values.items() if key not in top}
        training = as_values(rest.get("training"))
        if top and is_section(rest.get("training")):
            clash = [key for key in top if training.get(key, top[key]) != top[key]]
            if clash:
                raise ValueError(f"{clash[0]} has different values at the top level and in training; remove one")
            rest["training"] = {**training, **top}
        return with_defaults(str(rest.get("task", PRETRAIN)), rest)

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        found = [
            *self._unused_keys(),
            *(self._graph_problems() if self.kind == GRAPH else ()),
            *self._masking_problems(),
        ]
        if self.kind in FINE_TUNING:
            found += self._fine_tuning_problems()
        elif self.roots > self.model.max_seq_len:
            found.append(
                f"data.max_length {self.roots} is longer than model.max_seq_len {self.model.max_seq_len}; "
                "lower it or raise model.max_seq_len"
            )
        if found:
            raise ValueError("; ".join(found))
        return self

    def _unused_keys(self) -> Iterator[str]:
        """Yields a clause for every key that the kind of run does not use."""
        for name in _SECTIONS:
            section = getattr(self, name)
            for key, field in type(section).model_fields.items():
                kinds = kinds_with(f"{name}.{key}")
                if self.kind not in kinds and getattr(section, key) != default_of(self.kind, name, key, field.default):
                    known, here = labels(kinds, self.kind), label(self.kind)
                    yield f"{name}.{key} is for task {known}, and has no effect in {here}; leave it out"

    def _graph_problems(self) -> Iterator[str]:
        model, data = self.model, self.data
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
        for why, (missing, keys) in without.items():
            for section, _, key in (name.partition(".") for name in keys if missing):
                field = type(getattr(self, section)).model_fields[key]
                if getattr(getattr(self, section), key) != default_of(GRAPH, section, key, field.default):
                    yield f"{section}.{key} has no effect because {why}; leave it out"

    def _masking_problems(self) -> Iterator[str]:
        data, training = self.data, self.training
        if self.kind not in (GRAPH, MASKED):
            return
        if self.roots <= 2:
            yield f"data.max_length {self.roots} leaves no room for text between [CLS] and [SEP]; raise it"
        with_leaves = self.kind == GRAPH and self.model.leaf_slots > 0
        leaves = with_leaves and (data.leaf_mask_ratio or data.min_leaf_groups) and training.mnm_weight
        has_queries = data.entity_query_ratio or data.kge_triples
        queries = with_leaves and self.model.n_entities and has_queries and training.entity_weight
        if not (data.mask_ratio and training.mlm_weight) and not leaves and not queries:
            yield "the loss has no terms; raise data.mask_ratio or data.leaf_mask_ratio, and set its weight above 0"

    def _fine_tuning_problems(self) -> Iterator[str]:
        if self.model.name_or_path is None:
            yield f"task {self.task} fine-tunes a pretrained model; set model.name_or_path"
        if self.data.dataset_name == default_of(self.kind, "data", "dataset_name", PYTHON_STDLIB):
            yield f"task {self.task} needs {'texts' if self.kind == MASKED else 'rows'}; set data.dataset_name"

    @property
    def kind(self) -> str:
        """The task, or `masked` for task graph with a pretrained text encoder."""
        return kind_of(self.task, self.model.name_or_path)

    @property
    def roots(self) -> int:
        """Text tokens of one training example."""
        return self.data.max_length or self.model.max_seq_len

    @property
    def max_span(self) -> int:
        """Longest masked span in tokens."""
        return self.data.max_span or (self.model.leaf_slots if self.kind == GRAPH and self.model.leaf_slots else 1)

    @property
    def device(self) -> Device:
        return self.training.device

    @property
    def window(self) -> int:
        """Tokens of one training example, including the leaves of a graph."""
        return self.roots * (1 + self.model.leaf_slots) if self.kind == GRAPH else self.roots
