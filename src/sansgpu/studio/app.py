"""The web application of the studio."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sansgpu.studio import data_step, held_out, runs, taking, using, ways
from sansgpu.studio.access import HEADERS, LOGIN, MAX_PASSWORD_BYTES, Access, Guard
from sansgpu.studio.pages import Studio, fields_of
from sansgpu.studio.project import Project

_CACHED = {"Cache-Control": "private, max-age=3600"}
_VIEWS, _OWN = "sansgpu.views", "sansgpu.studio"
# The parts of each file that a page loads.
_FILES = {
    "studio.css": ((_VIEWS, "templates/colors.css"), (_VIEWS, "templates/page.css"), (_VIEWS, "templates/look.css"),
                   (_OWN, "static/studio.css")),
    "studio.js": ((_VIEWS, "templates/figures.js"), (_OWN, "static/studio.js")),
    "htmx.js": ((_OWN, "static/htmx.min.js"),),
    "plotly.js": (),
}  # fmt: skip


def build_app(project: Project, access: Access) -> Starlette:
    """Returns the application, which answers only requests that `access` allows."""
    studio = Studio(project)

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _FILES:
            return Response(status_code=HTTPStatus.NOT_FOUND)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(_content(name), media_type=kind, headers=_CACHED)

    async def nothing(request: Request) -> Response:
        page = studio.page(request, "problem.html", problem=f"there is no page {request.url.path}; go to the start.")
        page.status_code = int(HTTPStatus.NOT_FOUND)
        return page

    async def failed(request: Request, error: Exception) -> Response:
        problem = f"the studio failed ({type(error).__name__}); reload the page."
        page = studio.page(request, "problem.html", problem=problem)
        page.headers.update(HEADERS)  # the middleware has ended
        page.status_code = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        return page

    routes = [Route("/static/{name}", static)]
    for part in (ways, data_step, runs, using, held_out, taking):
        for path, method, handler in part.routes(studio):
            routes.append(Route(path, studio.guarded(handler), methods=[method]))
    routes.append(Route("/{path:path}", nothing))
    guard = Middleware(Guard, access=access, refuse=_refused, login=_login_of(access))
    return Starlette(routes=routes, middleware=[guard], exception_handlers={Exception: failed})


def busy() -> Response:
    """Returns the answer to browsers beyond the limit of connections."""
    return Response(
        "too many pages are open; close some.", int(HTTPStatus.SERVICE_UNAVAILABLE), {"Connection": "close"}
    )


@cache
def _content(name: str) -> bytes:
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs()).encode()
    return b"\n".join(files(package).joinpath(path).read_bytes() for package, path in _FILES[name])


_PLAIN = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>sansgpu studio</title>
<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 36rem; margin: 4rem auto; padding: 0 1rem">
<h1>sansgpu studio</h1>%s</body></html>"""


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request that is not allowed, as text, because it may quote what a stranger sent."""
    error = scope.get("refused")
    known = "this address lacks the token; open the address that `sansgpu studio` printed in its terminal."
    await Response(str(error or known), int(HTTPStatus.FORBIDDEN), media_type="text/plain")(scope, receive, send)


def _login_of(access: Access) -> Starlette:
    """Returns the application for browsers that have not given the password."""

    async def login(request: Request) -> Response:
        problem = ""
        if request.method == "POST" and 0 < int(request.headers.get("content-length", 0)) <= MAX_PASSWORD_BYTES:
            if await access.login((await fields_of(request)).get("password", [""])[0]):
                return access.welcome("/")
            problem = "<p role='alert'>The password is wrong.</p>"
        form = (
            f'{problem}<form method="post" action="{LOGIN}"><label>Password '
            '<input type="password" name="password" autofocus required></label> <button>Open</button></form>'
        )
        return HTMLResponse(_PLAIN % form, int(HTTPStatus.UNAUTHORIZED))

    return Starlette(routes=[Route("/{path:path}", login, methods=["GET", "POST"])])
