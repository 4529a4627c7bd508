"""Runs one command line. Every import of weight happens inside the command that needs it."""

from __future__ import annotations

import errno
import traceback
from typing import Annotated, Any

import typer

from sansgpu import __version__
from sansgpu.cli import (  # noqa: F401  what they define is in app
    cluster,
    extracting,
    planning,
    reporting,
    tools,
    training,
    tuning,
    using,
)
from sansgpu.cli.options import CONFIG_SUFFIXES, app, complain, show
from sansgpu.cli.signals import CODE, interrupted

# A path that was asked for cannot work, rather than the disk: it names nothing, a wrong kind of file, or is too long.
_WRONG_NAMES = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO,
)  # fmt: skip


def run(arguments: list[str]) -> int:
    """The exit code of one command line."""
    debug = "--debug" in arguments
    arguments = _with_resume_value([a for a in arguments if a != "--debug"])
    try:
        code = app(arguments, prog_name="sansgpu", standalone_mode=False)
        if interrupted():  # typer turns the interrupt into a code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return 0  # who read our output has left, as `head` does
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            for line in traceback.format_exc().splitlines():
                complain(line)
        message, code = _explained(error)
        complain(f"sansgpu: {message}")
        return code


def _explained(error: BaseException) -> tuple[str, int]:
    """One sentence, and the exit code."""
    from sansgpu.config import SansGPUError  # not above: `--help` needs no schema
    from sansgpu.config.plain import cut

    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename or error)
        return f"the name {cut(name)} has {len(name):,} characters, which is too long for the file system.", 2
    if interrupted() or isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted; what was saved before stays.", CODE
    usage_error: type[Any] = typer.BadParameter.__bases__[0]  # typer names it in no public place
    if isinstance(error, SansGPUError):
        return " ".join(str(error).split()), error.exit_code  # a library's reason in it may have several lines
    if isinstance(error, usage_error):
        context = error.ctx.command_path if error.ctx else "sansgpu"
        return f"{error.format_message().rstrip('.')}; see {context} --help.", 2
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{cut(str(error.filename))} cannot be used: {error.strerror}.", 2 if error.errno in _WRONG_NAMES else 1
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


def _version(asked: bool) -> None:
    if asked:
        show(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
) -> None:
    pass
