"""The interface of lm-evaluation-harness to our models: packed scoring with shared beginnings, and batched generation.

Texts are tokenized as by the library's `hf` models, so that both give equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import DEFAULT_MAX_LENGTH, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.data.tokenizer import Tokenizer
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.jobs.generate import slots_for
from sansgpu.machine.probe import mixed_precision
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.generation.generate import BatchModel, complete
from sansgpu.models.generation.prompts import prompt_text
from sansgpu.models.generation.sampling import Sampling
from sansgpu.models.generation.text import StopDetector
from sansgpu.models.scoring import Score, Scorer, ScoreRequest
from sansgpu.tasks.task import TrainedModel

# Options of generation that change nothing, with the value for which that is true.
_WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "use_cache": True}
_EMPTY = ConfigError("a task asks for the probability of a text without tokens; check its choices.")


class HarnessModel(TemplateLM):
    """A trained model as lm-evaluation-harness uses it."""

    def __init__(self, loaded: TrainedModel, warn: Warn, progress: ReportProgress) -> None:
        super().__init__()
        self._loaded, self._warn, self._progress = loaded, warn, progress
        tokenizer = loaded.tokenizer
        self.tokenizer = _transformers_tokenizer(tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer
        self._cut = 0  # requests that were longer than the context

    @cached_property
    def _scorer(self) -> Scorer:
        scorer: Scorer = self._loaded.task_class.scorer(self._loaded)
        return scorer

    @cached_property
    def _generator(self) -> BatchModel:
        chosen = replace(self._loaded, is_precision_chosen=True)  # otherwise chat models would generate in bf16
        model: BatchModel = self._loaded.task_class.batch_model(chosen)
        return model

    @property
    def max_length(self) -> int:
        return self._scorer.context or DEFAULT_MAX_LENGTH

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return self._loaded.source.target

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        with tokenizer_errors():
            if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
            chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(self.tokenizer.encode(string, **chosen))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether greedy decoding would generate it."""
        wanted = [self._score_request(context, continuation) for _, context, continuation in requests]
        scores: list[Score] = [Score(0.0, True)] * len(wanted)
        with mixed_precision(self._loaded.device, self._loaded.precision):
            for done, (number, score) in enumerate(self._scorer.scores(wanted), 1):
                scores[number] = score
                self._progress("scoring", done, len(wanted), "request")
        self._report_cuts()
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _score_request(self, context: list[int], continuation: list[int]) -> ScoreRequest:
        if not continuation:
            raise _EMPTY
        if len(continuation) > self.max_length:
            raise ConfigError(
                f"a task asks for the probability of {counted(len(continuation), 'token')}, more than the model's "
                f"context of {self.max_length:,}; choose a different task."
            )
        tokens = [*context, *continuation]
        self._cut += len(tokens) > self.max_length + 1
        return ScoreRequest(tokens[-(self.max_length + 1) :], len(continuation))

    def _report_cuts(self) -> None:
        if self._cut:
            self._warn(
                f"{counted(self._cut, 'prompt')} had too many tokens for the model's context of {self.max_length:,}; "
                "their beginnings were cut off."
            )
        self._cut = 0

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if not all(request.args[1] for request in requests):
            raise _EMPTY
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows, counts = [], []
        for text in (request.args[0] for request in requests):
            parts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            found = [(None, *make_disjoint_window(part)) for part in parts]
            windows += found
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum((next(scores)[0] for _ in range(count)), 0.0) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        groups: dict[Sampling, list[int]] = {}
        options = [_GenerationOptions(request.args[1], self) for request in requests]
        for number, option in enumerate(options):
            groups.setdefault(option.sampling, []).append(number)
        done = 0
        for sampling, numbers in groups.items():
            for number, text in self._generate(requests, options, numbers, sampling):
                texts[number] = text
                done += 1
                self._progress("generating", done, len(requests), "text")
        self._report_cuts()
        return texts

    def _generate(
        self, requests: Sequence[Any], options: Sequence[_GenerationOptions], numbers: Sequence[int], sampling: Sampling
    ) -> Any:
        """Yields the number and text of each completion of the requests `numbers`, as they end."""
        model, prompts = self._generator, []
        limits = [options[number].limit for number in numbers]
        for number, limit in zip(numbers, limits, strict=True):
            ids = self.tok_encode(requests[number].args[0]) or [self.prefix_token_id]
            room = self.max_length - limit
            self._cut += len(ids) > room
            prompts.append(ids[-room:])
        longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        reader = model.open_reader(slots_for(model, None, len(prompts), longest), longest)
        # The texts include special tokens, which a stop string may be.
        stops = [StopDetector(self.tokenizer.decode, options[number].until) for number in numbers]
        with torch.inference_mode():
            for completion in complete(
                reader, prompts, model.ends, limits, sampling, stops=lambda row, ids: stops[row].ends(ids)
            ):
                number = numbers[completion.row]
                text = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
                yield number, postprocess_generated_text(text, options[number].until, None)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return prompt_text(self.tokenizer, chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        template: str | None = self.tokenizer.chat_template
        return template


def _transformers_tokenizer(tokenizer: Tokenizer) -> Any:
    """Returns the tokenizer of a decoder pretrained with sansgpu as transformers loads it from an exported folder."""
    from transformers import PreTrainedTokenizerFast

    end = tokenizer.end_of_text
    backend = Backend.from_str(tokenizer.backend.to_str())  # a copy, which recognizes special tokens in texts
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, pad_token=end)


class _GenerationOptions:
    """The options of a request for a text, as the library's tasks write them. Raises ConfigError for others."""

    def __init__(self, given: dict[str, Any], model: HarnessModel) -> None:
        rest = dict(normalize_gen_kwargs(given))
        self.limit, self.until = int(rest.pop("max_gen_toks")), [str(one) for one in rest.pop("until")]
        is_sampled, temperature = bool(rest.pop("do_sample")), float(rest.pop("temperature", 1.0))
        top_k, top_p = int(rest.pop("top_k", 0) or 0), float(rest.pop("top_p", 1.0) or 1.0)
        self.sampling = Sampling(temperature, top_k, top_p) if is_sampled else Sampling(0.0)
        for name, value in rest.items():
            if value is not None and (name not in _WITHOUT_EFFECT or value != _WITHOUT_EFFECT[name]):
                raise ConfigError(
                    f"a task asks for {name}: {value} in generation, which sansgpu does not support; choose "
                    "a different task."
                )
        if self.limit >= model.max_length:
            raise ConfigError(
                f"a task generates up to {counted(self.limit, 'token')}, but the model's context has only "
                f"{model.max_length:,}; choose a different task."
            )
