"""The commands in the documentation run, and its tables match the schema."""

import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sansgpu import __version__
from sansgpu.config import Config
from sansgpu.config.section import all_keys
from sansgpu.data.forms.registry import FORMS
from sansgpu.tasks.configuration import SCHEMA
from tests.processes import environment, finish, fork_server, settings, write_corpus
from tests.project import PROJECT, ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))


def commands(page: Path) -> str:
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


def write_files(page: Path, folder: Path) -> None:
    """Writes each Python block whose first line is a file name to that file."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for block in blocks:
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("configs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy2(ROOT / "README.md", tmp_path)
    return tmp_path


# Pages whose commands take a long time.
SLOW = (
    "assistant", "bench", "classify", "configuration", "data", "distill", "embed", "entities", "fine-tuning", "graph",
    "grpo", "gguf", "guides", "harness", "kubernetes", "laptops", "ollama", "onnx", "own-text", "plan", "preference",
    "python", "questions", "report", "resume", "scaling", "search", "serve", "static", "train", "trainer", "tune",
    "use",
)  # fmt: skip


PACKAGES = {"harness": "lm_eval"}  # packages that the commands of a page need and that are not part of the extra `all`


def timed(page: Path) -> object:
    return pytest.param(page, id=page.stem, marks=pytest.mark.long if page.stem in SLOW else ())


@pytest.mark.parametrize("page", [timed(page) for page in PAGES if commands(page)])
def test_every_command_of_a_page_runs(page: Path, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    if package := PACKAGES.get(page.stem):
        pytest.importorskip(package)
    path = os.pathsep.join(map(str, [fork_server().command(), Path(sys.executable).parent, os.environ["PATH"]]))
    surroundings = {**environment(tmp_path_factory.getbasetemp() / "docs-cache"), "PATH": path}
    script = "set -e\n" + commands(page)
    write_files(page, checkout)
    done = subprocess.run(["bash", "-c", script], cwd=checkout, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def run_module(name: str, *arguments: Path) -> None:
    """Runs `python -m NAME ARGUMENTS` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_module(name, run_name="__main__")


def test_the_configuration_page_lists_every_key_once_with_its_default_and_meaning(tmp_path: Path) -> None:
    """`python -m tools.configuration_page docs/configuration.md` updates the tables of the page."""
    page = ROOT / "docs/configuration.md"
    shutil.copy2(page, tmp_path)
    run_module("tools.configuration_page", tmp_path / page.name)
    text = page.read_text(encoding="utf-8")
    assert text == (tmp_path / page.name).read_text(encoding="utf-8")
    rows = re.findall(r'^\| <a id="(.+?)"></a>`(.+?)` \| (.+?) \| (.+) \|$', text, re.MULTILINE)
    assert (
        sorted(row[0] for row in rows) == sorted(row[1] for row in rows) == sorted(key for key, _ in all_keys(Config))
    )
    cells = {key: (default, meaning) for key, _, default, meaning in rows}
    assert cells["training.warmup_steps"][0].startswith("`10`<br>`graph` without `model.name_or_path`: `50`")
    assert "`cosine`" in cells["training.lr_scheduler"][1]
    assert not [key for key, (default, _) in cells.items() if "null" in default]


