"""How a decoder starts: from counted pairs of tokens if the text is long enough, otherwise from random numbers."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.processes import digests, events_of, train

# The texts consist of 1,000 characters. With those for bytes, the vocabulary has 1,280 tokens, so pairs are counted in
# texts of at least 256,000 characters.
CHARACTERS = {
    "data__tokenizer": "char",
    "data__vocab_size": "",
    "training__max_steps": 4,
    "training__eval_steps": 0,
    "training__eval_batches": 8,
}


def write_text(path: Path, length: int, characters: int = 1000) -> None:
    """Writes random characters, each of which is followed by one of ten others."""
    draws = np.random.default_rng(0).integers(1, 11, length)
    path.write_text("".join(chr(0x4E00 + number) for number in np.cumsum(draws) % characters), encoding="utf-8")


def fill(home: Path) -> None:
    write_text(home / "corpus.txt", 300_000)
    write_text(home / "short.txt", 100_000)
    write_text(home / "letters.txt", 300_000, characters=30)


def of_characters(home: Path, changes: dict[str, object]) -> dict[str, object]:
    return {"data__dataset_name": home / "corpus.txt", **CHARACTERS, **changes}


def trained(home: Path, name: str, **changes: object) -> Path:
    assert train(home, home / name, **of_characters(home, changes)) == 0
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
    assert first_loss(pairs) < first_loss(noise) - 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data__dataset_name": "short.txt"}, "random"),
        ({"data__dataset_name": "short.txt", "model__initialization": "bigram"}, "bigram"),
        ({"data__dataset_name": "letters.txt"}, "random"),
        ({"model__tie_embeddings": "false", "model__d_ff": "16"}, "bigram"),
        ({"model__d_ff": "16"}, "random"),
        ({"model__d_model": "4", "model__n_heads": "1"}, "random"),
        ({"model__activation": "gelu", "model__d_ff": "64"}, "bigram"),
        ({"model__activation": "relu2"}, "random"),
        ({"data__pack_sequences": "false"}, "bigram"),
        ({"training__num_epochs": "3"}, "bigram"),
    ],
)
def test_the_choice(home: Path, changes: dict[str, str], expected: str) -> None:
    name = "-".join(changes.values())
    if "data__dataset_name" in changes:
        changes = {**changes, "data__dataset_name": str(home / changes["data__dataset_name"])}
    assert chosen(trained(home, f"choice-{name}", **changes)) == expected


@pytest.mark.parametrize(("epochs", "expected"), [(2, "bigram"), (3, "random")])
def test_a_text_that_is_read_often(home: Path, capsys: pytest.CaptureFixture[str], epochs: int, expected: str) -> None:
    changes = of_characters(home, {"training__num_epochs": epochs, "training__max_steps": "null"})
    assert train(home, home / "dry", "--dry-run", **changes) == 0
    assert f"initialization: {expected}" in capsys.readouterr().out


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
    assert train(home, home / "refused", **of_characters(home, dict(changes))) == 2
    assert named in capsys.readouterr().err
    assert not (home / "refused").exists()


def test_a_resumed_run_keeps_its_start_when_the_text_grows(home: Path) -> None:
    run = trained(home, "grown", data__dataset_name=home / "short.txt")
    assert train(home, run, "--resume", **of_characters(home, {"training__max_steps": 6})) == 0
    assert chosen(run) == "random"


def test_equal_runs_start_equally(home: Path) -> None:
    once, again = (trained(home, name) for name in ("once", "again"))
    assert digests(once) == digests(again)
