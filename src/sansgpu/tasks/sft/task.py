"""`task: sft` fine-tunes a causal model on conversations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from sansgpu.config.schema import Config
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.forms.chats import CONVERSATIONS, ConversationOptions
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.split import describe_split, split_examples
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.probe import has_bf16_tensors, has_native_bf16
from sansgpu.models.generation.generate import BatchModel, stream
from sansgpu.models.generation.prompts import decoder_chat, prompt_ids
from sansgpu.models.generation.sampling import Sampling, reading
from sansgpu.models.huggingface.causal_lm import transformers_scorer, transformers_teacher
from sansgpu.models.huggingface.source import gguf_file_of
from sansgpu.models.huggingface.tokenizer_files import end_ids_of, load_chat_tokenizer, tokenizer_parts
from sansgpu.models.modules import narrow_matrices
from sansgpu.models.scoring import Scorer, decoder_scorer
from sansgpu.models.teacher import Teacher, decoder_teacher
from sansgpu.tasks.capabilities import Chats, ExportsGGUF, GGUFParts, Teaches
from sansgpu.tasks.distillation import Lesson, configured_teacher_folder
from sansgpu.tasks.evaluation import read_requested
from sansgpu.tasks.fine_tuning import FineTuning, FineTuningTask, require_examples
from sansgpu.tasks.settings import DistilledTrainingConfig
from sansgpu.tasks.sft.data import (
    ChatCorpus,
    ConversationExamples,
    arrays_of,
    examples_in,
    shared_system_message,
    taught_corpus,
    tokenize_source,
)
from sansgpu.tasks.sft.evaluate import AnsweringEvaluator, SFTEvaluator
from sansgpu.tasks.sft.notes import template_notes
from sansgpu.tasks.sft.objective import DecoderChat, SFTObjective
from sansgpu.tasks.sft.settings import SETTINGS
from sansgpu.tasks.sft.template import with_native_template
from sansgpu.tasks.task import EvaluationRequest, Evaluator, ModelSource, TrainedModel


class SFT(Chats, Teaches, ExportsGGUF, FineTuningTask):
    """`task: sft`."""

    settings = SETTINGS
    verbs_for_any_model = ("generate", "chat")
    has_windows = True
    objective_class: ClassVar[type[FineTuning]] = SFTObjective
    evaluator_class: ClassVar[Callable[..., Evaluator]] = SFTEvaluator

    def __init__(self, config: Config, corpus: Any, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch, corpus.train.targets / corpus.train_tokens)
        self.evaluator = self.evaluator_class(self.objective, corpus.validation)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, ChatCorpus]:
        """Reads and tokenizes the rows, or opens a teacher's folder.

        Raises ConfigError if there are too few rows, one is invalid, or the teacher has a different vocabulary.
        """
        if DistilledTrainingConfig.of(config).distillation.teacher is not None:
            return taught_corpus(config, configured_teacher_folder(config), progress)
        tokenizer = load_chat_tokenizer(config)
        config = with_native_template(config, tokenizer, CONVERSATIONS)
        return config, cls.read(config, tokenizer, progress)

    @classmethod
    def read(cls, config: Config, tokenizer: Any, progress: ReportProgress) -> ChatCorpus:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        sources = open_sources(config.data)
        notes = [*sources.notes, *template_notes(config, tokenizer)]
        examples = examples_in(sources.train, config, tokenizer, progress, notes)
        split = None
        if sources.validation is not None:
            train = ConversationExamples(examples, np.arange(len(examples)))
            validation = tokenize_source(sources.validation, config, tokenizer, progress, notes)
        else:
            require_examples(sources, [len(examples)], "row", notes)
            contents = [examples.example(number)[0].tobytes() for number in range(len(examples))]
            numbers = split_examples(contents, examples.lengths(), config.data.validation_split)
            train, validation = (ConversationExamples(examples, part) for part in numbers)
            split = describe_split(len(train), len(validation), "row", config.data.validation_split)
        require_examples(sources, [len(train), len(validation)], "row", notes)
        tokens = int(train.lengths.sum())
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(train)}-{tokens}-{train.targets}"
        return ChatCorpus(train, validation, notes, fingerprint, tokenizer, split=split)

    @classmethod
    def lesson(cls, config: Config, tokenizer: Any, cache: Path, progress: ReportProgress) -> Lesson:
        corpus = cls.read(config, tokenizer, progress)
        arrays = {**arrays_of("train", corpus.train), **arrays_of("validation", corpus.validation)}

        def sequences(first: int, stop: int) -> PackedSequences:
            return corpus.train.batch(np.arange(first, stop))

        counts = np.array([int(corpus.train.example(number)[1][1:].sum()) for number in range(len(corpus.train))])
        return Lesson(arrays, counts, sequences, corpus.fingerprint, corpus.notes)

    @classmethod
    def load(cls, source: ModelSource) -> tuple[Any, Any, Config]:
        config = source.config or cls.config_of_model(source)
        decoder = DecoderChat.load(source, config)
        if decoder is None:
            return super().load(source)
        return decoder, load_chat_tokenizer(config), config

    @classmethod
    def teacher(cls, loaded: TrainedModel) -> Teacher:
        if isinstance(loaded.objective, DecoderChat):
            return decoder_teacher(loaded.objective.model)
        return transformers_teacher(loaded.objective.unpadded, context_of(loaded.objective))

    def batch(self, step: int, total_steps: int | None = None) -> ExampleBatch:
        batch = super().batch(step, total_steps)
        teacher = self.corpus.teacher if isinstance(self.corpus, ChatCorpus) else None
        if teacher is None or not isinstance(batch, PackedSequences):
            return batch
        assert batch.numbers is not None
        return teacher.add_to(batch, batch.numbers.numpy())

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> ExampleBatch:
        """Builds `size` examples of random tokens that are all targets."""
        drawn = cls.objective_class.random_tokens(config, size, tokens)
        return PackedSequences.of(drawn, drawn)

    def sample(self, prompt: str, tokens: int, sampling: Sampling) -> str:
        """Generates an answer to `prompt`."""
        from sansgpu.models.huggingface.generation import pretrained_single  # imports transformers

        tokenizer = self.corpus.tokenizer
        ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}])
        with reading(self.model):
            return "".join(stream(pretrained_single(self.model, tokenizer), ids, tokens, sampling))

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> Evaluator:
        open_model = partial(cls.batch_model, loaded)
        if request.data is None:
            own = cast(ChatCorpus, request.own_corpus()).validation
            return AnsweringEvaluator(loaded.objective, own, open_model)
        config = cls.config_to_evaluate(loaded, request)

        def read(source: Source, notes: list[str]) -> ConversationExamples:
            return tokenize_source(source, config, loaded.tokenizer, request.progress, notes)

        return AnsweringEvaluator(loaded.objective, read_requested(request, config.data, read), open_model)

    @classmethod
    def config_to_evaluate(cls, loaded: TrainedModel, request: EvaluationRequest) -> Config:
        """Returns the model's configuration with data.max_length set for the evaluation."""
        data = loaded.config.data
        assert data.max_length is not None
        longest = max(data.max_length, request.window or 0)
        window = request.window_within(context_of(loaded.objective) or longest, data.max_length)
        return loaded.config.with_values("data", max_length=window)

    @classmethod
    def batch_model(cls, loaded: TrainedModel) -> BatchModel:
        # Each generated token reads all matrices, so bf16 is always faster if the processor multiplies it.
        if has_bf16_tensors(loaded.precision) if loaded.is_precision_chosen else has_native_bf16():
            narrow_matrices(loaded.objective.model)
            if isinstance(loaded.objective, DecoderChat):
                loaded.objective.model.quantized_dtype = torch.bfloat16
        if isinstance(loaded.objective, DecoderChat):
            return decoder_chat(loaded.objective.model, loaded.tokenizer, loaded.objective.ends)
        from sansgpu.models.huggingface.generation import pretrained_batch  # imports transformers

        return pretrained_batch(loaded.objective.unpadded, loaded.tokenizer)

    @classmethod
    def system_message(cls, config: Config) -> str | None:
        return shared_system_message(open_sources(config.data).train, ConversationOptions.of(config.data))

    @classmethod
    def scorer(cls, loaded: TrainedModel) -> Scorer:
        if isinstance(loaded.objective, DecoderChat):
            return decoder_scorer(loaded.objective.model)
        return transformers_scorer(loaded.objective.unpadded, context_of(loaded.objective))

    @classmethod
    def gguf_parts(cls, loaded: TrainedModel) -> GGUFParts:
        model = loaded.objective.model
        parts = tokenizer_parts(loaded.tokenizer, end_ids_of(model), gguf_file_of(loaded.config.model))
        return model.config.to_dict(), loaded.objective.merged_weights(), parts


def context_of(objective: SFTObjective | DecoderChat) -> int | None:
    """Returns the model's context length in tokens, or None if its config does not have it."""
    if isinstance(objective, DecoderChat):
        return objective.model.config.max_seq_len
    context: int | None = getattr(objective.model.config, "max_position_embeddings", None)
    return context
