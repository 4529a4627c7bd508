"""The search space of `tune`: how it is read, filled and refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.config import ConfigError
from sansgpu.jobs.tune.search_space import SearchParameter, load_space, measure_of, spaced_values
from sansgpu.tasks.configuration import load_config
from tests.jobs.tune.searches import written


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "is empty"),
        ({"learning_rat": [1, 2]}, "did you mean training.learning_rate?"),
        ({"training.learnin_rate": [1, 2]}, "did you mean training.learning_rate?"),
        ({"vocab_size": [300, 400]}, "may be model.vocab_size or data.vocab_size"),
        ({"lora_rank": [4, 8]}, "has no effect in task pretrain"),
        ({"max_steps": [4, 8]}, "the same length"),
        ({"eval_steps": [4, 8]}, "sets it for every trial"),
        ({"validation_split": [0.1, 0.2]}, "losses would not be comparable"),
        ({"learning_rate": {"log": [0, 1]}}, "needs a lower bound above 0"),
        ({"learning_rate": {"log": [1, 0.5]}}, "the lower one first"),
        ({"learning_rate": {"float": [0.1]}}, "the lower one first"),
        ({"learning_rate": {"float": [-1, 1]}}, "greater than 0"),
        ({"dropout": {"float": [0, 1.5]}}, "less than 1"),
        ({"learning_rate": {"logg": [1, 2]}}, "write a list of choices"),
        ({"learning_rate": {"float": [1, 2], "stepp": 1}}, "stepp is unknown"),
        ({"learning_rate": 3}, "write a list of choices"),
        ({"learning_rate": [0.1]}, "at least two"),
        ({"learning_rate": [0.1, 0.1]}, "has a repeated value"),
        ({"learning_rate": [0.1, "much"]}, "valid number"),
        ({"learning_rate": {"float": [1, 2], "step": 5}}, "within its range"),
        ({"learning_rate": {"float": [1, 2], "step": 0.5, "log": True}}, "remove one of them"),
        ({"d_ff": {"float": [10, 20]}}, "{int: [low, high]}"),
        ({"d_ff": {"int": [10, 20.5]}}, "use integers, or write float"),
        ({"activation": ["swiglu", "gelo"]}, "model.activation"),
        ({"learning_rate": [1, 2], "training.learning_rate": [1, 2]}, "is duplicated"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_in_one_sentence(space: object, words: str) -> None:
    config, _ = load_config(None)
    with pytest.raises(ConfigError, match=r"^space\.yaml(: | is empty)") as refused:
        load_space(written(space), config)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_space_is_read_as_it_is_meant() -> None:
    config, _ = load_config(None)
    asked = {
        "learning_rate": {"log": ["5e-4", "2e-3"]},
        "d_ff": {"int": [64, 256], "step": 64},
        "compile": [True, False],
        "data.vocab_size": {"int": [300, 3000], "log": True},
    }
    space = load_space(written(asked), config)
    assert space["training.learning_rate"] == SearchParameter("training.learning_rate", (), 5e-4, 2e-3, log=True)
    assert space["model.d_ff"] == SearchParameter("model.d_ff", (), 64, 256, is_integer=True, step=64)
    assert space["training.compile"].choices == ("on", "off")
    assert measure_of(space) == "bits_per_byte"
    with pytest.raises(ConfigError, match=r"model\.vocab_size cannot be searched"):
        load_space(written({"model.vocab_size": [300, 600]}), load_config(None, ("task=graph",))[0])
    assert space["model.d_ff"].contains(128)
    assert not space["model.d_ff"].contains(100)


@pytest.mark.parametrize("task", ["pretrain", "graph", "sft", "qa"])
def test_every_kind_of_task_has_a_usual_space_with_the_configuration_in_it(task: str) -> None:
    tuned = ("model.name_or_path=there", "data.dataset_name=rows.jsonl") if task in ("sft", "qa") else ()
    config, _ = load_config(None, (f"task={task}", *tuned, *(("model.adapter=lora",) if task == "sft" else ())))
    space = load_space(None, config)
    assert "training.learning_rate" in space
    assert ("model.lora_rank" in space) == (task == "sft")
    for key, parameter in space.items():
        section, _, name = key.partition(".")
        assert parameter.contains(getattr(getattr(config, section), name)), key


@given(st.integers(0, 1000))
def test_points_that_fill_a_space_lie_in_it(number: int) -> None:
    space = {
        "a": SearchParameter("a", (), 1e-5, 3.0, log=True),
        "b": SearchParameter("b", (), 1, 9, is_integer=True, step=4),
        "c": SearchParameter("c", ("x", None, True)),
        "d": SearchParameter("d", (), 0.1, 0.7, step=0.2),
    }
    for key, value in spaced_values(space, number).items():
        assert space[key].contains(value), (key, value)
