"""argv -> one job. Every import of weight happens inside the command that needs it."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from sansgpu import __version__
from sansgpu.machine.launch import share_cores

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train language models on machines without a GPU.",
)
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train a byte-level BPE tokenizer, or encode text with one.")
snapshots_app = typer.Typer(no_args_is_help=True, help="Look at, check, delete and branch a run's snapshots.")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(snapshots_app, name="snapshots")

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)]
SnapshotOption = Annotated[str, typer.Option(help="latest, best, a step's number or a snapshot's name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def main() -> None:
    """Run the command line; errors are one sentence on stderr."""
    share_cores()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit code of one command line."""
    debug = "--debug" in arguments
    arguments = _with_resume_value([a for a in arguments if a != "--debug"])
    try:
        code = app(arguments, prog_name="sansgpu", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return 0  # who read our output has left, as `head` does
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        message, code = _explained(error)
        print(f"sansgpu: {message}", file=sys.stderr)
        return code


def _explained(error: BaseException) -> tuple[str, int]:
    """One sentence, and the exit code."""
    from sansgpu.config import SansGPUError  # not above: `--help` needs no schema

    usage_error: type[Any] = typer.BadParameter.__bases__[0]  # typer names it in no public place
    if isinstance(error, SansGPUError):
        return str(error), error.exit_code
    if isinstance(error, usage_error):
        context = error.ctx.command_path if error.ctx else "sansgpu"
        return f"{error.format_message().rstrip('.')}; see {context} --help.", 2
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted; what was saved before stays.", 130
    # a defect of ours, or a machine in trouble
    return f"{type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)", 1


def _with_resume_value(arguments: list[str]) -> list[str]:
    """`--resume` alone means `--resume latest`."""
    completed: list[str] = []
    for index, argument in enumerate(arguments):
        completed.append(argument)
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        if argument == "--resume" and (following.startswith("-") or following.endswith(CONFIG_SUFFIXES)):
            completed.append("latest")
    return completed


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    pass


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML, TOML or JSON; none: the built-in default.")
    ] = None,
    config_option: Annotated[
        Path | None, typer.Option("-f", "--config", metavar="FILE", help="The same as CONFIG.")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option("--output-dir", "--output_dir", help="The run's folder.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key; repeatable.")
    ] = None,
    resume: Annotated[str | None, typer.Option(metavar="[latest|SNAPSHOT]", help="Go on from a snapshot.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer updates.")] = None,
    batch_size: Annotated[str | None, typer.Option(metavar="N|auto", help="Examples of a micro-batch.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Context and window in tokens.")] = None,
    target_device: Annotated[str | None, typer.Option(metavar="cpu|gpu|auto", help="Where to train.")] = None,
    prefetch: Annotated[int | None, typer.Option(min=0, help="Batches prepared ahead.")] = None,
    seed: Annotated[int | None, typer.Option(help="The source of all randomness.")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="JSON lines on stdout, nothing else there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Everything up to the first step.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a resume that cannot be exact.")] = False,
    until: Annotated[
        str | None, typer.Option(metavar="HH:MM", help="Be over, with the model saved, by this time.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Begin though memory does not suffice.")] = False,
) -> int:
    """Train as CONFIG says.

    Example: sansgpu train configs/cpu_small.yaml --set data.dataset_name=notes/ --max-steps 200
    """
    started = time.monotonic()
    if config and config_option:
        raise typer.BadParameter("CONFIG is given twice")
    devices = {"cpu": "cpu", "gpu": "cuda", "auto": "auto", None: None}
    if target_device not in devices:
        raise typer.BadParameter(f"--target-device is {target_device}, but cpu, gpu and auto are known")
    flags = {
        "training.max_steps": max_steps,
        "training.batch_size": batch_size,
        "model.max_seq_len": seq_len,
        "data.max_length": seq_len,
        "device": devices[target_device],
        "training.dataloader_num_workers": None if prefetch is None else min(prefetch, 1),
        "training.dataloader_prefetch_factor": prefetch or None,
        "training.seed": seed,
        "training.until": until,
    }
    overrides = [*(override or []), *(f"{key}={value}" for key, value in flags.items() if value is not None)]

    from rich.console import Console

    from sansgpu.jobs.train import TrainRequest
    from sansgpu.jobs.train import train as job
    from sansgpu.train.loop import End
    from sansgpu.watch.events import Sink
    from sansgpu.watch.jsonl import JsonLines
    from sansgpu.watch.terminal import PreparationBar, Terminal

    errors = Console(stderr=True)
    sink: Sink = JsonLines(sys.stdout) if headless else Terminal(errors if dry_run else Console())
    request = TrainRequest(
        config or config_option, tuple(overrides), output_dir, resume, strict, dry_run, force, started
    )
    bar = PreparationBar(errors)
    try:
        outcome = job(request, [bar, sink], bar)
    finally:
        bar.close()
        sink.close()
    if isinstance(outcome, End):
        return 128 + outcome.signal if outcome.signal else 0
    _print_dry_run(outcome)
    return 0


