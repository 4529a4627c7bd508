"""`sansgpu tokenizer` and `snapshots`."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import (
    JsonOption,
    RunArgument,
    SnapshotOption,
    print_json,
    show,
    snapshots_app,
    tokenizer_app,
    warn,
    written_path,
)


@tokenizer_app.command("train")
def tokenizer_train(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file, a folder, a dataset or python-stdlib.")],
    output: Annotated[Path, typer.Option(parser=written_path, metavar="DIR", help="The tokenizer's folder.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens to learn.")] = 8192,
    sample_mb: Annotated[int, typer.Option(min=1, help="Megabytes of text to learn from.")] = 32,
    as_json: JsonOption = False,
) -> None:
    """Train byte-level BPE.

    Example: sansgpu tokenizer train notes/ --vocab-size 8192 --output tokenizer
    """
    from sansgpu.jobs.tokenize import train_tokenizer
    from sansgpu.watch.terminal import PreparationBar, RunConsole

    bar = PreparationBar(RunConsole(stderr=True))
    try:
        result = train_tokenizer(source, vocab_size, sample_mb, output, bar)
    finally:
        bar.close()
    if as_json:
        print_json(result)
    else:
        show(f"{result['vocab_size']:,} tokens, written to {output}")


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

    result = encode_text(tokenizer, _standard_input() if text is None else text)
    if as_json:
        print_json(result)
    else:
        show(" ".join(map(str, result["ids"])))


def _standard_input() -> str:
    """All of standard input, to the character: no line end is translated. Raises ConfigError if it is not UTF-8."""
    from sansgpu.config import ConfigError

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", newline="")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"standard input is not UTF-8 text (byte 0x{byte:02x}); convert it first.") from None


@snapshots_app.command("list")
def snapshots_list(run: RunArgument, as_json: JsonOption = False) -> None:
    """List a run's snapshots, and after them those of abandoned branches.

    Example: sansgpu snapshots list runs/default
    """
    from sansgpu.jobs.snapshots import list_snapshots

    rows = list_snapshots(run)
    if as_json:
        print_json({"snapshots": rows})
        return
    for row in rows:
        loss = "not evaluated" if row["loss"] is None else f"validation loss {row['loss']:.4f}"
        marks = "".join(f"  {mark}" for mark in ("best", "torn") if row.get(mark))
        show(f"{row['name']}  {loss}  {row['bytes'] / 1e6:.1f} MB  {row.get('content_id', '')[:12]}{marks}")


@snapshots_app.command("show")
def snapshots_show(run: RunArgument, snapshot: SnapshotOption = "latest", as_json: JsonOption = False) -> None:
    """Show all that a snapshot holds but its tensors.

    Example: sansgpu snapshots show runs/default --snapshot best
    """
    import yaml

    from sansgpu.jobs.snapshots import show_snapshot

    shown = show_snapshot(run, snapshot, warn)
    if as_json:
        print_json(shown)
    else:
        show(yaml.safe_dump(shown, sort_keys=False), end="")


@snapshots_app.command("verify")
def snapshots_verify(run: RunArgument) -> int:
    """Check every snapshot against its manifest; exit code 1 where one is torn or altered.

    Example: sansgpu snapshots verify runs/default
    """
    from sansgpu.jobs.snapshots import verify_snapshots

    results = verify_snapshots(run)
    for name, problem in results:
        show(f"{name}  {problem or 'whole'}")
    return int(any(problem for _, problem in results))


@snapshots_app.command("prune")
def snapshots_prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None,
        typer.Option(help="Number of newest snapshots to keep, besides the best. Default: 1, or all with --abandoned."),
    ] = None,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Delete the snapshots of abandoned branches, see snapshots list.")
    ] = False,
) -> None:
    """Delete old snapshots.

    Example: sansgpu snapshots prune runs/default --keep-last 1
    """
    from sansgpu.jobs.snapshots import prune_snapshots

    for name in prune_snapshots(run, 1 if keep_last is None and not abandoned else keep_last, abandoned):
        show(f"deleted {name}")


@snapshots_app.command("fork")
def snapshots_fork(
    run: RunArgument,
    output_dir: Annotated[Path, typer.Option(parser=written_path, metavar="DIR", help="The new run's folder.")],
    snapshot: SnapshotOption = "latest",
) -> None:
    """Begin a new run as a copy of a snapshot, to go on with other settings.

    Example: sansgpu snapshots fork runs/default --output-dir runs/lower-lr
    """
    from sansgpu.jobs.snapshots import fork_snapshot

    forked = fork_snapshot(run, snapshot, output_dir, warn)
    show(f"{forked}; go on with: sansgpu train --resume --output-dir {forked}")
