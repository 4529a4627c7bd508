"""`task: static` trains static embeddings, starting from random vectors, from an encoder or from a static model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.paths import TRAINED_TOKENIZERS, local_path
from sansgpu.config.schema import Config
from sansgpu.data.forms.pairs import TextRow
from sansgpu.data.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, load_tokenizer, rows_needed
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.probe import has_native_bf16
from sansgpu.models.formats.weights import set_weights
from sansgpu.models.huggingface.pretrained import weights_fingerprint
from sansgpu.models.huggingface.sentence_embedding import is_static_folder
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.capabilities import ignore_count
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.tasks.embed.data import EmbeddingCorpus, TextShape
from sansgpu.tasks.embed.evaluate import EmbeddingEvaluator
from sansgpu.tasks.embed.task import TextEmbedding, shape_of
from sansgpu.tasks.inference import load_for_use
from sansgpu.tasks.static.distill import distilled
from sansgpu.tasks.static.model import TOKENIZER, StaticModel, as_transformers, plain_tokenizer, read_tokenizer
from sansgpu.tasks.static.objective import StaticObjective, static_base, static_layout, with_rows
from sansgpu.tasks.static.settings import SETTINGS, StaticModelConfig
from sansgpu.tasks.static.words import TextTokenizer
from sansgpu.tasks.task import EvaluationRequest, ModelSource, TaskClass, TrainedModel

ENCODED_TEXTS = 4096  # texts that are embedded at a time, to bound the memory


class StaticEmbeddings(TextEmbedding):
    """`task: static`. A static model multiplies no matrices, so it needs no kernels to embed texts."""

    settings = SETTINGS
    verbs_for_any_model = ()
    verbs_without_kernels = ("embed",)
    objective_class = StaticObjective  # type: ignore[assignment]  # it has the same class methods

    def initialize(self, progress: ReportProgress) -> None:
        """Copies the table of a static model, or distills an encoder."""
        model, weight = StaticModelConfig.of(self.config), self.objective.model.embedding.weight
        if (static := static_base(self.config)) is not None:
            table = static.weights
        elif model.name_or_path is not None:
            progress(f"loading {model.name_or_path}", 0, 0)
            table = distilled(_encoder(self.config), model.embedding_dim, model.sif_coefficient, progress)
        else:
            return
        with torch.no_grad():
            weight[: len(table)] = table

    @classmethod
    def base_fingerprint(cls, config: Config) -> str:
        return "random" if config.model.name_or_path is None else weights_fingerprint(config.model)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, EmbeddingCorpus]:
        given = config.model.vocab_size
        config, corpus = super().prepare(config, cache, progress)
        config = config.with_values("model", vocab_size=given)
        return with_rows(config, rows_needed(corpus.tokenizer.backend_tokenizer)), corpus

    @classmethod
    def text_shape(cls, config: Config, train: Sequence[TextRow]) -> tuple[Config, TextShape]:
        """Returns how to tokenize. Trains a new tokenizer on the training rows if the run needs one."""
        layout = static_layout(config)
        if (static := static_base(config)) is not None:
            return config, shape_of(config, as_transformers(static.tokenizer), layout)
        named = config.model.name_or_path is not None
        backend = load_tokenizer_of(config.model).backend_tokenizer if named else _own_tokenizer(config, train).backend
        return config, shape_of(config, as_transformers(plain_tokenizer(backend)), layout)

    @classmethod
    def recognizes(cls, target: str) -> bool:
        return is_static_folder(local_path(target))

    @classmethod
    def load(cls, source: ModelSource) -> tuple[Any, Any, Config]:
        config = cls.with_vocabulary(source.config or cls.config_of_model(source))
        objective = StaticObjective(config)
        if source.snapshot is not None:
            assert source.tokenizer is not None
            set_weights(objective.model, source.snapshot.weights(), source.snapshot.folder)
            backend = read_tokenizer(source.tokenizer / TOKENIZER)
        else:
            static = static_base(config)
            assert static is not None  # because `recognizes` accepts no other folder
            objective.model = StaticModel(static.weights)
            backend = static.tokenizer
        objective.reader = TextTokenizer(plain_tokenizer(backend), objective.layout.max_length)
        return objective, as_transformers(plain_tokenizer(backend)), config

    @classmethod
    def encode_texts(
        cls, loaded: TrainedModel, texts: Sequence[str], encoded: Callable[[int], None] = ignore_count, prompt: str = ""
    ) -> np.ndarray:
        _require_no_precision(loaded)
        parts = [np.empty((0, loaded.objective.width), np.float32)]
        for start in range(0, len(texts), ENCODED_TEXTS):
            encoded(start)
            some = texts[start : start + ENCODED_TEXTS]
            parts.append(loaded.objective.encode([prompt + text for text in some] if prompt else some))
        encoded(len(texts))
        return np.concatenate(parts)

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> EmbeddingEvaluator:
        _require_no_precision(loaded)
        return super().evaluator_for(loaded, request)


def _require_no_precision(loaded: TrainedModel) -> None:
    """Raises ConfigError if the user chose a precision of matrix products."""
    if loaded.is_precision_chosen:
        raise ConfigError(
            f"--precision has no effect on {loaded.source.target}, because static embeddings multiply no matrices; "
            "remove it."
        )


def _own_tokenizer(config: Config, train: Sequence[TextRow]) -> Tokenizer:
    """Loads the configured tokenizer, or trains it on the first megabytes of the texts of rows."""
    data = config.data
    if data.tokenizer not in TRAINED_TOKENIZERS:
        return load_tokenizer(data.tokenizer)
    texts = dict.fromkeys(text for row in train for text in row.texts)
    if data.tokenizer == "char":
        return CharTokenizer.train(texts)
    return BPETokenizer.train(first_texts(texts, data.tokenizer_sample_mb * 1_000_000), data.vocab_size)


def first_texts(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yields texts until their total size reaches `size` bytes of UTF-8."""
    for text in texts:
        if size <= 0:
            return
        yield text
        size -= len(text.encode())


def _encoder(config: Config) -> TrainedModel:
    """Loads the encoder to distill, in bf16 if the processor multiplies it natively."""
    model = {key: getattr(config.model, key) for key in ("name_or_path", "revision", "trust_remote_code")}
    settings = SCHEMA.model_validate({"task": "embed", "model": model, "data": {"dataset_name": "-"}})
    source = ModelSource(str(config.model.name_or_path), config.model.trust_remote_code, settings)
    precision = "bf16" if has_native_bf16() else "fp32"
    return load_for_use(cast(TaskClass, TextEmbedding), source, torch.device("cpu"), precision)
