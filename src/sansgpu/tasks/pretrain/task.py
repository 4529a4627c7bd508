"""`task: pretrain` trains a decoder from scratch by next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from sansgpu.config import ConfigError, derive_seed
from sansgpu.config.data import DataConfig
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.data.batch import Batch
from sansgpu.data.order import batch_indices, generator, steps_per_epoch
from sansgpu.data.pack import PackedWindows, TextWindows, Windows, piece_length
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.settings import WindowedTrainingConfig
from sansgpu.data.shards import build_store, build_tokenizer, left_out_note
from sansgpu.data.sources import open_single
from sansgpu.data.split import all_documents
from sansgpu.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    load_tokenizer_of_model,
    special_tokens_around,
    tokenizer_of_model,
)
from sansgpu.events.progress import ReportProgress
from sansgpu.files.reading import read_object
from sansgpu.machine.probe import has_bf16_tensors
from sansgpu.models import TransformerLM
from sansgpu.models.architectures import DecoderConfig
from sansgpu.models.formats.decoder_folder import decoder_config, export_model, load_decoder, load_gguf_decoder
from sansgpu.models.formats.decoder_weights import hugging_face_config, to_hugging_face
from sansgpu.models.formats.folders import base_of, is_adapter_folder
from sansgpu.models.formats.gguf_source import is_gguf, open_gguf
from sansgpu.models.formats.tokenizers import TokenizerParts, with_rows
from sansgpu.models.formats.weights import set_weights
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.modules import narrow_matrices
from sansgpu.tasks.base import ComposedTask, with_layers, with_vocabulary_of
from sansgpu.tasks.capabilities import ExportsGGUF, Generates, GGUFParts, Teaches
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.tasks.distillation import Lesson, configured_teacher_folder, sequences_of
from sansgpu.tasks.evaluation import LanguageModeling
from sansgpu.tasks.pretrain.costs import DecoderCosts
from sansgpu.tasks.pretrain.data import (
    TextCorpus,
    arrays_of,
    corpus_of,
    open_documents,
    read_parts,
    taught_corpus,
    with_initialization,
)
from sansgpu.tasks.pretrain.objective import PretrainObjective
from sansgpu.tasks.pretrain.settings import SETTINGS
from sansgpu.tasks.settings import DistilledTrainingConfig
from sansgpu.tasks.task import EvaluationRequest, ModelSource, TrainedModel

if TYPE_CHECKING:  # gguf is optional; training needs none of the others
    from sansgpu.models.formats.gguf_file import GGUFFile
    from sansgpu.models.generation.generate import BatchModel
    from sansgpu.models.huggingface.causal_lm import HuggingFaceLM
    from sansgpu.models.scoring import Scorer
    from sansgpu.models.teacher import Teacher

EVALUATION_TOKENS = 4096  # tokens per micro-batch of an evaluation


UNBOUNDED_CONTEXT = 1024  # tokens of context for models without max_position_embeddings


class Pretrain(Generates, Teaches, ExportsGGUF, ComposedTask):
    """`task: pretrain`."""

    settings = SETTINGS
    verbs_for_any_model = ("evaluate", "distill")
    verbs_without_kernels = ("export", "gguf")
    has_windows = True

    def __init__(self, config: Config, corpus: TextCorpus, effective_batch: int) -> None:
        super().__init__(config, PretrainObjective(config), corpus, effective_batch)
        self.evaluator = LanguageModeling(self.model, corpus.validation)
        self.fingerprint = corpus.fingerprint
        self.flops_per_token = self.costs(config).work(1).needed
        # This epoch's windows, and the next one's for prefetched batches.
        self._windows = lru_cache(maxsize=2)(partial(_windows_of_epoch, corpus, config.training.seed))

    @staticmethod
    def prepare(config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, TextCorpus]:
        """Tokenizes the data, or opens a teacher's folder, and sets model.vocab_size.

        Raises ConfigError if there is not enough data, or if model.vocab_size is smaller than the tokenizer's.
        """
        if DistilledTrainingConfig.of(config).distillation.teacher is not None:
            return taught_corpus(config, configured_teacher_folder(config), progress)
        sources, cleaning = open_documents(config, cache, progress)
        tokenizer = build_tokenizer(config.data, sources.train, cache, progress)
        cleaning = [*cleaning, *filter(None, [left_out_note(tokenizer)])]
        config = with_vocabulary_of(config, tokenizer.vocab_size)
        train, validation, name = read_parts(config, sources, tokenizer, cache, progress)
        config = with_initialization(config, train.token_count)
        return config, replace(corpus_of(config, tokenizer, train, validation, name), cleaning=cleaning)

    @classmethod
    def recorded_settings(cls, config: Config, recorded: dict[str, Any]) -> list[str]:
        """Returns how the run was initialized, unless it is configured: it depends on the text."""
        chosen = (recorded.get("model") or {}).get("initialization", "random")
        return [f"model.initialization={chosen}"] if DecoderConfig.of(config).initialization == "auto" else []

    def initialize(self, progress: ReportProgress) -> None:
        if DecoderConfig.of(self.config).initialization == "bigram":
            from sansgpu.models.bigrams import initialize_from_bigrams
            from sansgpu.tasks.pretrain.bigrams import count_bigrams

            progress("counting pairs of tokens", 0, 0)
            bigrams = count_bigrams(self.corpus.documents, len(self.model.embedding.weight))
            initialize_from_bigrams(self.model, *bigrams, derive_seed(self.config.training.seed, "bigrams"))

    @classmethod
    def lesson(cls, config: Config, tokenizer: Tokenizer, cache: Path, progress: ReportProgress) -> Lesson:
        sources, _ = open_documents(config, cache, progress)
        train, validation, name = read_parts(config, sources, tokenizer, cache, progress)
        windows = PackedWindows(train, config.window, tokenizer.end_id)
        counts = np.full(len(windows), config.window, np.int64)
        counts[-1] -= counts.sum() - train.token_count
        arrays = {**arrays_of("train", train), **arrays_of("validation", validation)}
        arrays["validation_sizes"] = validation.token_sizes()

        def sequences(first: int, stop: int) -> PackedSequences:
            return sequences_of(windows.batch(np.arange(first, stop)))

        return Lesson(arrays, counts, sequences, name)

    @classmethod
    def teacher(cls, loaded: TrainedModel) -> Teacher:
        model, tokenizer = loaded.objective.model, loaded.tokenizer
        before = () if tokenizer.prefix_ids == (tokenizer.end_id,) else tokenizer.prefix_ids
        if isinstance(model, TransformerLM):
            from sansgpu.models.teacher import decoder_teacher

            return decoder_teacher(model, before)
        from sansgpu.models.huggingface.causal_lm import transformers_teacher

        return transformers_teacher(model.unpadded(), model.context, before)

    @classmethod
    def new_objective(cls, config: Config, layers: int | None = None) -> PretrainObjective:
        return PretrainObjective(with_layers(config, layers))

    @staticmethod
    def random_batch(config: Config, size: int, tokens: int | None = None) -> Batch:
        """Builds `size` full windows of random tokens, each a single document. Ignores `tokens`.

        If training selects tokens, all have the same loss of the teacher.
        """
        assert config.model.vocab_size is not None
        draws = torch.Generator().manual_seed(derive_seed(config.training.seed, "trial"))
        shape = (size, config.window + 1)
        drawn = torch.randint(0, config.model.vocab_size, shape, generator=draws)
        inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        positions = torch.arange(config.window).expand_as(inputs).contiguous()
        batch = Batch(inputs, targets, positions, torch.zeros_like(inputs))
        if not DistilledTrainingConfig.of(config).distillation.selects_tokens:
            return batch
        return replace(batch, teacher_target_log_probabilities=torch.zeros(inputs.shape, dtype=torch.float16))

    @classmethod
    def costs(cls, config: Config) -> DecoderCosts:
        return DecoderCosts(DecoderConfig.of(config), DistilledTrainingConfig.of(config), config.window, config.window)

    def batch(self, step: int, total_steps: int | None = None) -> Batch:
        """Returns the global batch of a step, whose windows are cut into pieces during sequence length warm-up."""
        training, window = WindowedTrainingConfig.of(self.config), self.config.window
        count = len(self.corpus.train)
        indices = batch_indices(training.seed, step, count, self._effective_batch)
        batch: Batch = self._windows(step // steps_per_epoch(count, self._effective_batch)).batch(indices)
        if self.corpus.teacher is not None:
            batch = self.corpus.teacher.add_to(batch, indices)
        piece = window if total_steps is None else piece_length(training, window, step, total_steps)
        return batch.in_pieces(piece) if piece < window else batch

    def sample(self, prompt: str, tokens: int, sampling: Sampling) -> str:
        from sansgpu.models.generation.generate import generate

        return "".join(generate(self.model, self.corpus.tokenizer, prompt, tokens, sampling))

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder with weights, config, tokenizer and generation config."""
        export_model(self.model, self.corpus.tokenizer, folder)

    @classmethod
    def recognizes(cls, target: str) -> bool:
        """Returns True for folders and GGUF files that TransformerLM supports, and for paths that `load` rejects."""
        from sansgpu.models.huggingface.sentence_embedding import is_static_folder

        path = local_path(target)
        if is_gguf(target):
            return decoder_config(path) is not None
        if path.is_dir():
            is_other = is_adapter_folder(path) or is_static_folder(path)
            is_other = is_other or ((path / "config.json").is_file() and decoder_config(path) is None)
            return not is_other
        return _is_path(target)

    @classmethod
    def load(cls, source: ModelSource) -> tuple[PretrainObjective, Tokenizer, Config]:
        """Loads a TransformerLM if it supports the model, otherwise any causal LM of transformers."""
        config, path = source.config or SCHEMA(), source.path
        if source.snapshot is not None:
            assert source.tokenizer is not None
            decoder = TransformerLM(DecoderConfig.of(config), seed=None)
            set_weights(decoder, source.snapshot.weights(), source.snapshot.folder, assign=True)
            return (
                PretrainObjective(config, decoder),
                _with_rows(load_tokenizer(source.tokenizer), decoder, source),
                config,
            )
        if is_gguf(source.target):
            from sansgpu.models.generation.answer_end import token_ids

            file = open_gguf(path)
            model: Any = load_gguf_decoder(file) or _transformers_model(str(path))
            tokenizer, ends = _with_rows(_gguf_tokenizer(file), model, source), token_ids(file.settings["eos_token_id"])
            _add_ends(tokenizer, ModelConfig(name_or_path=str(path)), ends, file.has_chat_template)
            return PretrainObjective(config, model), tokenizer, config
        name: str | Path = source.target
        model = None
        if path.is_dir() and not is_adapter_folder(path):
            if not (path / "config.json").is_file():
                raise ConfigError(
                    f"{path} is neither a run (config.yaml) nor a Hugging Face model (config.json); pass one of these."
                )
            name, model = path, load_decoder(path)
        elif not path.is_dir() and _is_path(source.target):
            raise ConfigError(f"{source.target} does not exist; pass a run folder or a Hugging Face model.")
        tokenizer = load_tokenizer_of_model(_with_tokenizer(name), source.remote_code)
        if model is not None:
            named = ModelConfig(name_or_path=str(path), trust_remote_code=source.remote_code)
            _add_ends(tokenizer, named, *_ends_in(path))
        model = model or _transformers_model(str(name), source.remote_code)
        return PretrainObjective(config, model), _with_rows(tokenizer, model, source), config

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return max(1, EVALUATION_TOKENS // config.window)

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> LanguageModeling:
        model, tokenizer, config = loaded.objective.model, loaded.tokenizer, loaded.config
        if request.data is None:
            return LanguageModeling(model, cast(TextCorpus, request.own_corpus()).validation)
        default = config.window if loaded.source.config else UNBOUNDED_CONTEXT
        window = request.window_within(_context_of(model), default)
        data = DataConfig(dataset_name=request.data, text_column=config.data.text_column)
        source = open_single(request.data, data, progress=request.progress)
        for note in source.notes:
            request.warn(f"{source.name}: {note}")
        documents = all_documents(build_store(source, tokenizer, request.cache, request.progress))
        # As in pretraining, the last token of a document predicts the first token of the next document.
        around = (tokenizer.prefix_ids, tokenizer.suffix_ids)
        if isinstance(model, TransformerLM) and around == ((tokenizer.end_id,), ()):
            return LanguageModeling(model, PackedWindows(documents, window, tokenizer.end_id))
        windows = TextWindows(documents, window, len(tokenizer.prefix_ids), tokenizer.end_id)
        return LanguageModeling(model, windows)

    @classmethod
    def batch_model(cls, loaded: TrainedModel) -> BatchModel:
        from sansgpu.models.generation.generate import decoder_batch

        model = loaded.objective.model
        if has_bf16_tensors(loaded.precision):
            narrow_matrices(model)
        return decoder_batch(model, loaded.tokenizer)

    @classmethod
    def scorer(cls, loaded: TrainedModel) -> Scorer:
        model = loaded.objective.model
        if isinstance(model, TransformerLM):
            from sansgpu.models.scoring import decoder_scorer

            return decoder_scorer(model)
        from sansgpu.models.huggingface.causal_lm import transformers_scorer

        return transformers_scorer(model.unpadded(), model.context)

    @classmethod
    def export_model(cls, loaded: TrainedModel, folder: Path, merge: bool | None) -> None:
        export_model(loaded.objective.model, loaded.tokenizer, folder)

    @classmethod
    def gguf_parts(cls, loaded: TrainedModel) -> GGUFParts:
        decoder, tokenizer, end = loaded.objective.model, loaded.tokenizer, loaded.tokenizer.end_id
        weights = to_hugging_face(decoder.config, decoder.state_dict())
        # The end-of-text token is also the first token of a document.
        parts = TokenizerParts(tokenizer.backend, end, end, end, adds_bos=True)
        return hugging_face_config(decoder.config, end), weights, parts


def _windows_of_epoch(corpus: TextCorpus, seed: int, epoch: int) -> Windows:
    """Returns the training windows of an epoch. Each epoch after the first has its own order of documents.

    A teacher's predictions belong to the windows of the first epoch.
    """
    if epoch == 0 or corpus.teacher is not None or not isinstance(corpus.train, PackedWindows):
        return corpus.train
    return corpus.train.recut(generator(seed, "cut", epoch))


def _ends_in(folder: Path) -> tuple[list[int], bool]:
    """Returns the end tokens in a model's generation_config.json, and whether the model has a chat template."""
    from sansgpu.models.generation.answer_end import token_ids

    generation, named = folder / "generation_config.json", folder / "tokenizer_config.json"
    ends = token_ids(read_object(generation).get("eos_token_id")) if generation.is_file() else []
    has_template = named.is_file() and "chat_template" in read_object(named)
    return ends, has_template or (folder / "chat_template.jinja").is_file()


def _add_ends(tokenizer: Tokenizer, model: ModelConfig, known: Sequence[int], has_template: bool) -> None:
    """Adds to a tokenizer the tokens and texts at which a model ends a text, including those of its chat template."""
    tokenizer.other_end_ids = tuple(known)
    if has_template:
        from sansgpu.models.generation.answer_end import end_tokens, stop_strings
        from sansgpu.models.huggingface.tokenizer_files import (
            load_tokenizer_of,
        )  # imports transformers, if it is needed

        chat = load_tokenizer_of(model)
        tokenizer.other_end_ids, tokenizer.stops = end_tokens(chat, known).ids, stop_strings(chat)


def _is_path(target: str) -> bool:
    return local_path(target).is_absolute() or target.startswith((".", "runs/"))


def _transformers_model(name: str, remote_code: bool = False) -> HuggingFaceLM:
    from sansgpu.models.huggingface.causal_lm import HuggingFaceLM

    return HuggingFaceLM(name, remote_code)


def _context_of(model: TransformerLM | HuggingFaceLM) -> int:
    """Returns the context length in tokens."""
    if isinstance(model, TransformerLM):
        return model.config.max_seq_len
    return model.context or UNBOUNDED_CONTEXT


def _with_tokenizer(name: str | Path) -> str | Path:
    """Returns the base model of an adapter without a tokenizer, which peft does not save, or else `name`."""
    folder = local_path(name)
    if is_adapter_folder(folder) and not (folder / "tokenizer.json").exists():
        base = base_of(ModelConfig(name_or_path=str(name)))
        return name if base is None else str(base.name_or_path)
    return name


def _with_rows(tokenizer: Tokenizer, model: TransformerLM | HuggingFaceLM, source: ModelSource) -> Tokenizer:
    """Returns a tokenizer whose tokens all have a row in the model's embedding. Raises ConfigError if one has none."""
    rows = model.config.vocab_size if isinstance(model, TransformerLM) else model.rows
    assert rows is not None
    tokenizer.backend = with_rows(tokenizer.backend, rows, source.target, lambda token: token == tokenizer.end_of_text)
    return tokenizer


def _gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    parts = file.tokenizer
    tokenizer = tokenizer_of_model(parts.backend, parts.token(parts.eos_id), file.path)
    tokenizer.prefix_ids, tokenizer.suffix_ids = special_tokens_around(tokenizer.backend)
    if parts.adds_bos and parts.bos_id is not None and not tokenizer.prefix_ids:
        tokenizer.prefix_ids = (parts.bos_id,)
    return tokenizer
