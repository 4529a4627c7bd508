"""The commands under the heading Train: `sansgpu train`, `tune` and `distill`."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sansgpu.cli.options import (
    CONFIGURATION,
    OUTPUT,
    ConfigArgument,
    JsonOption,
    OverrideOption,
    RemoteCodeOption,
    SnapshotOption,
    checked_config,
    flag,
    number_option,
    option,
    path_option,
    precision_option,
    preparation_bar,
    print_json,
    show,
    snapshot_names,
    suggest,
    warn,
    with_fields,
)
from sansgpu.cli.other_flags import with_other_flags

if TYPE_CHECKING:
    from sansgpu.jobs.train import TrainRequest
    from sansgpu.machine.distributed.world import World
    from sansgpu.views.terminal import PreparationBar, RunConsole


class Pruner(StrEnum):
    """Rules that stop trials early."""

    MEDIAN = "median"
    HYPERBAND = "hyperband"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class _TrainOptions:
    config: ConfigArgument = None
    config_option: Annotated[Path | None, option("Same as CONFIG.", CONFIGURATION, "-f", "--config")] = None
    override: OverrideOption = None
    max_steps: Annotated[
        int | None, option("Maximum number of optimizer steps (training.max_steps).", CONFIGURATION)
    ] = None
    batch_size: Annotated[
        str | None, option("Examples per micro-batch (training.batch_size).", CONFIGURATION, metavar="N|auto")
    ] = None
    seq_len: Annotated[
        int | None, option("Maximum tokens per example (model.max_seq_len and data.max_length).", CONFIGURATION)
    ] = None
    target_device: Annotated[str | None, option("Device to train on.", CONFIGURATION, metavar="cpu|gpu|auto")] = None
    prefetch: Annotated[int | None, option("Number of batches to prefetch.", CONFIGURATION, min=0)] = None
    seed: Annotated[int | None, option("Random seed.", CONFIGURATION)] = None
    until: Annotated[
        str | None, option("Deadline for the end of training, e.g. 07:00.", CONFIGURATION, metavar="HH:MM")
    ] = None
    objective: Annotated[
        str | None,
        option("Python class of your own task, instead of a built-in one.", CONFIGURATION, metavar="MODULE:CLASS"),
    ] = None
    output_dir: Annotated[Path | None, path_option("Run folder. Default: runs/NAME.", "DIR")] = None
    headless: Annotated[bool, flag("Print events to stdout as JSON lines, and nothing else.", OUTPUT, "--headless")] = (
        False
    )
    plain: Annotated[bool, flag("Print plain lines instead of the live view.", OUTPUT, "--plain")] = False
    resume: Annotated[
        str | None,
        option(
            "Resume from a snapshot (checkpoint). Default: the latest.",
            metavar="latest|SNAPSHOT",
            autocompletion=snapshot_names,
        ),
    ] = None
    strict: Annotated[
        bool, flag("Refuse to resume if the results could differ from those of an uninterrupted run.", None, "--strict")
    ] = False
    dry_run: Annotated[
        bool,
        flag(
            "Prepare everything and print the configuration and the first example, without training.", None, "--dry-run"
        ),
    ] = False
    force: Annotated[
        bool, flag("Start even if the memory estimate says that the run will not fit.", None, "--force")
    ] = False
    processes: Annotated[
        str | None, option("Number of processes to start. auto: one per NUMA node or socket.", metavar="N|auto")
    ] = None
    trust_remote_code: RemoteCodeOption = False


@with_other_flags
@with_fields
def train(given: _TrainOptions) -> int:
    """Train a model from a configuration.

    Example: sansgpu train configs/cpu_small.yaml --set data.dataset_name=notes/ --max-steps 200
    """
    started = time.monotonic()
    if given.config and given.config_option:
        raise typer.BadParameter("the configuration is given twice, as CONFIG and with --config; remove one of them")
    settings = {
        "training.max_steps": given.max_steps,
        "training.batch_size": given.batch_size,
        "model.max_seq_len": given.seq_len,
        "data.max_length": given.seq_len,
        "device": _device(given.target_device),
        "training.dataloader_num_workers": None if given.prefetch is None else min(given.prefetch, 1),
        "training.dataloader_prefetch_factor": given.prefetch or None,
        "training.seed": given.seed,
        "training.until": given.until,
        "objective": given.objective,
        "model.trust_remote_code": given.trust_remote_code or None,
    }
    overrides = (*(given.override or ()), *((key, value) for key, value in settings.items() if value is not None))

    from sansgpu.machine.distributed.world import find_world

    world, file = find_world(), given.config or given.config_option
    # A run to resume may use the configuration that it has recorded.
    config, notes = (None, []) if given.resume is not None else checked_config(file, overrides, world.size)
    with preparation_bar(silent=world.rank > 0) as bar:
        from sansgpu.jobs.train import TrainRequest

        number = 1 if given.processes is None else _number_of_processes(given.processes, world)
        request = TrainRequest(
            file, () if config else overrides, given.output_dir, given.resume, given.strict, given.dry_run, given.force,
            world, started, config=config, notes=tuple(notes),
        )  # fmt: skip
        if number == 1:
            return _train(request, given.headless, given.plain, bar)
    return _launch(number)


def _device(target: str | None) -> str | None:
    devices = {"cpu": "cpu", "gpu": "cuda", "auto": "auto", None: None}
    if target not in devices:
        raise typer.BadParameter(f"--target-device is {target}, but must be cpu, gpu or auto")
    return devices[target]


def _number_of_processes(requested: str, world: World) -> int:
    from sansgpu.machine.processes import processes

    if world.launcher:
        raise typer.BadParameter(
            f"--processes starts processes itself, but {world.launcher} already started this one; remove --processes"
        )
    return processes(requested)


def _launch(number: int) -> int:
    """Runs this command line in several processes and returns their exit code."""
    from sansgpu.machine.processes import launch

    return launch(number, _without(sys.argv[1:], "--processes"))


def _train(request: TrainRequest, headless: bool, plain: bool, bar: PreparationBar) -> int:
    """Trains with the requested display and returns the exit code."""
    from sansgpu.events.event import Sink
    from sansgpu.events.jsonl import JsonLines
    from sansgpu.jobs.train import train as job
    from sansgpu.machine.distributed.world import is_forwarded
    from sansgpu.train.loop import TrainingResult
    from sansgpu.views.terminal import RunConsole, Terminal, Warnings

    forwarded = is_forwarded(sys.stdout)
    console, errors, rank = RunConsole(forwarded=forwarded), RunConsole(stderr=True), request.world.rank
    sink: Sink = Terminal(errors if request.dry_run else console)
    if rank:
        sink = Warnings(errors, rank)
    elif headless:
        sink = JsonLines(sys.stdout)
    elif sys.stdout.isatty() and not (plain or request.dry_run or forwarded or _is_plain(console)):
        from sansgpu.views.live import LiveView

        sink = LiveView(console, request.controls, request.monitor.latest)
    bar.ends_at_start = not isinstance(sink, Terminal)
    with closing(sink), closing(bar):
        outcome = job(request, [bar, sink], bar)
    if isinstance(outcome, TrainingResult):
        if not (rank or headless or outcome.signal):
            _show_end(console, outcome.folder)
        return 128 + outcome.signal if outcome.signal else 0
    if not rank:
        _print_dry_run(outcome)
    return 0


def _is_plain(console: RunConsole) -> bool:
    """Returns whether a terminal cannot show the live view: it cannot move its cursor, or lacks lines and blocks."""
    return console.is_dumb_terminal or console.options.ascii_only


def _show_end(console: RunConsole, folder: Path) -> None:
    """Prints what a finished run learned. Its modules are not needed before, so they do not delay the first step."""
    from sansgpu.config import SansGPUError
    from sansgpu.views.record import RunRecord
    from sansgpu.views.run_end import print_run_end

    with suppress(SansGPUError):  # the model is written; a record that cannot be read has been warned about
        print_run_end(console, RunRecord.open(folder))


def _without(arguments: list[str], option: str) -> list[str]:
    """Removes an option and its value from the arguments."""
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith(f"{option}="):
            skip = argument == option
            remaining += [] if skip else [argument]
        else:
            skip = False
    return remaining


def _print_dry_run(run: Any) -> None:
    import yaml

    from sansgpu.cli.data import data_lines
    from sansgpu.config import acting_values

    environment = run.execution.environment()
    sections = {"output_dir": str(run.paths.root), "environment": environment, "run": run.facts()}
    show(yaml.safe_dump({"config": acting_values(run.config), **sections}, sort_keys=False), end="")
    show("".join(f"# data {line}\n" for line in data_lines(run.config)), end="")
    if (preview := run.corpus.preview()) is not None:
        show("# First training example. Tokens that count toward the loss are between ⟦ and ⟧:")
        show("".join(f"# {line}\n" for line in preview.splitlines()), end="")


@dataclass(frozen=True, kw_only=True)
class _TuneOptions:
    config: ConfigArgument = None
    override: OverrideOption = None
    space: Annotated[
        Path | None,
        option("YAML file with the search space. Default: the built-in search space.", CONFIGURATION, metavar="FILE"),
    ] = None
    seed: Annotated[int | None, option("Random seed (training.seed).", CONFIGURATION)] = None
    trials: Annotated[
        int | None, option("Number of trials. The first one uses the unchanged configuration.", min=1)
    ] = None
    hours: Annotated[float | None, number_option("Time budget of the search in hours.")] = None
    workers: Annotated[int, option("Number of trials to run in parallel. They share the cores.", min=1)] = 1
    pruner: Annotated[Pruner, option("Algorithm that stops unpromising trials early.")] = Pruner.MEDIAN
    dry_run: Annotated[
        bool, flag("Print the search space and a time estimate, without searching.", None, "--dry-run")
    ] = False
    output_dir: Annotated[Path | None, path_option("Folder for the search. Default: runs/tune-NAME.", "DIR")] = None
    as_json: JsonOption = False


@with_fields
def tune(given: _TuneOptions) -> int:
    """Search for the best hyperparameters.

    The best hyperparameters have the lowest validation loss. Run the command again to resume a search.

    Example: sansgpu tune configs/cpu_small.yaml --trials 20 --hours 8 --space space.yaml
    """
    overrides = (*(given.override or ()), *([] if given.seed is None else [("training.seed", given.seed)]))
    from sansgpu.config.errors import require

    require("sansgpu tune", "optuna", "plotly")
    checked_config(given.config, overrides)
    with preparation_bar() as bar:
        from sansgpu.jobs.tune import Interrupted, TuneRequest
        from sansgpu.jobs.tune import tune as job
        from sansgpu.views.terminal import RunConsole
        from sansgpu.views.tune import SearchEstimate, SearchEvent, TuneTerminal, print_estimate, print_tune

        console = RunConsole(stderr=given.as_json)
        terminal = TuneTerminal(console)

        def show(event: SearchEvent) -> None:
            bar.close()
            terminal(event)

        request = TuneRequest(
            given.config,
            overrides,
            given.space,
            given.trials,
            given.hours,
            given.workers,
            given.pruner.value,
            given.output_dir,
            given.dry_run,
        )
        with closing(terminal):
            result = job(request, bar, show, warn)
    if isinstance(result, Interrupted):
        console.print(f"interrupted and saved; the same command resumes {result.folder}", soft_wrap=True)
        return 128 + result.signal
    if given.as_json:
        print_json(asdict(result))
    elif isinstance(result, SearchEstimate):
        print_estimate(console, result)
    else:
        print_tune(console, result)
    return 0


@dataclass(frozen=True, kw_only=True)
class _DistillOptions:
    teacher: Annotated[str, typer.Argument(metavar="TEACHER", help="Run folder, Hugging Face model or GGUF file.")]
    data: Annotated[str, option("Dataset whose tokens the teacher predicts (file, folder or Hub name).")]
    output: Annotated[
        Path, path_option("Folder for the predictions. If it holds unfinished predictions, they are completed.", "DIR")
    ]
    top_k: Annotated[
        int,
        option(
            "Number of most likely next tokens to store at each position. 0: only how likely the text's own token is.",
            min=0,
        ),
    ] = 32
    task: Annotated[
        str,
        option(
            "Task that the student will train with. pretrain: plain text; sft: conversations.",
            None,
            "--task",
            metavar="pretrain|sft",
        ),
    ] = "pretrain"
    max_length: Annotated[
        int | None,
        option(
            "Maximum tokens per example. Default: 512, or 1,024 with --task sft, but at most the teacher's context.",
            min=2,
        ),
    ] = None
    text_column: Annotated[
        str | None, option("Column with the text. Default: `text`, `content` or the only column.")
    ] = None
    precision: Annotated[Any, precision_option("bf16, if that is faster on this machine.")] = "auto"
    snapshot: SnapshotOption = "final"
    trust_remote_code: RemoteCodeOption = False
    as_json: JsonOption = False


@with_fields
def distill(given: _DistillOptions) -> None:
    """Write a teacher's predictions to train a smaller model on.

    The smaller model trains with training.distillation.teacher=DIR.
    Run the command again to continue after an interruption.

    Example: sansgpu distill models/teacher --data notes/ --output lessons
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.distill import DistillRequest
        from sansgpu.jobs.distill import distill as job
        from sansgpu.train.loading import ModelRequest

        request = DistillRequest(
            model=ModelRequest(given.teacher, given.snapshot, given.trust_remote_code, precision=given.precision),
            data=given.data,
            output=given.output,
            top_k=given.top_k,
            task=given.task,
            max_length=given.max_length,
            text_column=given.text_column,
        )
        result = job(request, warn, bar)
    if given.as_json:
        print_json(result)
    else:
        size = f"{result['bytes'] / 1e6:,.1f} MB"
        what = f"the {given.top_k} most likely tokens" if given.top_k else "how likely the text's own token is"
        show(f"{given.output}: {what} at {result['tokens']:,} positions ({size})")
        section = "training.distillation"
        selection = () if given.top_k else ("--set", f"{section}.weight=0", "--set", f"{section}.token_share=0.6")
        suggest("train", "CONFIG", "--set", f"{section}.teacher={given.output}", *selection)
