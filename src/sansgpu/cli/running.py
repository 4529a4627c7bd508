"""Runs one command line. Slow imports happen inside the command that needs them."""

from __future__ import annotations

import errno
import sys
import traceback
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

from sansgpu.cli.options import CONFIG_SUFFIXES, complain, flag, show
from sansgpu.cli.signals import CODE, INTERRUPTED, interrupted
from sansgpu.machine.untrusted.user_code import no_silent_exit
from sansgpu.version import __version__

# Commands in the order of `sansgpu --help`, under its headings: a file of this folder, and the function or group in it.
# Within a heading, commands with subcommands come last.
_COMMANDS = {
    "Start": {
        "studio": "studio:studio", "init": "start:init", "data": "data:data", "doctor": "start:doctor",
        "plan": "plan:plan", "bench": "start:bench",
    },
    "Train": {"train": "train:train", "tune": "train:tune", "distill": "train:distill"},
    "Look": {"runs": "look:list_runs", "report": "look:report", "snapshots": "look:snapshots"},
    "Use": {
        "eval": "use:evaluate", "predict": "use:predict", "generate": "texts:generate", "chat": "texts:chat",
        "serve": "serve:serve", "extract": "use:extract", "embed": "texts:embed", "search": "texts:search",
        "export": "export:export", "tokenizer": "texts:tokenizer",
    },
    "Scale": {"k8s": "scale:k8s", "slurm": "scale:slurm"},
}  # fmt: skip
MIN_LIKENESS = 0.7  # suggest a known option for an unknown one if difflib's similarity ratio is at least this
# Errors caused by the requested path (missing, wrong kind of file, too long) rather than by the disk.
_PATH_ERRORS = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO,
)  # fmt: skip


def run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        _require_text(arguments)
        arguments = _with_resume_value(arguments)
        if arguments[:1] == ["train"]:
            from sansgpu.cli.other_flags import with_switch_values

            arguments = with_switch_values(arguments)
        with no_silent_exit():
            code = build_app(next(iter(arguments), ""))(arguments, prog_name="sansgpu", standalone_mode=False)
        if interrupted():  # typer turns the interrupt into an exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return 0  # the reader of our output closed the pipe, as `head` does
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            for line in traceback.format_exc().splitlines():
                complain(line)
        message, code = _explain(error, arguments)
        if message:
            complain(f"sansgpu: {message}")
        return code


