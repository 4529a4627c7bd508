"""Runs the kernel tests and short training runs on ARM processors that qemu emulates: `make test-arm`.

Debian's Python for arm64 and the packages' wheels for it are unpacked into build/arm once, without root. The arguments
are passed to pip to install torch: its version and, where needed, the address of an index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.outcome import json_lines

from tests.kernels.sanitize import CHECKED, LEFT_OUT, ROOT

ARM = ROOT / "build/arm"
SYSTEM, PACKAGES, PYTHON = ARM / "system", ARM / "packages", ARM / "python"
# qemu's processors, by the best instruction set that each has; `max` has every one.
PROCESSORS = {"portable": "cortex-a72", "neon": "a64fx", "neon_dotprod": "neoverse-n1", "neon_bf16": "max"}
MIRROR = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main"
DEBIAN_PACKAGES, PYTHON_VERSION = ("python3", "libgomp1", "libstdc++6"), "3.11"
TEST_PACKAGES = ("pytest", "hypothesis", "gguf")
GLIBC_OF_WHEELS = (17, 18, 24, 26, 27, 28, 31, 34)  # wheels say which minor version of glibc 2 they need
# Tests of the code that differs between instruction sets; the best set runs the others, too.
DIFFERING = ("test_code_tiles.py", "test_products.py", "test_quantized_linear.py")
# torch reads which processor this is from these files, and crashes without them.
PROCESSOR_FILES = {
    "proc/cpuinfo": "processor\t: {cpu}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd49\n\n",
    "sys/devices/system/cpu/cpu{cpu}/regs/identification/midr_el1": "0x00000000410fd490\n",
}
# Relative difference of losses on ARM and x86-64: weights are drawn with other vector functions, and sums are ordered
# differently. In int8 a last bit may also round a value to the next integer.
LOSS_TOLERANCE = {"fp32": 1e-4, "int8": 2e-3}
STEPS, STEPS_BEFORE_RESUME = 6, 4


def main() -> None:
    if not PYTHON.exists():
        shutil.rmtree(ARM, ignore_errors=True)
        unpack_python()
        install_packages(sys.argv[1:])
    build()
    for instructions, processor in PROCESSORS.items():
        print(f"test-arm: the tests of kernels on {processor}, which has {instructions} ...", flush=True)
        options = ("-q", "-p", "no:cacheprovider", "-k", CHECKED, "-m", "not long")
        options += tuple(f"--ignore=tests/kernels/{file}" for file in LEFT_OUT)
        files = ("",) if instructions == [*PROCESSORS][-1] else DIFFERING
        run([str(PYTHON), "-m", "pytest", *options, *(f"tests/kernels/{file}" for file in files)], emulated(processor))
    for precision, tolerance in LOSS_TOLERANCE.items():
        here = losses(sys.executable, precision, dict(os.environ))
        there = losses(str(PYTHON), precision, emulated(PROCESSORS["neon_bf16"]))
        print(f"test-arm: losses in {precision}: {here} on this processor, {there} on ARM.", flush=True)
        if any(abs(a - b) > tolerance * a for a, b in zip(here, there, strict=True)):
            raise SystemExit(f"test-arm: losses in {precision} differ by more than {tolerance} of their values.")


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    if subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"test-arm: failed: {' '.join(command)}")


def unpack_python() -> None:
    """Downloads Debian's Python for ARM with the libraries that it needs, and unpacks them."""
    if shutil.which("qemu-aarch64") is None or shutil.which("aarch64-linux-gnu-g++") is None:
        raise SystemExit("test-arm: needs g++-aarch64-linux-gnu and qemu-user; install them with apt-get.")
    state = ARM / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()  # no package is installed, so that apt-get downloads all that are needed
    (state / "sources.list").write_text(MIRROR + "\n")
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Install-Recommends": "false",
        "Dir::State": state / "state", "Dir::State::status": state / "status", "Dir::Cache": state / "cache",
        "Dir::Etc::sourcelist": state / "sources.list", "Dir::Etc::sourceparts": "-",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
    run([*apt, "update"])
    run([*apt, "--yes", "--download-only", "install", *DEBIAN_PACKAGES])
    for package in (state / "cache/archives").glob("*.deb"):
        run(["dpkg-deb", "--extract", str(package), str(SYSTEM)])
    for name, text in PROCESSOR_FILES.items():
        for cpu in range(os.cpu_count() or 1):
            (path := SYSTEM / name.format(cpu=cpu)).parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(text.format(cpu=cpu))


