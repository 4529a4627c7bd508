"""Devices, threads, memory, precision and compilation are chosen for this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from sansgpu.config import TrainingConfig
from sansgpu.kernels import library
from sansgpu.kernels.roofline import first_gemm_rate, is_faster, resolve_precision
from sansgpu.machine import probe
from sansgpu.machine.launch import CONTENDED_SPINS, SPINS, make_cublas_deterministic, set_openmp
from sansgpu.machine.measurements import assumed_seconds, cached_measurement
from sansgpu.machine.memory import effective_batch, micro_batch_choices, usual_micro_batch
from sansgpu.machine.torch_compile import missing_compiler, resolve_compile
from tests.processes import use_cache


@pytest.mark.parametrize("effective", [1, 6, 7, 16, 48])
def test_an_automatic_micro_batch_divides_the_effective_batch(effective: int) -> None:
    training = TrainingConfig(gradient_accumulation_steps=effective)
    assert effective_batch(training) == effective
    sizes = micro_batch_choices(training, 256)
    assert sizes == [size for size in range(1, effective + 1) if effective % size == 0]
    assert usual_micro_batch(256, sizes) * 256 <= 4096
    assert micro_batch_choices(TrainingConfig(batch_size=5), 256) == [5]


def test_compiling_is_for_long_runs_that_our_kernels_do_not_compute() -> None:
    assert missing_compiler() is None, "the tests need a C++ compiler"
    warnings: list[str] = []

    def resolved(
        asked: str, seconds: float, kernels: str = "torch", device: str = "cpu", recorded: str | None = None
    ) -> str:
        return resolve_compile(asked, recorded, seconds, kernels, device, warnings.append)

    assert resolved("auto", assumed_seconds(1e10, "fp32", 2)) == "off"
    assert resolved("auto", assumed_seconds(1e18, "fp32", 2)) == "on"
    assert resolved("auto", 300) == "on"
    assert resolved("auto", 300, "native avx2") == "off"
    assert resolved("auto", 300, "native avx2", "cuda") == "on"
    assert resolved("on", 1) == "on"
    assert resolved("off", 300) == "off"
    assert [resolved("auto", 300, recorded="off"), resolved("auto", 1, recorded="on")] == ["off", "on"]
    assert resolved("auto", 300, "native avx2", recorded="on") == "off"
    assert not warnings
    assert resolved("on", 300, "native avx2") == "off"
    (warning,) = warnings
    assert "has no effect" in warning


@pytest.mark.long
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2")
def test_torch_does_not_compile_programs_to_choose_vector_instructions(tmp_path: Path) -> None:
    """Such programs take seconds each, one after the other, before the first graph is compiled."""
    source = """
from torch import nn
from sansgpu.models.modules import compile_blocks
compile_blocks(nn.Module())
from torch._inductor.cpu_vec_isa import pick_vec_isa
print(pick_vec_isa())
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_VEC_ISA_OK")}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("avx")
    assert not [path for path in tmp_path.rglob("*.cpp") if "at::vec" in path.read_text()]


def test_a_measurement_is_made_once_a_question(tmp_path: Path) -> None:
    answers = iter([{"size": 1}, {"size": 2}, {"size": 3}])
    ask = partial(cached_measurement, tmp_path, measure=lambda: next(answers))
    assert ask({"threads": 2}) == ask({"threads": 2}) == {"size": 1}
    assert ask({"threads": 4}) == {"size": 2}
    for file in (tmp_path / "measured").iterdir():
        file.write_text("{torn")
    assert ask({"threads": 2}) == {"size": 3}


