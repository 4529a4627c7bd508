"""Configuration files and flags written for other trainers are accepted."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import sansgpu
from sansgpu.cli import run as run_command_line
from sansgpu.config import Config, ConfigError, DataConfig, ModelConfig, TrainingConfig, change_config, load_config
from tests.processes import environment, finish, settings, write_corpus

OXIDIZR = """
model:
  hidden_size: 64
  num_layers: 2
  num_heads: 4
  kv_heads: 2
  vocab_size: 600
  max_seq_len: 32
  rope_theta: 10000.0
  intermediate_size: 96
trainer:
  target_device: gpu
  learning_rate: 0.0003
  batch_size: 2
  max_steps: 0
  num_epochs: 2
  gradient_accumulation: 4
  checkpoint_dir: "./checkpoints"
  log_interval: 10
  save_interval: 500
  max_checkpoints: 3
"""
SANSGPU = [
    "model.d_model=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.vocab_size=600",
    "model.max_seq_len=32", "model.rope_theta=10000", "model.d_ff=96", "device=cuda", "training.learning_rate=0.0003",
    "training.batch_size=2", "training.num_epochs=2", "training.gradient_accumulation_steps=4",
    "training.checkpoint_dir=./checkpoints", "training.logging_steps=10", "training.save_steps=500",
]  # fmt: skip


def test_a_file_of_oxidizr_is_read_and_one_line_names_our_keys(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(OXIDIZR)
    (tmp_path / "ours.yaml").write_text("")
    config, [note] = load_config(tmp_path / "theirs.yaml")
    assert config == load_config(tmp_path / "ours.yaml", SANSGPU)[0]
    for replaced in ("trainer as training", "model.hidden_size as d_model", "training.save_interval as save_steps"):
        assert replaced in note
    assert "max_seq_len" not in note


@pytest.mark.parametrize(
    ("override", "own"),
    [
        ("trainer.gradient_accumulation=3", "training.gradient_accumulation_steps=3"),
        ("training.bf16=true", "training.precision=bf16"),
        ("training.use_cpu=true", "training.force_cpu=true"),
        ("training.num_train_epochs=2", "training.num_epochs=2"),
        ("data.max_seq_length=64", "data.max_length=64"),
    ],
)
def test_an_override_by_another_name_replaces_the_value_of_the_file(tmp_path: Path, override: str, own: str) -> None:
    (tmp_path / "a.yaml").write_text("training: {gradient_accumulation_steps: 8, precision: fp32, num_epochs: 7}")
    config, [note] = load_config(tmp_path / "a.yaml", [override])
    assert config == load_config(tmp_path / "a.yaml", [own])[0]
    assert f"{override.partition('=')[0]} as {own.partition('=')[0]}" in note


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"training": {"lr": 1, "learning_rate": 1}},
            "training.lr and training.learning_rate are names of the same key",
        ),
        ({"training": {"seed": 1}, "trainer": {"lr": 1}}, "trainer and training are two names of the same section"),
        ({"model": {"hidden_size": "wide"}}, "model.d_model is"),
        ({"trainer": {"mamba": 1}}, "unknown key training.mamba"),
        ({"trainer": 3}, "training is 3"),
    ],
)
def test_what_cannot_be_read_is_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(ConfigError, match=words) as of_file:
        load_config(tmp_path / "a.yaml")
    assert "a.yaml" in str(of_file.value)
    with pytest.raises(ConfigError, match=words):
        sansgpu.fit(values, tmp_path / "run")


def test_sections_made_in_python_take_other_names() -> None:
    config = Config(
        task="sft",
        model=ModelConfig(model_name_or_path="m"),
        training=TrainingConfig(bf16=True, use_cpu=True),
        data={"train_file": "rows.jsonl", "max_seq_length": 64},
    )
    assert (config.training.precision, config.training.force_cpu, config.data.max_length) == ("bf16", True, 64)
    assert Config(training={"num_train_epochs": 2}).training.num_epochs == 2
    assert DataConfig(validation_file="v").validation_name == "v"
    config.training.bf16 = False
    assert config.training.precision == "fp32"
    with pytest.raises(ConfigError, match=r"training\.bf16 and training\.precision are names of the same key"):
        TrainingConfig(bf16=True, precision="fp32")
    with pytest.raises(ValidationError, match="bf17"):
        TrainingConfig(bf17=True)


FLAGS = {
    "--learning_rate=0.01": "training.learning_rate: 0.01",
    "--bf16": "training.precision: bf16",
    "--use_cpu": "training.force_cpu: true",
    "--ddp_backend=gloo": "training.distributed_backend: gloo",
    "--save_total_limit=4": "training.keep_last: 4",
    "--num-train-epochs=2": "training.num_epochs: 2.0",
    "--per_device_train_batch_size=3": "training.batch_size: 3",
    "--weight_decay=0.2": "training.weight_decay: 0.2",
    "--warmup_steps=1": "training.warmup_steps: 1",
    "--gradient_accumulation_steps=5": "training.gradient_accumulation_steps: 5",
    "--max_seq_length=16": "data.max_length: 16",
    "--max_steps=2": "training.max_steps: 2",
    "--seed=3": "training.seed: 3",
}


def test_train_takes_flags_of_other_trainers_and_warns_of_another_world_size(tmp_path: Path) -> None:
    chosen = settings(data__dataset_name=write_corpus(tmp_path / "corpus.jsonl"), training__world_size=2)
    arguments = ["train", *chosen, *FLAGS, "--do_train", "--do_eval", "--dry-run"]
    arguments += ["--output_dir", str(tmp_path / "run")]
    code, out, error = finish(arguments, tmp_path / "cache")
    assert code == 0, error
    shown = yaml.safe_load(out.partition("# First")[0])["config"]
    for setting in FLAGS.values():
        key, _, value = setting.partition(": ")
        section, name = key.split(".")
        assert shown[section][name] == yaml.safe_load(value), setting
    assert "training.world_size is 2, but the world size is 1" in error


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--do_eval", "--do_eval without --do_train trains nothing; use `sansgpu eval RUN`"),
        ("--do_predict", "there is no option --do_predict (`sansgpu predict RUN` writes predictions); see"),
        ("--overwrite_output_dir", "a run never overwrites an existing one"),
    ],
)
def test_a_flag_without_a_counterpart_is_explained(flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["train", flag]) == 2
    assert words in capsys.readouterr().err


def test_fit_reads_other_names_and_records_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANSGPU_CACHE", environment(tmp_path / "cache")["SANSGPU_CACHE"])
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=20)
    config = load_config(None, settings(data__dataset_name=corpus)[1::2])[0]
    values = {**change_config(config, []).given_values(), "training": {"lr": 0.01, "max_steps": 1, "report_to": "none"}}
    run = sansgpu.fit(values, tmp_path / "run", quiet=True)
    assert run.record.config["training"]["learning_rate"] == 0.01
    assert "training.lr as learning_rate" in run.events("warning")[0]["message"]
