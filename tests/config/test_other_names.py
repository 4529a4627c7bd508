"""Configuration files and flags written for other trainers are accepted."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import sansgpu
from sansgpu.cli import run as run_command_line
from sansgpu.config import Config, ConfigError, DataConfig, ModelConfig, TrainingConfig, change_config
from sansgpu.config.other_names import KEYS
from sansgpu.config.remedies import COUNTERPARTS
from sansgpu.config.section import all_keys
from sansgpu.tasks.configuration import load_config
from tests.processes import environment, finish, messages, settings, write_corpus

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
    "--bf16=True": "training.precision: bf16",
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
    "--use_cpu": "training.force_cpu: true",  # followed by True, below
}


def test_train_takes_flags_of_other_trainers_and_warns_of_another_world_size(tmp_path: Path) -> None:
    chosen = settings(data__dataset_name=write_corpus(tmp_path / "corpus.jsonl"), training__world_size=2)
    arguments = ["train", *chosen, *FLAGS, "True", "--do_train=true", "--do_eval", "True", "--dry-run"]
    arguments += ["--output_dir", str(tmp_path / "run")]
    code, out, error = finish(arguments, tmp_path / "cache")
    assert code == 0, error
    shown = yaml.safe_load(out.partition("# First")[0])["config"]
    for setting in FLAGS.values():
        key, _, value = setting.partition(": ")
        section, name = key.split(".")
        assert shown[section][name] == yaml.safe_load(value), setting
    assert "training.world_size is 2, but the world size is 1" in error


def test_a_batch_size_per_device_is_refused_with_several_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, ours, key = tmp_path / "theirs.yaml", "training.batch_size=4", "per_device_train_batch_size"
    file.write_text(f"training: {{{key}: 4, gradient_accumulation_steps: 3}}\ndata: {{dataset_name: python-stdlib}}")
    flags = [f"--{key}=4", "--gradient_accumulation_steps=3"]
    two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun sets them
    for given in ([str(file)], flags, [str(file), "--set", ours, "--set", f"training.{key}=4"]):
        code, _, error = finish(["train", *given, "--output-dir", str(tmp_path / "run")], tmp_path / "cache", **two)
        assert (code, len(messages(error))) == (2, 1), error
        assert "per_device_train_batch_size 4 would count for each of the 2 processes" in error
        assert "set training.batch_size=4 and training.gradient_accumulation_steps=6." in error
    for command in (["plan", str(file), "--nodes", "2"], ["slurm", str(file), "--nodes", "2"]):
        assert run_command_line(command) == 2
        assert "would count for each of the 2 processes" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        for name, value in two.items():
            patch.setenv(name, value)
        with pytest.raises(ConfigError, match="each of the 2 processes"):
            sansgpu.fit({"training": {key: 4}}, tmp_path / "run")
    assert load_config(file, [ours], processes=2)[0].training.batch_size == 4


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


def refusal_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_command_line(arguments) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sansgpu: ")]
    return line


# Flags of other programs' scripts that are none of ours, with what the message says about each.
SCRIPTS = {
    "LLaMA-Factory": (
        "--stage sft --do_train True --finetuning_type lora --template qwen3 --cutoff_len 2048 --lora_target all "
        "--val_size 0.1 --quantization_bit 4 --max_samples 9 --plot_loss True --lora_rank 8 --bf16 --report_to none",
        {
            "--stage": "--set task=VALUE",
            "--finetuning_type": "--set model.adapter=VALUE",
            "--template": "--set data.chat_template=VALUE",
            "--cutoff_len": "--set data.max_length=VALUE",
            "--lora_target": "--set model.lora_targets=VALUE",
            "--val_size": "--set data.validation_split=VALUE",
            "--quantization_bit": "--set model.base_precision=VALUE",
            "--max_samples": "use a shorter file, or max_steps for a shorter run",
            "--plot_loss": "`sansgpu report RUN` plots the loss; remove it",
            "--lora_rank": "--set model.lora_rank=VALUE",
            "--report_to": "--set training.report_to=VALUE",
        },
    ),
    "TRL": (
        "--model_name_or_path m --dataset_name d --use_peft --lora_r 32 --packing --eval_strategy steps "
        "--loss_type ipo --push_to_hub --learning_rate 2e-4",
        {
            "--use_peft": "--set model.adapter=lora",
            "--lora_r": "--set model.lora_rank=VALUE",
            "--packing": "--set data.pack_sequences=VALUE",
            "--eval_strategy": "--set training.eval_steps=VALUE",
            "--loss_type": "--set training.preference.loss=VALUE",
            "--push_to_hub": "`sansgpu export RUN --push-to-hub OWNER/NAME` uploads the model",
        },
    ),
    "run_glue, run_ner, run_clm and run_mlm": (
        "--task_name mrpc --text_column_name t --mlm_probability 0.2 --pad_to_max_length --config_name gpt2 --fp16",
        {
            "--task_name": "set data.dataset_name and data.dataset_config to the dataset and its subset",
            "--text_column_name": "--set data.text_column=VALUE",
            "--mlm_probability": "--set data.mask_ratio=VALUE",
            "--pad_to_max_length": "rows are packed without padding; remove it",
            "--config_name": "the keys of section model describe a model to train from scratch",
            "--fp16": "CPUs compute in bf16 or fp32; use bf16",
        },
    ),
    "accelerate": (
        "--num_processes 2 --mixed_precision bf16 --cpu",
        {
            "--num_processes": "`--processes N` or torchrun starts several processes",
            "--mixed_precision": "--set training.precision=VALUE",
            "--cpu": "--set training.force_cpu=true",
        },
    ),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_unknown_flags_of_a_script_are_answered_at_once(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags, answers = SCRIPTS[script]
    said = refusal_of(["train", *flags.split()], capsys)
    expected = ", ".join(f"{flag} ({answer})" for flag, answer in answers.items())
    assert said == f"sansgpu: there are no options {expected}; see sansgpu train --help."


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--do_train False", "--do_train False trains nothing; use `sansgpu eval RUN`"),
        ("--do_eval false", "use --eval_steps 0 to evaluate only at the end"),
        ("--bf16=maybe", "--bf16 is maybe, but must be true or false"),
        ("--version_2_with_negative False --set task=classify", "data.null_answers is for task qa"),
        ("--bf16 False --set training.use_amp=true", "use_amp true means mixed precision, but precision is fp32"),
        ("--model_name_or_path m --dataset_name d", "or --set task=TASK, where TASK is one of graph, sft, qa, "),
        ("--set model.name_or_path=m", "has no effect in pretrain; set task, or remove it"),
        ("-f qa --doc_stride 3 --stride 4", "there is no option --stride"),
        ("--frobnicate --lr=1 --zip --zip", "there are no options --frobnicate, --zip; see sansgpu train --help"),
    ],
)
def test_flags_that_cannot_work_say_what_to_write(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal_of(["train", *flags.split()], capsys)


LLAMA_FACTORY = (
    "model_name_or_path stage do_train finetuning_type lora_rank lora_target dataset template cutoff_len max_samples "
    "overwrite_cache preprocessing_num_workers output_dir logging_steps plot_loss per_device_train_batch_size "
    "learning_rate num_train_epochs lr_scheduler_type warmup_ratio bf16 ddp_timeout resume_from_checkpoint val_size"
)
AXOLOTL = (
    "base_model load_in_4bit datasets val_set_size output_dir adapter sequence_len sample_packing lora_r lora_alpha "
    "lora_target_modules micro_batch_size num_epochs optimizer train_on_inputs flash_attention evals_per_epoch"
)
MAMBA = (
    "mamba_layers mamba2_num_heads mamba2_head_dim mamba2_state_size mamba2_chunk_size mamba2_n_groups mamba2_expand"
)
NANO = f"{MAMBA} name kv_latent_dim q_latent_dim d_rope num_experts experts_per_tok shared_expert_enabled"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            dict.fromkeys(LLAMA_FACTORY.split(), 1),
            "model_name_or_path (write model.name_or_path); stage (write task); do_train (`sansgpu train` always",
        ),
        (
            dict.fromkeys(AXOLOTL.split(), 1),
            "base_model (write model.name_or_path); load_in_4bit (write model.base_precision: int4); datasets (write",
        ),
        (
            {"trainer": dict.fromkeys(["max_epochs", "accumulate_grad_batches", "default_root_dir", "devices"], 1)},
            "training.max_epochs (write training.num_epochs)",
        ),
        (
            {"model": "mlx-community/m", "data": "rows", "iters": 9, "steps_per_eval": 3, "fine_tune_type": "lora"},
            "but a section must contain keys and values; write data.dataset_name",
        ),
        (
            {"training": {"output_dir": "x", "bf16": True}},
            "unknown key training.output_dir (the run folder is not part of",
        ),
        (
            {
                "model": {"hidden_size": 64, "kv_heads": None, **dict.fromkeys(NANO.split(), 1)},
                "trainer": {"load_balance_alpha": 0.01, "group_size": 4, "beta_kl": 0.04},
            },
            "Mamba layers are not trained from scratch; remove it, or fine-tune a Mamba model",
        ),
    ],
    ids=["LLaMA-Factory", "axolotl", "Lightning", "MLX LM", "TrainingArguments", "oxidizr"],
)
def test_a_file_of_another_program_is_answered_key_by_key(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "theirs.yaml")
    said = str(refused.value)
    assert words in said
    inner = [key for value in values.values() if isinstance(value, dict) for key in value]
    known = {"hidden_size", "kv_heads", "bf16"} if inner else set()
    assert [key for key in inner or values if key not in known and key not in said] == []


def test_suggested_replacements_are_keys() -> None:
    keys = {*dict(all_keys(Config)), "task", "device"}
    assert {text.partition("=")[0] for text in COUNTERPARTS.values()} <= keys
    assert {f"{section}.{key}" for section, names in KEYS.items() for key in names.values()} <= keys


def test_fit_reads_other_names_and_records_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANSGPU_CACHE", environment(tmp_path / "cache")["SANSGPU_CACHE"])
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=20)
    config = load_config(None, settings(data__dataset_name=corpus)[1::2])[0]
    values = {**change_config(config, []).given_values(), "training": {"lr": 0.01, "max_steps": 1, "report_to": "none"}}
    run = sansgpu.fit(values, tmp_path / "run", quiet=True)
    assert run.record.config["training"]["learning_rate"] == 0.01
    assert "training.lr as learning_rate" in run.events("warning")[0]["message"]
