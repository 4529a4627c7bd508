"""Lets a chat model write questions about documents, with answers, as rows that tasks qa and sft learn."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.paths import local_path
from sansgpu.config.wording import counted, duration
from sansgpu.data.documents.collection import Collection
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.partial_file import PartialFile
from sansgpu.jobs.data.asking import NO_QUESTION, Kept, Reply, conversation, judged, question_in, row_of
from sansgpu.jobs.embed import passage_files, token_spans
from sansgpu.jobs.generate import open_generator, slots_for
from sansgpu.machine.distributed.world import require_one_process
from sansgpu.models.formats.weights import weights_sha256
from sansgpu.models.generation.generate import BatchModel, Completion, SlotReader, complete, stops_of
from sansgpu.models.generation.prefix_cache import PrefixCache
from sansgpu.models.generation.quotes import Encoded, Quotes, QuotingReader
from sansgpu.models.generation.sampling import Sampling, reading
from sansgpu.models.generation.text import without_stop
from sansgpu.models.generation.thoughts import THOUGHT_END
from sansgpu.tasks.embed.passages import Passage, PassageRules
from sansgpu.train.loading import ModelRequest

TASKS = ("qa", "sft")
PASSAGE_TOKENS = 384  # a longer paragraph is cut; most have less, and small models lose track of more
MIN_PASSAGE_TOKENS = 32  # the model's context must have room for a passage of this length
MIN_PASSAGE_BYTES = 80  # a shorter paragraph, such as a heading, has nothing to ask about
QUESTION_TOKENS = 64
ANSWER_TOKENS = 160  # the most for an answer in the model's own words
QUOTE_WORDS = 20  # SQuAD's answers have 3 words on average, and 99 % have at most 20
BATCH = 32  # questions at once; after each batch, its replies are safe
TYPICAL_REPLY_TOKENS = 40  # assumed for a question with its answer, to forecast the time
TEMPERATURE, TOP_P = 0.7, 0.9  # questions are sampled, because several about a passage shall differ


@dataclass(frozen=True)
class AskRequest:
    """Arguments of `sansgpu data --ask`."""

    documents: str
    model: ModelRequest
    output: Path
    task: str
    questions: int  # about each passage
    seed: int


class _Located(NamedTuple):
    """A passage with the name of its file within the documents."""

    file: str
    passage: Passage


def ask(request: AskRequest, warn: Warn, say: Warn, progress: ReportProgress) -> dict[str, Any]:
    """Writes a row for each usable question, and returns a summary. Repeated after a kill, the command continues.

    Raises ConfigError if there is nothing to ask about, or the model has no chat template. Raises SansGPUError if no
    question is usable.
    """
    require_one_process("data --ask")
    if request.task not in TASKS:
        raise ConfigError(f"--task is {request.task}, but --ask writes rows of the tasks {' and '.join(TASKS)}.")
    loaded = open_generator(request.model, warn, progress)
    model: BatchModel = loaded.task_class.batch_model(loaded)
    if model.chat_ids is None:
        raise ConfigError(f"{request.model.target} has no chat template; pass a chat model to --ask.")
    asker = _Asker(model, loaded.tokenizer, request)
    passages = _passages(
        request.documents, PassageRules(partial(token_spans, loaded.tokenizer), asker.room), warn, progress
    )
    progress("identifying the model by its weights", 0, 0)
    key = repr((request.model.target, loaded.source.step, loaded.precision, request.task, request.questions))
    digest = hashlib.sha256(f"{key}{request.seed}{passages!r}".encode()).hexdigest()
    file = PartialFile(request.output, request.model.target, digest, weights_sha256(loaded.objective.model), "--write")
    start, kept = time.monotonic(), Kept()
    with write_failures_as(SansGPUError, request.output, "--write"), reading(loaded.objective.model):
        resumed = file.open()
        for reply in asker.replies(passages, resumed, say, progress):
            file.write(json.dumps(asdict(reply), ensure_ascii=False) + "\n")
        file.finish_with(lambda lines: _rows(lines, passages, request.questions, kept))
        if not kept.questions:
            request.output.unlink()
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in kept.left_out.most_common())
            raise SansGPUError(f"no reply of the model is of use ({reasons}); pass a larger chat model to --ask.")
    return {
        "rows": kept.questions,
        "passages": len(passages),
        "used_passages": len(kept.passages),
        "left_out": dict(kept.left_out.most_common()),
        "resumed": resumed,
        "tokens": asker.tokens,
        "seconds": time.monotonic() - start,
        "output": str(request.output),
    }


def _passages(documents: str, rules: PassageRules, warn: Warn, progress: ReportProgress) -> list[_Located]:
    """Returns the passages of all documents that are long enough. Raises ConfigError if there are none."""
    root, collection, found = local_path(documents), Collection(), list[_Located]()
    for path in passage_files(root):
        progress(f"reading {path.name}", 0, 0)
        name = str(path.relative_to(root)) if root.is_dir() else path.name
        found += [_Located(name, passage) for passage in rules.read_or_skip(path, collection, warn) or ()]
    notes = collection.notes()
    if not found and notes:
        raise collection.refusal()
    for note in notes:
        warn(note)
    long = [one for one in found if len(one.passage.text.encode()) >= MIN_PASSAGE_BYTES]
    if not long:
        raise ConfigError(
            f"{documents} has no paragraph of at least {MIN_PASSAGE_BYTES} bytes; pass documents with longer ones."
        )
    return long


def _rows(lines: Iterable[str], passages: Sequence[_Located], questions: int, kept: Kept) -> Iterator[str]:
    """Yields the rows of the usable replies."""
    replies = ((number // questions, Reply(**json.loads(line))) for number, line in enumerate(lines))
    for number, (place, reply) in enumerate(kept.among(replies), 1):
        file, passage = passages[place]
        row = row_of(f"{passage.place_in(file)}, question {number}", file, passage.text, reply)
        yield json.dumps(row, ensure_ascii=False) + "\n"


class _Asker:
    """Generates questions about passages and their answers."""

    def __init__(self, model: BatchModel, tokenizer: Any, request: AskRequest) -> None:
        """Raises ConfigError if the model's context is too short."""
        self._model, self._tokenizer, self._request = model, tokenizer, request
        self._quotes = request.task == "qa"
        thinks = "enable_thinking" in str(tokenizer.chat_template)
        self._variables = {"enable_thinking": False} if thinks else {}
        self.tokens = 0
        self._others = len(self._prompt("", "")) + QUESTION_TOKENS + ANSWER_TOKENS
        self.room = min(PASSAGE_TOKENS, model.context - self._others)
        if self.room < MIN_PASSAGE_TOKENS:
            raise ConfigError(
                f"{request.model.target} has a context of {model.context:,} tokens, but --ask needs at least "
                f"{self._others + MIN_PASSAGE_TOKENS:,}; pass a model with a longer context."
            )

    def replies(self, passages: Sequence[_Located], first: int, say: Warn, progress: ReportProgress) -> Iterator[Reply]:
        """Yields the reply for each question of each passage, from number `first` on, and says how long it may take."""
        texts = [one.passage.text for one in passages for _ in range(self._request.questions)]
        total = len(texts)
        if first == total:
            return
        length = self.room + self._others
        slots = min(BATCH, slots_for(self._model, None, total - first, 2 * length))  # twice: the prefix cache, too
        reader = self._model.open_reader(slots, length)
        progress("timing a question", 0, 0)
        say(self._forecast(reader, slots, texts[first:]))
        for start in range(first, total, slots):
            progress("writing questions", start, total, "question")
            if isinstance(reader, SlotReader):
                reader.prefixes = PrefixCache(slots * length)  # so that answers do not read their passage again
            asked = self._questions(reader, texts[start : start + slots], start)
            progress("writing answers", start, total, "question")
            yield from self._replies(reader, texts[start : start + slots], asked)
        progress("writing answers", total, total, "question")

    def _questions(self, reader: Any, texts: Sequence[str], first: int) -> list[str | None]:
        """Returns a question about each text, or None if the reply of the model is no question."""
        sampling = Sampling(TEMPERATURE, top_p=TOP_P, seed=self._request.seed)
        prompts = [self._prompt(text) for text in texts]
        asked = self._complete(reader, prompts, [QUESTION_TOKENS] * len(texts), sampling, first)
        return [question_in(self._text(one)) for one in asked]

    def _replies(self, reader: Any, texts: Sequence[str], questions: Sequence[str | None]) -> list[Reply]:
        valid = [number for number, question in enumerate(questions) if question is not None]
        replies = [Reply(left_out=NO_QUESTION)] * len(texts)
        if valid:
            chosen = [(texts[number], str(questions[number])) for number in valid]
            for number, reply in zip(valid, self._answered(reader, chosen), strict=True):
                replies[number] = reply
        return replies

    def _answered(self, reader: Any, asked: Sequence[tuple[str, str]]) -> list[Reply]:
        """Returns the answers of questions about texts: quotes from the texts for task qa."""
        prompts = [self._prompt(*one) for one in asked]
        if not self._quotes:
            answers = self._complete(reader, prompts, [ANSWER_TOKENS] * len(asked), Sampling(temperature=0))
            texts = [self._text(one) if one.reason == "stop" else "" for one in answers]
            return [
                judged(passage, question, text, None) for (passage, question), text in zip(asked, texts, strict=True)
            ]
        quotes = [Quotes(text, self._encode, QUOTE_WORDS) for text, _ in asked]
        by_prompt = {tuple(prompt): one for prompt, one in zip(prompts, quotes, strict=True)}
        quoting = QuotingReader(reader, by_prompt, self._model.ends)
        limits = [one.max_tokens + 1 for one in quotes]
        answers = self._complete(quoting, prompts, limits, Sampling(temperature=0))
        replies = []
        for (text, question), one, answer in zip(asked, quotes, answers, strict=True):
            start, end = one.find(answer.ids) or (0, 0)
            quote = text[start:end]
            is_cut = len(quote.split()) >= QUOTE_WORDS  # the model did not end it
            replies.append(judged(text, question, "" if is_cut else quote, start))
        return replies

    def _complete(
        self, reader: Any, prompts: Sequence[list[int]], limits: Sequence[int], sampling: Sampling, first: int = 0
    ) -> list[Completion]:
        """Returns the completion of each prompt, in order."""
        found = complete(reader, prompts, self._model.ends, limits, sampling, first, stops_of(self._model))
        completions = sorted(found, key=lambda one: one.row)
        reader.keep([])  # stores the last sequences in the prefix cache
        self.tokens += sum(len(one.ids) for one in completions)
        return completions

    def _text(self, completion: Completion) -> str:
        text = without_stop(self._model.decode(completion.ids), self._model.stops)
        return text.rpartition(THOUGHT_END)[2].strip()

    def _prompt(self, passage: str, question: str | None = None) -> list[int]:
        assert self._model.chat_ids is not None
        return self._model.chat_ids(conversation(passage, question, self._quotes), variables=self._variables)

    def _encode(self, texts: list[str]) -> list[Encoded]:
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def _forecast(self, reader: Any, slots: int, texts: Sequence[str]) -> str:
        """Returns how long the questions may take, from the time of a prompt and of a few steps of a whole batch."""
        prompt = self._prompt(sorted(texts, key=len)[len(texts) // 2])
        reader.add([prompt])  # the first pass allocates the cache
        reader.reset()
        start = time.monotonic()
        reader.add([prompt] * slots)
        read = time.monotonic() - start
        steps = 4
        for _ in range(steps):
            reader.step(prompt[:1] * slots)
        step = (time.monotonic() - start - read) / steps
        reader.reset()
        passages = len(texts) / self._request.questions
        seconds = passages * read + len(texts) * (read * 0.2 + TYPICAL_REPLY_TOKENS * step / slots)
        return f"{counted(len(texts), 'question')} to ask, about {duration(seconds)}"
