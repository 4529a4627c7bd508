"""Configurations are read from files and overrides, checked with helpful error messages, and saved."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import Config, ConfigError, DataConfig, ModelConfig, TrainingConfig, derive_seed
from sansgpu.config.identity import identity, require_identity
from sansgpu.config.load import acting_values, change_config, flatten, save_config
from sansgpu.tasks.configuration import as_config, default_values, load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))

# The same keys as in llm-trainer's configs/cpu_small_model.yaml and cpu_medium_model.yaml.
LLM_TRAINER = [
    {
        "device": "cpu",
        "model": {
            "vocab_size": size, "d_model": width, "n_heads": width // 64, "n_layers": layers, "d_ff": 4 * width,
            "max_seq_len": length, "dropout": 0.1, "attention_dropout": 0.1, "activation": "gelu", "pre_norm": True,
            "gradient_checkpointing": False,
        },
        "training": {
            "batch_size": 2, "learning_rate": 0.0008, "weight_decay": 0.01, "num_epochs": 5, "lr_scheduler": "cosine",
            "warmup_steps": 200, "optimizer": "adamw", "gradient_accumulation_steps": 8, "use_amp": False,
            "save_steps": 500, "eval_steps": 250, "logging_steps": 25, "max_grad_norm": 1.0,
            "dataloader_num_workers": 2, "dataloader_pin_memory": False,
        },
        "data": {
            "dataset_name": "wikitext", "dataset_config": "wikitext-2-raw-v1", "max_length": length,
            "vocab_size": size, "pack_sequences": True, "preprocessing_num_workers": 2,
        },
    }
    for size, width, layers, length in [(32000, 256, 4, 512), (50000, 768, 12, 1024)]
]  # fmt: skip


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_loads(path: Path) -> None:
    assert load_config(path)[0].model.n_layers > 0


def test_the_default_file_is_the_built_in_default() -> None:
    path = next(path for path in CONFIGS if path.stem == "default")
    assert load_config(path) == load_config(None)


@pytest.mark.parametrize("values", LLM_TRAINER, ids=["small", "medium"])
def test_a_file_written_for_llm_trainer_loads_unchanged(values: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    config, notes = load_config(tmp_path / "theirs.yaml")
    assert notes == []
    assert config.device == "cpu"
    assert config.training.precision == "fp32"
    assert config.model.vocab_size == config.data.vocab_size
    for section in ("model", "training", "data"):
        dumped = config.model_dump()[section]
        assert {key: dumped[key] for key in values[section]} == values[section]  # type: ignore[attr-defined, index]


def test_windows_follow_a_context_that_is_shortened_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {max_seq_len: 64}\ndata: {max_length: 64}")
    config, [note] = load_config(tmp_path / "a.yaml", ["model.max_seq_len=32"])
    assert config.data.max_length == config.window == 32
    assert note == "data.max_length is 32 instead of 64, because it cannot be longer than model.max_seq_len."
    assert change_config(load_config(tmp_path / "a.yaml")[0], ["model.max_seq_len=16"]).window == 16
    assert load_config(tmp_path / "a.yaml", ["model.max_seq_len=128"])[0].window == 64
    with pytest.raises(ConfigError, match=r"data\.max_length 64 is longer than model\.max_seq_len 32"):
        load_config(tmp_path / "a.yaml", ["model.max_seq_len=32", "data.max_length=64"])


def test_no_mixed_precision_is_recorded_as_fp32(tmp_path: Path) -> None:
    config = Config(training={"use_amp": False})
    save_config(config, tmp_path / "config.yaml")
    recorded = yaml.safe_load((tmp_path / "config.yaml").read_text())["training"]
    assert (recorded["use_amp"], recorded["precision"]) == (False, "fp32")
    assert load_config(tmp_path / "config.yaml")[0].training.precision == "fp32"
    config.training.use_amp = None
    assert config.training.precision == "auto"


def test_a_loop_over_the_epochs_works_without_setting_their_number() -> None:
    assert list(range(TrainingConfig().num_epochs)) == [0]
    assert TrainingConfig(max_steps=5).num_epochs is None
    config = Config()
    assert acting_values(config)["training"]["num_epochs"] is None, "so that a resumed run may set another limit"
    config.training.max_steps = 5
    assert config.training.num_epochs is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.d_modle=3", "did you mean model.d_model?"),
        ("training.d_model=3", "unknown key training.d_model (write model.d_model)"),
        ("modell.d_model=3", "did you mean model?"),
        ("model.n_layers=four", "model.n_layers"),
        ("model.d_model=255", "not divisible by n_heads"),
        ("model.n_kv_heads=3", "not divisible by n_kv_heads"),
        ("model.pre_norm=false", "pre_norm"),
        ("training.batch_size=0", "or 'auto'"),
        ("training.batch_size=some", "'auto'"),
        ("training.learning_rate=.nan", "finite"),
        ("training.optimizer=lion", "'auto', 'muon', 'adamw', 'adam' or 'sgd'"),
        ("training.lr_power=2", "lr_power has no effect with lr_scheduler wsd"),
        ("training.report_to=tb", "'tensorboard', 'wandb', 'trackio' or 'mlflow'"),
        ("data.max_length=100000", "longer than model.max_seq_len"),
        ("task=dance", "task"),
        ("device=tpu", "device"),
        ("model=3", "model is 3"),
        ("model.d_model.x=3", "d_model"),
        ("model..d_model=3", "unknown key model."),
        ("no-value", "write --set key.path=value"),
        ("=3", "write --set key.path=value"),
    ],
)
def test_overrides_that_cannot_work_are_reported_in_one_sentence(override: str, words: str) -> None:
    overrides = ["model.d_model=256", override] if override == "model.d_model.x=3" else [override]
    assert words in refusal(*overrides)


def test_all_problems_are_reported_at_once() -> None:
    message = refusal("model.n_layers=-1", "training.seed=x", "data.nonsense=1")
    assert all(word in message for word in ("model.n_layers", "training.seed", "data.nonsense"))


def test_an_empty_file_asks_for_every_default(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing yet\n")
    assert load_config(tmp_path / "a.yaml") == (Config(), [])


def test_yaml_sections_may_be_merged_from_an_anchor(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: &small\n  d_model: 64\n  n_heads: 2\n")
    (tmp_path / "b.yaml").write_text("model:\n  <<: {d_model: 64, n_heads: 8}\n  n_heads: 2\n")
    assert load_config(tmp_path / "b.yaml") == load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("overrides", "section", "key", "expected"),
    [
        (["training.seed=1", "training.seed=2"], "training", "seed", 2),
        (["training.max_steps=null"], "training", "max_steps", None),
        (["training.report_to=[tensorboard, wandb]"], "training", "report_to", ["tensorboard", "wandb"]),
        (["training.learning_rate=1e-3"], "training", "learning_rate", 0.001),
        (["data.dataset_name={odd"], "data", "dataset_name", "{odd"),
        (["data.dataset_name=a=b"], "data", "dataset_name", "a=b"),
        (["training.compile=off"], "training", "compile", "off"),
    ],
)
def test_an_override_is_read_as_in_a_file_and_the_last_one_counts(
    overrides: list[str], section: str, key: str, expected: object
) -> None:
    assert load_config(None, overrides)[0].model_dump()[section][key] == expected


def test_an_override_takes_precedence_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model:\n  d_model: 64\n  n_layers: 3\n")
    model = load_config(tmp_path / "a.yaml", ["model.d_model=128"])[0].model
    assert (model.d_model, model.n_layers) == (128, 3)


def test_device_may_be_set_at_the_top_level_or_in_training_or_equally_in_both(tmp_path: Path) -> None:
    for place in ("device: cpu\n", "training:\n  device: cpu\n", "device: cpu\ntraining:\n  device: cpu\n"):
        (tmp_path / "a.yaml").write_text(place)
        assert load_config(tmp_path / "a.yaml")[0].training.device == "cpu"
    assert load_config(None, ["force_cpu=true"])[0].training.force_cpu


@pytest.mark.parametrize(
    "place", ["device: cpu\n", "training: {device: cpu}\n", "device: cpu\ntraining: {device: auto}\n"]
)
@pytest.mark.parametrize("key", ["device", "training.device"])
def test_an_overridden_device_takes_precedence_wherever_the_file_sets_it(tmp_path: Path, place: str, key: str) -> None:
    (tmp_path / "a.yaml").write_text(place)
    config, notes = load_config(tmp_path / "a.yaml", [f"{key}=cuda"])
    assert config.device == "cuda"
    elsewhere = key == "training.device" and place.startswith("device")
    note = '--set training.device=cuda overrides device: "cpu" at the top level of the file.'
    assert notes == ([note] if elsewhere else [])


@pytest.mark.parametrize(("text", "expected"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("true", "on")])
def test_yaml_switches_are_read_as_written(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.yaml").write_text(f"training:\n  compile: {text}\n")
    assert load_config(tmp_path / "a.yaml")[0].training.compile == expected


def test_yaml_toml_and_json_give_the_same_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("device: cpu\nmodel:\n  d_model: 64\ntraining:\n  learning_rate: 1e-3\n")
    (tmp_path / "a.toml").write_text('device = "cpu"\n[model]\nd_model = 64\n[training]\nlearning_rate = 1e-3\n')
    (tmp_path / "a.json").write_text('{"device": "cpu", "model": {"d_model": 64}, "training": {"learning_rate": 1e-3}}')
    loaded = [load_config(tmp_path / f"a.{form}")[0] for form in ("yaml", "toml", "json")]
    assert loaded[0] == loaded[1] == loaded[2]
    assert loaded[0].training.learning_rate == 0.001


def test_a_prefetch_factor_without_workers_is_dropped_with_one_note() -> None:
    config, notes = load_config(None, ["training.dataloader_num_workers=0", "training.dataloader_prefetch_factor=2"])
    assert config.training.dataloader_prefetch_factor is None
    assert config.training.prefetch == 0
    assert len(notes) == 1
    assert "prefetch_factor" in notes[0]
    assert load_config(None, ["training.dataloader_num_workers=0"])[1] == []
    config, notes = load_config(None, ["training.dataloader_num_workers=3", "training.dataloader_prefetch_factor=5"])
    assert (config.training.prefetch, notes) == (15, [])


def test_use_amp_means_a_precision() -> None:
    assert TrainingConfig(use_amp=True).precision == "auto"
    assert TrainingConfig(use_amp=False).precision == "fp32"
    assert TrainingConfig(precision="bf16").precision == "bf16"
    for precision in ("bf16", "int16", "int8"):
        assert f"precision is {precision}" in refusal("training.use_amp=false", f"training.precision={precision}")
    assert "use_amp true means mixed" in refusal("training.use_amp=true", "training.precision=fp32")


@settings(max_examples=30)
@given(
    st.builds(ModelConfig, n_heads=st.sampled_from([1, 2, 4]), d_model=st.sampled_from([64, 128])),
    st.builds(
        TrainingConfig,
        batch_size=st.one_of(st.just("auto"), st.integers(1, 9)),
        compile=st.sampled_from(["on", "off", "auto"]),
        device=st.sampled_from(["auto", "cpu", "cuda"]),
        report_to=st.sampled_from([[], ["tensorboard"], ["tensorboard", "wandb"]]),
        learning_rate=st.floats(1e-6, 1),
    ),
    st.builds(DataConfig, dataset_name=st.text(min_size=1, alphabet=st.characters(exclude_categories=["C"]))),
)
def test_a_saved_configuration_loads_unchanged(
    tmp_path_factory: pytest.TempPathFactory, model: ModelConfig, training: TrainingConfig, data: DataConfig
) -> None:
    config = Config(model=model, training=training, data=data)
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    save_config(config, path)
    assert load_config(path)[0] == config


def test_the_python_interface() -> None:
    config = Config(model=ModelConfig(d_model=64), training=TrainingConfig(force_cpu=True), data=DataConfig())
    assert config.training.get_effective_device().type == "cpu"
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert TrainingConfig(device="auto").get_effective_device().type == best
    assert TrainingConfig(device="cpu").get_effective_device().type == "cpu"
    assert TrainingConfig(device="cuda", force_cpu=True).get_effective_device().type == "cpu"
    assert Config.model_validate({"device": "cpu"}).device == "cpu"


def test_configuration_needs_no_torch() -> None:
    program = "import sys, sansgpu.config; sansgpu.config.load_config(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"


def test_derived_seeds_are_stable_and_distinct() -> None:
    assert derive_seed(42, "dropout", 1, 0, 0) == derive_seed(42, "dropout", 1, 0, 0)
    seeds = [derive_seed(s, p, a, b) for s in (1, 2) for p in ("dropout", "model") for a in range(9) for b in range(9)]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(42, "model") == 1959802467413677158  # if it changes, every seed gives a different model


@pytest.mark.parametrize(
    ("given", "architecture", "activation"),
    [
        ({}, "qwen3", "swiglu"),
        ({"activation": "swiglu"}, "qwen3", "swiglu"),
        ({"activation": "relu2"}, "apertus", "relu2"),
        ({"activation": "gelu"}, "gpt2", "gelu"),
        ({"activation": "relu"}, "gpt2", "relu"),
        ({"architecture": "llama"}, "llama", "swiglu"),
        ({"architecture": "apertus"}, "apertus", "relu2"),
        ({"architecture": "gpt2", "bias": None}, "gpt2", "gelu"),
        ({"architecture": "gpt2", "activation": "relu"}, "gpt2", "relu"),
        ({"qk_norm": False}, "llama", "swiglu"),
        ({"qk_norm": True, "activation": "relu2"}, "apertus", "relu2"),
        ({"norm": "layernorm"}, "gpt2", "gelu"),
        ({"positions": "learned"}, "gpt2", "gelu"),
        ({"bias": "attention"}, "qwen3", "swiglu"),
        ({"bias": "all"}, "llama", "swiglu"),
    ],
)
def test_the_architecture_follows_from_any_of_its_keys(
    given: dict[str, Any], architecture: str, activation: str
) -> None:
    config = as_config({"model": given})
    assert (config.model.decoder.name, config.model.activation) == (architecture, activation)
    assert as_config(config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"architecture": "llama", "activation": "gelu"},
            "architecture llama requires activation swiglu, but it is gelu; change activation, or set architecture to "
            "gpt2",
        ),
        (
            {"architecture": "llama", "qk_norm": True},
            "architecture llama requires qk_norm false, but it is true; change qk_norm, or set architecture to qwen3",
        ),
        (
            {"architecture": "qwen3", "bias": "all"},
            "qwen3 requires bias none or attention, but it is all; change bias, or set",
        ),
        ({"activation": "gelu", "bias": "none"}, "architecture gpt2 requires bias all, but it is none; change bias."),
        (
            {"activation": "swiglu", "norm": "layernorm"},
            "qwen3 requires norm rmsnorm, but it is layernorm; change norm.",
        ),
        (
            {"architecture": "apertus", "positions": "learned"},
            "apertus requires positions rope, but it is learned; change",
        ),
        ({"architecture": "gpt2", "n_kv_heads": 2}, "because GPT-2 has no grouped-query attention"),
        ({"architecture": "mamba"}, 'model.architecture is "mamba", but input should be '),
    ],
)
def test_unsupported_values_of_an_architecture_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        as_config({"model": given})
    assert sentence in str(error.value)


def test_a_run_recorded_before_the_key_architecture_is_still_recognized(tmp_path: Path) -> None:
    config = as_config({"model": {"activation": "relu2"}})
    later = {"architecture", "norm", "bias", "positions", "qk_norm"}
    recorded = identity(config)
    recorded["fixed"] = {k: v for k, v in recorded["fixed"].items() if k.removeprefix("model.") not in later}
    assert len(identity(config)["fixed"]) == len(recorded["fixed"]) + len(later)
    values = acting_values(config)
    require_identity(tmp_path / "config.yaml", values, [recorded])
    values["model"] = {key: value for key, value in values["model"].items() if key not in later}
    require_identity(tmp_path / "config.yaml", values, [recorded])


def test_a_section_inside_a_section_is_read_saved_and_reported_by_its_dotted_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("task: own:Task\ntraining:\n  preference:\n")  # an empty section uses the defaults
    overrides = ["training.preference.loss=ipo", ("training.preference.beta", 0.5)]
    config = load_config(file, overrides, trusted=False)[0]
    assert (config.training.preference.loss, config.training.preference.scale) == ("ipo", 0.5)
    config.training.preference.beta = 0.25
    save_config(config, file)
    assert load_config(file, trusted=False)[0].training.preference == config.training.preference
    values = acting_values(config)
    assert flatten(values)["training.preference.loss"] == "ipo"
    assert default_values(values)["training.preference.loss"] == "dpo"
    recorded = [identity(config)]
    values["training"]["preference"] |= {"beta": 1.0}
    require_identity(file, values, recorded)
    values["training"]["preference"] |= {"loss": "dpo"}
    with pytest.raises(ConfigError, match=r"training.preference.loss is dpo, but the run was trained with ipo"):
        require_identity(file, values, recorded)
    with pytest.raises(ConfigError, match=r"unknown key training.preference.lose \(did you mean .*preference.loss"):
        load_config(file, ["training.preference.lose=ipo"], trusted=False)
    with pytest.raises(ConfigError, match="gamma has no effect with loss ipo, only with simpo"):
        load_config(file, ["training.preference.gamma=2"], trusted=False)
