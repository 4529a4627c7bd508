"""`task: grpo` trains a causal model on its own completions of prompts, which a reward function rates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.batch import ExampleBatch
from sansgpu.data.forms.chats import PROMPTS
from sansgpu.data.order import batch_indices
from sansgpu.data.sources import Source, open_sources
from sansgpu.data.split import describe_split
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.distributed.group import Group
from sansgpu.models.huggingface.tokenizer_files import load_chat_tokenizer
from sansgpu.tasks.evaluation import read_requested
from sansgpu.tasks.fine_tuning import require_examples, split_rows
from sansgpu.tasks.grpo.batch import Completions
from sansgpu.tasks.grpo.evaluate import GRPOEvaluator
from sansgpu.tasks.grpo.objective import GRPOObjective
from sansgpu.tasks.grpo.rewards import check_answer
from sansgpu.tasks.grpo.rows import PromptCorpus, PromptExamples, read_prompts
from sansgpu.tasks.grpo.settings import SETTINGS, GRPOTrainingConfig
from sansgpu.tasks.sft.notes import template_notes
from sansgpu.tasks.sft.task import SFT, context_of
from sansgpu.tasks.sft.template import with_native_template
from sansgpu.tasks.task import EvaluationRequest, TrainedModel


class GRPO(SFT):
    """`task: grpo`."""

    settings = SETTINGS
    objective_class = GRPOObjective
    evaluator_class = GRPOEvaluator

    def __init__(self, config: Config, corpus: Any, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch)
        context = context_of(self.objective)
        if context is not None and config.window > context:
            raise ConfigError(
                f"data.max_length {config.window} is longer than the model's context of {counted(context, 'token')}; "
                "lower it."
            )
        self.objective.open(corpus.tokenizer, GRPOTrainingConfig.of(config).grpo.reward)

    def complete(self, batch: Any, group: Group) -> ExampleBatch:
        completed: ExampleBatch = self.objective.complete(batch, group)
        return completed

    def generation_seconds(self, completions: int, tokens: int) -> float:
        seconds: float = self.objective.generation_seconds(completions, tokens)
        return seconds

    def step_problem(self, event: Mapping[str, Any]) -> str | None:
        """Describes steps in which all completions of each prompt had the same reward."""
        if event.get("equal_rewards") != 1.0:
            return None
        grpo = GRPOTrainingConfig.of(self.config).grpo
        nothing = (
            "all completions of a prompt have had the same reward in the last steps, so the model learns nothing from "
            "them"
        )
        if event.get("truncated") == 1.0:
            return (
                f"{nothing}: all were cut off after {grpo.max_completion_length} tokens, before they ended. Raise "
                "training.grpo.max_completion_length, or ask for short answers in the prompts."
            )
        return (
            f"{nothing}: their mean reward is {event['reward']:g}. Check what the reward function returns; use one "
            "that also rewards partly right answers, easier prompts, a larger training.grpo.group_size (now "
            f"{grpo.group_size}), or a higher training.grpo.temperature (now {grpo.temperature:g})."
        )

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, Any]:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        sources = open_sources(config.data)
        tokenizer = load_chat_tokenizer(config)
        config = with_native_template(config, tokenizer, PROMPTS)
        notes = [*sources.notes, *template_notes(config, tokenizer)]
        train = read_prompts(sources.train, config, tokenizer, progress, notes)
        split = None
        if sources.validation is not None:
            held = read_prompts(sources.validation, config, tokenizer, progress, notes)
        else:
            require_examples(sources, [len(train)], "prompt", notes)
            contents = [question.ids.tobytes() for question in train.questions]
            parts = split_rows(train.questions, contents, config.data.validation_split)
            train, held = (PromptExamples(part, train.group_size, train.longest) for part in parts)
            split = describe_split(len(train), len(held), "prompt", config.data.validation_split)
        require_examples(sources, [len(train), len(held)], "prompt", notes)
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(train)}-{int(train.lengths.sum())}"
        return config, PromptCorpus(train, held, notes, fingerprint, tokenizer, split=split)

    def batch(self, step: int, total_steps: int | None = None) -> ExampleBatch:
        part, size = self.corpus.train, self._effective_batch // self.corpus.train.group_size
        indices = batch_indices(self.config.training.seed, step, len(part), size)
        batch: ExampleBatch = part.batch(indices, step)
        return batch

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> ExampleBatch:
        """Builds `size` completions of random tokens, in groups. Each has `tokens` tokens with its prompt."""
        drawn, grpo = cls.objective_class.random_tokens(config, size, tokens), GRPOTrainingConfig.of(config).grpo
        prompt = max(1, len(drawn[0]) - grpo.max_completion_length)
        prompts = [drawn[number - number % grpo.group_size][:prompt] for number in range(size)]
        return Completions.with_advantages(prompts, [[*ids[prompt:].tolist(), 0] for ids in drawn], torch.ones(size))

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> GRPOEvaluator:
        reward = request.reward or GRPOTrainingConfig.of(loaded.config).grpo.reward
        if request.reward is None and GRPOTrainingConfig.of(loaded.config).grpo.reward_function is not None:
            raise ConfigError(
                f"{loaded.source.target} was trained with the reward {reward}, which is Python code: add --reward "
                f"{reward} to run it, or --reward answer to compare completions with the rows' answers."
            )
        config = cls.config_to_evaluate(loaded, request).with_values("training.grpo", reward=reward)
        loaded.objective.open(loaded.tokenizer, reward)
        if request.data is None:
            part = cast(PromptCorpus, request.own_corpus()).validation
        else:

            def read(source: Source, notes: list[str]) -> PromptExamples:
                return read_prompts(source, config, loaded.tokenizer, request.progress, notes)

            part = read_requested(request, config.data, read)
        if GRPOTrainingConfig.of(config).grpo.reward_function is None:
            for question in part.questions:
                check_answer(question.columns, question.where)
        return GRPOEvaluator(loaded.objective, part)
