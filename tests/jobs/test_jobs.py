"""`sansgpu eval`, `generate`, `export` and `tokenizer` give correct results for a tiny run."""

import io
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sansgpu.cli import run as cli
from sansgpu.train.snapshots import snapshots
from tests.processes import events_of, json_of, settings, write_corpus

pytestmark = pytest.mark.usefixtures("home")


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=120)
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=20)
    assert cli(["train", *chosen, "--output-dir", str(home / "run")]) == 0


def test_eval_repeats_the_runs_own_last_evaluation(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = events_of(home / "run", "eval")[-1]
    found = json_of(capsys, "eval", home / "run")
    for key in ("step", "loss", "perplexity", "bits_per_byte"):
        assert found[key] == pytest.approx(last[key], rel=1e-5)


def test_eval_of_a_text_by_hand(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "the model reads a page: ünïcode\n"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(home / "run/final").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "run/final")
    end = tokenizer.eos_token_id
    ids = [end, *tokenizer.encode(text, add_special_tokens=False), end]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    total = float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
    assert len(ids) <= 33, "the text must fit into one window"
    for target in (home / "run", home / "run/final"):
        found = json_of(capsys, "eval", target, "--data", tmp_path / "text.txt")
        assert found["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-4)
        assert found["perplexity"] == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-3)
        assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-4)
    assert cli(["eval", str(home / "run/final"), "--data", str(tmp_path / "text.txt")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'text.txt'}: loss")


def test_eval_of_another_architecture(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(home / "run/final")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape["num_key_value_heads"] = 1
    MistralForCausalLM(MistralConfig(vocab_size=320, max_position_embeddings=64, **shape)).save_pretrained(
        tmp_path / "mistral"
    )
    tokenizer.save_pretrained(tmp_path / "mistral")
    found = json_of(capsys, "eval", tmp_path / "mistral", "--data", home / "corpus.jsonl")
    assert found["loss"] == pytest.approx(math.log(320), rel=0.1)
    assert cli(["generate", str(tmp_path / "mistral"), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("ab")


def test_a_window_longer_than_the_context_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["eval", str(home / "run"), "--data", str(home / "corpus.jsonl"), "--window", "999"]) == 2
    assert "longer than the model's context" in capsys.readouterr().err
    assert cli(["eval", str(home / "run/final")]) == 2
    assert "--data" in capsys.readouterr().err


def test_generate_repeats_itself_with_a_seed_and_goes_beyond_the_context(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*more: str) -> str:
        capsys.readouterr()
        assert cli(["generate", str(home / "run"), "--prompt", "the model", "--max-new-tokens", "80", *more]) == 0
        return capsys.readouterr().out

    assert text("--seed", "1").startswith("the model")
    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--temperature", "0") == text("--top-k", "1", "--seed", "3")
    best = min(events_of(home / "run", "eval"), key=lambda e: e["loss"])
    assert text("--seed", "1", "--snapshot", "best") == text("--seed", "1", "--snapshot", str(best["step"]))
    first = snapshots(home / "run/snapshots")[0].step
    assert text("--seed", "1") != text("--seed", "1", "--snapshot", str(first)), "the texts of snapshots must differ"
    assert cli(["generate", str(home / "run"), "--top-p", "0"]) == 2
    assert cli(["generate", str(home / "run"), "--snapshot", "9999"]) == 2


def test_export_writes_the_snapshot_asked_for(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = snapshots(home / "run/snapshots")[0], snapshots(home / "run/snapshots")[-1]
    for name, snapshot in (("first", first), ("last", last)):
        assert (
            cli(["export", str(home / "run"), "--snapshot", str(snapshot.step), "--output", str(tmp_path / name)]) == 0
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(model.get_input_embeddings().weight, snapshot.weights()["embedding.weight"])
    assert (tmp_path / "last/model.safetensors").read_bytes() == (home / "run/final/model.safetensors").read_bytes()
    assert cli(["export", str(home / "run"), "--output", str(home / "cache")]) == 2
    assert "choose another --output" in capsys.readouterr().err


def test_a_tokenizer_is_trained_used_and_taken_up_by_a_run(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokenizer"
    trained = json_of(capsys, "tokenizer", "train", home / "corpus.jsonl", "--vocab-size", 280, "--output", folder)
    assert trained["vocab_size"] <= 280
    encoded = json_of(capsys, "tokenizer", "encode", folder, "--text", "the model")
    assert AutoTokenizer.from_pretrained(folder).decode(encoded["ids"]) == "the model"
    monkeypatch.setattr("sys.stdin", io.StringIO("the model"))
    assert json_of(capsys, "tokenizer", "encode", folder) == encoded
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=2, data__tokenizer=folder)
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "run")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "run/final").encode("the model") == encoded["ids"]