def install_packages(torch: list[str]) -> None:
    """Installs the packages that the tests need, and writes a script that runs Python in the emulator."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in GLIBC_OF_WHEELS]
    target = ["--platform=manylinux2014_aarch64", *platforms, "--python-version", PYTHON_VERSION]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--target", str(PACKAGES), *target]
    run([*pip, "-c", "constraints.txt", *torch, *needed, *TEST_PACKAGES])
    script = f'#!/bin/sh\nexec qemu-aarch64 -L {SYSTEM} -0 "$0" {SYSTEM}/usr/bin/python{PYTHON_VERSION} "$@"\n'
    PYTHON.write_text(script)
    PYTHON.chmod(0o755)


def build() -> None:
    """Compiles the kernels of every instruction set of ARM, and installs them with the sources among the packages."""
    cmake, ninja = (str(Path(sys.executable).parent / tool) for tool in ("cmake", "ninja"))
    settings = {
        "SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": "aarch64-linux-gnu-g++",
        "MAKE_PROGRAM": ninja,
    }  # fmt: skip
    options = [f"-DCMAKE_{key}={value}" for key, value in settings.items()]
    run([cmake, "-S", str(ROOT), "-B", str(ARM / "kernels"), "-G", "Ninja", "--log-level=WARNING", *options])
    run([cmake, "--build", str(ARM / "kernels")])
    shutil.rmtree(PACKAGES / "sansgpu", ignore_errors=True)
    others = shutil.ignore_patterns("libraries", "__pycache__")
    shutil.copytree(ROOT / "src/sansgpu", PACKAGES / "sansgpu", ignore=others)
    run([cmake, "--install", str(ARM / "kernels"), "--prefix", str(PACKAGES)])


def emulated(processor: str) -> dict[str, str]:
    """Returns the environment in which PYTHON runs on a processor of qemu."""
    own = {"QEMU_CPU": processor, "PYTHONHOME": f"{SYSTEM}/usr", "PYTHONPATH": f"{PACKAGES}:{ROOT}"}
    return {**os.environ, **own}


def losses(python: str, precision: str, environment: dict[str, str]) -> list[float]:
    """Trains a tiny model, resumes the run and generates text. Returns the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        sansgpu, into = [python, "-m", "sansgpu"], ["--output-dir", f"{folder}/run"]
        # The cache holds speeds measured on one processor, which do not apply to the other.
        own = {**environment, "SANSGPU_CACHE": f"{folder}/cache"}
        changes = {
            "training.precision": precision, "training.logging_steps": 1, "training.report_to": "none",
            "training.threads": 2, "data.dataset_name": "docs/train.md",
        }  # fmt: skip
        keys = [f"--set={key}={value}" for key, value in changes.items()]
        run([*sansgpu, "train", "configs/tiny.yaml", "--max-steps", str(STEPS_BEFORE_RESUME), *keys, *into], own)
        run([*sansgpu, "train", "--resume", "--max-steps", str(STEPS), *into], own)
        run([*sansgpu, "generate", f"{folder}/run", "--prompt", "A run", "--max-new-tokens", "8"], own)
        events = json_lines(Path(folder, "run/metrics.jsonl"))
        return [event["loss"] for event in events if event["event"] == "step"]


if __name__ == "__main__":
    main()
