"""The one schema: every key, its type, its default and its meaning. Help, docs and errors come from here."""

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

# Keys of task graph that act only where there are leaves, and where a head is mixed into its tail.
_OF_FUSION = ("model.relation_rank", "model.relation_dropout")
_OF_ENTITIES = ("model.entity_rank", "training.entity_weight", "data.entity_query_ratio", "data.kge_triples")
_OF_LEAVES = (
    "model.n_relations", "model.slot_embedding", "model.fusion", *_OF_FUSION, "training.mnm_weight",
    "training.mnm_ramp_steps", "training.mnm_reduction", "data.triples", "data.inverse_relations",
    "data.leaf_mask_ratio", "data.min_leaf_groups", "data.long_tails", "model.n_entities", *_OF_ENTITIES,
)  # fmt: skip


_SECTIONS = ("model", "training", "data")  # one without keys, as `data:` alone, is YAML's null


class DataConfig(Section):
    """What is learned from, and how it becomes tokens and windows."""

    dataset_name: str = Field(
        PYTHON_STDLIB,
        description="a Hugging Face dataset, a local file or folder, `python-stdlib`, `python-stdlib-graph`, or "
        "`python-stdlib-chat`",
    )
    dataset_config: str | None = Field(None, description="configuration of a Hugging Face dataset")
    validation_name: str | None = Field(None, description="another source for validation, in the same forms")
    text_column: str | None = Field(
        None,
        description="column of the text; by default `text`, `content` or the only one",
    )
    tokenizer: str = Field("bpe", description="bpe, char, a tokenizer.json, or a Hugging Face tokenizer")
    vocab_size: int = Field(8192, ge=257, description="size a bpe tokenizer is trained to")
    tokenizer_sample_mb: int = Field(32, ge=1, description="megabytes of text a tokenizer is trained on")
    max_length: int | None = Field(
        None,
        ge=2,
        description="window in tokens without leaves, by default model.max_seq_len; of sft and qa the longest example",
    )
    pack_sequences: bool = Field(
        True, description="several documents or examples one behind the other, which do not see each other; no padding"
    )
    long_rows: Literal["truncate", "drop"] = Field(
        "truncate",
        description="of a row longer than max_length, keep the end, or leave it out",
    )
    chat_template: str | None = Field(
        None, description="file with a Jinja chat template, in place of the model's own; `simple`: one of ours"
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail",
        description="fail: name the first row that cannot be learned from; skip: leave such rows out, counted",
    )
    triples: Literal["all", "first"] = Field(
        "all",
        description="of several triples of one head, a window holds one at a time. all: it is read again with each; "
        "first: the others are left out, counted",
    )
    inverse_relations: bool = Field(
        False, description="learn every triple from its tail as well, where the data has a text for that"
    )
    mask_ratio: float = Field(0.15, ge=0, lt=1, description="share of a text's tokens that are masked and predicted")
    max_span: int | None = Field(
        None, ge=1, description="longest span that is masked, in tokens; 1: single tokens; by default model.leaves"
    )
    leaf_mask_ratio: float = Field(0.15, ge=0, le=1, description="share of the triples whose tails are masked")
    min_leaf_groups: Literal[0, 1] = Field(0, description="tails that are masked at least, in windows that have one")
    entity_query_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="share of a knowledge graph's triples that ask for the tail among all entities, in each epoch; the "
        "others show or mask the tail's tokens",
    )
    kge_triples: int = Field(
        4,
        ge=0,
        description="knowledge graph embedding: triples drawn beside each example, of which the tail is predicted from "
        "the vector of the head and the relation alone, without a text",
    )
    long_tails: Literal["refuse", "drop"] = Field(
        "refuse",
        description="refuse: stop where more than 1 % of the training triples have a tail of more tokens than "
        "model.leaves; drop: leave such triples out, counted",
    )
    doc_stride: int = Field(128, ge=0, description="tokens that two windows of a long context share")
    n_best_size: int = Field(20, ge=1, description="answers that are weighed against each other")
    max_answer_length: int = Field(30, ge=1, description="tokens of the longest answer")
    null_answers: bool | None = Field(
        None, description="whether a question may have no answer; by default whether the training part has such"
    )
    null_score_diff_threshold: float = Field(
        0.0,
        description="a question has no answer where that scores higher than the best answer by more than this",
    )
    preprocessing_num_workers: int = Field(2, ge=1, description="threads that tokenize")
    cache_dir: str | None = Field(None, description="where tokens are kept; by default ~/.cache/sansgpu")
    validation_split: float = Field(
        0.01, gt=0, lt=1, description="share of the tokens held out where the data has no validation part"
    )


