"""A person's whole ways in a real browser, from a dropped file to a model in use, without a request to elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tools.report_picture import chromium, launched

from tests.processes import write_rows
from tests.studio.visiting import SECONDS, Studio, studio
from tests.tasks.folders import model_folder

playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("starlette")
pytest.importorskip("plotly")
CHROMIUM = chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
ROOT = Path(__file__).parents[2]
HOSTILE = "<img src=x onerror='document.title = 1'><script>document.title = 2</script>"
WIDE, NARROW = {"width": 1300, "height": 900}, {"width": 390, "height": 844}
PAINT_SECONDS = 2.0
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
# Folder for a picture of each step, which docs/studio.md shows.
PICTURES = os.environ.get("SANSGPU_STUDIO_PICTURES")


@pytest.fixture(scope="module")
def visited(home: Path) -> Iterator[Studio]:
    for name in ("bert", "qwen2"):
        shutil.copytree(model_folder(name), home / "project" / "models" / name)
    with studio(home / "project") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(CHROMIUM) as browser:
        yield browser


@pytest.fixture
def page(browser: Any, visited: Studio) -> Iterator[Any]:
    """A window in which a violation of the pages' policy, an error or a request to elsewhere fails the test."""
    wrong: list[str] = []
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(SECONDS * 1000)
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    own = (f"http://{visited.host}/", "data:", "blob:")
    context.on("request", lambda asked: None if asked.url.startswith(own) else wrong.append(asked.url))
    page.goto(visited.address)
    yield page
    context.close()
    assert wrong == []


def shown(page: Any, step: str) -> None:
    """Checks a page in every width and scheme, and takes its picture."""
    for viewport in (NARROW, WIDE):
        page.set_viewport_size(viewport)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (step, viewport)
    for element in page.query_selector_all("input:not([type=hidden]), textarea, select, button, meter, progress"):
        name = element.evaluate("one => one.ariaLabel || one.labels?.length || one.textContent.trim()")
        assert name or not element.is_visible(), (step, element.evaluate("one => one.outerHTML"))
    if PICTURES:
        page.screenshot(path=str(Path(PICTURES) / f"studio-{step}.png"))


def until(get: Callable[[], Any]) -> Any:
    """Returns a value as soon as it is true."""
    deadline = time.monotonic() + SECONDS
    while not (value := get()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def address(page: Any) -> str:
    return str(page.evaluate("location.pathname + location.search"))


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).first.click()


def follow(page: Any, name: str) -> None:
    page.get_by_role("link", name=name).first.click()


def reloaded(page: Any, words: str) -> None:
    """Reloads a page, which then shows the same."""
    page.reload()
    page.wait_for_selector(f"text={words}")


