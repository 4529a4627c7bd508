"""`task: preference` trains a causal model on preferences between answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.schema import Config
from sansgpu.data.forms.chats import ConversationOptions
from sansgpu.data.forms.preferences import PREFERENCES
from sansgpu.data.row_report import RowReport
from sansgpu.data.shards import cache_key, cached, rows_with_progress
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.split import describe_split
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.distributed.group import SINGLE_PROCESS, Group
from sansgpu.machine.probe import has_bf16_tensors, mixed_precision
from sansgpu.models.huggingface.pretrained import weights_fingerprint
from sansgpu.models.huggingface.tokenizer_files import load_chat_tokenizer
from sansgpu.models.modules import narrowed_matrices
from sansgpu.tasks.evaluation import read_requested
from sansgpu.tasks.fine_tuning import StepWideTask, passes, require_examples, split_rows
from sansgpu.tasks.preference.batch import (
    ANSWERS,
    AnswerPairs,
    PreferenceCorpus,
    PreferenceExamples,
    with_other_answers,
)
from sansgpu.tasks.preference.evaluate import PreferenceEvaluator
from sansgpu.tasks.preference.objective import KTOObjective, PreferenceObjective
from sansgpu.tasks.preference.rows import Answers, tokenize_preferences
from sansgpu.tasks.preference.settings import KTO as KTO_SETTINGS
from sansgpu.tasks.preference.settings import SETTINGS, PreferenceTrainingConfig
from sansgpu.tasks.sft.notes import ReadingNotes, template_notes
from sansgpu.tasks.sft.task import SFT
from sansgpu.tasks.sft.template import with_native_template
from sansgpu.tasks.task import EvaluationRequest, TrainedModel

PROMPT_SHARE = 0.5  # share of the prompt in the tokens of a random example


class Preference(SFT):
    """`task: preference` on pairs of answers."""

    settings = SETTINGS
    objective_class = PreferenceObjective
    evaluator_class = PreferenceEvaluator
    rated: ClassVar[bool] = False

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, Any]:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        sources = open_sources(config.data)
        tokenizer = load_chat_tokenizer(config)
        config = with_native_template(config, tokenizer, PREFERENCES)
        notes = [*sources.notes, *template_notes(config, tokenizer)]
        train = cls._read(sources.train, config, tokenizer, progress, notes)
        split = None
        if sources.validation is not None:
            held = cls._read(sources.validation, config, tokenizer, progress, notes)
        else:
            require_examples(sources, [len(train)], "row", notes)
            train, held = split_rows(train, [one.prompt.tobytes() for one in train], config.data.validation_split)
            split = describe_split(len(train), len(held), "example", config.data.validation_split)
        require_examples(sources, [len(train), len(held)], "row", notes)
        parts = cls._examples(train, config), cls._examples(held, config)
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(train)}-{parts[0].lengths.sum()}-{parts[0].targets}"
        return config, PreferenceCorpus(
            *parts,
            notes,
            fingerprint,
            tokenizer,
            PreferenceTrainingConfig.of(config).preference.needs_reference,
            split=split,
        )

    @classmethod
    def _read(
        cls, source: Source, config: Config, tokenizer: Any, progress: ReportProgress, notes: list[str]
    ) -> list[Answers]:
        found = ReadingNotes(RowReport.of(config.data))
        rows, data = rows_with_progress(source, progress), config.data
        examples = tokenize_preferences(
            rows, tokenizer, config.window, data.long_rows, cls.rated, found, ConversationOptions.of(data)
        )
        notes += found.messages(source.name, config.window, "the oldest turns of their prompts were removed")
        return examples

    @classmethod
    def _examples(cls, examples: Sequence[Answers], config: Config) -> PreferenceExamples:
        return PreferenceExamples(with_other_answers(examples, config.window) if cls.rated else examples)

    def compute_reference(
        self, device: torch.device, precision: str, cache: Path, progress: ReportProgress, group: Group
    ) -> None:
        if self.objective.preference.needs_reference:
            parts = [self.corpus.train, self.corpus.validation]
            compute_reference(
                parts, lambda: self.objective, self.config.model, device, precision, cache, progress, group
            )

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> Any:
        """Builds `size` examples of random tokens. Each has `tokens` tokens, counting the shared prompt once."""
        total = min(tokens or ANSWERS * config.window, ANSWERS * config.window)
        prompt = max(1, round(total * PROMPT_SHARE)) if tokens else 1
        answer = min(max(0, total - prompt) // ANSWERS, config.window - prompt) + 1
        drawn = cls.objective_class.random_tokens(config, size * ANSWERS, prompt + answer)
        examples = [
            Answers(one[:prompt], (one[prompt:], other[prompt:]), (np.ones(len(one) - prompt, np.bool_),) * ANSWERS)
            for one, other in zip(drawn[::2], drawn[1::2], strict=True)
        ]
        return PreferenceExamples(examples).batch(np.arange(size))

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> Any:
        config = loaded.config
        if request.data is None:
            part = cast(PreferenceCorpus, request.own_corpus()).validation
        else:
            evaluated = cls.config_to_evaluate(loaded, request)

            def read(source: Source, notes: list[str]) -> PreferenceExamples:
                rows = cls._read(source, evaluated, loaded.tokenizer, request.progress, notes)
                return cls._examples(rows, evaluated)

            part = read_requested(request, evaluated.data, read)
        if PreferenceTrainingConfig.of(config).preference.needs_reference:
            plain = config  # an adapter that was trained further: the reference is the adapter before this run
            if config.model.adapter != "continue":
                plain = config.with_values("model", adapter="none")
            compute_reference(
                [part], lambda: cls.objective_class(plain), config.model, loaded.device, loaded.precision,
                request.cache, request.progress,
            )  # fmt: skip
        return PreferenceEvaluator(loaded.objective, part)


class KTO(StepWideTask, Preference):
    """`task: preference` on rated answers."""

    settings = KTO_SETTINGS
    objective_class = KTOObjective
    rated = True


CHUNK = 64  # examples per file of the cache, so that a killed run loses little work


_FILE = "log_probabilities.npy"


# The keys of a model that do not change the reference, which is the model before training.
_TRAINING_KEYS = {
    "name_or_path", "adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "merge_adapter",
    "trained_layers", "freeze_after", "keep_activations",
}  # fmt: skip


def compute_reference(
    parts: list[PreferenceExamples],
    model: Callable[[], PreferenceObjective],
    settings: ModelConfig,
    device: torch.device,
    precision: str,
    cache: Path,
    progress: ReportProgress,
    group: Group = SINGLE_PROCESS,
) -> None:
    """Sets `reference` of `parts`: reads it from the cache, or computes it in chunks that the ranks share.

    `model` returns the reference model, and is only called if a chunk is not in the cache. Raises ConfigError if the
    cache cannot be used.
    """
    splits = [(part, np.split(np.arange(len(part)), range(CHUNK, len(part), CHUNK))) for part in parts]
    chunks = [(part, numbers) for part, pieces in splits for numbers in pieces]
    weights = (weights_fingerprint(settings), settings.model_dump_json(exclude=_TRAINING_KEYS), precision)
    own = {}
    for number in range(group.rank, len(chunks), group.size):
        progress("computing the reference", number, len(chunks), "batch")
        part, indices = chunks[number]
        batch = part.batch(indices)

        def build(folder: Path, batch: AnswerPairs = batch) -> None:
            np.save(folder / _FILE, _log_probabilities(model(), batch, device, precision))

        folder = cached(cache / "reference" / cache_key("reference", *weights, batch.content()), build)
        own[number] = _read(folder, len(indices)).tolist()
    for found in group.all_gather_object(own):
        for number, values in found.items():
            part, indices = chunks[int(number)]
            part.reference[indices] = values


def _read(folder: Path, count: int) -> np.ndarray:
    try:
        values: np.ndarray = np.load(folder / _FILE, allow_pickle=False)
        if values.shape == (count, 2) and values.dtype == np.float64 and np.isfinite(values).all():
            return values
    except (OSError, ValueError, EOFError):
        pass
    raise ConfigError(
        f"the cached log-probabilities in {folder} are damaged; delete that folder to compute them again."
    )


def _log_probabilities(
    objective: PreferenceObjective, batch: AnswerPairs, device: torch.device, precision: str
) -> np.ndarray:
    """Computes the log-probabilities of the answers, (B, 2) float64, in passes of a few thousand tokens."""
    from sansgpu.models.generation.sampling import reading

    objective.model.to(device)  # type: ignore[arg-type]
    results = np.empty((len(batch), 2))
    # Rounds weights as training does, for equal log-probabilities in step 1.
    rounded = narrowed_matrices(objective.model) if has_bf16_tensors(precision) else nullcontext()
    with reading(objective.model), torch.no_grad(), rounded, mixed_precision(device, precision):
        lengths = batch.sizes.sum(1).numpy()
        order = objective.ordered(np.argsort(-lengths, kind="stable"), lengths, batch.prompt)
        for numbers in passes(lengths, order):
            pieces = AnswerPairs.joined([batch.rows(number, number + 1) for number in numbers])
            results[numbers] = objective.log_probabilities(pieces.to(device)).cpu().numpy()
    return results