def test_the_page_about_data_lists_every_form(tmp_path: Path) -> None:
    """`python -m tools.forms_page docs/data.md` updates the table of the page. Another test reads each example."""
    page = ROOT / "docs/data.md"
    shutil.copy2(page, tmp_path)
    run_module("tools.forms_page", tmp_path / page.name)
    text = page.read_text(encoding="utf-8")
    assert text == (tmp_path / page.name).read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\|[^|]*\|[^|]*\| `\{", text, re.MULTILINE)
    assert len(rows) == sum(len(forms.forms) for forms in FORMS.values()) > 20


def test_the_page_of_commands_is_that_of_the_commands() -> None:
    """This command updates the page:

    typer sansgpu.cli.app utils docs --name sansgpu --title Commands --output docs/reference/commands.md
    """
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "typer",
            "sansgpu.cli.app",
            "utils",
            "docs",
            "--name",
            "sansgpu",
            "--title",
            "Commands",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8").rstrip() == made.stdout.rstrip()


def test_the_page_for_python_names_the_class_of_every_task() -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    classes = re.findall(r"`(sansgpu\.tasks\.\w+\.\w+:\w+)`", page)
    assert sorted(classes) == sorted(settings.implementation for settings in SCHEMA.tasks.kinds.values())


def test_a_page_calls_a_snapshot_a_checkpoint_first() -> None:
    """Readers search for the word that other trainers use."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "commands.md"]  # generated from the help
    found = {}
    for page in pages:
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        if first := re.search(r"(?i)(checkpoints? \()?snapshot", prose):
            found[page.name] = first[1]
    assert len(found) > 15
    assert [name for name, named in found.items() if not named] == []


def test_the_messages_on_the_page_of_troubles_are_those_of_the_program() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    quoted = re.findall(
        r'"([^"]+)"', "\n".join(re.findall(r"^\| [^|]+", (ROOT / "docs/troubleshooting.md").read_text(), re.M))
    )
    assert len(quoted) >= 7
    for message in quoted:
        assert all(part in source for part in message.split(" ... ")), message


def test_the_page_for_users_of_trainers_names_every_flag() -> None:
    page = (ROOT / "docs/trainer.md").read_text(encoding="utf-8")
    flags = re.findall(r'^    \(?"(--[a-z0-9-]+)"', (ROOT / "src/sansgpu/cli/other_flags.py").read_text(), re.M)
    assert len(flags) > 20
    assert [flag for flag in flags if "--" + flag[2:].replace("-", "_") not in page] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *(ROOT / "docs/reference").glob("*.md"), *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_shows_every_page() -> None:
    """`make site` fails if a page is missing, but not if the menu does not list a page."""
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    shown = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples/README.md"]
    assert sorted(listed) == sorted(page.relative_to(ROOT).as_posix() for page in shown)


def test_every_file_of_a_release_has_the_same_version() -> None:
    released = re.search(r"^## \[(\d.*?)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert released[1] == __version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\n" in citation
    assert f'\ndate-released: "{released[2]}"\n' in citation
    named = re.findall(r"sansgpu:(\d[\w.]*)", (ROOT / "docs/docker.md").read_text())
    assert {*named} == {__version__}


def test_contributing_names_every_dependency() -> None:
    extras = [extra for name, extra in PROJECT["optional-dependencies"].items() if name != "dev"]
    names = [re.split(r"[>;\[]", line)[0] for line in itertools.chain(PROJECT["dependencies"], *extras)]
    assert len(names) > 30
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Dependencies")[1]
    assert [name for name in names if name not in table] == []


def test_the_readme_is_short_and_shows_a_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 900  # table rules are not words
    assert len(text.splitlines()) <= 175
    assert re.search(r"^!\[.+\]\(docs/live\.svg\)$", text, re.MULTILINE)


def test_the_index_lists_every_page() -> None:
    docs = ROOT / "docs"
    listed = re.findall(r"^- \[.+?\]\((?!\.\.)(.+?)\)", (docs / "README.md").read_text(), re.MULTILINE)
    pages = [page.relative_to(docs).as_posix() for page in docs.rglob("*.md")]
    assert sorted(listed) == sorted(page for page in pages if page != "README.md")


def test_the_index_is_in_the_order_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    index = (ROOT / "docs/README.md").read_text()
    assert re.findall(r"^## (.+)$", index, re.MULTILINE) == re.findall(r"^  - (.+):$", menu, re.MULTILINE)
    pages = [page for page in re.findall(r"docs/(\S+\.md)$", menu, re.MULTILINE) if page != "README.md"]
    assert re.findall(r"^- \[.+?\]\((?!\.\.)(.+?)\)", index, re.MULTILINE) == pages


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in ("README", "lab-notes")], ids=lambda page: page.stem
)
def test_a_page_opens_with_a_command_and_its_output(page: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n", page.read_text(encoding="utf-8"), re.MULTILINE)
    opening = list(itertools.takewhile(lambda language: language != "text", blocks))
    assert opening in (["bash"], ["console"], ["python", "bash"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_output_follows_the_commands_that_print_it(page: Path) -> None:
    """Code blocks whose language is `text` are outputs."""
    blocks = re.findall(r"^```(\w+)\n", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {before for before, language in itertools.pairwise(blocks) if language == "text"} <= {"bash", "console"}


def test_a_picture_of_a_run_is_drawn(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    train = ["train", "--output-dir", str(tmp_path / "run"), "--max-steps", "8"]
    code, _, error = finish([*train, *settings(data__dataset_name=corpus)], tmp_path / "cache")
    assert code == 0, error
    draw = [sys.executable, "-m", "tools.live_picture", str(tmp_path / "run"), str(tmp_path / "live.svg")]
    done = subprocess.run(draw, cwd=ROOT, env=environment(tmp_path / "cache"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    picture = (tmp_path / "live.svg").read_text(encoding="utf-8")
    assert all(word in picture for word in ("step&#160;6&#160;of&#160;8", "tokens/s", "validation", "snapshot"))


def test_the_page_of_benchmarks_says_how_its_tables_are_measured() -> None:
    """Steps and rounds equal the commands' defaults, and each row says if its work differs from sansgpu's."""
    text = " ".join((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").split())
    for name in ("speed.peers", "fine_tuning.trainer", "graph.encoder"):
        source = (ROOT / f"benchmarks/{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        patterns = (rf'(?:"--{key}".*?default=|\b{key}: int = )(\d+)' for key in ("steps", "rounds"))
        steps, rounds = (re.search(pattern, source) for pattern in patterns)
        assert steps
        assert rounds
        assert re.search(rf"`{name}` of {steps[1]} (steps )?in (each of )?{rounds[1]}\b", text), name
    lines = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").splitlines()
    names = ("speed.peers --size m80", "speed.peers --size cpu_small", "graph.encoder`")
    tables = {name: _table_after(lines, f"`python -m benchmarks.{name}") for name in names}
    for name, rows in tables.items():
        assert len(rows) >= 4
        ours, others = ("masked nodes", "all nodes") if name == "graph.encoder`" else ("apart", "seen across")
        for row in rows:
            assert row.split(" | ")[1] == (ours if "sansgpu" in row else others), row


def _table_after(lines: list[str], heading: str) -> list[str]:
    """Returns the rows of the table below a heading."""
    below = lines[next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2 :]
    return list(itertools.takewhile(lambda line: line.startswith("|"), below))[2:]
