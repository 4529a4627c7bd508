"""The Dockerfile that `sansgpu k8s` writes."""

import importlib.metadata
import re
from collections.abc import Iterator

import pytest
import torch
from packaging.requirements import Requirement

from sansgpu import __version__
from sansgpu.jobs.k8s import LIBIOMP, TCMALLOC, USER
from tests.jobs.k8s.rendered import ROOT, render

IMAGE_EXTRAS = ("hf", "gguf", "parquet", "report", "tensorboard")
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize(
    ("allocator", "openmp", "preloaded"),
    [
        ("tcmalloc", "libgomp", [TCMALLOC]),
        ("tcmalloc", "libiomp", [TCMALLOC, LIBIOMP]),
        ("none", "libiomp", [LIBIOMP]),
        ("none", "libgomp", []),
    ],
)
def test_preloaded_libraries_are_in_the_image(allocator: str, openmp: str, preloaded: list[str]) -> None:
    rendered = render(allocator=allocator, openmp=openmp)
    assert rendered.env.get("LD_PRELOAD", "").split(":") == (preloaded or [""])
    assert ("KMP_BLOCKTIME" in rendered.env) == (openmp == "libiomp")
    assert not [name for name in rendered.env if name.startswith("GOMP")]  # the program sets these variables itself
    for library in (TCMALLOC, LIBIOMP):
        assert (library in rendered.dockerfile) == (library in preloaded)
    assert ("libtcmalloc-minimal4" in rendered.dockerfile) == (allocator == "tcmalloc")
    pinned = re.search(r"intel-openmp==\d+\.\d+\.\d+", rendered.dockerfile)
    assert (pinned is not None) == (openmp == "libiomp")


def test_the_image_copies_files_of_a_checkout() -> None:
    rendered = render()
    lines = rendered.dockerfile.splitlines()
    copied = [source for line in lines if re.match("COPY (?!--from)", line) for source in line.split()[1:-1]]
    assert {"pyproject.toml", "CMakeLists.txt", "constraints.txt", "src"} <= {*copied}
    assert all((ROOT / source).exists() for source in copied)
    ignored = rendered.texts["Dockerfile.dockerignore"].splitlines()
    assert ignored[1] == "*"
    assert {f"!{source}" for source in copied} <= {*ignored}


def test_the_dockerfile_of_the_repository_is_the_one_that_is_written() -> None:
    """To update the two files, run `sansgpu k8s` with `--image sansgpu:VERSION` and copy them."""
    rendered = render(image=f"sansgpu:{__version__}")
    assert (ROOT / "Dockerfile").read_text() == rendered.dockerfile.replace("-f out/Dockerfile ", "")
    assert (ROOT / ".dockerignore").read_text() == rendered.texts["Dockerfile.dockerignore"]


def test_the_image_pins_its_packages_and_runs_unprivileged() -> None:
    rendered = render()
    text = rendered.dockerfile
    assert re.search(r"^FROM python:3\.12\.\d+-slim-bookworm$", text, re.MULTILINE)
    assert f"torch=={torch.__version__.partition('+')[0]}" in text
    assert "https://download.pytorch.org/whl/cpu" in text
    assert {"g++", "libgomp1", "libtcmalloc-minimal4"} <= {*text.split()}
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert all("--no-cache-dir" in line for line in installs)
    assert all(re.search("-c (/opt/sansgpu/)?constraints.txt|==", line) for line in installs)
    assert f'test "$(sansgpu --version)" = {__version__}' in text
    assert f"\nUSER {USER}:{USER}\nWORKDIR /data\n" in text.rpartition("\nRUN ")[2]  # no later line changes them
    assert '.whl)[hf,report,wandb]"' in render("--set", "training.report_to=[wandb]").dockerfile
    assert {*requirements("sansgpu")} - {*pinned()} == {"sansgpu", "torch"}


def pinned() -> Iterator[str]:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line:
            yield line.partition("==")[0].lower().replace("_", "-")


def requirements(name: str, seen: set[str] | None = None) -> set[str]:
    """Returns the names of a package and its requirements here, with only those extras that the image has."""
    seen = set() if seen is None else seen
    name = name.lower().replace("_", "-")
    if name not in seen:
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return seen  # for a different platform or Python version
        seen.add(name)
        for line in needed:
            inner = Requirement(line)
            extras = IMAGE_EXTRAS if name == "sansgpu" else ("",)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                requirements(inner.name, seen)
    return seen
