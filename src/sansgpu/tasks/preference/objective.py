"""Trains causal models on preferences: pairs of a chosen and a rejected answer, or answers rated good or bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch

from sansgpu.config import SETTINGS, Config, ConfigError, ModelConfig
from sansgpu.data.rows import BadRows
from sansgpu.data.shards import ReportProgress, cache_key, cached, rows_with_progress
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.split import describe_split
from sansgpu.machine.group import SINGLE_PROCESS, Group
from sansgpu.models.huggingface.costs import PretrainedCosts
from sansgpu.models.huggingface.pretrained import load_tokenizer_of, weights_fingerprint
from sansgpu.models.modules import narrowed_matrices
from sansgpu.tasks.evaluation import SplitEvaluator, read_requested
from sansgpu.tasks.fine_tuning import FineTuning, passes, require_examples, split_rows
from sansgpu.tasks.preference.batch import AnswerPairs, PreferenceExamples, with_other_answers
from sansgpu.tasks.preference.data import PreferenceCorpus
from sansgpu.tasks.preference.losses import Scores, kl_divergence, kto_losses, pair_losses
from sansgpu.tasks.preference.rows import Answers, ReadingNotes, tokenize_preferences
from sansgpu.tasks.sft.objective import SFT
from sansgpu.tasks.task import StepSums, Sums
from sansgpu.tasks.trained_model import EvaluationRequest, TrainedModel

if TYPE_CHECKING:
    pass


CHUNK = 64  # examples whose results are one file of the cache, so that a killed run loses little work
_FILE = "log_probabilities.npy"
_ADAPTER_KEYS = {"name_or_path", "adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "merge_adapter"}


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
    """Sets the reference of `parts`, whose chunks the ranks divide. `model` returns the model before training.

    It is called only if a chunk is not in the cache. Raises ConfigError if the cache cannot be used.
    """
    splits = [(part, np.split(np.arange(len(part)), range(CHUNK, len(part), CHUNK))) for part in parts]
    chunks = [(part, numbers) for part, pieces in splits for numbers in pieces]
    weights = (weights_fingerprint(settings), settings.model_dump_json(exclude=_ADAPTER_KEYS), precision)
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
    """Returns the log-probabilities of the answers, (B, 2) float64, in passes of a few thousand tokens."""
    from sansgpu.models.generation.sampling import reading

    objective.model.to(device)  # type: ignore[arg-type]
    results = np.empty((len(batch), 2))
    narrow = precision == "bf16"  # the first step must find no difference from its own rounded weights
    rounded = narrowed_matrices(objective.model) if narrow else nullcontext()
    with reading(objective.model), torch.no_grad(), rounded, torch.autocast(device.type, torch.bfloat16, narrow):
        for numbers in passes(batch.sizes.sum(1).numpy()):
            pieces = AnswerPairs.joined([batch.rows(number, number + 1) for number in numbers])
            results[numbers] = objective.log_probabilities(pieces.to(device)).cpu().numpy()
    return results


ANSWERS = 2  # answers in an example
PROMPT_SHARE = 0.5  # assumed share of the prompt in the tokens of an example of a random batch


class PreferenceObjective(FineTuning):
    """A causal model and its loss of pairs of answers."""

    head_kind = "causal"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from sansgpu.tasks.preference.model import AnswerModel  # imports transformers, which takes seconds

        super().__init__(*arguments, **named)
        self.preference = self.config.training.preference
        self._answers = AnswerModel(self.unpadded)
        self._step_sums = StepSums()

    def log_probabilities(self, batch: AnswerPairs) -> torch.Tensor:
        """Returns the log-probability of each answer, (B, 2) fp64."""
        return self._answers.log_probabilities(batch.tokens, batch.sizes, batch.targets)

    def summed_loss(self, batch: Any) -> torch.Tensor:
        loss, sums = self.measured(self.log_probabilities(batch), batch)
        self._step_sums.add(sums)
        return loss

    def measured(self, policy: torch.Tensor, batch: AnswerPairs) -> tuple[torch.Tensor, Sums]:
        """Returns the summed loss of examples with the log-probabilities `policy` (B, 2), and sums for metrics."""
        known = batch.has_target()
        scores = _scores(policy, batch, known)
        losses, rewards = pair_losses(self.preference, scores)
        chosen, rejected = rewards.detach().double().unbind(1)
        count = float(len(rewards))
        sums = {
            "examples": count, "accuracy": float((chosen > rejected).sum()),
            "chosen": float(chosen.sum()), "rejected": float(rejected.sum()), "rated_good": count, "rated_bad": count,
        }  # fmt: skip
        if self.preference.loss == "orpo":
            sums["nll"] = -float((scores.policy / scores.tokens.clamp(min=1))[:, 0].detach().double().sum())
        return losses.sum(), sums

    def step_sums(self) -> Sums:
        return self._step_sums.take()

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return reward_metrics(sums)

    @classmethod
    def costs(cls, config: Config) -> PretrainedCosts:
        return replace(super().costs(config), window=ANSWERS * config.window)


class KTOObjective(PreferenceObjective):
    """A causal model and the loss of rated answers, whose KL divergence is estimated from all answers of a step."""

    def outputs(self, batch: AnswerPairs) -> torch.Tensor:
        with self.forward_pass():
            return self.log_probabilities(batch)

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[AnswerPairs]) -> torch.Tensor:
        loss, sums = self.measured(outputs, AnswerPairs.joined(batches))
        self._step_sums.add(sums)  # every rank has the sums of all ranks, so that their ratios are right
        return loss

    def measured(self, policy: torch.Tensor, batch: AnswerPairs) -> tuple[torch.Tensor, Sums]:
        known = batch.has_target()
        scores, is_good = _scores(policy, batch, known), batch.labels[known] == 1
        kl = kl_divergence(scores)
        losses, rewards = kto_losses(self.preference, scores, is_good, kl)
        right = (rewards > self.preference.scale * kl) == is_good
        rewards = rewards.detach().double()
        return losses.sum(), {
            "examples": float(len(rewards)), "accuracy": float(right.sum()), "kl": float(kl) * len(rewards),
            "chosen": float(rewards[is_good].sum()), "rejected": float(rewards[~is_good].sum()),
            "rated_good": float(is_good.sum()), "rated_bad": float((~is_good).sum()),
        }  # fmt: skip


def _scores(policy: torch.Tensor, batch: AnswerPairs, known: torch.Tensor) -> Scores:
    return Scores(policy[known], batch.reference[known], batch.target_tokens()[known])


def reward_metrics(sums: Sums) -> dict[str, float]:
    """Computes means from the sums of `measured`."""
    count = sums["examples"]
    chosen = sums["chosen"] / max(1.0, sums["rated_good"])
    rejected = sums["rejected"] / max(1.0, sums["rated_bad"])
    means: dict[str, float] = {name: sums[name] / count for name in ("accuracy", "nll", "kl") if name in sums}
    return {**means, "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}


class Preference(PreferenceObjective, SFT):
    """`task: preference` with pairs of answers."""

    settings = SETTINGS["preference"]
    objective_class = PreferenceObjective
    rated: ClassVar[bool] = False

    def __init__(self, config: Config, corpus: PreferenceCorpus, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch)
        self.evaluator = PreferenceEvaluator(self, corpus.validation)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, Any]:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        sources = open_sources(config.data)
        tokenizer = load_tokenizer_of(config.model, config.data.chat_template)
        notes: list[str] = []
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
            *parts, notes, fingerprint, tokenizer, config.training.preference.needs_reference, split=split
        )

    @classmethod
    def _read(
        cls, source: Source, config: Config, tokenizer: Any, progress: ReportProgress, notes: list[str]
    ) -> list[Answers]:
        found = ReadingNotes(bad_rows=BadRows(config.data.on_bad_row))
        rows, long_rows = rows_with_progress(source, progress), config.data.long_rows
        examples = tokenize_preferences(rows, tokenizer, config.window, long_rows, cls.rated, found)
        notes += found.texts(source.name, config.window)
        return examples

    @classmethod
    def _examples(cls, examples: Sequence[Answers], config: Config) -> PreferenceExamples:
        return PreferenceExamples(with_other_answers(examples, config.window) if cls.rated else examples)

    def compute_reference(
        self, device: torch.device, precision: str, cache: Path, progress: ReportProgress, group: Group
    ) -> None:
        if self.preference.needs_reference:
            parts = [self.corpus.train, self.corpus.validation]
            compute_reference(parts, lambda: self, self.config.model, device, precision, cache, progress, group)

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> Any:
        """Builds `size` examples of random tokens; `tokens` is the length of each, with a shared prompt."""
        total = min(tokens or ANSWERS * config.window, ANSWERS * config.window)
        prompt = max(1, round(total * PROMPT_SHARE)) if tokens else 1
        answer = min(max(0, total - prompt) // ANSWERS, config.window - prompt) + 1
        drawn = cls.random_tokens(config, size * ANSWERS, prompt + answer)
        examples = [
            Answers(one[:prompt], (one[prompt:], other[prompt:]), (np.ones(len(one) - prompt, np.bool_),) * ANSWERS)
            for one, other in zip(drawn[::2], drawn[1::2], strict=True)
        ]
        return PreferenceExamples(examples).batch(np.arange(size))

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return 8

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
        if config.training.preference.needs_reference:
            plain = config.model_copy(update={"model": config.model.model_copy(update={"adapter": "none"})})
            compute_reference(
                [part], lambda: cls.objective_class(plain), config.model, loaded.device, loaded.precision,
                request.cache, request.progress,
            )  # fmt: skip
        return PreferenceEvaluator(loaded.objective, part)


class KTO(KTOObjective, Preference):
    """`task: preference` with rated answers."""

    settings = SETTINGS["kto"]
    objective_class = KTOObjective
    rated = True


class PreferenceEvaluator(SplitEvaluator[PreferenceObjective, PreferenceExamples]):
    """Evaluates a model on held-out preferences."""

    def evaluate(self, batch: AnswerPairs) -> Sums:
        """Returns the log-probabilities of each example under its number, because the KL is a mean over all of them."""
        found = self._objective.log_probabilities(batch).tolist()
        rows = zip(batch.numbers.tolist(), found, strict=True)
        return {f"{number} {answer}": row[answer] for number, row in rows for answer in range(ANSWERS)}

    def metrics(self, sums: Sums) -> dict[str, float]:
        numbers = sorted({int(name.split()[0]) for name in sums})
        policy = torch.tensor(
            [[sums[f"{number} {answer}"] for answer in range(ANSWERS)] for number in numbers], dtype=torch.float64
        )
        loss, found = self._objective.measured(policy, self._part.batch(np.array(numbers)))
        return {"loss": float(loss) / len(numbers), **reward_metrics(found), "examples": len(numbers)}
