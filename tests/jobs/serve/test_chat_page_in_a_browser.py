"""The page of `sansgpu serve` works in a real browser, and shows what a model writes only as text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tools.report_picture import chromium, launched

from sansgpu.views.chat_page import ChatPage
from tests.tasks.folders import model_folder

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("openai")

from tests.jobs.serve.serving import Server, served  # noqa: E402  needs openai

CHROMIUM = chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
KEY = "a secret"
HOSTILE = "<img src=x onerror='document.title = 1'><script>document.title = 2</script> &amp; **x**"


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    model = model_folder("qwen2", max_position_embeddings=65536)
    with served(model, home / "cache", "--context", "65536", SANSGPU_API_KEY=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(CHROMIUM) as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A window in which a violation of the page's policy or a request to elsewhere fails the test."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 390, "height": 700})
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(("http://127.0.0.1", "data:")) else wrong.append(asked.url),
    )
    yield page
    context.close()
    assert wrong == []


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def answers(page: Any) -> list[str]:
    return list(page.locator("#log .assistant p").all_text_contents())


def test_a_conversation_with_a_key(page: Any, server: Server) -> None:
    page.goto(server.url)
    until(lambda: "API key" in page.locator("#problem").text_content())
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    until(lambda: page.locator("#send").is_enabled())
    assert page.title() == model_folder("qwen2", max_position_embeddings=65536).name
    page.fill("#temperature", "0")  # with which this model repeats itself and never ends
    page.fill("#tokens", "20")
    for number in range(1, 3):
        say(page, f"{HOSTILE} {number}")
        until(lambda: page.locator("#send").is_enabled())
        until(lambda number=number: len(answers(page)) == number and answers(page)[-1] != "")
    assert page.locator("#log .user p").first.text_content() == f"{HOSTILE} 1"
    page.fill("#tokens", "60000")
    say(page, "red blue")
    until(lambda: len(answers(page)) == 3 and len(answers(page)[2]) > 50)
    page.click("#stop")
    until(lambda: page.locator("#send").is_enabled())
    assert page.locator("#problem").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("#new")
    assert page.locator("#log section").count() == 0


class HostileModel(BaseHTTPRequestHandler):
    """A server whose model's name and answers are HTML, and whose stream ends with an error."""

    def do_GET(self) -> None:
        shown = ChatPage.load()
        if self.path == "/":
            self._answer(shown.html.encode(), **shown.headers, **{"Content-Type": "text/html"})
        else:
            self._answer(_json({"data": [{"id": HOSTILE, "endpoints": ["completions"], "context": 9}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        parts = [{"choices": [{"text": piece}]} for piece in (HOSTILE[:9], HOSTILE[9:])]
        events = [*parts, {"error": {"message": HOSTILE}}]
        self._answer(b"".join(b"data: " + _json(event) + b"\n\n" for event in events))

    def _answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def test_no_text_of_a_model_becomes_html(page: Any) -> None:
    hostile = ThreadingHTTPServer(("127.0.0.1", 0), HostileModel)
    Thread(target=hostile.serve_forever, daemon=True).start()
    try:
        page.goto(f"http://127.0.0.1:{hostile.server_port}")
        until(lambda: page.locator("#send").is_enabled())
        say(page, "hello")
        until(lambda: page.locator("#problem").is_visible())
        until(lambda: answers(page) == [HOSTILE])
        assert (
            page.locator("#problem").text_content() == page.title() == page.locator("#name").text_content() == HOSTILE
        )
        assert page.locator("#log img, #log script").count() == 0
    finally:
        hostile.shutdown()
        hostile.server_close()