def drop(page: Any, file: Path) -> None:
    """Drops a file on the page, as a mouse does."""
    text = file.read_text(encoding="utf-8")
    transfer = page.evaluate_handle(
        "([text, name]) => { const data = new DataTransfer(); data.items.add(new File([text], name)); return data; }",
        [text, file.name],
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    page.wait_for_selector(f"li:has-text('{file.name}')")


def planned(page: Any, **settings: str) -> None:
    """Chooses a minute and other settings on the page of the time, and waits for the plan."""
    page.fill("[name=hours]", "1")
    assert page.is_checked("[value=hours]"), "a value chooses its radio button"
    page.click("#settings summary")
    for key, value in settings.items():
        page.fill(f"[name='{key.replace('__', '.')}']", value)
    press(page, "Change the plan")
    page.wait_for_selector("text=Start training")


def test_a_dropped_table_becomes_a_classifier(page: Any, visited: Studio, tmp_path: Path) -> None:
    table = tmp_path / "reviews.csv"
    things = ("kettle", "lamp", "chair", "clock", "radio", "table")
    opinions = (("I like this {}, it works well", "good"), ("the {} broke after {} days", "bad"))
    rows = (f"{text.format(things[n % 6], n + 2)};{label}" for n in range(36) for text, label in opinions)
    table.write_text("comment;label\n" + "\n".join(dict.fromkeys(rows)) + "\n", encoding="utf-8")
    shown(page, "purpose")
    page.get_by_role("button", name="A classifier").click()
    drop(page, table)
    page.wait_for_selector("text=What was found")
    shown(page, "data")
    reloaded(page, "What was found")
    follow(page, "Next: model")
    page.check("[value='models/bert']")
    press(page, "Choose, and see whether it fits")
    page.wait_for_selector("text=It fits")
    shown(page, "model")
    reloaded(page, "It fits")
    follow(page, "Next: time")
    planned(page, training__num_epochs="2", data__max_length="32")
    shown(page, "time")
    reloaded(page, "Start training")
    press(page, "Start training")
    page.wait_for_selector("text=Next: try it")
    page.wait_for_selector("html[data-drawn] .plot .main-svg", state="attached")
    shown(page, "classifier")
    reloaded(page, "Next: try it")
    follow(page, "Next: try it")
    page.fill("[name=texts]", "I like my new clock\nit broke at once")
    press(page, "Predict")
    page.wait_for_selector("text=Predictions")
    page.wait_for_selector("text=the worst first")
    shown(page, "try")
    reloaded(page, "the worst first")
    page.fill("[name=texts]", HOSTILE)
    press(page, "Predict")
    page.wait_for_selector(".answer:has-text('onerror')")
    page.locator(".confusion a").first.click()
    page.wait_for_selector("text=Show all")
    follow(page, "Next: take it away")
    press(page, "Export")
    page.wait_for_selector("text=Written to")
    shown(page, "take")
    reloaded(page, "Written to")
    assert re.fullmatch(r"classifier · sansgpu studio|runs/classifier · sansgpu studio", page.title())


@pytest.mark.long
def test_dropped_conversations_become_an_assistant(page: Any, browser: Any, visited: Studio) -> None:
    page.get_by_role("button", name="An assistant a model to chat needs conversations").click()
    drop(page, ROOT / "examples" / "bakery.jsonl")
    page.wait_for_selector("text=What was found")
    follow(page, "Next: model")
    page.fill("[name=other]", "models/qwen2")
    press(page, "Choose, and see whether it fits")
    page.wait_for_selector("text=It fits")
    follow(page, "Next: time")
    planned(page, training__num_epochs="2")
    press(page, "Start training")
    other = browser.new_context().new_page()  # a second browser, which knows the address
    other.goto(visited.address)
    other.goto(f"http://{visited.host}{address(page)}")
    other.wait_for_selector("text=Next: try it", timeout=SECONDS * 1000)
    other.context.close()
    page.wait_for_selector("text=Next: try it")
    follow(page, "Next: try it")
    page.fill("[name=prompt]", HOSTILE)
    press(page, "Ask")
    for side in ("trained", "base"):
        page.wait_for_selector(f"[data-side={side}] .answer pre")
    shown(page, "chat")
    assert page.title() == "runs/assistant · sansgpu studio"
    follow(page, "Next: take it away")
    press(page, "Export")
    page.wait_for_selector("text=ollama create")
    shown(page, "ollama")


@pytest.mark.long
def test_a_named_folder_of_notes_becomes_a_model_from_scratch(page: Any, visited: Studio, tmp_path: Path) -> None:
    for number, file in enumerate(sorted((ROOT / "docs").glob("*.md"))):
        shutil.copy(file, tmp_path / f"{number}.md")
    page.get_by_role("button", name="A model from scratch").click()
    page.fill("[name=data]", str(tmp_path))
    press(page, "Use")
    page.wait_for_selector("text=What was found")
    follow(page, "Next: model")
    page.wait_for_selector("text=time to train it well")
    follow(page, "Next: time")
    planned(page, training__num_epochs="1")
    press(page, "Start training")
    page.wait_for_selector("text=training, step")
    press(page, "Save and stop")
    page.wait_for_selector("#resume")
    shown(page, "stopped")
    press(page, "Resume")
    page.wait_for_selector("text=Next: try it")
    page.reload()
    page.wait_for_selector("html[data-drawn] .plot .main-svg", state="attached")
    shown(page, "run")
    page.goto(f"http://{visited.host}/runs")
    page.wait_for_selector("text=Compare the chosen runs")
    shown(page, "runs")


def test_the_first_page_is_painted_soon_and_works_by_keyboard(browser: Any, visited: Studio) -> None:
    context = browser.new_context(color_scheme="dark", viewport=WIDE)
    page = context.new_page()
    page.goto(visited.address)
    paints = []
    for _ in range(5):
        page.goto(f"http://{visited.host}/")
        paints.append(until(partial(page.evaluate, FIRST_PAINT)) / 1000)
    assert sorted(paints)[2] < PAINT_SECONDS
    dark, light = "rgb(21, 23, 26)", "rgb(251, 251, 250)"
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == dark
    page.click("#scheme")
    assert page.evaluate(background) == light
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(40):
        if "A classifier" in page.evaluate("document.activeElement.textContent"):
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/data")
    page.focus("#files")
    assert page.evaluate("document.activeElement.matches(':focus-visible')")
    context.close()


def test_a_file_of_the_wrong_kind_is_answered_with_a_sentence(page: Any, tmp_path: Path) -> None:
    page.get_by_role("button", name="A classifier").click()
    rows = write_rows(tmp_path / "wrong.jsonl", [{"remark": "a word", "kind": "x"}] * 9)
    page.set_input_files("#files", str(rows))
    page.wait_for_selector("[role=alert]")
    assert "data.label_column" in page.inner_text("[role=alert]")
    shown(page, "wrong")
    picture = tmp_path / "picture.csv"
    picture.write_bytes(bytes(range(256)) * 100)
    page.set_input_files("#files", str(picture))
    time.sleep(1)
    page.wait_for_selector("[role=alert]")
    assert "Traceback" not in page.inner_text("main")


def test_an_upload_that_fails_says_so(page: Any, visited: Studio, tmp_path: Path) -> None:
    page.get_by_role("button", name="An assistant a model to chat needs conversations").click()
    name = address(page).split("/")[2]
    (visited.folder / "data").mkdir(exist_ok=True)
    (visited.folder / "data" / name).write_text("a file in place of the folder", encoding="utf-8")
    page.set_input_files("#files", str(write_rows(tmp_path / "a.jsonl", [{"text": "a"}])))
    until(lambda: "cannot be" in page.inner_text("#uploading"))
    (visited.folder / "data" / name).unlink()


def test_a_copied_line_is_the_command(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="A classifier").click()
    page.click("#same > summary")
    page.locator(".copy").first.click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("cd ")
    assert json.dumps(page.evaluate("getSelection().toString()")).startswith('"cd ')
