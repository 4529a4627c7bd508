"""Trains causal models on preferences: pairs of a chosen and a rejected answer, or answers rated good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from sansgpu.config import SETTINGS, Config
from sansgpu.data.answer_pairs import AnswerPairs, PreferenceExamples, with_other_answers
from sansgpu.data.chat import show_masked
from sansgpu.data.preferences import Answers, ReadingNotes, tokenize_preferences
from sansgpu.data.rows import BadRows
from sansgpu.data.shards import ReportProgress, rows_with_progress
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.split import describe_split
from sansgpu.machine.group import Group
from sansgpu.models.pretrained import load_tokenizer_of
from sansgpu.models.pretrained_costs import PretrainedCosts
from sansgpu.tasks.evaluation import SplitEvaluator, read_requested
from sansgpu.tasks.fine_tuning import FineTuning, require_examples, split_rows
from sansgpu.tasks.preference_losses import Scores, kl_divergence, kto_losses, pair_losses
from sansgpu.tasks.preference_reference import compute_reference
from sansgpu.tasks.sft import SFT
from sansgpu.tasks.task import StepSums, Sums
from sansgpu.tasks.trained_model import EvaluationRequest, TrainedModel
from sansgpu.tasks.variable_length_corpus import TokenizedCorpus, largest_batch

ANSWERS = 2  # answers in an example
PROMPT_SHARE = 0.5  # assumed share of the prompt in the tokens of an example of a random batch


@dataclass(frozen=True)
class PreferenceCorpus(TokenizedCorpus[PreferenceExamples]):
    """Tokenized preferences for training and validation."""

    needs_reference: bool

    @property
    def reference_tokens(self) -> int:
        return self.train_tokens + self.validation_tokens if self.needs_reference else 0

    def preview(self) -> str | None:
        """Returns the text of the first example; brackets enclose the chosen and the rejected answer."""
        first = self.train.examples[0]
        prompt = [(int(token), False) for token in first.prompt]
        shown = []
        for before, ids, learned in zip((prompt, []), first.ids, first.learned, strict=False):
            tokens = [*before, *zip(ids.tolist(), learned.tolist(), strict=True)]
            shown.append(show_masked([t for t, _ in tokens], [known for _, known in tokens], self.tokenizer))
        return "\n".join(shown)

    @property
    def sequence_tokens(self) -> float:
        return float(self.train.sequence_lengths.mean())

    def most_tokens(self, examples: int, padded: bool) -> int:
        parts = (self.train, self.validation)
        if padded:
            return ANSWERS * examples * max(int(part.sequence_lengths.max()) for part in parts)
        return max(largest_batch(part.lengths, examples) for part in parts)


class PreferenceObjective(FineTuning):
    """A causal model and its loss of pairs of answers."""

    head_kind = "causal"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from sansgpu.models.answer_model import AnswerModel  # imports transformers, which takes seconds

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
