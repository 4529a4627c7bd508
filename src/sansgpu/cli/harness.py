"""`sansgpu eval --harness`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sansgpu.cli.options import flag, option, preparation_bar, print_result, warn

_GROUP = "lm-evaluation-harness"  # box in the command's help

HarnessOption = Annotated[
    str | None,
    option(
        "Evaluate on tasks of lm-evaluation-harness, separated by commas: names (arc_easy,hellaswag), YAML files or "
        "folders of such files (./tasks).",
        _GROUP,
        metavar="TASKS",
    ),
]
FewshotOption = Annotated[
    int | None, option("Number of solved examples before each question. Default: that of the task.", _GROUP, min=0)
]
ChatTemplateOption = Annotated[
    bool, flag("Put the questions into the model's chat template.", _GROUP, "--apply-chat-template")
]
TaskCodeOption = Annotated[
    bool,
    flag(
        "Allow Python code that ships with the model, or that local tasks of --harness name, to run.",
        None,
        "--trust-remote-code",
    ),
]


def refuse_other_data(given: Any, option: str) -> None:
    """Raises BadParameter for options of `sansgpu eval` about what to evaluate, which `option` decides."""
    for name in ("data", "window", "link_prediction", "mteb", "reward", "predictions"):
        if f"--{name}" != option and getattr(given, name) not in (None, False):
            raise typer.BadParameter(f"--{name.replace('_', '-')} has no effect with {option}; remove it")


def evaluate_on_harness(given: Any) -> None:
    """Runs `sansgpu eval` with the options of the command. Raises BadParameter for options without effect."""
    if given.harness is None:
        option = "--apply-chat-template" if given.fewshot is None else "--fewshot"
        raise typer.BadParameter(f"{option} requires --harness; add it")
    refuse_other_data(given, "--harness")
    tasks = [name.strip() for name in given.harness.split(",") if name.strip()]
    if not tasks:
        raise typer.BadParameter("--harness is empty; pass the names or files of tasks")
    from sansgpu.views.tables import print_harness

    with preparation_bar() as bar:
        from sansgpu.jobs.harness import HarnessRequest
        from sansgpu.jobs.harness import evaluate_on_harness as job
        from sansgpu.train.loading import ModelRequest

        model = ModelRequest(given.run, given.snapshot, given.trust_remote_code, given.objective, given.precision)
        request = HarnessRequest(model, tasks, given.fewshot, given.limit, given.apply_chat_template)
        result = job(request, warn, bar)
    print_result(result, given.as_json, print_harness)