def test_a_measurement_disturbed_by_another_program_is_not_kept(tmp_path: Path) -> None:
    def slow() -> dict[str, int]:
        time.sleep(1.0)
        return {"b": 2}

    burn = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    stranger = int(subprocess.run(["sh", "-c", burn], capture_output=True, text=True, check=True).stdout)
    try:
        assert cached_measurement(tmp_path, {"a": 1}, slow) == {"b": 2}
        assert list(tmp_path.rglob("*.json")) == []
        assert cached_measurement(tmp_path, {"a": 1}, slow, keep_disturbed=True) == {"b": 2}
        assert len(list(tmp_path.rglob("*.json"))) == 1
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_precision_is_what_was_asked_for_and_auto_is_the_faster() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision(TrainingConfig(precision="fp32"), cpu) == "fp32"
    assert resolve_precision(TrainingConfig(precision="bf16"), cpu) == "bf16"
    automatic = resolve_precision(TrainingConfig(), cpu)
    if automatic == "bf16":
        assert probe.has_native_bf16()
        threads = torch.get_num_threads()
        fast, slow = (first_gemm_rate(p, "cpu", threads) for p in ("bf16", "fp32"))
        assert fast > slow


def test_the_faster_precision_is_measured_once_for_all_numbers_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(monkeypatch, tmp_path)
    library.load()
    is_faster("int16", "fp32", ours=True)
    (file,) = tmp_path.rglob("measured/*.json")
    for fast, slow in (("int16", "fp32"), ("fp32", "int16")):
        answer = {fast: 1.0, slow: 1.001}
        file.write_text(json.dumps({**json.loads(file.read_text()), "answer": answer}))
        with probe.one_thread():
            assert is_faster(fast, slow, ours=True)
        assert not is_faster(slow, fast, ours=True)
    assert len(list(tmp_path.rglob("measured/*.json"))) == 1


def test_threads_and_memory_are_within_the_machine() -> None:
    assert 1 <= probe.available_cores() <= probe.psutil.cpu_count()
    assert 0 < probe.available_memory(torch.device("cpu")) <= probe.psutil.virtual_memory().total
    assert probe.resolve_threads(TrainingConfig(threads=3)) == 3


@pytest.mark.parametrize(
    ("given", "load", "expected"),
    [
        ({}, 0.0, str(SPINS)),
        ({}, 1e6, str(CONTENDED_SPINS)),  # other programs use the cores
        ({"GOMP_SPINCOUNT": "7"}, 1e6, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, 0.0, None),
    ],
)
def test_threads_spin_briefly_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], load: float, expected: str | None
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_openmp()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that monkeypatch removes it afterwards


def test_a_process_begins_with_its_randomness_settled_before_torch_is_there() -> None:
    """String hashes, which order sets, differ between processes unless PYTHONHASHSEED is set."""
    program = (
        "import os, sys; from sansgpu.machine.launch import has_random_hashes, make_deterministic, set_openmp;"
        "set_openmp(); make_deterministic();"
        "names = ('PYTHONHASHSEED', 'CUBLAS_WORKSPACE_CONFIG', 'OMP_DYNAMIC');"
        "print(has_random_hashes(), 'torch' in sys.modules, hash('a word'), *(os.environ[name] for name in names))"
    )
    free = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}

    def said(environment: dict[str, str]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    first = said(free)
    assert first == said(free)
    assert first[:2] == ["False", "False"]
    assert first[3:] == ["0", ":4096:8", "FALSE"]
    assert said({**free, "PYTHONHASHSEED": "7"})[3] == "7"


@pytest.mark.parametrize(
    ("given", "late", "random"),
    [({}, None, True), ({"PYTHONHASHSEED": "0"}, None, False), ({"PYTHONHASHSEED": "7"}, None, False),
     ({"PYTHONHASHSEED": "random"}, None, True), ({}, "0", True)],
)  # fmt: skip
def test_random_hashes_are_noticed_even_if_their_seed_is_set_too_late(
    given: dict[str, str], late: str | None, random: bool
) -> None:
    program = (
        f"import os; late = {late!r}; late and os.environ.update(PYTHONHASHSEED=late);"
        "from sansgpu.machine.launch import has_random_hashes; print(has_random_hashes())"
    )
    free = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run([sys.executable, "-c", program], env={**free, **given}, capture_output=True, text=True)
    assert done.stdout.split() == [str(random)]


def test_cublas_is_made_deterministic_unless_cuda_was_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for used, given, settled in ((False, None, True), (True, None, False), (True, ":16:8", True)):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        if given:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=used: used)
        assert make_cublas_deterministic() is settled
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (given or ":4096:8")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that monkeypatch removes it afterwards