def _print_dry_run(begun: Any) -> None:
    """The resolved configuration and what the run would do, as YAML."""
    import dataclasses

    import yaml

    prepared = begun.prepared
    environment = dataclasses.asdict(prepared.environment)
    sections = {"output_dir": str(begun.paths.root), "environment": environment, "run": prepared.facts()}
    config = prepared.config.model_dump(mode="json")
    print(yaml.safe_dump({"config": config, **sections}, sort_keys=False), end="")


ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="A file, or small, medium, large; none: the built-in default.")
]
OverrideOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key; repeatable.")
]


@app.command()
def plan(
    config: ConfigArgument = None,
    override: OverrideOption = None,
    presets: Annotated[bool, typer.Option("--presets", help="A table of small, medium and large.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a run costs in memory and hours, before any work.

    Example: sansgpu plan configs/cpu_small.yaml --set data.dataset_name=notes/
    """
    from rich.console import Console

    from sansgpu.jobs.plan import plan as job
    from sansgpu.jobs.plan import plan_presets
    from sansgpu.watch.tables import print_plan, print_presets
    from sansgpu.watch.terminal import PreparationBar

    bar = PreparationBar(Console(stderr=True))
    try:
        rows = plan_presets(override or [], _warn) if presets else []
        result = {"presets": rows} if presets else job(config, override or [], bar, _warn)
    finally:
        bar.close()
    if as_json:
        _print_json(result)
    elif presets:
        print_presets(Console(), rows)
    else:
        print_plan(Console(), result)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine is and can do, and what would make it faster.

    Example: sansgpu doctor
    """
    from rich.console import Console

    from sansgpu.jobs.doctor import doctor as job
    from sansgpu.watch.tables import print_doctor

    result = job()
    if as_json:
        _print_json(result)
    else:
        print_doctor(Console(), result)


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a Hugging Face model.")],
    data: Annotated[str | None, typer.Option(help="A source as data.dataset_name; by default the run's own.")] = None,
    snapshot: SnapshotOption = "latest",
    window: Annotated[int | None, typer.Option(min=2, help="Tokens a window, with --data.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure loss, perplexity and bits per byte.

    Example: sansgpu eval runs/default --data notes.txt
    """
    from rich.console import Console

    from sansgpu.jobs.evaluate import evaluate_model
    from sansgpu.watch.terminal import PreparationBar, Terminal

    bar = PreparationBar(Console(stderr=True))
    try:
        event = evaluate_model(run, data, snapshot, window, bar, _warn)
    finally:
        bar.close()
    if as_json:
        _print_json(event)
    else:
        Terminal(Console()).emit(event)


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a Hugging Face folder of ours.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that make up this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0,
    snapshot: SnapshotOption = "latest",
) -> None:
    """Write a text, token by token.

    Example: sansgpu generate runs/default --prompt "def main" --max-new-tokens 100
    """
    from sansgpu.jobs.generate import generate_text
    from sansgpu.models.generate import Sampling

    pieces = generate_text(run, prompt, max_new_tokens, Sampling(temperature, top_k, top_p, seed), snapshot, _warn)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


@app.command()
def export(
    run: RunArgument,
    form: Annotated[str, typer.Option("--format", metavar="hf", help="hf: a Hugging Face folder.")] = "hf",
    snapshot: SnapshotOption = "latest",
    output: Annotated[Path | None, typer.Option(help="Where to write; by default RUN/export.")] = None,
) -> None:
    """Write a snapshot as a model that others load.

    Example: sansgpu export runs/default --snapshot best --output my-model
    """
    if form != "hf":
        raise typer.BadParameter(f"--format is {form}, but only hf is known")
    from sansgpu.jobs.export import export_run

    print(export_run(run, snapshot, output, _warn))


@tokenizer_app.command("train")
def tokenizer_train(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file, a folder, a dataset or python-stdlib.")],
    output: Annotated[Path, typer.Option(help="The tokenizer's folder.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens to learn.")] = 8192,
    sample_mb: Annotated[int, typer.Option(min=1, help="Megabytes of text to learn from.")] = 32,
    as_json: JsonOption = False,
) -> None:
    """Train byte-level BPE.

    Example: sansgpu tokenizer train notes/ --vocab-size 8192 --output tokenizer
    """
    from rich.console import Console

    from sansgpu.jobs.tokenize import train_tokenizer
    from sansgpu.watch.terminal import PreparationBar

    bar = PreparationBar(Console(stderr=True))
    try:
        result = train_tokenizer(source, vocab_size, sample_mb, output, bar)
    finally:
        bar.close()
    if as_json:
        _print_json(result)
    else:
        print(f"{result['vocab_size']:,} tokens, written to {output}")


@tokenizer_app.command("encode")
def tokenizer_encode(
    tokenizer: Annotated[
        str, typer.Argument(metavar="TOKENIZER", help="A folder, a tokenizer.json, or a model's name.")
    ],
    text: Annotated[str | None, typer.Option(help="The text; by default standard input.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the token ids of a text.

    Example: sansgpu tokenizer encode tokenizer --text "def main"
    """
    from sansgpu.jobs.tokenize import encode_text

    result = encode_text(tokenizer, sys.stdin.read() if text is None else text)
    if as_json:
        _print_json(result)
    else:
        print(*result["ids"])


@snapshots_app.command("list")
def snapshots_list(run: RunArgument, as_json: JsonOption = False) -> None:
    """List a run's snapshots.

    Example: sansgpu snapshots list runs/default
    """
    from sansgpu.jobs.snapshots import list_snapshots

    rows = list_snapshots(run)
    if as_json:
        _print_json({"snapshots": rows})
        return
    for row in rows:
        loss = "not evaluated" if row["loss"] is None else f"validation loss {row['loss']:.4f}"
        marks = ("  best" if row["best"] else "") + ("  torn" if row.get("torn") else "")
        print(f"{row['name']}  {loss}  {row['bytes'] / 1e6:.1f} MB{marks}")


@snapshots_app.command("show")
def snapshots_show(run: RunArgument, snapshot: SnapshotOption = "latest", as_json: JsonOption = False) -> None:
    """Show all that a snapshot holds but its tensors.

    Example: sansgpu snapshots show runs/default --snapshot best
    """
    import yaml

    from sansgpu.jobs.snapshots import show_snapshot

    shown = show_snapshot(run, snapshot, _warn)
    if as_json:
        _print_json(shown)
    else:
        print(yaml.safe_dump(shown, sort_keys=False), end="")


@snapshots_app.command("verify")
def snapshots_verify(run: RunArgument) -> int:
    """Check every snapshot against its manifest; exit code 1 where one is torn or altered.

    Example: sansgpu snapshots verify runs/default
    """
    from sansgpu.jobs.snapshots import verify_snapshots

    results = verify_snapshots(run)
    for name, problem in results:
        print(f"{name}  {problem or 'whole'}")
    return int(any(problem for _, problem in results))


@snapshots_app.command("prune")
def snapshots_prune(
    run: RunArgument, keep_last: Annotated[int, typer.Option(help="How many of the newest stay; so does the best.")] = 1
) -> None:
    """Delete old snapshots.

    Example: sansgpu snapshots prune runs/default --keep-last 1
    """
    from sansgpu.jobs.snapshots import prune_snapshots

    for name in prune_snapshots(run, keep_last):
        print(f"deleted {name}")


@snapshots_app.command("fork")
def snapshots_fork(
    run: RunArgument,
    output_dir: Annotated[Path, typer.Option(help="The new run's folder.")],
    snapshot: SnapshotOption = "latest",
) -> None:
    """Begin a new run as a copy of a snapshot, to go on with other settings.

    Example: sansgpu snapshots fork runs/default --output-dir runs/lower-lr
    """
    from sansgpu.jobs.snapshots import fork_snapshot

    forked = fork_snapshot(run, snapshot, output_dir, _warn)
    print(f"{forked}; go on with: sansgpu train --resume --output-dir {forked}")
