"""Uploads an exported model to the Hugging Face Hub."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.wording import first_line
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.marks import read_mark
from sansgpu.files.ownership import README
from sansgpu.jobs.report import errors_as_warnings
from sansgpu.machine.hub import quiet_hub, reachable
from sansgpu.train.loading import require_snapshot
from sansgpu.train.run_folders import open_run
from sansgpu.views.model_card import model_card
from sansgpu.views.record import RunRecord

OPTION = "--push-to-hub"


def require_hub(name: str) -> None:
    """Raises ConfigError unless `name` may name a repository, there is a token, and the Hub answers."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    refusal = f"{OPTION} is {name}, but must be OWNER/NAME with letters, digits, - . and _, e.g. me/my-model."
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(refusal) from None
    if "/" not in name:
        raise ConfigError(refusal)
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{OPTION} needs the Hub, but HF_HUB_OFFLINE is set; unset it.")
    if get_token() is None:
        raise ConfigError(f"{OPTION} needs a token with write access; run `hf auth login`, or set HF_TOKEN.")
    if not reachable(constants.ENDPOINT):
        raise ConfigError(f"the Hub at {constants.ENDPOINT} is unreachable; check the network, or remove {OPTION}.")


def push_to_hub(exported: Path, name: str, is_private: bool, progress: ReportProgress, card: str | None = None) -> str:
    """Uploads a file, or the files that sansgpu wrote to a folder, in a single commit; returns the model's address.

    Also uploads `card`, a model card, unless the repository has one, which may have been edited. Creates the repository
    if there is none. Raises ConfigError or SansGPUError; then the repository has no new commit.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # not in its __all__

    quiet_hub()
    disable_progress_bars()
    files = [exported] if exported.is_file() else _files_of(exported)
    root = exported.parent if exported.is_file() else exported
    progress(f"uploading to {name}", 0, 0)
    api = HfApi(library_name="sansgpu")
    with _hub_errors(exported, name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the model card, e.g. a missing license
        address = api.create_repo(name, private=is_private or None, exist_ok=True)
        # upload_folder would divide the files into several commits
        additions = [CommitOperationAdd(str(path.relative_to(root)), path) for path in files]
        if card is not None and not api.file_exists(name, README):
            additions.append(CommitOperationAdd(README, card.encode()))
        api.create_commit(name, additions, commit_message=f"Upload {exported.name} with sansgpu")
    return str(address)


def gguf_card(run: Path, snapshot: str, file: Path, is_adapter: bool, warn: Warn) -> str | None:
    """Returns the model card for a GGUF file of a run's snapshot. Returns None after a failure, which is a warning."""
    card = None
    with errors_as_warnings(f"the model card of {file}", warn):
        found = require_snapshot(run, *open_run(run), snapshot, warn)
        card = model_card(RunRecord.open(run), found.step, is_adapter, file.name)
    return card


def _files_of(folder: Path) -> list[Path]:
    """Returns the files that sansgpu wrote and the model card, which may be edited; other files may be private."""
    mark = read_mark(folder)
    assert mark is not None, f"{folder} has no mark"
    paths = [folder / name for name in sorted({*mark.files, README})]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@contextmanager
def _hub_errors(exported: Path, name: str) -> Iterator[None]:
    """Turns the client's errors into one sentence."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:  # the client also raises those of httpx, of its Rust code, RuntimeError and ValueError
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        code = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        if code == 401:
            raise ConfigError("the Hub rejects the token; run `hf auth login` again, or correct HF_TOKEN.") from None
        if code in (403, 404):
            raise ConfigError(
                f"the token may not write to {name}; use one with write access, or another OWNER in {OPTION}."
            ) from None
        why = (cause.server_message if isinstance(cause, HfHubHTTPError) else None) or first_line(cause)
        raise SansGPUError(
            f"the upload to {name} failed ({why}); the repository has no new commit, and the model is in {exported}; "
            "run the command again."
        ) from None
