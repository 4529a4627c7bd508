"""Training with `training.precision: int16`, which multiplies integers in block floating point."""

from pathlib import Path

import pytest

from tests.processes import digests, events_of, finish, messages, settings, train, use_cache, write_corpus

# Micro-batches of 256 tokens, for which matmuls are ours.
LARGE = {"model__max_seq_len": 128, "training__max_steps": 24, "training__eval_steps": 24, "training__save_steps": 0}


def final_loss(home: Path, precision: str) -> float:
    assert train(home, home / precision, training__precision=precision, **LARGE) == 0
    return float(events_of(home / precision, "eval")[-1]["loss"])


def test_a_model_learns_as_well_as_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    write_corpus(tmp_path / "corpus.jsonl", 200)
    exact, rounded = final_loss(tmp_path, "fp32"), final_loss(tmp_path, "int16")
    assert "parameters, int16, 1 thread, native" in capsys.readouterr().out
    assert rounded == pytest.approx(exact, rel=0.003)
    assert set(digests(tmp_path / "fp32").values()).isdisjoint(digests(tmp_path / "int16").values())


def test_without_our_kernels_it_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    changes = {"training__precision": "int16", "training__kernels": "torch"}
    arguments = settings(data__dataset_name=tmp_path / "corpus.jsonl", **changes)
    code, out, error = finish(["train", *arguments, "--output-dir", str(tmp_path / "run")], tmp_path / "cache")
    (sentence,) = messages(error)
    assert "training.precision is int16, which PyTorch's operators (training.kernels torch) cannot compute" in sentence
    assert (code, out, (tmp_path / "run" / "final").exists()) == (2, "", False)
