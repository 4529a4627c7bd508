"""How a decoder starts: from counted pairs of tokens if the text is long enough, otherwise from random numbers."""

from pathlib import Path

import pytest
import yaml

from tests.processes import digests, events_of, train, write_corpus

# A character tokenizer has 320 tokens here with those for bytes. `corpus.jsonl` has over 200 characters for each.
CHARACTERS = {"data__tokenizer": "char", "data__vocab_size": "", "training__max_steps": 4, "training__eval_steps": 0}


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=300)
    write_corpus(home / "short.jsonl", documents=20)


def trained(home: Path, name: str, **changes: object) -> Path:
    assert train(home, home / name, **{**CHARACTERS, **changes}) == 0
    return home / name


def chosen(run: Path) -> str:
    return str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["model"]["initialization"])


def first_loss(run: Path) -> float:
    return float(events_of(run, "eval")[0]["loss"])


def test_a_model_starts_with_the_loss_of_a_bigram_model(home: Path) -> None:
    pairs = trained(home, "pairs", training__eval_on_start="true")
    noise = trained(home, "noise", training__eval_on_start="true", model__initialization="random")
    assert chosen(pairs) == "bigram"
    assert chosen(noise) == "random"
    assert first_loss(pairs) < 0.6 * first_loss(noise)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data__dataset_name": "short.jsonl"}, "random"),
        ({"data__dataset_name": "short.jsonl", "model__initialization": "bigram"}, "bigram"),
        ({"model__tie_embeddings": "false", "model__d_ff": "16"}, "bigram"),
        ({"model__d_ff": "16"}, "random"),
        ({"model__d_model": "4", "model__n_heads": "1"}, "random"),
        ({"model__activation": "gelu", "model__d_ff": "64"}, "bigram"),
        ({"model__activation": "relu2"}, "random"),
        ({"data__pack_sequences": "false"}, "bigram"),
        ({"training__num_epochs": "3", "training__max_steps": "null", "data__validation_split": "0.5"}, "random"),
        ({"training__num_epochs": "3"}, "bigram"),
    ],
)
def test_the_choice(home: Path, changes: dict[str, str], expected: str) -> None:
    name = "-".join(changes.values())
    if "data__dataset_name" in changes:
        changes = {**changes, "data__dataset_name": str(home / changes["data__dataset_name"])}
    assert chosen(trained(home, f"choice-{name}", **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__initialization": "bigram", "model__d_ff": "16"}, "a d_ff of at least 32"),
        ({"model__initialization": "bigram", "model__d_model": "4"}, "a d_model of at least 8"),
        ({"model__initialization": "zero"}, "model.initialization"),
    ],
)
def test_what_cannot_work_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], named: str
) -> None:
    assert train(home, home / "refused", **{**CHARACTERS, **changes}) == 2
    assert named in capsys.readouterr().err
    assert not (home / "refused").exists()


def test_a_resumed_run_keeps_its_start_when_the_text_grows(home: Path) -> None:
    run = trained(home, "grown", data__dataset_name=home / "short.jsonl")
    changes = {**CHARACTERS, "training__max_steps": 6}
    assert train(home, run, "--resume", **changes) == 0
    assert chosen(run) == "random"


def test_equal_runs_start_equally(home: Path) -> None:
    once, again = (trained(home, name) for name in ("once", "again"))
    assert digests(once) == digests(again)
