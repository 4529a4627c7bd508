"""The step Try: what the trained model answers, beside the model that it was made from."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.wording import truncate
from sansgpu.data.preview.example import TextSegment
from sansgpu.files.atomic import write_failures_as, write_text
from sansgpu.machine.http.hosts import is_this_machine, name_in
from sansgpu.studio.commands import Command, Detached
from sansgpu.studio.held_out import held_out_values, predict_held_out, with_spans
from sansgpu.studio.pages import Handler, Studio, address, form_of, query_of
from sansgpu.studio.project import STATE, Project, as_argument
from sansgpu.studio.runs import finished_record, run_page
from sansgpu.views.record import RunRecord

ANSWER_SECONDS = 600
LOADING_SECONDS = 0.3  # between two looks whether a model is loaded
MAX_ANSWER_TOKENS = 256
MAX_TEXTS, MAX_ANSWERS = 200, 40
_SERVING = re.compile(r"^serving .* at (http://\S+) \(", re.MULTILINE)
# What the models of a run are used for, by the command that its task declares for them.
_KINDS = {
    "chat": "text", "generate": "text", "predict": "predict", "search": "search", "embed": "search",
}  # fmt: skip


def routes(studio: Studio) -> list[tuple[str, str, Handler]]:
    """Returns the path, method and handler of each page and form."""
    pages = _Using(studio)
    return [
        ("/try", "GET", pages.page),
        ("/try/unload", "POST", pages.unload),
        ("/try/answer", "POST", pages.answer),
        ("/try/predict", "POST", pages.predict),
        ("/try/predicted", "GET", pages.predicted),
        ("/try/search", "POST", pages.search),
        ("/try/found", "GET", pages.found),
    ]


def kind_of(record: RunRecord) -> str:
    """Returns what the models of a run do: text, predict, search, or "" for anything else."""
    card = record.settings.card
    words = card(record.section("model")).command.split() if card else []
    return _KINDS.get(words[1], "") if len(words) > 1 else ""


class ModelServer:
    """A `sansgpu serve` process with a model: a run, or the model that it was made from."""

    def __init__(self, project: Project, target: str) -> None:
        self.target, self._project = target, project
        self._process = Detached(project.process_file(f"serve-{target}"))

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    @property
    def address(self) -> str | None:
        """The address of the server once it serves."""
        found = _SERVING.search(self._process.log) if self.is_alive else None
        return found[1] if found and is_this_machine(name_in(found[1].partition("//")[2])) else None

    @property
    def failure(self) -> str:
        return self._process.failure

    @property
    def status(self) -> str:
        return (self._process.log.splitlines() or ["starting"])[-1]

    def start(self) -> None:
        """Starts the server unless it lives. Raises SansGPUError."""
        if not self.is_alive:
            self._project.start(f"serve-{self.target}", ["serve", self.target, "--port", "0"])

    def stop(self) -> None:
        if self.is_alive:
            self._process.stop()

    def ask(self, prompt: str, temperature: float) -> str:
        """Returns the answer to a prompt. Raises ConfigError if the server does not answer."""
        if (server := self.address) is None:
            raise ConfigError(self._process.failure or f"{self.target} cannot be loaded; see its log in {STATE}.")
        chats = "chat" in _call(f"{server}/v1/models")["data"][0].get("endpoints", ())
        asked: dict[str, Any] = {"max_tokens": MAX_ANSWER_TOKENS, "temperature": temperature, "seed": 0}
        if chats:
            asked["messages"] = [{"role": "user", "content": prompt}]
            return str(_call(f"{server}/v1/chat/completions", asked)["choices"][0]["message"]["content"])
        asked["prompt"] = prompt
        return str(_call(f"{server}/v1/completions", asked)["choices"][0]["text"])


def _call(address: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the answer of a server on this machine. Raises ConfigError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigError(_message_in(error.read())) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model does not answer ({error}); load it again.") from None


def _message_in(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the model does not answer; load it again."


class _Using:
    """The pages and forms of this step."""

    def __init__(self, studio: Studio) -> None:
        self._studio, self._project = studio, studio.project
        self._answered: dict[str, list[dict[str, str]]] = {}  # the last answers of each run, the newest first

    async def page(self, request: Request) -> Response:
        run = query_of(request, "run")
        record = finished_record(self._project, run)
        kind = kind_of(record)
        if kind == "predict":
            predict_held_out(self._project, run, record)
        return run_page(
            self._studio, request, "try", "try_step.html", run, kind=kind, record=record,
            base=_base_of(self._project, record), pairs=record.section("data").get("text_pair_column") is not None,
            prompt=record.section("training").get("sample_prompt") or "",
            **({"command": self._project.commands.known(f"{run}/search")} if kind == "search" else {}),
            **self._predictions(run), **self._servers(run, record), answered=self._answered.get(run, []),
            shows_rows=kind == "predict" or record.settings.rows in ("prompts", "conversations"),
            **held_out_values(
                self._project, run, record, *(request.query_params.get(name, "") for name in ("label", "predicted"))
            ),
        )  # fmt: skip

    def _servers(self, run: str, record: RunRecord) -> dict[str, Any]:
        base = _base_of(self._project, record)
        targets = {"trained": run, **({"base": base} if base else {})} if kind_of(record) == "text" else {}
        found = {side: ModelServer(self._project, target) for side, target in targets.items()}
        return {"servers": found, "loaded": [server.target for server in found.values() if server.is_alive]}

    async def unload(self, request: Request) -> Response:
        form = await form_of(request)
        for server in serving(self._project):
            server.stop()
        return self._studio.back(address("/try", run=form.get("run", "")))

    async def answer(self, request: Request) -> Response:
        form = await form_of(request)
        run, side = self._project.run_path(form.get("run", "")), form.get("side", "")
        servers = self._servers(run, finished_record(self._project, run))["servers"]
        if not (prompt := form.get("prompt", "")):
            raise ConfigError("the prompt is empty; write one.")
        if side not in servers:
            raise ConfigError(f"there is no model {truncate(side)}; reload the page.")
        problem, text, server = "", "", servers[side]
        try:
            self._unload_others(servers)
            server.start()
            while server.is_alive and server.address is None:
                await asyncio.sleep(LOADING_SECONDS)
            text = await asyncio.to_thread(server.ask, prompt, _temperature(form.get("temperature", "")))
        except SansGPUError as error:
            problem = str(error)
        answer = {"side": side, "prompt": prompt, "text": text, "problem": problem}
        self._answered[run] = [answer, *self._answered.get(run, [])][:MAX_ANSWERS]
        return self._studio.page(request, "answer_part.html", answer=answer)

    def _unload_others(self, servers: dict[str, ModelServer]) -> None:
        """Frees the memory of the models that another run's page has loaded."""
        targets = {server.target for server in servers.values()}
        for server in serving(self._project):
            if server.target not in targets:
                server.stop()

    async def predict(self, request: Request) -> Response:
        """Predicts one row of a form, or each line of its texts."""
        form = await form_of(request)
        run = self._project.run_path(form.get("run", ""))
        record = finished_record(self._project, run)
        rows = _rows_of(form, record)
        file = self._project.process_file(f"texts-{run}").with_suffix(".jsonl")
        with write_failures_as(ConfigError, file):
            write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        data = str(file.relative_to(self._project.root))
        self._project.commands.run(f"{run}/predict", ["predict", run, "--data", data], rows)
        return self._studio.back(address("/try", run=run))

    async def predicted(self, request: Request) -> Response:
        run = query_of(request, "run")
        return self._studio.page(request, "predicted_part.html", run=run, **self._predictions(run))

    def _predictions(self, run: str) -> dict[str, Any]:
        command = self._project.commands.known(f"{run}/predict")
        has_ended = command is not None and command.code == 0
        rows: Any = command.fresh if command is not None else []
        return {
            "command": command,
            "predictions": predictions_of(command) if command is not None and has_ended else [],
            "texts": "\n".join(next(iter(row.values())) for row in rows),
        }

    async def search(self, request: Request) -> Response:
        form = await form_of(request)
        run = self._project.run_path(form.get("run", ""))
        folder, words = as_argument(form.get("folder", "")), form.get("words", "")
        finished_record(self._project, run)
        if not folder or not words:
            raise ConfigError("a folder and a question are needed to search; write both.")
        self._project.commands.run(f"{run}/search", ["search", "--json", "--", run, folder, words], object())
        return self._studio.back(address("/try", run=run))

    async def found(self, request: Request) -> Response:
        run = query_of(request, "run")
        return self._studio.page(
            request, "found_part.html", run=run, command=self._project.commands.known(f"{run}/search")
        )


