"""Supervised fine-tuning (SFT) of causal models on conversations; only assistant turns have a loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from sansgpu.config import SETTINGS, Config
from sansgpu.data.batch import IGNORE, ExampleBatch
from sansgpu.data.chat import TokenizedConversations, show_masked, tokenize_conversations
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.shards import ReportProgress, rows_with_progress
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.split import describe_split, split_examples
from sansgpu.data.teacher_folder import Predictions, TeacherFolder
from sansgpu.kernels.cross_entropy import DEFAULT_LOSS_OPTIONS, LossOptions
from sansgpu.machine.probe import has_native_bf16
from sansgpu.models.batched import BatchModel, stream
from sansgpu.models.generate import Sampling, reading
from sansgpu.models.modules import narrow_matrices
from sansgpu.models.pretrained import load_tokenizer_of, tokenizer_parts
from sansgpu.models.prompts import decoder_chat, prompt_ids
from sansgpu.models.teacher import Teacher, decoder_teacher, student_loss, transformers_teacher
from sansgpu.tasks.decoder_chat import DecoderChat
from sansgpu.tasks.distillation import (
    Lesson,
    StudentLoss,
    open_lesson,
    require_same_vocabulary,
    student_metrics,
    with_length_of,
)
from sansgpu.tasks.evaluation import SplitEvaluator, read_requested
from sansgpu.tasks.fine_tuning import FineTuning, FineTuningTask, require_examples
from sansgpu.tasks.language_modeling import text_metrics
from sansgpu.tasks.task import Evaluator, GGUFParts, Sums
from sansgpu.tasks.trained_model import EvaluationRequest, ModelSource, TrainedModel
from sansgpu.tasks.variable_length_corpus import TokenizedCorpus

CHAT_TEMPLATE_FILE = "chat_template.jinja"  # the name that transformers gives to it


@dataclass(frozen=True)
class ConversationExamples:
    """A subset of examples, by index."""

    examples: TokenizedConversations
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Returns the number of input tokens of each example: the last token is only a target."""
        lengths: np.ndarray = self.examples.lengths()[self.numbers] - 1
        return lengths

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids (L,) and the loss mask (L,) of one example."""
        return self.examples.example(self.numbers[index])

    @property
    def targets(self) -> int:
        """Returns the number of tokens with a loss."""
        return sum(int(self.examples.example(number)[1][1:].sum()) for number in self.numbers)

    def batch(self, indices: np.ndarray) -> PackedSequences:
        """Returns the examples with these indices, with targets shifted by one token."""
        pairs = [self.examples.example(self.numbers[index]) for index in indices]
        targets = [np.where(learned[1:], ids[1:], IGNORE) for ids, learned in pairs]
        return PackedSequences.of([ids[:-1] for ids, _ in pairs], targets, numbers=self.numbers[indices])

    def target_bytes(self, numbers: np.ndarray) -> int:
        """Returns the UTF-8 bytes of text with a loss in the examples with these numbers."""
        return int(self.examples.learned_bytes[numbers].sum())


@dataclass(frozen=True)
class ChatCorpus(TokenizedCorpus[ConversationExamples]):
    """Tokenized conversations with loss masks, for training and validation."""

    teacher: Predictions | None = None

    def preview(self) -> str | None:
        """Returns the text of the first example; brackets enclose the parts with a loss."""
        return show_masked(*self.train.examples.example(self.train.numbers[0]), self.tokenizer)


class SFTObjective(FineTuning):
    """A causal model and its loss."""

    head_kind = "causal"

    def __init__(self, config: Config, random: bool = False, layers: int | None = None, frozen: bool = False) -> None:
        super().__init__(config, random, layers, frozen)
        self._student = StudentLoss(config)

    def step_sums(self) -> Sums:
        return self._student.sums.take()

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return student_metrics(sums)

    def summed_loss(self, batch: Any) -> torch.Tensor:
        """Computes the summed cross-entropy with the configured label smoothing and z-loss, or a student's loss: ()."""
        training = self.config.training
        if (soft := self._student.soft_targets(batch)) is not None:
            loss, parts = student_loss(self.unpadded, batch.tokens, batch.lengths, batch.targets, soft, training.z_loss)
            self._student.add(parts, batch.targets)
            return loss
        return self._cross_entropy(batch, LossOptions(training.label_smoothing, training.z_loss))

    def plain_loss(self, batch: PackedSequences) -> torch.Tensor:
        """Computes the summed cross-entropy without label smoothing and z-loss, ()."""
        return self._cross_entropy(batch, DEFAULT_LOSS_OPTIONS)

    def _cross_entropy(self, batch: PackedSequences, shape: LossOptions) -> torch.Tensor:
        return self.unpadded.summed_loss(batch.tokens, batch.lengths, batch.targets, shape)


