"""The `sansgpu tokenizer` and `snapshots` commands."""

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
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File, folder, Hugging Face dataset or python-stdlib.")
    ],
    output: Annotated[Path, typer.Option(parser=written_path, metavar="DIR", help="Folder for the tokenizer.")],
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size.")] = 8192,
    sample_mb: Annotated[int, typer.Option(min=1, help="Megabytes of text to train on.")] = 32,
    as_json: JsonOption = False,
) -> None:
    """Train a byte-level BPE tokenizer.

    Example: sansgpu tokenizer train notes/ --vocab-size 8192 --output tokenizer
    """
    from sansgpu.jobs.tokenize import train_tokenizer
    from sansgpu.reporting.terminal import PreparationBar, RunConsole

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
        str, typer.Argument(metavar="TOKENIZER", help="Tokenizer folder, tokenizer.json file or model name.")
    ],
    text: Annotated[str | None, typer.Option(help="Text to encode. Default: standard input.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the token ids of a text.

    Example: sansgpu tokenizer encode tokenizer --text "def main"
    """
    from sansgpu.jobs.tokenize import encode_text

    result = encode_text(tokenizer, _standard_input() if text is None else text)
    if as_json:
        print_json(result)
    else:
        show(" ".join(map(str, result["ids"])))


def _standard_input() -> str:
    """Reads standard input without translating line ends. Raises ConfigError if it is not UTF-8."""
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
    """List a run's snapshots, then those of abandoned branches.

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
    """Show a snapshot's contents except its tensors.

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
    """Check every snapshot against its manifest. Exits with code 1 if one is incomplete or altered.

    Example: sansgpu snapshots verify runs/default
    """
    from sansgpu.jobs.snapshots import verify_snapshots

    results = verify_snapshots(run)
    for name, problem in results:
        show(f"{name}  {problem or 'ok'}")
    return int(any(problem for _, problem in results))


@snapshots_app.command("prune")
def snapshots_prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None,
        typer.Option(help="Newest snapshots to keep in addition to the best. Default: 1, or all with --abandoned."),
    ] = None,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Also delete the snapshots of abandoned branches.")
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
    output_dir: Annotated[Path, typer.Option(parser=written_path, metavar="DIR", help="Folder for the new run.")],
    snapshot: SnapshotOption = "latest",
) -> None:
    """Copy a snapshot into a new run, to continue training with other settings.

    Example: sansgpu snapshots fork runs/default --output-dir runs/lower-lr
    """
    from sansgpu.jobs.snapshots import fork_snapshot

    forked = fork_snapshot(run, snapshot, output_dir, warn)
    show(f"{forked}; continue with: sansgpu train --resume --output-dir {forked}")