class Config(Section):
    """One run. `device` and `force_cpu` may also stand at the top level of a file."""

    task: Literal["pretrain", "graph", "sft", "qa"] = Field(
        "pretrain",
        description="pretrain: a decoder from scratch; graph: an encoder of texts and triples, or of texts alone; "
        "sft: a model's answers in conversations; qa: answers that stand in a text",
    )
    objective: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="`package.module:Class` that does the task, derived from the built-in class for it",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @model_validator(mode="before")
    @classmethod
    def _device_at_the_top(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {key: value for key, value in values.items() if value is not None or key not in _SECTIONS}
        top = {key: values[key] for key in ("device", "force_cpu") if key in values}
        rest = {key: value for key, value in values.items() if key not in top}
        training = as_values(rest.get("training"))
        if top and is_section(rest.get("training")):
            clash = [key for key in top if training.get(key, top[key]) != top[key]]
            if clash:
                raise ValueError(f"{clash[0]} stands twice, at the top and in training, with different values")
            rest["training"] = {**training, **top}
        return with_defaults(str(rest.get("task", PRETRAIN)), rest)

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        found = [*self._misplaced(), *(self._of_graphs() if self.kind == GRAPH else ()), *self._of_gaps()]
        if self.kind in FINE_TUNING:
            found += self._of_fine_tuning()
        elif self.roots > self.model.max_seq_len:
            found.append(
                f"data.max_length {self.roots} is longer than model.max_seq_len {self.model.max_seq_len}; "
                "lower the one or raise the other"
            )
        if found:
            raise ValueError("; ".join(found))
        return self

    def _misplaced(self) -> Iterator[str]:
        """A sentence for every key that would not act."""
        for name in _SECTIONS:
            section = getattr(self, name)
            for key, field in type(section).model_fields.items():
                kinds = kinds_with(f"{name}.{key}")
                if self.kind not in kinds and getattr(section, key) != default_of(self.kind, name, key, field.default):
                    known, here = labels(kinds, self.kind), label(self.kind)
                    yield f"{name}.{key} is for task {known}, and does nothing in {here}; leave it out"

    def _of_graphs(self) -> Iterator[str]:
        model, data = self.model, self.data
        if model.activation not in ("gelu", "relu"):
            yield f"model.activation {model.activation} is a decoder's; a graph encoder has gelu or relu"
        if data.dataset_name == PYTHON_STDLIB:
            yield "data.dataset_name python-stdlib has no triples; take python-stdlib-graph, or leave it out"
        if data.inverse_relations and data.dataset_name == PYTHON_STDLIB_GRAPH:
            yield "data.inverse_relations does nothing for python-stdlib-graph: its tails have no texts; leave it out"
        without = {
            "model.leaves is 0": (model.leaves == 0, _OF_LEAVES),
            "model.n_entities is 0": (model.n_entities == 0, _OF_ENTITIES),
            "model.fusion is none": (model.fusion == "none", _OF_FUSION),
            "model.decay is none": (model.decay == "none", ("model.decay_base",)),
        }
        for why, (missing, keys) in without.items():
            for section, _, key in (name.partition(".") for name in keys if missing):
                field = type(getattr(self, section)).model_fields[key]
                if getattr(getattr(self, section), key) != default_of(GRAPH, section, key, field.default):
                    yield f"{section}.{key} does nothing where {why}; leave it out"

    def _of_gaps(self) -> Iterator[str]:
        """What is wrong with how gaps are made, where they are."""
        data, training = self.data, self.training
        if self.kind not in (GRAPH, MASKED):
            return
        if self.roots <= 2:
            yield f"data.max_length {self.roots} leaves no room between [CLS] and [SEP]; raise it"
        of_tails = self.kind == GRAPH and self.model.leaf_slots > 0
        leaves = of_tails and (data.leaf_mask_ratio or data.min_leaf_groups) and training.mnm_weight
        asked = data.entity_query_ratio or data.kge_triples
        queries = of_tails and self.model.n_entities and asked and training.entity_weight
        if not (data.mask_ratio and training.mlm_weight) and not leaves and not queries:
            yield "nothing is learned: raise data.mask_ratio or data.leaf_mask_ratio, with a weight above 0"

    def _of_fine_tuning(self) -> Iterator[str]:
        if self.model.name_or_path is None:
            yield f"task {self.task} goes on from a model; set model.name_or_path"
        if self.data.dataset_name == default_of(self.kind, "data", "dataset_name", PYTHON_STDLIB):
            yield f"task {self.task} needs {'texts' if self.kind == MASKED else 'rows'}; set data.dataset_name"

    @property
    def kind(self) -> str:
        """What is made of the run: the task, or `masked` where a graph task goes on from a model of text alone."""
        return kind_of(self.task, self.model.name_or_path)

    @property
    def roots(self) -> int:
        """Tokens of text of one training example."""
        return self.data.max_length or self.model.max_seq_len

    @property
    def max_span(self) -> int:
        """Tokens of the longest span that is masked."""
        return self.data.max_span or (self.model.leaf_slots if self.kind == GRAPH and self.model.leaf_slots else 1)

    @property
    def device(self) -> Device:
        """The device asked for."""
        return self.training.device

    @property
    def window(self) -> int:
        """Tokens of one training example; of graphs roots and leaves."""
        return self.roots * (1 + self.model.leaf_slots) if self.kind == GRAPH else self.roots