def _require_text(arguments: list[str]) -> None:
    """Raises ConfigError if an argument has bytes that Python could not decode and reads as lone surrogates."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            from sansgpu.config import ConfigError  # not needed otherwise

            if (encoding := sys.getfilesystemencoding()) != "utf-8":
                raise ConfigError(f"the argument {argument} is not text in {encoding}; set PYTHONUTF8=1.") from None
            raise ConfigError(
                f"the argument {argument} is not UTF-8 text; if it is the name of a file, rename the file."
            ) from None


def _explain(error: BaseException, arguments: list[str]) -> tuple[str, int]:
    """Returns the sentence to print, or "" if the help was printed instead, and the exit code."""
    if interrupted() or isinstance(error, (KeyboardInterrupt, typer.Abort)):
        # Checked first, because an interrupt during an import may have left a partly initialized module.
        return INTERRUPTED, CODE
    from sansgpu.config import SansGPUError  # imported here because `--help` does not need the schema
    from sansgpu.config.errors import missing_package
    from sansgpu.config.wording import truncate
    from sansgpu.machine.address_space import out_of_memory

    error = out_of_memory(error, "or use a smaller model") or missing_package(error) or error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename or error)
        return (
            f"the file name {truncate(name)} has {len(name):,} characters, which is too long for the file system; "
            "choose a shorter name.",
            2,
        )
    if isinstance(error, UnicodeEncodeError) and error.reason.startswith("surrogates"):
        return f"the file name {truncate(error.object)} is not UTF-8 text; rename the file or folder.", 2
    usage_error: type[Any] = typer.BadParameter.__bases__[0]  # typer does not export it
    if isinstance(error, SansGPUError):
        return " ".join(str(error).split()), error.exit_code  # it may quote a multi-line message of a library
    if isinstance(error, usage_error):
        return _usage_problem(error, arguments), 2
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return (
            f"{truncate(str(error.filename))} cannot be used: {error.strerror}.",
            2 if error.errno in _PATH_ERRORS else 1,
        )
    # a bug in sansgpu, or a failing machine
    return f"{type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)", 1


def _usage_problem(error: Any, arguments: list[str]) -> str:
    """Returns a sentence about invalid arguments of a command, with what to write instead of unknown options."""
    from sansgpu.config.wording import truncate

    context = error.ctx.command_path if error.ctx else "sansgpu"
    if getattr(error, "option_name", None) and error.ctx:
        names = _unknown_options(error.ctx, arguments) or [error.option_name]
        named = ", ".join(f"{truncate(name)}{_hint(name, error.ctx.command)}" for name in names)
        message = f"there {'is no option' if len(names) == 1 else 'are no options'} {named}"
    else:
        message = error.format_message().rstrip(".").replace(". Did you mean ", ", did you mean ")
    return f"{message.rstrip('?')}; see {context} --help." if message else ""


def _unknown_options(context: Any, arguments: list[str]) -> list[str]:
    """Returns the arguments of the context's command that look like options, without those that it has."""
    known = {name: each for each in context.command.get_params(context) for name in each.opts}
    unknown: list[str] = []
    is_value = False  # True if the argument is the value of the option before it
    for argument in arguments[len(context.command_path.split()) - 1 :]:
        if hasattr(context.command, "commands") and not argument.startswith("-"):
            break  # a subcommand, whose options follow
        name, equals, _ = argument.partition("=")
        option = None if is_value else known.get(name.replace("_", "-"))
        if name.startswith("--") and option is None and not is_value:
            unknown.append(name)
        is_value = option is not None and not equals and not option.is_flag
    return list(dict.fromkeys(unknown))


def _hint(name: str, command: Any) -> str:
    """Returns what to write instead of an unknown option, in parentheses, or "" if nothing is similar."""
    from sansgpu.config.remedies import advice
    from sansgpu.config.section import counterpart
    from sansgpu.tasks.configuration import SCHEMA

    known = [known for param in command.params for known in param.opts if known.startswith("--")]
    key = name.removeprefix("--").replace("-", "_")
    if "--set" in known:
        if text := advice(key):
            return f" ({text})"
        if setting := counterpart(SCHEMA, key):
            return f" (--set {setting if '=' in setting else f'{setting}=VALUE'})"
    begins = [known for known in known if len(name) > len("--x") and known.startswith(name)]
    near = begins or get_close_matches(name, known, n=1, cutoff=MIN_LIKENESS)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _with_resume_value(arguments: list[str]) -> list[str]:
    """Expands `--resume` without a value to `--resume latest`."""
    completed: list[str] = []
    for index, argument in enumerate(arguments):
        completed.append(argument)
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        if argument == "--resume" and (following.startswith("-") or following.endswith(CONFIG_SUFFIXES)):
            completed.append("latest")
    return completed


def _version(requested: bool) -> None:
    if requested:
        show(__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Show the version.")
    ] = False,
    debug: Annotated[bool, flag("Show the traceback of an error.", None, "--debug")] = False,
) -> None:
    """Train language models on machines without a GPU."""


def build_app(command: str = "") -> typer.Typer:
    """Returns the program with one command, or with all if `command` is none of them: importing all takes long."""
    app = typer.Typer(
        callback=_options,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        # Options may also be written with underscores, e.g. --output_dir.
        context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    )
    is_known = any(command in commands for commands in _COMMANDS.values())
    for title, commands in _COMMANDS.items():
        for name in commands if not is_known else commands.keys() & {command}:
            file, _, attribute = commands[name].partition(":")
            found: Any = getattr(import_module(f"sansgpu.cli.{file}"), attribute)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name, rich_help_panel=title)
            else:
                app.command(name, rich_help_panel=title)(found)
    return app
