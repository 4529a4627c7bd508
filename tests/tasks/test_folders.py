"""A task consists of one folder and one line in tasks/configuration.py.

Copies of the package work without one of the tasks, and with an additional task.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sansgpu.tasks.configuration import TASK_FOLDERS
from tests.processes import environment, settings
from tests.project import ROOT
from tests.tasks.test_outside_task import write_stories

REMOVED = "tokens"  # a task whose code no other task uses
TABLE = "tasks/configuration.py"
EXAMPLE = ROOT / "docs/examples/sentence_order.py"
DECLARATION = '''"""The settings of task order."""

from pydantic import Field

from sansgpu.config import Metric
from sansgpu.config.data import DataConfig
from sansgpu.config.tasks import TaskSettings


class PairsDataConfig(DataConfig):
    """The section `data` of this task, with its own key."""

    swap_ratio: float = Field(0.5, ge=0, le=1, description="fraction of the pairs whose sentences are swapped")


SETTINGS = TaskSettings(
    "order",
    ("from scratch", "texts"),
    implementation="sansgpu.tasks.order.task:SentenceOrder",
    description="order of sentences",
    sections=(PairsDataConfig,),
    defaults={"model": {"activation": "gelu"}},
    metrics=(Metric("accuracy", form="{:.1%}", better="higher"),),
)
'''
# Disables editable installations, which would be imported instead of the copied package.
UNINSTALL = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Returns a copy of the package, which the test may change."""
    package = tmp_path / "copy/sansgpu"
    source = ROOT / "src/sansgpu"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__", "libraries"))
    (package / "kernels/libraries").symlink_to(source / "kernels/libraries")
    (package.parent / "sitecustomize.py").write_text(UNINSTALL)
    return package


def replace_line(package: Path, old: str, new: str) -> None:
    text = (package / TABLE).read_text()
    assert text.count(old) == 1
    (package / TABLE).write_text(text.replace(old, new))


def run(package: Path, *arguments: str) -> tuple[int, str]:
    """Runs Python with the copied package, and returns the exit code and all output."""
    paths = os.pathsep.join((str(package.parent), str(ROOT)))
    variables = {**environment(package.parent / "cache"), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def without(package: Path, task: str) -> None:
    shutil.rmtree(package / "tasks" / task)
    replace_line(package, f'    "{task}": (),\n', "")


@pytest.mark.long
def test_a_task_is_removed_with_its_folder_and_its_line(copy: Path) -> None:
    without(copy, REMOVED)
    program = "from sansgpu.tasks.registry import TASKS; print(*(kind.settings.task for kind in TASKS.values()))"
    code, out = run(copy, "-c", program)
    assert code == 0, out
    assert set(out.split()) == TASK_FOLDERS.keys() - {REMOVED}
    code, out = run(copy, "-m", "sansgpu", "train", "--set", f"task={REMOVED}")
    assert code == 2
    assert "but input should be 'pretrain', 'graph'" in out
    code, out = run(copy, "-m", "sansgpu", "plan", "--set", "data.tag_column=1")
    assert (code, "unknown key data.tag_column" in out) == (2, True), out


@pytest.mark.long
def test_a_task_is_added_with_a_folder_and_a_line(copy: Path, tmp_path: Path) -> None:
    folder = copy / "tasks/order"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "settings.py").write_text(DECLARATION)
    text = EXAMPLE.read_text()
    start, stop = text.index("    settings = TaskSettings("), text.index("    model_class = ")
    task = text[:start] + "    settings = SETTINGS\n" + text[stop:]
    start, stop = task.index("class PairsDataConfig("), task.index("class OrderClassifier(")
    task = task[:start] + task[stop:]
    declared = "from sansgpu.tasks.order.settings import SETTINGS, PairsDataConfig\n"
    (folder / "task.py").write_text(task.replace("LABELS =", f"{declared}LABELS ="))
    replace_line(copy, '    "grpo": ("sft",),\n', '    "grpo": ("sft",),\n    "order": (),\n')
    corpus = write_stories(tmp_path / "stories.jsonl")
    chosen = settings(
        task="order", data__dataset_name=corpus, data__vocab_size=300, training__max_steps=1, training__batch_size=2,
        model__max_seq_len=32, model__d_model=32, model__n_heads=2, model__n_layers=1, data__validation_split=0.3,
        data__swap_ratio=0.3,
    )  # fmt: skip
    code, out = run(copy, "-m", "sansgpu", "train", *chosen, "--output-dir", str(tmp_path / "run"))
    assert code == 0, out
    assert (tmp_path / "run/final/model.safetensors").is_file()


@pytest.mark.long
def test_the_other_tasks_pass_their_tests_without_a_removed_one(copy: Path) -> None:
    without(copy, REMOVED)
    others = [str(path) for path in sorted((ROOT / "tests/tasks").iterdir()) if (path / "__init__.py").is_file()]
    others.remove(str(ROOT / "tests/tasks" / REMOVED))
    code, out = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *others)
    assert code == 0, out[-3000:]
