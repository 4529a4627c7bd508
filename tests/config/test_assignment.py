"""Values assigned to a configuration are checked like values read from a file."""

from operator import attrgetter
from pathlib import Path

import pytest
import yaml

import sansgpu
from sansgpu.config import Config, ConfigError, ModelConfig, TrainingConfig, acting_values, change_config, save_config
from sansgpu.models import TransformerLM
from sansgpu.tasks.configuration import default_values, load_config, schema_for


def test_assigned_values_are_parsed_as_in_a_file() -> None:
    config = Config()
    training = config.training
    training.learning_rate = "1e-3"  # type: ignore[assignment]
    config.training.report_to = "none"  # type: ignore[assignment]
    config.device = "cpu"  # type: ignore[misc]
    config.model = ModelConfig(n_layers=3)
    assert config.training is training
    overrides = ["training.learning_rate=1e-3", "training.report_to=none", "device=cpu", "model.n_layers=3"]
    assert config == change_config(Config(), overrides)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.learning_rate", -1),
        ("training.learning_rat", 1),
        ("training.d_model", 64),
        ("training.optimizer", "lion"),
        ("training.preference.los", "ipo"),
        ("training.preference.beta", -1),
        ("training.preference", 3),
        ("model.d_model", 255),
        ("model.lora_rank", 4),
        ("data.mask_ratio", 2),
        ("task", "dance"),
        ("training", 3),
        ("modell", {}),
    ],
)
def test_an_invalid_assignment_raises_the_error_of_a_file_and_changes_nothing(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as of_file:
        change_config(Config(), [(key, value)])
    config = Config()
    section, _, name = key.rpartition(".")
    with pytest.raises(ConfigError) as of_assignment:
        setattr(attrgetter(section)(config) if section else config, name, value)
    assert str(of_assignment.value) == str(of_file.value)
    assert config == Config()
    assert config.given_values() == Config().given_values()


def test_defaults_follow_assignments_and_given_values_stay() -> None:
    model = ModelConfig(architecture="gpt2", n_layers=3)
    model.architecture = "llama"
    assert (model.activation, model.n_layers) == ("swiglu", 3)
    config = Config(task="graph", training=TrainingConfig(seed=7))
    assert config.training.optimizer == "muon"
    config.task = "pretrain"
    assert (config.training.optimizer, config.training.seed) == (Config().training.optimizer, 7)


def test_a_copy_is_validated_and_independent_of_the_original(recwarn: pytest.WarningsRecorder) -> None:
    config = Config(training=TrainingConfig(seed=7))
    copied = config.copy()
    copied.training.seed = 8
    assert (config.training.seed, copied.training.seed) == (7, 8)
    assert config.training.copy(update={"batch_size": 4}) == TrainingConfig(seed=7, batch_size=4)
    assert config.copy(update={"task": "graph"}).training.optimizer == "muon"
    with pytest.raises(ConfigError, match=r"unknown key training\.sed"):
        config.training.copy(update={"sed": 1})
    # Python warns about files that earlier tests left open whenever it collects them.
    assert not [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning]


def test_a_whole_number_of_epochs_is_an_integer(tmp_path: Path) -> None:
    for written in (3, 3.0, "3"):
        config = Config.model_validate({"training": {"num_epochs": written}})
        assert list(range(config.training.num_epochs)) == [0, 1, 2]  # type: ignore[arg-type]
        save_config(config, tmp_path / "saved.yaml")
        assert list(range(load_config(tmp_path / "saved.yaml")[0].training.num_epochs)) == [0, 1, 2]  # type: ignore[arg-type]
    assert TrainingConfig(num_epochs=0.5).num_epochs == 0.5


@pytest.mark.parametrize("key", ["batch_size", "threads"])
def test_an_automatic_value_refuses_arithmetic(key: str, tmp_path: Path) -> None:
    save_config(Config(), tmp_path / "saved.yaml")
    for config in (Config(), load_config(tmp_path / "saved.yaml")[0], Config().copy()):
        value = getattr(config.training, key)
        assert value == "auto"
        for compute in (lambda v: v * 8, lambda v: 8 * v, lambda v: v / 2, lambda v: 64 // v, range):
            with pytest.raises(TypeError, match="auto, which is resolved when the run starts; assign a number"):
                compute(value)
    for values in (default_values(acting_values(Config())), TrainingConfig().model_dump(), Config().given_values()):
        assert yaml.safe_load(yaml.safe_dump(values)) == values  # run reports write these values
    assert TrainingConfig(batch_size=4).batch_size * 8 == 32  # type: ignore[operator]


def test_assignments_to_a_section_keep_the_defaults_of_the_task() -> None:
    values = {"task": "sft", "model": {"name_or_path": "m"}, "data": {"dataset_name": "rows.jsonl"}}
    config = Config.model_validate(values)
    config.training.max_steps = 5
    assert config == Config.model_validate({**values, "training": {"max_steps": 5}})
    config.task = "classify"
    assert config.training.learning_rate == 5e-5


def test_sections_that_do_not_fit_together_are_refused_by_fit(tmp_path: Path) -> None:
    config = Config()
    config.data.max_length = 4096
    with pytest.raises(ConfigError, match=r"longer than model\.max_seq_len"):
        sansgpu.fit(config, tmp_path / "run")


def test_an_assignment_changes_neither_another_configuration_nor_a_model() -> None:
    model = ModelConfig(d_model=32, n_heads=2, n_layers=1, d_ff=48, vocab_size=300)
    config, network = Config(model=model), TransformerLM(model)
    model.n_layers = 4
    assert (config.model.n_layers, network.config.n_layers) == (1, 1)
    assert len(network.new_caches(1)) == 1
    assert load_config()[0].model == Config().model


def test_errors_name_whole_keys_after_the_schema_for_another_class_was_composed() -> None:
    config = Config()
    schema_for({"task": "unknown_package:Class"}, False)
    with pytest.raises(ConfigError, match=r"^the configuration: training\.seed is -1"):
        config.training.seed = -1