class SFT(SFTObjective, FineTuningTask):
    """`task: sft`."""

    settings = SETTINGS["sft"]
    verbs = ("evaluate", "generate", "complete", "chat", "export", "gguf", "distill")
    verbs_for_any_model = ("generate", "chat")
    has_windows = True
    objective_class: ClassVar[type[FineTuning]] = SFTObjective

    def __init__(self, config: Config, corpus: ChatCorpus, effective_batch: int) -> None:
        super().__init__(config)
        self.use_corpus(corpus, effective_batch, corpus.train.targets / corpus.train_tokens)
        self.evaluator = SFTEvaluator(self, corpus.validation)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, ChatCorpus]:
        """Reads and tokenizes the rows, or opens a teacher's.

        Raises ConfigError if there are too few, one is invalid, or the teacher has another vocabulary.
        """
        if config.training.distillation.teacher is not None:
            return _taught_corpus(config, open_lesson(config), progress)
        return config, cls.read(config, load_tokenizer_of(config.model, config.data.chat_template), progress)

    @classmethod
    def read(cls, config: Config, tokenizer: Any, progress: ReportProgress) -> ChatCorpus:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        sources = open_sources(config.data)
        notes: list[str] = []
        examples = _examples(sources.train, config, tokenizer, progress, notes)
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
        arrays = {**_arrays_of("train", corpus.train), **_arrays_of("validation", corpus.validation)}

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
        return decoder, load_tokenizer_of(config.model, config.data.chat_template), config

    @classmethod
    def teacher(cls, loaded: TrainedModel) -> Teacher:
        if isinstance(loaded.objective, DecoderChat):
            return decoder_teacher(loaded.objective.model)
        return transformers_teacher(loaded.objective.unpadded, _context_of(loaded.objective))

    def batch(self, step: int, total_steps: int | None = None) -> ExampleBatch:
        batch = super().batch(step, total_steps)
        teacher = self.corpus.teacher if isinstance(self.corpus, ChatCorpus) else None
        if teacher is None or not isinstance(batch, PackedSequences):
            return batch
        assert batch.numbers is not None
        return teacher.add_to(batch, batch.numbers.numpy())

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> ExampleBatch:
        """Builds `size` examples of random tokens, all with a loss."""
        drawn = cls.random_tokens(config, size, tokens)
        return PackedSequences.of(drawn, drawn)

    def sample(self, prompt: str, tokens: int, seed: int) -> str:
        """Generates an answer to `prompt`."""
        from sansgpu.models.chat import pretrained_single  # imports transformers

        tokenizer = self.corpus.tokenizer
        ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}])
        with reading(self.model):
            return "".join(stream(pretrained_single(self.model, tokenizer), ids, tokens, Sampling(seed=seed)))

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> Evaluator:
        if request.data is None:
            return SFTEvaluator(loaded.objective, cast(ChatCorpus, request.own_corpus()).validation)
        config = cls.config_to_evaluate(loaded, request)

        def read(source: Source, notes: list[str]) -> ConversationExamples:
            return tokenize_source(source, config, loaded.tokenizer, request.progress, notes)

        return SFTEvaluator(loaded.objective, read_requested(request, config.data, read))

    @classmethod
    def config_to_evaluate(cls, loaded: TrainedModel, request: EvaluationRequest) -> Config:
        """Returns the configuration of a model, with the maximum length of the examples to evaluate."""
        data = loaded.config.data
        assert data.max_length is not None
        longest = max(data.max_length, request.window or 0)
        window = request.window_within(_context_of(loaded.objective) or longest, data.max_length)
        return loaded.config.model_copy(update={"data": data.model_copy(update={"max_length": window})})

    @classmethod
    def batch_model(cls, loaded: TrainedModel) -> BatchModel:
        if isinstance(loaded.objective, DecoderChat):
            _narrow_where_faster(loaded.objective.model)
            return decoder_chat(loaded.objective.model, loaded.tokenizer)
        from sansgpu.models.chat import pretrained_batch  # imports transformers

        _narrow_where_faster(loaded.objective.model)
        return pretrained_batch(loaded.objective.unpadded, loaded.tokenizer)

    @classmethod
    def gguf_parts(cls, loaded: TrainedModel) -> GGUFParts:
        settings = loaded.objective.model.config.to_dict()
        return settings, loaded.objective.merged_weights(), tokenizer_parts(loaded.tokenizer)


