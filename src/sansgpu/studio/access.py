"""Who may use the studio: a browser that has opened the address with the token, or that knows the password."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from http import HTTPStatus
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sansgpu.config.wording import truncate
from sansgpu.machine.http.hosts import is_same_origin, is_this_machine, name_in

WRONG_PASSWORD_SECONDS = 1.0  # wait after a wrong password, one at a time, so that guessing takes long
MAX_PASSWORD_BYTES = 1000
LOGIN = "/login"
# Plotly writes style elements. No script runs except the files of the studio, and nothing is loaded from elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class RefusedError(Exception):
    """A request that is refused, with the HTTP status and a sentence for the user."""

    def __init__(self, message: str, status: int = HTTPStatus.FORBIDDEN) -> None:
        super().__init__(message)
        self.status = int(status)


class Access:
    """The secrets of one server, and the checks of each request."""

    def __init__(self, token: str, password: str | None, port: int) -> None:
        self.token, self._password = token, password
        self._session, self._cookie = secrets.token_urlsafe(32), f"sansgpu-studio-{port}"  # browsers ignore the port
        self._guess = asyncio.Lock()

    @property
    def has_password(self) -> bool:
        return self._password is not None

    def check_page(self, request: Request) -> None:
        """Raises RefusedError for requests that pages of other sites make in a browser on this machine.

        These are cross-origin requests (by the header Origin) and, where only this machine may connect, DNS rebinding
        (by the header Host).
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self.has_password and not is_this_machine(name_in(host)):
            raise RefusedError(f"the host {truncate(host)} is not this machine; open the address that was printed.")
        if origin is not None and not is_same_origin(origin, host):
            raise RefusedError(f"pages of {truncate(origin)} may not use the studio; open its own address.")
        if request.method not in ("GET", "HEAD") and origin is None:
            raise RefusedError("the request does not say which page it comes from; use the studio's own pages.")

    def is_known(self, request: Request) -> bool:
        return _equal(request.cookies.get(self._cookie, ""), self._session)

    def opens(self, request: Request) -> bool:
        """Returns whether the address has the token, which opens a server without a password."""
        return not self.has_password and _equal(request.query_params.get("token", ""), self.token)

    def welcome(self, target: str) -> Response:
        """Returns a redirect that lets the browser in."""
        answer = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
        return answer

    async def login(self, password: str) -> bool:
        """Returns whether the password is right; if not, waits first."""
        if self._password is not None and _equal(password, self._password):
            return True
        async with self._guess:
            await asyncio.sleep(WRONG_PASSWORD_SECONDS)
        return False


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode(errors="replace"))


class Guard:
    """Middleware that answers only requests that `Access` allows, and adds the headers to each answer."""

    def __init__(self, app: ASGIApp, access: Access, refuse: ASGIApp, login: ASGIApp) -> None:
        self._app, self._access, self._refuse, self._login = app, access, refuse, login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app = self._app
        try:
            self._access.check_page(request)
            if self._access.opens(request):
                left = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
                app = self._access.welcome(request.url.path + (f"?{urlencode(left)}" if left else ""))
            elif not self._access.is_known(request):
                app = self._login if self._access.has_password else self._refuse
        except RefusedError as error:
            scope["refused"] = error
            app = self._refuse
        await app(scope, receive, send_with_headers)
