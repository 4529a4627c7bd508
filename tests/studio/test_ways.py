"""The steps from a file to a model in use, page by page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import write_rows
from tests.studio.visiting import Studio, studio
from tests.tasks.folders import model_folder

pytest.importorskip("starlette")
pytest.importorskip("plotly")
MODELS = ("bert", "qwen2")
REVIEWS = "n;comment;opinion\n" + "".join(
    f"{number};the model {'learns' if number % 2 else 'forgets'} a word {number};{'good' if number % 2 else 'bad'}\n"
    for number in range(60)
)
HOSTILE = "<img src=x onerror='document.title = 1'><script>document.title = 2</script>"


@pytest.fixture(scope="module")
def visited(home: Path) -> Iterator[Studio]:
    for name in MODELS:
        shutil.copytree(model_folder(name), home / "project" / "models" / name)
    with studio(home / "project") as found:
        found.enter()
        yield found


def begin(visited: Studio, task: str, name: str) -> str:
    """Begins a way, and returns its name."""
    visited.submit("/ways", task=task, name=name)
    return visited.last.split("/")[2]


def test_a_table_becomes_a_classifier_that_was_used(visited: Studio) -> None:
    way = begin(visited, "classify", "opinions")
    assert "Drop files here" in visited.open(f"/way/{way}/data").text
    assert visited.upload(way, "reviews.csv", REVIEWS.encode("cp1252")).status == 204
    page = visited.until(f"/way/{way}/data", lambda page: 'role="alert"' in page.body)
    assert "Use the column “comment” as data.text_column" in page.text
    visited.submit(f"/way/{way}/set", **{"data.text_column": "comment"})
    page = visited.shows(f"/way/{way}/data", "What was found in data/opinions/reviews.csv")
    assert "read as 3 columns separated by semicolons (n, comment, opinion)" in page.text
    assert "0 = bad (30), 1 = good (30)" in page.text
    assert "sansgpu data data/opinions/reviews.csv --task classify" in page.text
    assert "models/bert" in visited.open(f"/way/{way}/model").text
    visited.submit(f"/way/{way}/model", model="models/bert")
    assert "It fits." in visited.shows(f"/way/{way}/model", "Next: time").text
    visited.submit(f"/way/{way}/time", kind="hours", hours="1", unit="m")
    visited.submit(f"/way/{way}/set", **{"training.max_steps": "4", "data.max_length": "32", "training.num_epochs": ""})
    page = visited.shows(f"/way/{way}/time", "Start training")
    assert "4 steps of" in page.text
    assert (
        "sansgpu init opinions.yaml --text data/opinions/reviews.csv --task classify --model models/bert --hours 1m "
        "--set data.text_column=comment --set training.max_steps=4 --set data.max_length=32 --yes --force"
    ) in page.text
    assert "max_steps: 4" in (visited.folder / "opinions.yaml").read_text(encoding="utf-8")
    visited.submit(f"/way/{way}/start")
    assert visited.last == "/run?run=runs/opinions"
    page = visited.shows(visited.last, "Next: try it")
    assert "step 4 of 4" in page.text
    assert "done after step 4" in page.text, "what the terminal shows"
    plots = json.loads(visited.open("/plots?run=runs/opinions").body)
    assert next(plot["name"] for plot in plots if plot["section"] == "Curves") == "loss"

    visited.submit("/try/predict", run="runs/opinions", texts=f"the model learns\n\n{HOSTILE}")
    page = visited.shows("/try?run=runs/opinions", "Predictions")
    assert page.body.count('<div class="answer">') == 2
    assert HOSTILE not in page.body
    assert "<script>document" not in page.body
    visited.submit("/try/predict", run="runs/opinions", texts="another text")
    page = visited.until("/try?run=runs/opinions", lambda page: page.body.count('<div class="answer">') == 1)
    assert "another text" in page.text
    page = visited.shows("/try?run=runs/opinions", "the worst first")
    assert "the model learns a word" in page.text or "the model forgets a word" in page.text
    chosen = visited.open("/try?run=runs/opinions&label=good&predicted=bad").text
    assert "Rows with label good that are predicted as bad" in chosen

    visited.submit("/take/export", run="runs/opinions", format="onnx", type="int8")
    assert "Written to" in visited.until("/take?run=runs/opinions", lambda page: "<progress" not in page.body).text


def test_what_is_wrong_with_data_is_said_with_buttons(visited: Studio) -> None:
    way = begin(visited, "classify", "wrong")
    visited.upload(way, "a.csv", b"remark,kind\n" + b"a word,x\nthe page,y\n" * 20)
    page = visited.until(f"/way/{way}/data", lambda page: 'role="alert"' in page.body)
    assert "data.label_column" in page.text
    visited.submit(f"/way/{way}/set", **{"data.text_column": "remark", "data.label_column": "kind"})
    assert visited.last == f"/way/{way}/data", "the page from which a key was set"
    page = visited.shows(f"/way/{way}/data", "What was found")
    assert "data.label_column=kind" in page.text
    visited.submit(f"/way/{way}/unset", key="data.label_column")
    assert "data.label_column=kind" not in visited.open(f"/way/{way}/data").text
    for setting, problem in (
        ("data.label_colum=kind", "did you mean data.label_column"),
        ("training.max_steps=many", "training.max_steps"),
        ("nothing", "has no value"),
    ):
        assert problem in visited.submit(f"/way/{way}/set", setting=setting).text
    visited.submit(f"/way/{way}/source", data="no/such/file.csv")
    page = visited.until(f"/way/{way}/data", lambda page: 'role="alert"' in page.body)
    assert "no/such/file.csv" in page.text
    visited.submit(f"/way/{way}/source", data="later.csv")
    visited.until(f"/way/{way}/data", lambda page: 'role="alert"' in page.body)
    visited.submit(f"/way/{way}/unset", key="data.text_column")
    (visited.folder / "later.csv").write_text("text,label\n" + "a word,x\nthe page,y\n" * 20, encoding="utf-8")
    visited.submit(f"/way/{way}/again")
    visited.shows(f"/way/{way}/data", "What was found")
    visited.upload(way, "picture.csv", bytes(range(256)) * 40)
    visited.submit(f"/way/{way}/source", data="data/wrong/picture.csv")
    page = visited.until(f"/way/{way}/data", lambda page: 'role="alert"' in page.body)
    assert "Traceback" not in page.text


def test_the_purpose_is_guessed_from_the_rows(visited: Studio, tmp_path: Path) -> None:
    way = begin(visited, "", "chats")
    rows = [{"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"word {n}"}]}
            for n in range(8)]  # fmt: skip
    visited.upload(way, f"{HOSTILE}.jsonl", write_rows(tmp_path / "a.jsonl", rows).read_bytes())
    page = visited.shows(f"/way/{way}/data", "What was found")
    assert "sft, guessed from the rows" in page.text
    assert HOSTILE in page.text
    assert HOSTILE not in page.body
    assert "An assistant" in visited.open(f"/way/{way}/data").text


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("../../../evil.csv", "evil.csv"),
        ("/etc/passwd", "passwd"),
        (".sansgpu.json", "sansgpu.json"),
        ("..", "data"),
        ("a\0b c.csv", "a-b-c.csv"),
        ("Ünïcode námes.tar.gz", "Ünïcode-námes.tar.gz"),
        ("训练.csv", "训练.csv"),
        ("x" * 300 + ".jsonl", "x" * 60 + ".jsonl"),
    ],
)
def test_files_stay_in_the_folder_of_their_way(visited: Studio, given: str, stored: str) -> None:
    way = begin(visited, "sft", "names")
    assert visited.upload(way, given, b"{}\n").status == 204
    found = list((visited.folder / "data" / way).iterdir())
    assert [path.name for path in found] == [stored]
    visited.submit(f"/way/{way}/remove", file=f"../../{way}.yaml")
    visited.submit(f"/way/{way}/remove", file=stored)
    assert not any((visited.folder / "data" / way).iterdir())


@pytest.mark.parametrize(
    "path",
    [
        "/way/../data", "/way/a%2F..%2Fb/data", "/way/.studio/data", "/way/none/model", "/run?run=../../etc",
        "/run?run=/etc", "/run?run=runs/none", "/run", "/try?run=models/bert", "/take/file?run=runs/none",
        "/compare?run=runs/none", "/run?run=.studio", "/try?run=runs",
    ],
)  # fmt: skip
def test_addresses_that_lead_nowhere_say_so(visited: Studio, path: str) -> None:
    page = visited.open(path)
    assert page.status in (400, 404)
    assert "This does not work" in page.text
    assert "Error" not in page.text


def test_a_configuration_that_was_edited_by_hand_is_kept(visited: Studio) -> None:
    way = begin(visited, "classify", "edited")
    visited.upload(way, "reviews.csv", REVIEWS.encode())
    visited.submit(f"/way/{way}/set", **{"data.text_column": "comment"})
    visited.submit(f"/way/{way}/model", model="models/bert")
    visited.submit(f"/way/{way}/time", kind="hours", hours="1", unit="m")
    visited.shows(f"/way/{way}/time", "Start training")
    file = visited.folder / "edited.yaml"
    mine = file.read_text(encoding="utf-8").replace("num_epochs: ", "num_epochs: 1")
    file.write_text(mine, encoding="utf-8")
    assert "edited.yaml was edited by hand" in visited.open(f"/way/{way}/time").text
    visited.submit(f"/way/{way}/set", **{"training.num_epochs": "5"})
    visited.shows(f"/way/{way}/time", "Start training")
    assert file.read_text(encoding="utf-8") == mine
    visited.submit(f"/way/{way}/rewrite")
    visited.shows(f"/way/{way}/time", "Start training")
    assert "num_epochs: 5" in file.read_text(encoding="utf-8")
    assert file.with_suffix(".old.yaml").read_text(encoding="utf-8") == mine


@pytest.mark.long
def test_conversations_become_an_assistant_for_ollama(visited: Studio) -> None:
    way = begin(visited, "sft", "bakery")
    rows = (Path(__file__).parents[2] / "examples" / "bakery.jsonl").read_bytes()
    visited.upload(way, "bakery.jsonl", rows)
    visited.submit(f"/way/{way}/model", other="models/qwen2")
    page = visited.shows(f"/way/{way}/data", "What was found")
    assert "learned)" in page.text, "the tokens of the chosen model"
    visited.submit(f"/way/{way}/time", kind="hours", hours="1", unit="m")
    visited.submit(f"/way/{way}/set", **{"training.max_steps": "2"})
    visited.shows(f"/way/{way}/time", "Start training")
    visited.submit(f"/way/{way}/start")
    visited.shows(visited.last, "Next: try it")
    for side in ("trained", "base"):
        answer = visited.submit("/try/answer", run="runs/bakery", side=side, prompt=HOSTILE, temperature="0")
        assert "<pre" in answer.body, answer.body
        assert HOSTILE not in answer.body
    visited.submit("/try/held-out", run="runs/bakery")
    page = visited.shows("/try?run=runs/bakery", "answer in the data")
    assert "1 conversation up to the last answer" in page.text
    assert "In memory: runs/bakery, models/qwen2" in visited.open("/try?run=runs/bakery").text
    visited.submit("/take/export", run="runs/bakery", format="ollama", type="q8_0")
    page = visited.shows("/take?run=runs/bakery", "Written to")
    assert "ollama create bakery -f Modelfile" in page.text
    assert "ollama run bakery" in page.text
    assert ".sansgpu.json" not in page.text
    sent = visited.request("GET", "/take/file?run=runs/bakery&name=Modelfile")
    assert sent.body.startswith("FROM ./bakery-q8_0.gguf")
    for name in ("../../config.yaml", "/etc/passwd", ".sansgpu.json"):
        assert "has no exported file" in visited.open(f"/take/file?run=runs/bakery&name={name}").text
    visited.submit("/take/export", run="runs/bakery", format="gguf", type="q8_0")
    visited.shows("/take?run=runs/bakery", "copy or download this file")
    sent = visited.request("GET", "/take/file?run=runs/bakery&name=bakery-q8_0.gguf")
    assert sent.headers["content-disposition"] == 'attachment; filename="bakery-q8_0.gguf"'
    visited.submit("/take/serve", run="runs/bakery")
    assert "curl http://127.0.0.1:" in visited.shows("/take?run=runs/bakery", "It is served at").text
    visited.submit("/try/unload", run="runs/bakery")
    visited.until("/try?run=runs/bakery", lambda page: "In memory" not in page.text)


@pytest.mark.long
def test_a_folder_of_notes_becomes_a_model_from_scratch(visited: Studio, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    shutil.copytree(Path(__file__).parents[2] / "docs", notes, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    way = begin(visited, "pretrain", "notes")
    visited.submit(f"/way/{way}/source", data=str(notes))
    visited.shows(f"/way/{way}/data", "What was found")
    assert "tokens per second" in visited.shows(f"/way/{way}/model", "Next: time").text
    visited.submit(f"/way/{way}/time", kind="hours", hours="1", unit="m")
    visited.shows(f"/way/{way}/time", "Start training")
    visited.submit(f"/way/{way}/set", **{"training.max_steps": "30", "training.eval_steps": "10"})
    visited.shows(f"/way/{way}/time", "30 steps of")
    visited.submit(f"/way/{way}/start")
    visited.shows(visited.last, "Next: try it")
    answer = visited.submit("/try/answer", run="runs/notes", side="trained", prompt="# Train", temperature="0")
    assert "<pre" in answer.body
