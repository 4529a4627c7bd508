"""Base classes of fine-tuning tasks: transformers models with sansgpu's kernels and optional adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch

from sansgpu.config import ConfigError, derive_seed
from sansgpu.config.schema import Config
from sansgpu.config.section import AUTO
from sansgpu.config.wording import counted
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.order import batch_indices
from sansgpu.data.sources import Sources
from sansgpu.data.split import split_examples
from sansgpu.models.formats.weights import StoredTensor
from sansgpu.models.huggingface.adapters import (
    add_adapter,
    load_adapter_weights,
    load_model,
    lower_layers,
    restore_frozen,
    save_adapter,
)
from sansgpu.models.huggingface.costs import PretrainedCosts, pretrained_shape
from sansgpu.models.huggingface.merging import merge_adapter, merged_tensors, require_known_biases
from sansgpu.models.huggingface.pretrained import (
    Head,
    HeadType,
    merges_adapter,
    plain_name,
    random_model,
    save_pretrained,
    stored_dtype,
    weights_fingerprint,
)
from sansgpu.models.huggingface.probes import towers_of
from sansgpu.models.huggingface.source import is_text_part, requantized_formats
from sansgpu.models.huggingface.tokenizer_files import end_ids_of, load_chat_tokenizer, save_tokenizer
from sansgpu.models.modules import blocks_of
from sansgpu.models.shared_prefixes import lexicographic_order
from sansgpu.tasks.base import TRAINING, ComposedTask, ModelUse, ObjectiveBase
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.tasks.evaluation import TokensOf, tokens_of
from sansgpu.tasks.kept_activations import KeepingTask, TokenSequences
from sansgpu.tasks.task import COMPUTED_TOKENS, SEQUENCE_TOKENS, ModelSource, Sums, TrainedModel

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

T = TypeVar("T")
SORTED_TOGETHER = 4096  # examples of an evaluation that are sorted together, which bounds the memory
PASS_TOKENS = 4096  # tokens per forward pass outside training: enough for full speed, and they fit the CPU's cache


class FineTuning(ObjectiveBase, ABC):
    """A pretrained model and its loss."""

    head_type: ClassVar[HeadType]

    def __init__(self, config: Config, use: ModelUse = TRAINING) -> None:
        from sansgpu.models.huggingface.packed_forward import UnpaddedModel
        from sansgpu.models.huggingface.patches import (  # imports transformers, which takes seconds
            LAYERS,
            patch_layers,
            patch_model,
        )

        self.config, settings, seed = config, config.model, config.training.seed
        self.head = self.head_of(config)
        if use.layers is not None and settings.trained_layers not in (None, AUTO):
            settings = settings.model_copy(update={"trained_layers": 1.0})  # times a trained block
        if use.random:
            self.model = random_model(settings, self.head, use.layers)
        else:
            self.model = load_model(settings, self.head, seed, use.frozen)
        self._loaded_as = {n: p.dtype for n, p in self.model.named_parameters(remove_duplicate=False)}
        unpatched = patch_model(self.model) if use.computes else [LAYERS]
        pack = config.data.pack_sequences and use.computes  # otherwise trials would compute
        self.unpadded = UnpaddedModel(self.model, pack, config.window)
        self._adapted = add_adapter(self.model, settings, seed) if settings.adapter != "none" else None
        if settings.adapter == "continue" and not use.random:
            load_adapter_weights(self._adapted, settings)
        if LAYERS not in unpatched:
            patch_layers(self.model)  # again, for the layers of the adapter
        if self._adapted is not None:
            from sansgpu.models.huggingface.lora import patch_adapter  # imports peft, which takes a second

            patch_adapter(self.model)
        self._lower = lower_layers(self.model, settings)  # those that are frozen, or will be
        if settings.freezes_at_start:
            self.unpadded.frozen = self._lower
        self.notes: Sequence[str] = list(self._notes(unpatched)) if use.computes else ()
        self._blocks = blocks_of(self.model)
        self._callback: Callable[[], None] = lambda: None
        self._in_forward = False  # True in the forward pass of training, but not while backward recomputes a block
        for block in self._blocks:
            block.register_forward_pre_hook(lambda *_: self._callback() if self._in_forward else None)

    def _notes(self, unpatched: Sequence[str]) -> Iterator[str]:
        name, pack = self.config.model.name_or_path, self.config.data.pack_sequences
        if is_text_part(self.model, self.config.model):
            yield f"{name} also reads images or sound; only its language model is loaded, trained and saved."
        if unpatched:
            yield f"{name}: sansgpu has no kernels for its {' and '.join(unpatched)}, so transformers' code is used."
        if changed := requantized_formats(self.config.model):
            yield (
                f"{name}: its {' and '.join(changed)} weights are requantized to q8_0, because sansgpu has no kernels "
                "for them."
            )
        if towers := towers_of(self.model):
            yield f"{name}: only its language model learns; {' and '.join(towers)} stay as they are."
        if pack and not self.unpadded.packs:
            yield f"{name} does not support packing several examples into one sequence, so short examples are padded."
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        tied = head is not None and getattr(head, "weight", None) is getattr(table, "weight", table)
        if tied and self._lower is not None and self._adapted is None:
            frozen = "is not trained" if self.unpadded.frozen is not None else "will stop learning with them,"
            yield (
                f"{name}: its output head {frozen} either, because it shares its weights with the token "
                "embedding, which runs before the first trained block."
            )

    @classmethod
    def head_of(cls, config: Config) -> Head:
        return Head(cls.head_type)

    @abstractmethod
    def summed_loss(self, batch: Any) -> torch.Tensor:
        """Computes the task's loss summed over targets, ()."""

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Context for a forward pass, in which the callback of `between_blocks` is called if gradients are enabled.

        Frozen layers run without dropout.
        """
        self._in_forward = torch.is_grad_enabled()
        if self.unpadded.frozen is not None:
            self.unpadded.frozen.without_dropout()
        try:
            yield
        finally:
            self._in_forward = False

    def loss(self, batch: Any) -> torch.Tensor:
        with self.forward_pass():
            return self.summed_loss(batch)

    def freeze_layers(self) -> tuple[int, int]:
        """Freezes what is below the last `model.trained_layers` blocks; returns the frozen and all blocks' numbers."""
        assert self._lower is not None
        self._lower.freeze(learned=True)
        self.unpadded.frozen = self._lower
        return len(self._lower.blocks), len(self._blocks)

    def step_sums(self) -> Sums:
        return dict(zip((SEQUENCE_TOKENS, COMPUTED_TOKENS), self.unpadded.take_counts(), strict=True))

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        saved = sums.get(SEQUENCE_TOKENS, 0.0) - sums.get(COMPUTED_TOKENS, 0.0)
        return {"shared_tokens": saved / sums[SEQUENCE_TOKENS]} if saved else {}

    def ordered(self, indices: np.ndarray, lengths: np.ndarray, sequence: TokensOf | None = None) -> np.ndarray:
        """Returns `indices` in the order in which their examples take the least work.

        Examples that begin with the same tokens become neighbors, if the model shares beginnings and `sequence` returns
        the tokens of an example. If the model needs padding, examples are sorted by length.
        """
        if self.unpadded.shares and sequence is not None:
            parts = np.split(indices, range(SORTED_TOGETHER, len(indices), SORTED_TOGETHER))
            orders = [lexicographic_order([sequence(index) for index in part.tolist()]) for part in parts]
            return np.concatenate([part[order] for part, order in zip(parts, orders, strict=True)])
        return indices if self.unpadded.packs else indices[np.argsort(lengths[indices], kind="stable")]

    def between_blocks(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def merged_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Merges the adapter and returns the transformers model in `dtype` on the CPU. It cannot be trained further.

        Training in bf16 has rounded the frozen weights, so they are reloaded from the model's files first.
        """
        self.model.cpu()
        if self._frozen_are_rounded():
            restore_frozen(self.model, self.config.model, self.head, self.config.training.seed)
        if self._adapted is not None:
            return merge_adapter(self._adapted, dtype)
        self.model.to(dtype)  # type: ignore[arg-type]
        return self.model

    def merged_weights(self) -> Mapping[str, torch.Tensor | StoredTensor]:
        """Returns the fp32 tensors of the model with the adapter merged in, which happens when they are read."""
        if self._adapted is None:
            weights = self.merged_model().state_dict()
            require_known_biases(weights, self.config.model, self.head)
            return weights
        if self._frozen_are_rounded():
            restore_frozen(self.model, self.config.model, self.head, self.config.training.seed)
        merged = merged_tensors(self._adapted)
        require_known_biases(merged, self.config.model, self.head)
        return merged

    def _frozen_are_rounded(self) -> bool:
        """Returns whether a frozen weight is now in a narrower dtype than the one in which it was loaded."""
        frozen = ((plain_name(n), p.dtype) for n, p in self.model.named_parameters() if not p.requires_grad)
        return any(torch.promote_types(self._loaded_as[name], dtype) != dtype for name, dtype in frozen)

    def export_to(self, tokenizer: Any, folder: Path, merge: bool | None = None) -> None:
        """Writes a Hugging Face folder. `merge` says whether to merge an adapter; default: model.merge_adapter.

        Merged and full models are written in the dtype of the base model's config.json.
        """
        settings = self.config.model
        merge = merges_adapter(settings) if merge is None else merge
        if self._adapted is not None and not merge:
            save_adapter(self._adapted, tokenizer, folder, settings, self.head, self.write_more)
        else:
            merged = self.merged_model(stored_dtype(settings))
            require_known_biases(merged.state_dict(), settings, self.head)
            save_pretrained(merged, tokenizer, folder, settings, self.write_more)

    def write_more(self, folder: Path) -> None:
        """Adds the task's own files to an exported folder."""

    @classmethod
    def costs(cls, config: Config) -> PretrainedCosts:
        shape = pretrained_shape(config.model, cls.head_of(config))
        return PretrainedCosts(
            config.model, config.training, config.window, config.window, shape=shape, pack=config.data.pack_sequences
        )

    @classmethod
    def with_vocabulary(cls, config: Config) -> Config:
        return config  # a pretrained model has its own vocabulary

    @staticmethod
    def sequences(batch: Any) -> TokenSequences:
        """Returns the sequences of a batch as the model gets them."""
        return TokenSequences(batch.tokens, batch.lengths, getattr(batch, "types", None))

    def flops_of_token(self, example_tokens: float, target_ratio: float = 1.0) -> float:
        """Returns the FLOPs per token of the current steps, for examples of `example_tokens` tokens on average."""
        config = self.config if self.unpadded.frozen is None else self.config.after_freezing()
        costs = replace(self.costs(config), example_tokens=example_tokens, target_ratio=target_ratio)
        return costs.work(1).needed

    @classmethod
    def random_tokens(cls, config: Config, size: int, tokens: int | None) -> list[np.ndarray]:
        return random_tokens(config, cls.costs(config).vocabulary, size, tokens)


class FineTuningTask(KeepingTask, ComposedTask):
    """Base of tasks that fine-tune a transformers model: training batches, loading and saving."""

    objective_class: ClassVar[type[FineTuning]]
    objective: Any  # an instance of `objective_class`

    def __init__(self, config: Config, corpus: Any, effective_batch: int, target_ratio: float = 1.0) -> None:
        """`target_ratio` is the number of targets per token of `corpus`."""
        super().__init__(config, self.objective_class(config), corpus, effective_batch)
        self.fingerprint = f"{corpus.fingerprint}-{self.base_fingerprint(config)}"
        self._target_ratio = target_ratio
        self.flops_per_token = self.objective.flops_of_token(corpus.sequence_tokens, target_ratio)

    def batch(self, step: int, total_steps: int | None = None) -> ExampleBatch:
        part = self.corpus.train
        indices = batch_indices(self.config.training.seed, step, len(part), self._effective_batch)
        batch: ExampleBatch = part.batch(self.objective.ordered(indices, part.lengths, tokens_of(part)))
        return batch

    def freeze_layers(self) -> tuple[int, int]:
        numbers: tuple[int, int] = self.objective.freeze_layers()
        self.flops_per_token = self.objective.flops_of_token(self.corpus.sequence_tokens, self._target_ratio)
        return numbers

    @classmethod
    def base_fingerprint(cls, config: Config) -> str:
        """Identifies the weights that a run starts from, to detect on resume that they have changed."""
        return weights_fingerprint(config.model)

    def save_tokenizer(self, folder: Path) -> None:
        save_tokenizer(self.corpus.tokenizer, folder, end_ids_of(self.model))

    def export(self, folder: Path) -> None:
        """Writes the model, or only its adapter."""
        self.objective.export_to(self.corpus.tokenizer, folder)

    @classmethod
    def new_objective(cls, config: Config, layers: int | None = None) -> FineTuning:
        return cls.objective_class(config, ModelUse(random=True, layers=layers))

    @classmethod
    def costs(cls, config: Config) -> PretrainedCosts:
        return cls.objective_class.costs(config)

    @classmethod
    def with_vocabulary(cls, config: Config) -> Config:
        return cls.objective_class.with_vocabulary(config)

    @classmethod
    def load(cls, source: ModelSource) -> tuple[FineTuning, Any, Config]:
        """Loads a transformers model and, for a run, its trained weights from the snapshot (checkpoint)."""
        config = source.config or cls.config_of_model(source)
        config = cls.with_vocabulary(config.with_values("model", trust_remote_code=source.remote_code))
        use = ModelUse(frozen=source.config is None, computes=source.computes)
        objective = cls.objective_class(config, use)
        tokenizer = load_chat_tokenizer(config)
        if source.snapshot is not None:
            with torch.no_grad():
                objective.model.load_state_dict(source.snapshot.weights(), strict=False)
        objective.model.float()
        return objective, tokenizer, config

    @classmethod
    def config_of_model(cls, source: ModelSource) -> Config:
        """Returns the configuration for a model that does not come from a run. Raises ConfigError."""
        settings = {"task": cls.settings.task, "model": {"name_or_path": source.target}, "data": {"dataset_name": "-"}}
        return SCHEMA.model_validate(settings)

    @classmethod
    def export_model(cls, loaded: TrainedModel, folder: Path, merge: bool | None) -> None:
        loaded.objective.export_to(loaded.tokenizer, folder, merge)


class StepWideTask(FineTuningTask):
    """Base of fine-tuning tasks whose loss depends on all examples of a step together, as with in-batch negatives."""

    def outputs(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.objective.outputs(batch)
        return outputs

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[Any]) -> torch.Tensor:
        loss: torch.Tensor = self.objective.step_loss(outputs, batches)
        return loss


def random_tokens(config: Config, vocabulary: int, size: int, tokens: int | None) -> list[np.ndarray]:
    """Returns `size` examples of `tokens` random tokens."""
    length = min(tokens or config.window, config.window)
    draws = torch.Generator().manual_seed(derive_seed(config.training.seed, "trial"))
    return list(torch.randint(0, vocabulary, (size, length), generator=draws).numpy())


def longest_example(config: Config, tokenizer: Any) -> int:
    """Returns the maximum tokens of an example: data.max_length, or the tokenizer's model_max_length if smaller."""
    assert config.data.max_length is not None
    return min(config.data.max_length, int(tokenizer.model_max_length))


def passes(lengths: np.ndarray, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yields the indices of the examples for each forward pass outside training, in `order` or the longest ones first.

    The examples of a pass have about `PASS_TOKENS` tokens in total even if they are padded.
    """
    order, start = np.argsort(-lengths, kind="stable") if order is None else order, 0
    while start < len(order):
        following = lengths[order[start : start + PASS_TOKENS]]
        padded = np.maximum.accumulate(following) * np.arange(1, len(following) + 1)
        size = max(1, int(np.searchsorted(padded, PASS_TOKENS, side="right")))
        yield order[start : start + size]
        start += size


def split_rows(rows: Sequence[T], contents: Sequence[bytes], share: float) -> tuple[list[T], list[T]]:
    """Splits off `share` of the rows for validation. Rows with the same `contents` are in the same part."""
    train, held = split_examples(contents, np.ones(len(rows)), share)
    return [rows[number] for number in train], [rows[number] for number in held]


def require_examples(sources: Sources, counts: Sequence[int], what: str, notes: Sequence[str]) -> None:
    """Raises ConfigError if there are no training or validation examples.

    `counts` are the numbers of training examples and, if known, of validation examples. The message calls an example
    `what`, and includes `notes` about skipped rows.
    """
    reasons = "".join(f" ({note.removesuffix('.')})" for note in notes)
    parts = zip((sources.train, sources.validation), counts, strict=False)
    empty = next((part.name for part, count in parts if part is not None and not count), None)
    if empty is not None and (sources.validation is not None or not sum(counts)):
        raise ConfigError(f"{empty} has no usable {what}s{reasons}; add some.")
    if sources.validation is None and (sum(counts) < 2 or not all(counts)):
        usable = counted(sum(counts), f"usable {what}")
        raise ConfigError(
            f"{sources.train.name} has {usable}, too few distinct ones to hold some out for validation{reasons}; add "
            "more or set data.validation_name."
        )
