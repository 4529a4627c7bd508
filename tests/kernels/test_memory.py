"""The allocator of large tensors: blocks do not overlap; freed ones are reused, and merged if sizes vary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import environment

# Creates and frees tensors of many sizes at random, each filled with its own number. Prints the growth of peak memory
# relative to the most bytes in tensors at once, and the memory that remains in use once all tensors are freed.
SCRIPT = """
import random, sys
import torch
from sansgpu.kernels import library
from sansgpu.machine.allocator import trim_memory
from sansgpu.machine.monitor import peak_rss_bytes
from sansgpu.machine.probe import held_memory
assert library.load() is None
library.install_caching_allocator(varying=sys.argv[1] == "varying", warn=sys.exit)
before, draw, held, live, most = peak_rss_bytes(), random.Random(3), {}, 0, 0
for number in range(1000):
    if held and (live > 100e6 or draw.random() < 0.45):
        key = draw.choice(list(held))
        tensor = held.pop(key)
        assert bool((tensor == key % 251).all()), key
        live -= tensor.nbytes
    else:
        scale = 1 + number // 125  # sizes grow over time
        held[number] = torch.full((draw.randint(1 << 20, 2 << 20) * scale,), number % 251, dtype=torch.uint8)
        live += held[number].nbytes
        most = max(most, live)
for key, tensor in held.items():
    assert bool((tensor == key % 251).all()), key
print((peak_rss_bytes() - before) / most)
held.clear()
del tensor
trim_memory()
print(held_memory(torch.device("cpu")) - before)
"""


def grown(kind: str) -> tuple[float, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, check=True)
    ratio, left = done.stdout.split()
    return float(ratio), int(left)


@pytest.mark.long
def test_tensors_of_ever_other_sizes_take_little_more_memory_than_is_in_them() -> None:
    ratio, left = grown("varying")
    assert ratio < 2.2
    assert left < 40e6  # nearly all memory was returned to the system


@pytest.mark.long
def test_without_our_allocator_they_take_twice_the_memory() -> None:
    assert grown("steady")[0] > 2 * grown("varying")[0]


ALLOCATORS = """
import json, sys
import torch
from sansgpu.cli import run
from sansgpu.kernels import library
assert library.load() is None
if code := run(["doctor", "--json"]):
    raise SystemExit(code)
library.install_caching_allocator(varying=False, warn=sys.exit)
tensor = torch.empty(100 << 20, dtype=torch.uint8)
maps = [line for line in open("/proc/self/smaps") if line.startswith("VmFlags") and " hg" in line]
print(len(maps) > 0)
"""  # prints whether memory with huge pages exists, which only our allocator requests


@pytest.mark.long
def test_the_environment_turns_the_allocator_off_and_doctor_says_so(tmp_path: Path) -> None:
    for value, used in (("sansgpu", True), ("system", False)):
        settings = {**environment(tmp_path), "SANSGPU_ALLOCATOR": value}
        command = [sys.executable, "-c", ALLOCATORS]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        *facts, huge = done.stdout.splitlines()
        problem = None if used else "SANSGPU_ALLOCATOR is system"
        found = json.loads("\n".join(facts))
        assert (found["caching_allocator"], found["caching_allocator_problem"]) == (used, problem)
        assert huge == str(used)
    settings["SANSGPU_ALLOCATOR"] = "jemalloc"
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    sentence = "sansgpu: SANSGPU_ALLOCATOR is jemalloc; unset it or set it to sansgpu or system."
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (2, "", sentence)


def test_a_request_that_cannot_be_met_is_an_error_and_no_crash() -> None:
    with pytest.raises(RuntimeError):
        torch.empty(1 << 60, dtype=torch.uint8)


# Trains layers on batches of 60 different numbers of rows; prints how much memory the last 55 have added.
FEW_ROWS = """
import torch
from sansgpu.kernels import library
from sansgpu.kernels.linear import Linear
from sansgpu.machine.probe import held_memory
assert library.load() is None
layers = torch.nn.Sequential(Linear(512, 1024), Linear(1024, 512)).bfloat16()
def train(numbers_of_rows):
    for rows in numbers_of_rows:
        with torch.autocast("cpu", torch.bfloat16):
            layers(torch.ones(rows, 512)).sum().backward()
train(range(160, 165))
before = held_memory(torch.device("cpu"))
train(range(100, 155))
print(held_memory(torch.device("cpu")) - before)
"""


def test_each_new_number_of_rows_takes_no_memory_of_its_own() -> None:
    """torch caches a compiled matmul for every number of rows; our kernels do not."""
    command = [sys.executable, "-c", FEW_ROWS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10e6
