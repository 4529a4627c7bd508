"""The instruction set of the kernels: SANSGPU_ISA forces it, commands show it, and snapshots record it."""

import json
from pathlib import Path

import pytest

from sansgpu.kernels import library
from sansgpu.machine.instruction_sets import allowed
from tests.processes import finish, messages, settings


@pytest.mark.parametrize(("command", "name"), [("train", "avx3"), ("doctor", "AVX2")])
def test_an_unknown_set_is_refused_in_one_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.setenv("SANSGPU_ISA", name)
    arguments = [*settings(data__dataset_name=home / "corpus.jsonl"), "--dry-run"] if command == "train" else []
    code, out, error = finish([command, *arguments], home / "cache")
    (sentence,) = messages(error)
    assert sentence.startswith(
        f"sansgpu: SANSGPU_ISA is {name}, which this processor does not support; unset it or set"
    )
    assert (code, out) == (2, "")


def test_mixed_precision_that_the_processor_cannot_compute_is_not_promised(home: Path, tmp_path: Path) -> None:
    changes = {"training__precision": "auto", "training__use_amp": True, "training__kernels": "torch"}
    arguments = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=2, **changes)
    train = ["train", *arguments, "--output-dir", str(tmp_path / "run")]
    amp = "training.use_amp is true, but this run computes in fp32, because"
    for more, reason in (
        ([], "this processor does not support bf16"),
        (["--max-steps", "4", "--resume"], "it started in fp32"),
    ):
        code, out, error = finish([*train, *more], tmp_path / "cache", SANSGPU_ISA="portable")
        assert code == 0, error
        assert f"{amp} {reason}." in out + error


@pytest.fixture
def portable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forces the instruction set `portable`; returns a folder for the cache."""
    monkeypatch.setenv("SANSGPU_ISA", "portable")
    return tmp_path / "cache"


@pytest.mark.long
def test_doctor_names_the_forced_set(portable: Path) -> None:
    code, out, error = finish(["doctor", "--json"], portable)
    assert code == 0, error
    facts = json.loads(out)
    assert (facts["kernels"], facts["bf16_native"]) == ("native portable", False)
    assert any("unset SANSGPU_ISA=portable" in advice["text"] for advice in facts["advice"])


@pytest.mark.long
def test_a_run_names_its_set_and_resuming_with_another_one_is_not_exact(
    home: Path, tmp_path: Path, portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"training__precision": "auto", "training__max_steps": 4}
    train = ["train", *settings(data__dataset_name=home / "corpus.jsonl", **changes)]
    train += ["--output-dir", str(tmp_path / "run")]
    code, out, error = finish([*train, "--max-steps", "2"], portable)
    assert code == 0, error
    assert "parameters, int16, 1 thread, native portable kernels" in out  # portable kernels have no bf16 matmuls
    monkeypatch.delenv("SANSGPU_ISA")
    assert allowed()[-1].name != "portable"
    difference = f"was written with kernels native portable, now {library.name()}"
    code, _, error = finish([*train, "--resume", "latest", "--strict"], portable)
    assert (code, difference in messages(error)[0]) == (2, True)
    code, out, error = finish([*train, "--resume", "latest"], portable)
    assert code == 0, error
    assert difference in out
    assert f"parameters, int16, 1 thread, {library.name()} kernels, resumed from step-000002" in out


@pytest.mark.parametrize(
    ("kernels", "cost"), [("native", "up to twice"), pytest.param("torch", "5 to 35 times", marks=pytest.mark.long)]
)
def test_emulated_bf16_is_announced_and_mfu_compares_with_fp32(
    home: Path, tmp_path: Path, portable: Path, kernels: str, cost: str
) -> None:
    changes = {"training__precision": "bf16", "training__kernels": kernels, "training__max_steps": 1}
    configured = settings(data__dataset_name=home / "corpus.jsonl", **changes)
    sentence = (
        f"training.precision is bf16, which this processor only emulates: a step takes {cost} as long as in fp32; set "
        "it to auto or fp32."
    )
    for command in (["plan"], ["train", "--dry-run"], ["train", "--output-dir", str(tmp_path / "run")]):
        code, out, error = finish([*command, *configured], portable)
        assert code == 0, error
        assert (out + error).count(sentence) == 1
    measured = [json.loads(file.read_text())["question"] for file in (portable / "measured").iterdir()]
    assert [question["precision"] for question in measured if "gemm" in question] == ["fp32"]
