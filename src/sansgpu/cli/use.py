"""The commands that apply a model to data: `sansgpu eval`, `predict` and `extract`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sansgpu.cli.harness import (
    ChatTemplateOption,
    FewshotOption,
    HarnessOption,
    TaskCodeOption,
    evaluate_on_harness,
    refuse_other_data,
)
from sansgpu.cli.options import (
    OUTPUT,
    JsonOption,
    ModelArgument,
    ObjectiveOption,
    PrecisionOption,
    RemoteCodeOption,
    SnapshotOption,
    check_tables_for,
    flag,
    number_option,
    option,
    path_option,
    preparation_bar,
    print_json,
    print_result,
    show,
    suggest_export,
    warn,
    with_fields,
    write_json_lines,
)

if TYPE_CHECKING:
    from sansgpu.events.progress import ReportProgress

_GRAPH, _QUERY = "Task graph", "Query"


@dataclass(frozen=True, kw_only=True)
class _EvaluateOptions:
    run: ModelArgument
    data: Annotated[
        str | None, option("Dataset to evaluate on (file, folder or Hub name). Default: the run's validation split.")
    ] = None
    precision: PrecisionOption = "auto"
    snapshot: SnapshotOption = "final"
    window: Annotated[int | None, option("With --data: context length in tokens.", min=2)] = None
    link_prediction: Annotated[
        bool,
        flag("Evaluate link prediction: rank all entities as tails of held-out triples.", _GRAPH, "--link-prediction"),
    ] = False
    limit: Annotated[
        int | None,
        option(
            "With --link-prediction: maximum number of tail queries and, with data.inverse_relations, of head queries. "
            "With --harness: maximum number of examples per task. With --predictions: maximum number of rows in FILE.",
            min=1,
        ),
    ] = None
    mteb: Annotated[
        str | None,
        option(
            "Evaluate an embedding model on tasks of MTEB, separated by commas: names, or folders with a task.yaml.",
            metavar="TASKS",
        ),
    ] = None
    harness: HarnessOption = None
    fewshot: FewshotOption = None
    apply_chat_template: ChatTemplateOption = False
    trust_remote_code: TaskCodeOption = False
    objective: ObjectiveOption = None
    predictions: Annotated[
        Path | None,
        path_option(
            "Also write each row with its label and prediction, as JSON lines. For models that `predict` supports, for "
            "conversations, whose last answer the model writes itself, and for reinforcement learning.",
            "FILE",
        ),
    ] = None
    reward: Annotated[
        str | None,
        option(
            "Reward for reinforcement learning: answer, or a Python function that computes rewards. Required to run a "
            "run's own function.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None
    as_json: JsonOption = False


@with_fields
def evaluate(given: _EvaluateOptions) -> None:
    """Evaluate a model on text or labeled data.

    Prints loss, perplexity and bits per byte of the text, or of the answers in conversations.
    Task qa: exact match and F1; the answers are written to the run folder.
    Task classify: accuracy, F1 and Matthews correlation, or correlations with the scores.
    Task tokens: precision, recall and F1 of entities, and accuracy of tags.
    Task graph: accuracy on masked tokens and leaves.
    Reinforcement learning: mean reward of the most likely completions.
    With --mteb: the scores of an embedding model in the Massive Text Embedding Benchmark.
    With --harness: metrics of tasks of lm-evaluation-harness; those of a run are added to its harness.json.

    Example: sansgpu eval runs/default --data notes.txt
    """
    if given.harness is not None or given.fewshot is not None or given.apply_chat_template:
        evaluate_on_harness(given)
        return
    if given.limit is not None and not given.link_prediction and given.predictions is None:
        raise typer.BadParameter("--limit requires --link-prediction, --harness or --predictions; add one of them")
    if given.window is not None and given.link_prediction:
        raise typer.BadParameter("--window has no effect with --link-prediction; remove it")
    if given.mteb is not None:
        _evaluate_mteb(given)
        return
    if given.data is not None:
        check_tables_for(given.run, given.data)
    if given.predictions is not None:
        from sansgpu.files.ownership import require_file

        if given.link_prediction:
            raise typer.BadParameter("--predictions has no effect with --link-prediction; remove it")
        require_file(given.predictions)
    from sansgpu.events.event import finite
    from sansgpu.views.tables import print_link_prediction
    from sansgpu.views.terminal import Terminal

    with preparation_bar() as bar:
        from sansgpu.jobs.evaluate import evaluate_model, link_prediction
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, given.objective, given.precision)
        if given.link_prediction:
            result = link_prediction(model, given.data, given.limit, bar, warn)
        else:
            file, limit = given.predictions, given.limit
            write = None if file is None else lambda rows: write_json_lines(islice(rows, limit), file)
            event, settings = evaluate_model(model, given.data, given.window, bar, warn, given.reward, write)
    if given.link_prediction:
        print_result(result, given.as_json, print_link_prediction)
        return
    name = given.data or "validation"
    print_result(finite(event), given.as_json, lambda console, event: Terminal(console, settings, name).emit(event))
    if not given.as_json:
        suggest_export(given.run)


def _evaluate_mteb(given: _EvaluateOptions) -> None:
    assert given.mteb is not None
    refuse_other_data(given, "--mteb")
    from sansgpu.views.tables import print_mteb

    with preparation_bar() as bar:
        from sansgpu.jobs.mteb import evaluate_mteb
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, given.objective, given.precision)
        result = evaluate_mteb(model, given.mteb, bar, warn)
    print_result(result, given.as_json, print_mteb)


@dataclass(frozen=True, kw_only=True)
class _PredictOptions:
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Run of task qa, classify or tokens, or a Hugging Face model of such a task."
        ),
    ]
    text: Annotated[str | None, option("Text to classify or to find entities in.")] = None
    text_pair: Annotated[str | None, option("With --text: second text, for models that classify pairs of texts.")] = (
        None
    )
    question: Annotated[str | None, option("With --context: question to answer.")] = None
    context: Annotated[str | None, option("With --question: text that contains the answer.")] = None
    data: Annotated[str | None, option("Dataset to make predictions for (file, folder or Hub name).")] = None
    null_answers: Annotated[
        bool | None, flag("Allow an empty answer. Default: as in training.", None, "--null-answers/--no-null-answers")
    ] = None
    output: Annotated[Path | None, path_option("With --data: JSON lines file to write. Default: stdout.", "FILE")] = (
        None
    )
    precision: PrecisionOption = "auto"
    snapshot: SnapshotOption = "final"
    trust_remote_code: RemoteCodeOption = False
    objective: ObjectiveOption = None
    as_json: JsonOption = False


@with_fields
def predict(given: _PredictOptions) -> None:
    """Classify texts, find entities in them or answer questions.

    With --data: prints one JSON line per row.

    Example: sansgpu predict runs/reviews --text "I liked it."
    """
    from sansgpu.files.ownership import require_file

    row = _single_row(given)
    if given.output is not None and given.data is None:
        raise typer.BadParameter("--output requires --data; add it")
    if given.output is not None:
        require_file(given.output)
    options = {} if given.null_answers is None else {"null_answers": given.null_answers}
    with preparation_bar() as bar:
        from sansgpu.jobs.predict import predict as job
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, given.objective, given.precision)
        results, in_words = job(model, row if given.data is None else given.data, warn, bar, **options)
        if given.output is not None:
            write_json_lines(_with_progress(results, bar), given.output)
        elif given.data is None:
            (result,) = results
    if given.data is not None and given.output is None:
        write_json_lines(results, None)
    elif given.data is None and given.as_json:
        print_json(result)
    elif given.data is None:
        show(in_words(result))


def _with_progress(predictions: Iterable[dict[str, Any]], progress: ReportProgress) -> Iterator[dict[str, Any]]:
    for number, prediction in enumerate(predictions, 1):
        progress("predicting", number, 0, "row")
        yield prediction


_SINGLE_ROWS = (("text",), ("text", "text_pair"), ("question", "context"))  # columns of a row given by flags


def _single_row(given: _PredictOptions) -> dict[str, str]:
    """Returns the row that flags give; empty if `data` names a dataset. Raises BadParameter for other combinations."""
    flags = {name: getattr(given, name) for name in ("text", "text_pair", "question", "context")}
    row = {name: value for name, value in flags.items() if value is not None}
    if (given.data is not None and row) or (given.data is None and tuple(row) not in _SINGLE_ROWS):
        raise typer.BadParameter("pass one of --text, --text with --text-pair, --question with --context, and --data")
    if empty := next((name for name, value in row.items() if not value.strip()), None):
        raise typer.BadParameter(f"--{empty.replace('_', '-')} must not be empty")
    return row


@dataclass(frozen=True, kw_only=True)
class _ExtractOptions:
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run of task graph, or a folder exported from one.")]
    text: Annotated[str | None, option("Text to extract triples from.")] = None
    data: Annotated[str | None, option("Dataset to read (file, folder or Hub name).")] = None
    head: Annotated[
        list[str] | None,
        option(
            "Head entity to query. Default: the document's entities, or all its words if it has none. Repeatable.",
            _QUERY,
        ),
    ] = None
    relation: Annotated[list[str] | None, option("Relation to query. Default: all relations. Repeatable.", _QUERY)] = (
        None
    )
    closed: Annotated[
        bool,
        flag(
            "Choose tails from the document's entities, or from all training tails if it has none.", _QUERY, "--closed"
        ),
    ] = False
    min_score: Annotated[
        float | None,
        number_option("Minimum score of a printed triple (mean log-probability of the tail's tokens).", _QUERY),
    ] = None
    beams: Annotated[int, option("Beam width for generating tails token by token.", _QUERY, min=1)] = 10
    top: Annotated[int, option("Maximum number of tails per head and relation.", _QUERY, min=1)] = 1
    output: Annotated[Path | None, path_option("JSON lines file to write. Default: stdout.", "FILE")] = None
    precision: PrecisionOption = "auto"
    snapshot: SnapshotOption = "final"
    objective: ObjectiveOption = None
    as_json: Annotated[bool, flag("With --output: print counts and scores as one JSON object.", OUTPUT, "--json")] = (
        False
    )


@with_fields
def extract(given: _ExtractOptions) -> None:
    """Extract knowledge graph triples from text.

    Prints JSON lines with doc, head, relation, tail and score.
    If the data has triples, prints precision, recall and F1 to stderr.

    Example: sansgpu extract runs/graph --text "Metformin lowers glucose." --head Metformin
    """
    from sansgpu.files.ownership import require_file
    from sansgpu.views.tables import print_extraction
    from sansgpu.views.terminal import RunConsole

    if given.as_json and given.output is None:
        raise typer.BadParameter("--json requires --output, because the triples are printed to stdout")
    if given.output is not None:
        require_file(given.output)
    with preparation_bar() as bar:
        from sansgpu.jobs.extract import ExtractRequest
        from sansgpu.jobs.extract import extract as job
        from sansgpu.train.loading import ModelRequest

        request = ExtractRequest(
            model=ModelRequest(given.run, given.snapshot, objective=given.objective, precision=given.precision),
            text=given.text,
            data=given.data,
            heads=given.head or (),
            relations=given.relation or (),
            closed=given.closed,
            min_score=given.min_score,
            beams=given.beams,
            top=given.top,
        )
        triples = job(request, warn, bar)
        write_json_lines(triples, given.output)
    if given.as_json:
        print_json(triples.summary())
    else:
        print_extraction(RunConsole(stderr=True), triples.summary())
