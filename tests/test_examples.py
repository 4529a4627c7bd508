"""The examples run in the order of their page and write the files that it promises."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment, finish, fork_server
from tests.tasks.folders import model_folder

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "examples/README.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_every_example_runs_from_the_root_of_the_repository(tmp_path: Path) -> None:
    for name in ("configs", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    path = os.pathsep.join(map(str, [fork_server().command(), Path(sys.executable).parent, os.environ["PATH"]]))
    surroundings = {**environment(tmp_path / "cache"), "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    [block] = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    outputs = {}
    for command in block.splitlines():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
        outputs[command] = done.stdout
    runs = tmp_path / "runs"
    models = [
        "own-loop",
        *(f"{name}/final" for name in ("pretrain", "chat", "graph", "qa-bert", "qa", "two-processes")),
    ]
    assert [name for name in models if not (runs / name / "model.safetensors").is_file()] == []
    assert (runs / "lora/final/adapter_model.safetensors").is_file()
    answers = json.loads((runs / "qa/predictions.json").read_text(encoding="utf-8"))
    assert sum(answers[city] == city for city in answers) >= 4
    assert answers["Rome"] in outputs["python examples/qa.py"]


def test_the_bakery_of_the_readme_is_the_file_and_runs_in_a_clone(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"\(examples/bakery\.yaml\):\n\n```yaml\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert shown == (ROOT / "examples/bakery.yaml").read_text(encoding="utf-8")
    assert re.search(r"name_or_path: HuggingFaceTB/\S+", shown)  # a name on the Hub, not a file that a clone lacks
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    command = [
        "train",
        "examples/bakery.yaml",
        "--set",
        f"model.name_or_path={model_folder('qwen2')}",
        "--max-steps",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        code, _, err = finish([*command, "--output-dir", "runs/bakery"], tmp_path / "cache")
    assert code == 0, err


def test_first_commands_name_what_exists() -> None:
    """sansgpu is on no package index, and a model on the Hub has an owner."""
    for page in ("README.md", "docs/install.md", "docs/notebooks/teach_a_small_model.ipynb"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"^[% \"]*(uv )?pip install .*\bsansgpu\b(?! @)", text, re.MULTILINE), page
    models = re.findall(r"^\$ sansgpu (?:search|chat) (\S+)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert models
    assert all("/" in model for model in models)


def test_the_page_lists_every_example() -> None:
    files = {file.name for file in (ROOT / "examples").iterdir()} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.\w+)\)", PAGE)) == files
    blocks = "".join(re.findall(r"^```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    runs = set(re.findall(r"^(?:\$ )?(?:python|bash|sansgpu train) examples/(\S+)", blocks, re.MULTILINE))
    assert {name for name in files if not name.endswith(".jsonl")} == runs
