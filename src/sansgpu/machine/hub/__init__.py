"""Settings of the Hugging Face Hub client: no retry messages, and offline mode if the Hub is unreachable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from sansgpu.config.wording import first_line
from sansgpu.machine.hub.client import HUB, install_client

ANSWER_SECONDS = 5.0  # time limit for DNS, connection and response; the client would retry for about half a minute


def quiet_hub() -> None:
    """Silences the client's retry messages, because our own messages report what fails."""
    from huggingface_hub.utils import logging  # takes a second to import

    logging.set_verbosity_error()
    install_client()


def is_unreachable(error: Exception) -> bool:
    """Returns whether the Hub could not be asked, or could not answer, rather than answering with an error."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, OSError) and (HUB.problem is not None or not isinstance(error, HfHubHTTPError))


def failure(error: BaseException) -> str:
    """Returns a clause about why a library could not read something; it may hide that the Hub did not answer."""
    if isinstance(error, OSError) and HUB.problem:
        return f"{HUB.problem}, and it is not in the cache; try again later"
    return first_line(error)


def why_unread(reason: str) -> str:
    """Returns a clause about why something could not be read from the Hub. `reason` is a library's own."""
    return HUB.problem or f"the Hub is unreachable ({reason})"


@contextmanager
def reading_hub() -> Iterator[None]:
    """Context that enables offline mode, i.e. uses only the cache, if the Hub is unreachable; avoids slow retries."""
    import datasets.config
    from huggingface_hub import constants

    quiet_hub()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        if not (before[0] or reachable(constants.ENDPOINT)):
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@lru_cache
def hub_folder(name: str, revision: str | None, needed: str, absent: str, patterns: tuple[str, ...]) -> Path | None:
    """Downloads the files of a repository that match `patterns`, if it has the file `needed` but not `absent`.

    Returns their folder, or None if there is no such repository or it cannot be reached. Asks the Hub only about files
    of which the cache does not know whether they exist.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # not in its __all__

    quiet_hub()
    disable_progress_bars()
    try:
        if _is_on_hub(name, revision, absent) or not _is_on_hub(name, revision, needed):
            return None
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError):
        return None


def _is_on_hub(name: str, revision: str | None, file: str) -> bool:
    """Returns whether a repository has a file, which is downloaded. Raises OSError or ValueError if this is unknown."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    cached = try_to_load_from_cache(name, file, revision=revision)
    if cached is not None:
        return isinstance(cached, str)  # otherwise the file is known not to exist
    if not reachable(constants.ENDPOINT):
        raise OSError(f"{constants.ENDPOINT} is unreachable")  # the client would retry for about half a minute
    try:
        hf_hub_download(name, file, revision=revision)
    except RemoteEntryNotFoundError:
        return False
    return True


def reachable(address: str) -> bool:
    """Returns whether a server, through the configured proxy if there is one, answers within ANSWER_SECONDS.

    Uses the session of the Hub client, so proxies and certificates are those that a download would use. Raises
    ConfigError if the proxy needs a package that is not installed.
    """
    from huggingface_hub import get_session

    install_client()
    answered = threading.Event()
    session = get_session()

    def ask() -> None:
        with suppress(Exception):  # DNS, the connection, its encryption or the proxy may fail, each in its own way
            session.head(address, timeout=ANSWER_SECONDS)
            answered.set()

    attempt = threading.Thread(target=ask, daemon=True)  # a thread, because a DNS query may block for longer
    attempt.start()
    attempt.join(ANSWER_SECONDS)
    if not answered.is_set():
        HUB.give_up(f"the Hub is unreachable (no answer within {ANSWER_SECONDS:.0f} seconds)")
    return answered.is_set()
