"""Runs that fit into memory start; others are refused with settings that would fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from sansgpu.config import Config, ConfigError, change_config
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.planning.memory_fit import changes_that_fit, estimate_memory, fitting_micro_batches
from sansgpu.tasks.registry import TASKS

EXECUTION = Execution(1, 1, "fp32", "off", "native", "adamw")
TASK = TASKS["pretrain"]
PLENTY = 1 << 50


def config_of(**training: object) -> Config:
    return Config.model_validate({"training": training, "model": {"vocab_size": 1000, "n_layers": 8}})


def needs(config: Config, size: int) -> int:
    memory = estimate_memory(config, replace(EXECUTION, micro_batch=size))
    return int(memory.least * 1.06)


def test_less_memory_gives_a_smaller_micro_batch_and_in_the_end_a_refusal() -> None:
    config, said = config_of(gradient_accumulation_steps=16), list[str]()
    assert fitting_micro_batches(config, EXECUTION, PLENTY, "refuse", said.append) == [1, 2, 4, 8, 16]
    assert fitting_micro_batches(config, EXECUTION, needs(config, 4), "refuse", said.append) == [1, 2, 4]
    with pytest.raises(ConfigError, match="it fits with"):
        fitting_micro_batches(config, EXECUTION, int(needs(config, 1) * 0.9), "refuse", said.append)
    assert said == []


def test_processes_share_a_step_and_with_sharding_its_memory() -> None:
    config = config_of(gradient_accumulation_steps=12, optimizer="adamw")
    shares = {n: fitting_micro_batches(config, replace(EXECUTION, world_size=n), PLENTY, "refuse", print)
              for n in (1, 2, 4, 5, 12)}  # fmt: skip
    assert [sizes[-1] for sizes in shares.values()] == [12, 6, 3, 3, 1]
    fixed = config_of(batch_size=8, gradient_accumulation_steps=1)
    assert fitting_micro_batches(fixed, replace(EXECUTION, world_size=4), PLENTY, "refuse", print) == [2]
    whole, *spread = (
        estimate_memory(config_of(optimizer="adamw", sharding=sharding), replace(EXECUTION, world_size=4))
        for sharding in ("none", "optimizer", "full")
    )
    assert [memory.optimizer * 4 for memory in spread] == [whole.optimizer] * 2
    assert spread[1].gradients < spread[0].gradients == whole.gradients
    assert spread[1].least < spread[0].least < whole.least


def test_processes_short_of_memory_are_advised_to_shard_the_optimizer() -> None:
    execution = replace(EXECUTION, world_size=4)
    config = config_of(optimizer="adamw", gradient_accumulation_steps=4)
    wide = {"vocab_size": 1000, "n_layers": 16, "d_model": 1024, "n_heads": 16, "d_ff": 4096}
    config = config.model_copy(update={"model": type(config.model).model_validate(wide)})
    available = int(estimate_memory(config, execution).least * 0.9)
    changes = changes_that_fit(config, execution, available)
    assert "training.sharding=optimizer" in changes[0].settings
    assert not any("sharding" in str(c) for c in changes_that_fit(config, EXECUTION, available))


def test_a_fixed_micro_batch_that_does_not_fit_is_refused_or_begun_in_parts() -> None:
    config, said = config_of(batch_size=16, gradient_accumulation_steps=2), list[str]()
    available = needs(config, 4)
    with pytest.raises(ConfigError, match=r"training\.batch_size=4 training\.gradient_accumulation_steps=8.*--force"):
        fitting_micro_batches(config, EXECUTION, available, "refuse", said.append)
    assert fitting_micro_batches(config, EXECUTION, available, "begin", said.append) == [4]
    assert "a micro-batch size of 4 and the same effective batch size" in said[0]
    assert fitting_micro_batches(config, EXECUTION, 1, "begin", said.append) == [1]
    assert fitting_micro_batches(config, EXECUTION, 1, "report", said.append) == [16]


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6])
def test_every_change_that_is_named_fits_and_costs_something(share: float) -> None:
    config = config_of(batch_size=32, gradient_accumulation_steps=1)
    available = int(needs(config, 32) * share)
    changes = changes_that_fit(config, replace(EXECUTION, micro_batch=32), available)
    assert 1 <= len(changes) <= 3
    for change in changes:
        assert change.cost
        assert change.memory.fits(available)
        changed = change_config(config, change.settings)
        size = changed.training.batch_size
        assert size != "auto"
        precision = "bf16" if "training.precision=bf16" in change.settings else "fp32"
        optimizer = "muon" if "training.optimizer=muon" in change.settings else "adamw"
        execution = replace(EXECUTION, micro_batch=size, precision=precision, optimizer=optimizer)
        assert estimate_memory(changed, execution).total == change.memory.total


def test_where_no_change_alone_helps_several_do() -> None:
    config = Config.model_validate(
        {"model": {"vocab_size": 50_000, "d_model": 1024, "n_heads": 1, "n_layers": 24, "d_ff": 4096}}
    )
    found = [changes_that_fit(config, EXECUTION, int(gigabytes * 1e9)) for gigabytes in (2.0, 2.4, 2.6, 2.8, 2.9)]
    assert found[0] == []
    together = [changes[0] for changes in found if len(changes) == 1 and len(changes[0].settings) > 3]
    assert together
    assert all(change.memory.fits(int(2.9e9)) for change in together)


def test_changes_that_help_together_keep_the_tokens_of_a_step_and_name_every_cost() -> None:
    config = Config.model_validate(
        {
            "model": {
                "vocab_size": 50_000,
                "d_model": 1024,
                "n_heads": 1,
                "n_layers": 24,
                "d_ff": 4096,
                "max_seq_len": 512,
            },
            "training": {"batch_size": 6, "gradient_accumulation_steps": 2, "compile": "off"},
        }
    )
    together = 0
    for available in range(int(2.6e9), int(5e9), int(1e8)):
        for change in changes_that_fit(config, replace(EXECUTION, micro_batch=6), available):
            changed = change_config(config, change.settings)
            assert change.memory.fits(available)
            assert effective_batch(changed.training) * changed.window == effective_batch(config.training) * 512
            pieces, fewer = changed.training.batch_size != 6, changed.model.n_layers < 24
            assert ("same effective batch size" in change.cost) == pieces
            assert (f"a context of {changed.window} tokens" in change.cost) == (changed.window < 512)
            assert ("M parameters instead of " in change.cost) == fewer
            together += len(change.cost.split("; ")) > 1
    assert together


def test_presets_have_the_parameters_they_are_named_for() -> None:
    from sansgpu.config import PRESETS
    from sansgpu.tasks.configuration import load_config

    assert PRESETS == ("small", "medium", "large")
    for name, millions in zip(PRESETS, (25, 117, 345), strict=True):
        config, notes = load_config(Path(name))
        assert notes == []
        assert sum(TASK.costs(config).parameters().values()) / 1e6 == pytest.approx(millions, rel=0.015)
