"""The HTTP client of the Hugging Face Hub's library: reads without a rejected token, and reports why it has to wait."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line

PATIENCE_SECONDS = 20.0  # how long to retry if the Hub answers with errors; the library alone would try for a minute
REST_SECONDS = 30.0  # after that or a failed connection, requests fail immediately for this time
LONGEST_WAIT_SECONDS = 330.0  # for a request, as the Hub tells; it limits the requests of each five minutes
_TOLD_WAITS = "retry-after", "ratelimit"  # headers that tell how long to wait
_REJECTED_TOKEN = re.compile("invalid|expired", re.IGNORECASE)
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass
class HubStatus:
    """Records whether the Hub answers the requests of this process, and why not."""

    report: Callable[[str], None] = field(default=lambda message: None)  # shows the user a sentence
    _endpoint: str = ""  # the address of the Hub that the rest is about
    _problem: str | None = None
    _failing_since: float | None = None
    _gave_up_at: float | None = None
    _reported: set[str] = field(default_factory=set)

    @property
    def problem(self) -> str | None:
        """A clause about why the last request failed; None: it did not."""
        self._forget_other_hub()
        return self._problem

    def _forget_other_hub(self) -> None:
        from huggingface_hub import constants

        if self._endpoint != constants.ENDPOINT:
            self._endpoint = constants.ENDPOINT
            self._problem = self._failing_since = self._gave_up_at = None
            self._reported.clear()

    def send(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Sends a request with the client's own `send`."""
        self._forget_other_hub()
        if self._gave_up_at is not None and time.monotonic() - self._gave_up_at < REST_SECONDS:
            from huggingface_hub.errors import OfflineModeIsEnabled

            raise OfflineModeIsEnabled(f"{self._problem}")
        self._gave_up_at = None
        try:
            response = send(request, **options)
        except Exception as error:
            self._failed(request, f"the Hub is unreachable ({first_line(error)})")
            raise
        if response.status_code == HTTPStatus.UNAUTHORIZED and "authorization" in request.headers:
            response = self._without_token(send, request, options, response)
        if response.status_code == HTTPStatus.TOO_MANY_REQUESTS and request.method in ("GET", "HEAD"):
            response = self._after_waits(send, request, options, response)
        if response.status_code == HTTPStatus.TOO_MANY_REQUESTS or response.status_code >= 500:
            if self._gave_up_at is None:
                self._failed(request, f"the Hub answers {response.status_code} ({response.reason_phrase})")
        else:
            self._problem = self._failing_since = self._gave_up_at = None
        return response

    def give_up(self, problem: str) -> None:
        """Makes requests fail immediately for REST_SECONDS."""
        self._problem, self._gave_up_at = self.problem or problem, time.monotonic()

    def _failed(self, request: Any, problem: str) -> None:
        now = time.monotonic()
        self._problem, is_first = problem, self._failing_since is None
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > PATIENCE_SECONDS:
            self.give_up(problem)
        elif not is_first:
            self._report_once(f"{problem}; trying again for up to {PATIENCE_SECONDS:.0f} seconds.")

    def _without_token(self, send: Callable[..., Any], request: Any, options: dict[str, Any], refused: Any) -> Any:
        """Repeats a request to read without the token, which may be invalid. Public repositories need none."""
        if request.method not in ("GET", "HEAD"):
            return refused
        from huggingface_hub import constants

        del request.headers["authorization"]
        response = send(request, **options)
        is_invalid = _REJECTED_TOKEN.search(refused.headers.get("x-error-message", "")) is not None
        if response.status_code == HTTPStatus.UNAUTHORIZED and not is_invalid:
            return refused
        place = next((name for name in _TOKEN_VARIABLES if os.environ.get(name)), constants.HF_TOKEN_PATH)
        self._report_once(
            f"the Hub rejects the token in {place}, so only public repositories can be read; correct it, or run "
            "`hf auth login`."
        )
        constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = True  # it would be rejected again
        return response

    def _after_waits(self, send: Callable[..., Any], request: Any, options: dict[str, Any], refused: Any) -> Any:
        """Repeats a request after the time that the Hub tells. Gives up at once if that is too long."""
        response, waited = refused, 0.0
        is_only_question = request.url.path in ("", "/")  # whether there is a Hub, which it has answered
        while response.status_code == HTTPStatus.TOO_MANY_REQUESTS and not is_only_question:
            wait = told_wait(response.headers)
            if wait is None:
                break
            told = f"the Hub answers 429 (Too Many Requests) and asks to wait {wait:.0f} seconds"
            if waited + wait > LONGEST_WAIT_SECONDS:
                self._problem = None
                self.give_up(f"{told}, which is too long")
                break
            self.report(f"{told}; waiting.")
            time.sleep(wait)
            waited += wait
            response.close()
            response = send(request, **options)
        for header in _TOLD_WAITS:  # otherwise the library would wait, without a limit and without a word
            if header in response.headers:
                del response.headers[header]
        return response

    def _report_once(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            self.report(message)


def told_wait(headers: Any) -> float | None:
    """Returns the seconds to wait that an answer tells in Retry-After or the Hub's RateLimit; None if it tells none."""
    given = headers.get("retry-after", "").strip()
    if given.isdecimal():
        return max(1.0, float(given))
    if given:
        try:
            return max(1.0, (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError):
            return None
    reset = re.search(r"\bt=(\d+)", headers.get("ratelimit", ""))
    return None if reset is None else max(1.0, float(reset[1]))


HUB = HubStatus()
_installing = threading.Lock()
_installed: list[bool] = []


def install_client() -> None:
    """Makes the Hub's library use this module's client from now on."""
    with _installing:
        if not _installed:
            from huggingface_hub import set_client_factory

            set_client_factory(_client)
            _installed.append(True)


def _client() -> Any:
    """Returns the library's own client, whose requests pass through HUB. Raises ConfigError if a package is missing."""
    from huggingface_hub.utils._http import default_client_factory

    try:
        client = default_client_factory()
    except ImportError as error:
        if "socksio" not in str(error):
            raise
        raise ConfigError(
            "the proxy for the Hugging Face Hub is a SOCKS proxy (see ALL_PROXY and HTTPS_PROXY), which needs the "
            "package socksio; run `pip install socksio`, or unset the variable."
        ) from None
    send = client.send
    client.send = lambda request, **options: HUB.send(send, request, **options)  # type: ignore[method-assign]
    return client
