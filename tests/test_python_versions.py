"""The package runs on every Python that its metadata promise, and says what it needs on an older one."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from packaging.specifiers import SpecifierSet

from tests.project import PROJECT, ROOT

SUPPORTED = SpecifierSet(PROJECT["requires-python"])
VERSIONS = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d", line)]
OLD = [f"3.{minor}" for minor in range(6, 11)]
PACKAGES = Path(typer.__file__).parents[1]


@cache
def python(version: str) -> str | None:
    """Returns the program of a Python, from pyenv or PATH, or None."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(root.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def start(version: str, *arguments: str) -> subprocess.Popen[str]:
    program = python(version)
    assert program is not None
    surroundings = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{PACKAGES}"}
    return subprocess.Popen(
        [program, "-S", *arguments],
        cwd=ROOT,
        env=surroundings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_documents_name_the_supported_versions() -> None:
    assert [SUPPORTED.contains(version) for version in (*OLD, *VERSIONS)] == [False] * len(OLD) + [True] * len(VERSIONS)
    assert SUPPORTED.contains("3.99")  # an upper bound would make pip install an old release instead of warning
    oldest = VERSIONS[0]
    for name in ("README.md", "docs/install.md", "Makefile", "src/sansgpu/__init__.py"):
        assert f"Python {oldest} or newer" in (ROOT / name).read_text(encoding="utf-8"), name
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["linux"]["strategy"]["matrix"]["python"] == VERSIONS


@pytest.mark.long
def test_every_module_is_imported_by_each_python_of_this_machine() -> None:
    versions = [version for version in VERSIONS if python(version)]
    if not versions:
        pytest.skip("neither pyenv nor PATH has a supported Python")
    processes = {version: start(version, "-W", "error", "-m", "tests.import_everything") for version in versions}
    modules = [path for path in (ROOT / "src/sansgpu").rglob("*.py") if path.parent.name != "native"]
    for version, process in processes.items():
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, f"Python {version}: {err}"
        assert int(out) > 0.9 * len(modules)


def test_an_older_python_says_what_is_needed() -> None:
    versions = [version for version in OLD if python(version)]
    if not versions:
        pytest.skip("neither pyenv nor PATH has an older Python")
    for version in versions:
        sentence = f"{python(version)} is Python {version}, but sansgpu needs Python {VERSIONS[0]} or newer; "
        command, imported = start(version, "-m", "sansgpu", "train"), start(version, "-c", "import sansgpu")
        out, err = command.communicate(timeout=60)
        assert (command.returncode, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith(f"sansgpu: {sentence}")
        assert imported.communicate(timeout=60)[1].splitlines()[-1].startswith(f"ImportError: {sentence}")


def test_make_refuses_an_older_python_before_it_installs_anything(tmp_path: Path) -> None:
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    old = next(filter(None, map(python, reversed(OLD))), None)
    if old is None:
        pytest.skip("neither pyenv nor PATH has an older Python")
    venv = tmp_path / "venv"

    def make(program: str) -> tuple[int, str]:
        done = subprocess.run(
            ["make", "setup", f"PYTHON={program}", f"VENV={venv}"], cwd=ROOT, text=True, capture_output=True
        )
        return done.returncode, done.stderr.splitlines()[0]

    code, sentence = make(old)
    assert (code, venv.exists()) == (2, False)
    assert sentence.startswith(f"{old} is Python")
    assert sentence.endswith("name it: make PYTHON=python3.12")
    subprocess.run([old, "-m", "venv", "--without-pip", venv], check=True)  # a release that supported this Python
    code, sentence = make(sys.executable)
    assert code == 2
    assert sentence.startswith(f"{venv}/bin/python is Python")
    assert sentence.endswith(f"delete {venv} and run make again")