def _taught_corpus(config: Config, folder: TeacherFolder, progress: ReportProgress) -> tuple[Config, ChatCorpus]:
    """Opens the conversations and the predictions of a teacher's folder.

    The student gets the teacher's chat template. Raises ConfigError if its tokenizer has another vocabulary.
    """
    template = folder.root / CHAT_TEMPLATE_FILE
    tokenizer = load_tokenizer_of(config.model, str(template) if template.is_file() else None)
    require_same_vocabulary(tokenizer.backend_tokenizer, str(config.model.name_or_path), folder)
    train, validation = (_examples_of(folder, part) for part in ("train", "validation"))
    predictions = Predictions(folder, progress)
    corpus = ChatCorpus(train, validation, [], folder.fingerprint, tokenizer, predictions)
    return with_length_of(config, folder), corpus


def _arrays_of(part: str, rows: ConversationExamples) -> dict[str, np.ndarray]:
    """Returns the tokens and loss masks of examples, one after the other, and the size of each."""
    examples = [rows.example(number) for number in range(len(rows))]
    return {
        f"{part}_tokens": np.concatenate([ids for ids, _ in examples]),
        f"{part}_learned": np.concatenate([learned for _, learned in examples]),
        f"{part}_lengths": np.array([len(ids) for ids, _ in examples], np.int64),
        f"{part}_bytes": rows.examples.learned_bytes[rows.numbers],
    }


def _examples_of(folder: TeacherFolder, part: str) -> ConversationExamples:
    names = ("tokens", "learned", "lengths", "bytes")
    tokens, learned, lengths, sizes = (folder.array(f"{part}_{name}") for name in names)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    examples = TokenizedConversations(tokens, learned, offsets, sizes, 0, 0, 0, None)
    return ConversationExamples(examples, np.arange(len(examples)))


def _context_of(objective: SFTObjective | DecoderChat) -> int | None:
    """Returns the model's maximum number of tokens, or None if it declares none."""
    if isinstance(objective, DecoderChat):
        return objective.model.config.max_seq_len
    context: int | None = getattr(objective.model.config, "max_position_embeddings", None)
    return context


def _narrow_where_faster(model: torch.nn.Module) -> None:
    """Converts matrices to bf16 if this CPU computes it natively, because each generated token reads all of them."""
    if has_native_bf16():
        narrow_matrices(model)


class SFTEvaluator(SplitEvaluator[SFTObjective | DecoderChat, ConversationExamples]):
    """Evaluates a model on the assistant turns of conversations."""

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the loss, the number of targets and the bytes of text that they cover."""
        assert batch.numbers is not None
        size = self._part.target_bytes(batch.numbers.cpu().numpy())
        loss = float(self._objective.plain_loss(batch))
        return {"loss": loss, "tokens": float(batch.target_count()), "bytes": float(size)}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return text_metrics(sums)


def tokenize_source(
    source: Source, config: Config, tokenizer: Any, progress: ReportProgress, notes: list[str]
) -> ConversationExamples:
    """Reads all rows of a source. Raises ConfigError if one is invalid."""
    examples = _examples(source, config, tokenizer, progress, notes)
    return ConversationExamples(examples, np.arange(len(examples)))


def _examples(
    source: Source, config: Config, tokenizer: Any, progress: ReportProgress, notes: list[str]
) -> TokenizedConversations:
    data = config.data
    assert data.max_length is not None
    rows, window = rows_with_progress(source, progress), data.max_length
    examples = tokenize_conversations(rows, tokenizer, window, data.long_rows, data.on_bad_row)
    if examples.shortened:
        notes.append(
            f"{source.name}: {examples.shortened} rows are longer than {window} tokens and were shortened at their "
            "start, conversations by whole turns."
        )
    if examples.dropped:
        whole = "their last question and answer" if data.long_rows == "truncate" else "they"
        notes.append(
            f"{source.name}: {examples.dropped} rows are dropped: {whole} are longer than {window} tokens, or there is "
            "nothing to learn; raise data.max_length (eval: --window) to keep the long ones."
        )
    if examples.lacking_system:
        notes.append(
            f"{source.name}: the chat template leaves out the system message of {examples.lacking_system} rows; to "
            "train on it, put its text into the first question."
        )
    if examples.skipped:
        notes.append(f"{source.name}: bad rows skipped: {examples.skipped}; the first: {examples.first_skipped}")
    return examples
