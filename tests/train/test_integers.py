"""Training with `training.precision` int16 and int8, which multiply integers in block floating point."""

from pathlib import Path

import pytest

from tests.processes import digests, events_of, finish, messages, settings, train, use_cache, write_corpus

# Micro-batches of 256 tokens, for which matmuls are ours.
LARGE = {"model__max_seq_len": 128, "training__max_steps": 24, "training__eval_steps": 24, "training__save_steps": 0}


def final_loss(home: Path, precision: str) -> float:
    assert train(home, home / precision, training__precision=precision, **LARGE) == 0
    return float(events_of(home / precision, "eval")[-1]["loss"])


@pytest.mark.parametrize(("precision", "share"), [("int16", 0.003), pytest.param("int8", 0.01, marks=pytest.mark.long)])
def test_a_model_learns_as_well_as_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str, share: float
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    write_corpus(tmp_path / "corpus.jsonl", 200)
    exact, rounded = final_loss(tmp_path, "fp32"), final_loss(tmp_path, precision)
    assert f"parameters, {precision}, 1 thread, native" in capsys.readouterr().out
    assert rounded == pytest.approx(exact, rel=share)
    assert set(digests(tmp_path / "fp32").values()).isdisjoint(digests(tmp_path / precision).values())


@pytest.mark.parametrize("precision", ["int16", "int8"])
def test_without_our_kernels_it_is_refused_in_one_sentence(tmp_path: Path, precision: str) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    changes = {"training__precision": precision, "training__kernels": "torch"}
    arguments = settings(data__dataset_name=tmp_path / "corpus.jsonl", **changes)
    code, out, error = finish(["train", *arguments, "--output-dir", str(tmp_path / "run")], tmp_path / "cache")
    (sentence,) = messages(error)
    assert f"training.precision is {precision}, which PyTorch's operators (training.kernels torch) cannot" in sentence
    assert (code, out, (tmp_path / "run" / "final").exists()) == (2, "", False)