def _temperature(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        raise ConfigError(f"the temperature {truncate(text)} is not a number; write e.g. 0.7.") from None


@dataclass(frozen=True)
class Prediction:
    """A predicted row: its text in pieces, of which some have a label, the prediction in words, and its score."""

    pieces: list[TextSegment]
    words: str = ""
    score: float | None = None


def predictions_of(command: Command) -> list[Prediction]:
    """Returns what `sansgpu predict` has printed as JSON lines about the rows that it was given."""
    rows: Any = command.fresh
    found = zip(rows, command.output.splitlines(), strict=False)
    return [_prediction(row, json.loads(line)) for row, line in found]


def _prediction(row: dict[str, str], predicted: dict[str, Any]) -> Prediction:
    text = row.get("context") or next(iter(row.values()))
    if "spans" in predicted:
        return Prediction(with_spans(text, predicted["spans"]))
    if "answer" in predicted:
        return Prediction([TextSegment(row["question"])], str(predicted["answer"]) or "(no answer)")
    if "scores" in predicted:
        labels = predicted.get("labels", [predicted.get("label")])
        scores = [predicted["scores"][label] for label in labels]
        return Prediction([TextSegment(text)], ", ".join(labels) or "(no label)", scores[0] if scores else None)
    return Prediction([TextSegment(text)], f"{predicted.get('score', 0):.4f}")


def _base_of(project: Project, record: RunRecord) -> str | None:
    """Returns the model that a run was made from, by its path in the project if it is there; None: from scratch."""
    base = str(record.section("model").get("name_or_path") or "")
    return base.removeprefix(f"{project.root}/") or None


def _rows_of(form: Any, record: RunRecord) -> list[dict[str, str]]:
    """Returns the rows to predict. Raises ConfigError if there is no text."""
    data = record.section("data")
    if record.settings.rows == "questions":
        row = {"question": form.get("question", ""), "context": form.get("context", "")}
        if not all(row.values()):
            raise ConfigError("a question and a text with the answer are needed; write both.")
        return [row]
    text, pair = data.get("text_column"), data.get("text_pair_column")
    text = text if isinstance(text, str) and text else "text"  # a number is the place of a column in a table
    lines = [line.strip() for line in form.get("texts", "").splitlines() if line.strip()][:MAX_TEXTS]
    if not lines:
        raise ConfigError("there is no text; write one text a line.")
    return [{text: line, **({str(pair): form.get("pair", "")} if pair else {})} for line in lines]


def serving(project: Project) -> Iterator[ModelServer]:
    """Yields the servers that live, whichever studio has started them."""
    for file in sorted(project.process_file("serve-").parent.glob("serve-*.json")):
        match Detached(file).command:
            case ["serve", target, *_]:
                server = ModelServer(project, target)
                if server.is_alive:
                    yield server
