"""Functions that try what rows of docs/guides.md say; each takes an empty folder."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.elastic.utils.logging import get_logger

import sansgpu
from sansgpu.config import Config, ConfigError, DataConfig, ModelConfig, RunPaths, TrainingConfig, change_config
from sansgpu.data.tokenizer import BPETokenizer
from sansgpu.events.event import Sinks
from sansgpu.jobs.tune.search_space import load_space
from sansgpu.kernels import library
from sansgpu.machine.execution import Execution
from sansgpu.machine.memory import effective_batch
from sansgpu.models import TransformerLM
from sansgpu.planning.presets import compare_presets, presets_that_fit
from sansgpu.planning.resolve import ResolveOptions, ignore_message, resolve_run
from sansgpu.planning.suggestions import asked_changes
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from sansgpu.train import Trainer
from tests.processes import TINY, finish, options, overrides, write_corpus
from tests.project import ROOT
from tests.tasks.folders import model_folder, squad

PAGE = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
Try = Callable[[Path], object]


@cache
def small_run() -> sansgpu.Run:
    """Returns a finished run of a few steps."""
    folder = Path(mkdtemp(prefix="guides-"))
    chosen = [f"data.dataset_name={write_corpus(folder / 'corpus.jsonl')}", "training.max_steps=4"]
    logged = ["training.report_to=[tensorboard]", f"training.logging_dir={folder / 'logs'}"]
    return sansgpu.fit(None, folder / "run", overrides=[*overrides(TINY), *chosen, *logged], quiet=True)


def dry_run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Returns the configuration that `sansgpu train ARGUMENTS --dry-run` prints."""
    code, out, error = finish(["train", *arguments, "--dry-run"], folder / "cache")
    assert code == 0, error
    shown: dict[str, Any] = yaml.safe_load(out.partition("# First")[0])
    return {"error": error, "output_dir": shown["output_dir"], **shown["config"]}


def train_script(folder: Path) -> None:
    tiny = options(TINY, {"data.dataset_name": write_corpus(folder / "corpus.jsonl"), "data.max_length": 32})
    output = ["--output_dir", str(folder / "run")]
    shown = dry_run(folder, "--config", "configs/cpu_small_model.yaml", *output, *tiny)
    assert (shown["training"]["num_epochs"], shown["output_dir"]) == (5, str(folder / "run"))
    assert "configs/cpu_small.yaml is used" in shown["error"]
    assert load_config(Path("configs/cpu_medium_model.yaml"))[0] == load_config(Path("cpu_medium"))[0]


def sections(_: Path) -> None:
    model = ModelConfig(
        vocab_size=32000, d_model=256, n_heads=4, n_layers=4, d_ff=1024, max_seq_len=512, dropout=0.1,
        gradient_checkpointing=False,
    )  # fmt: skip
    training = TrainingConfig(
        device="cpu", batch_size=2, learning_rate=8e-4, num_epochs=5, gradient_accumulation_steps=8, use_amp=False,
        dataloader_num_workers=2, dataloader_pin_memory=False, logging_steps=25, eval_steps=250, save_steps=500,
        checkpoint_dir="./checkpoints/cpu_model",
    )  # fmt: skip
    data = DataConfig(
        dataset_name="wikitext", dataset_config="wikitext-2-raw-v1", max_length=512, vocab_size=32000,
        pack_sequences=True, preprocessing_num_workers=2,
    )  # fmt: skip
    assert Config(model=model, training=training, data=data).training.learning_rate == 8e-4


def devices(_: Path) -> None:
    for config in (TrainingConfig(device="cpu"), TrainingConfig(device="cuda", force_cpu=True)):
        assert config.get_effective_device() == torch.device("cpu")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    assert TrainingConfig(device="auto").get_effective_device() == torch.device(found)


def assigned_fields(_: Path) -> None:
    base = TrainingConfig()
    config = base.copy()
    for key, value in {"learning_rate": 2e-3, "batch_size": 4, "warmup_steps": 500, "weight_decay": 0.05}.items():
        setattr(config, key, value)
    assert (config.batch_size, config.warmup_steps, base.warmup_steps) == (4, 500, 10)
    with pytest.raises(ConfigError, match=r"training\.batch_size is 0"):
        config.batch_size = 0


def epochs(_: Path) -> None:
    assert list(range(TrainingConfig().num_epochs)) == [0]  # type: ignore[arg-type]
    assert list(range(TrainingConfig(num_epochs=5).num_epochs)) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]


def forward_pass(_: Path) -> None:
    model = TransformerLM(ModelConfig(vocab_size=1000, d_model=128, n_heads=4, n_layers=2, max_seq_len=256))
    ids = torch.randint(0, 1000, (4, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids)
        library.load()
        assert torch.allclose(model(ids), plain, atol=1e-4)
    assert plain.shape == (4, 256, 1000)


def own_loop(_: Path) -> None:
    tokenizer = BPETokenizer()
    ids = torch.tensor([tokenizer.encode("the model learns a word")] * 2)
    model = TransformerLM(ModelConfig(vocab_size=tokenizer.vocab_size, d_model=32, n_heads=2, n_layers=1, d_ff=48))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _epoch in range(TrainingConfig(num_epochs=5).num_epochs):  # type: ignore[arg-type]
        loss = model(**{"input_ids": ids, "labels": ids}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TrainingConfig().max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def no_amp(folder: Path) -> None:
    (folder / "a.yaml").write_text("training: {use_amp: false}")
    config = load_config(folder / "a.yaml")[0]
    assert config.training.precision == "fp32"


def settings_load(*chosen: str) -> Try:
    """Tries settings together, in the guide's small configuration."""

    def load(_: Path) -> None:
        config, _notes = load_config(Path("cpu_small"), chosen)
        assert all(
            f"'{setting.partition('=')[0].rpartition('.')[2]}'" in str(config.model_dump()) for setting in chosen
        )
        assert config.window <= config.model.max_seq_len

    return load


def per_process(_: Path) -> None:
    training = TrainingConfig(distributed_backend="gloo", world_size=4, batch_size=1, gradient_accumulation_steps=4)
    assert effective_batch(training) == 4  # summed over processes


def measured_while_training(_: Path) -> None:
    event = small_run().events("step")[-1]
    assert event["rss_bytes"] > 1e7
    assert event["cpu_percent"] >= 0
    assert (small_run().folder / "report.html").is_file()


def tensorboard(_: Path) -> None:
    assert [*(small_run().folder.parent / "logs").rglob("events.out.tfevents.*")]


def log_training_stats(trainer: Any) -> str:
    """Does what the guide's function of this name does."""
    last = trainer.state.log_history[-1]
    speed = last["train_samples_per_second"]
    return f"Loss: {last['train_loss']:.4f}, Learning Rate: {last['learning_rate']:.2e}, {speed:.2f}"


def log_history(folder: Path) -> None:
    config = load_config(None, [*overrides(TINY), f"data.dataset_name={write_corpus(folder / 'corpus.jsonl')}"])[0]
    config = change_config(config, ["training.max_steps=2", "training.eval_steps=0", "training.save_steps=0"])
    run = resolve_run(config, lambda *_: None, ignore_message, ResolveOptions("report", timed="never"))
    task = task_of(run.config)(run.config, run.corpus, effective_batch(run.config.training))
    trainer = Trainer(task, replace(run, paths=RunPaths(folder / "run")), Sinks([]))
    trainer.train()
    for done in (trainer, small_run()):
        assert log_training_stats(done).startswith("Loss: ")
    assert trainer.state.log_history[-1]["step"] == trainer.state.global_step == 2


def search_space(folder: Path) -> None:
    space = {
        "learning_rate": [5e-4, 8e-4, 1e-3, 2e-3], "batch_size": [1, 2, 4], "gradient_accumulation_steps": [8, 16, 32],
        "warmup_steps": [20, 50, 100], "weight_decay": [0.01, 0.05, 0.1],
    }  # fmt: skip
    (folder / "space.yaml").write_text(yaml.safe_dump(space))
    assert len(load_space(folder / "space.yaml", load_config(Path("cpu_small"))[0])) == len(space)


def presets(_: Path) -> None:
    assert [round(row["parameters"] / 1e6) for row in compare_presets(())] == [25, 117, 347]
    assert [row["fits"] for row in presets_that_fit(16 * 10**9, 3600, None)["presets"]] == [True] * 3


def cpu_and_gpu(_: Path) -> None:
    for device, batch, accumulated, mixed in (("cpu", 2, 8, False), ("cuda", 16, 1, True)):
        training = TrainingConfig(
            device=device, batch_size=batch, gradient_accumulation_steps=accumulated, use_amp=mixed,
            dataloader_pin_memory=mixed,
        )  # fmt: skip
        assert Config(training=training).device == device


GRAPH = ("model.n_relations=12", "model.vocab_size=8000", "data.vocab_size=8000")


def graph_of(*changes: str) -> Config:
    return load_config(Path("graph_80m"), [*GRAPH, *changes])[0]


def graph_sizes(_: Path) -> None:
    config = graph_of()
    parts = {name: round(number / 1e6) for name, number in task_of(config).costs(config).parameters().items()}
    assert parts["attention"] + parts["feed_forward"] == 85
    assert (parts["embedding"], parts["relations"], config.window) == (6, 8, 512)
    for changes, millions in (((), 99), (("model.relation_rank=64",), 93)):
        config = graph_of(*changes)
        assert round(sum(task_of(config).costs(config).parameters().values()) / 1e6) == millions
    assert (config.training.batch_size, config.training.gradient_accumulation_steps) == (1, 4)


def short_windows(_: Path) -> None:
    assert graph_of("model.max_seq_len=32").window == 128


def variations(_: Path) -> None:
    changes = asked_changes(
        graph_of("model.n_heads=8"), ["model.max_seq_len=32", "model.n_layers=8", "model.d_model=512"]
    )
    assert [name for name, _, _ in changes] == ["model.max_seq_len=32", "model.n_layers=8", "model.d_model=512"]


def graph_memory(_: Path) -> None:
    config = graph_of()
    memory = task_of(config).costs(config).memory(Execution(1, 4, "bf16", kernels="native", optimizer="adamw"))
    assert 3.5e9 < memory.total < 4.5e9


def run_qa(folder: Path) -> None:
    flags = (
        "--do_train --do_eval --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2 "
        "--max_seq_length 384 --doc_stride 128 --bf16 --use_cpu"
    )
    names = ["--model_name_or_path", str(model_folder("bert")), "--dataset_name", str(squad(folder / "squad.json"))]
    shown = dry_run(folder, *names, *flags.split(), "--output_dir", str(folder / "run"))
    assert "so the task is qa; --set task=TASK chooses another" in shown["error"]
    training, data = shown["training"], shown["data"]
    assert (shown["task"], training["batch_size"], training["gradient_accumulation_steps"]) == ("qa", 12, 1)
    assert (training["learning_rate"], training["num_epochs"], training["precision"]) == (3e-5, 2, "bf16")
    assert (data["max_length"], data["doc_stride"], training["force_cpu"]) == (384, 128, True)


def training_arguments(folder: Path) -> None:
    assert TrainingConfig(bf16=True, use_cpu=True).precision == "bf16"
    (folder / "a.yaml").write_text("training: {output_dir: x, bf16: true, use_cpu: true}")
    with pytest.raises(ConfigError, match=r"remove it, and pass `--output-dir DIR`"):
        load_config(folder / "a.yaml")
    assert small_run().folder.name == "run"  # the second argument of `sansgpu.fit`


def says(page: str, *words: str) -> Try:
    """Tries that a page of the documentation has these words."""

    def check(_: Path) -> None:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert [word for word in words if word not in text] == []

    return check


def loglevel(folder: Path) -> None:
    says("kubernetes.md", "{name: LOGLEVEL, value: INFO}")(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGLEVEL", "DEBUG")
        assert get_logger("sansgpu.guides").level == 10


def streaming(folder: Path) -> None:
    (folder / "a.yaml").write_text("sampling: {stream: true}")
    with pytest.raises(ConfigError, match=r"sampling\.stream is not supported in training"):
        load_config(folder / "a.yaml")


def smoke(_: Path) -> None:
    assert "-m tools.smoke" in (ROOT / "Makefile").read_text()
    assert 'os.environ.get("SANSGPU_LIVE_MODEL")' in (ROOT / "tools/smoke.py").read_text()


def oxidizr_flags(folder: Path) -> None:
    flags = "-f models/nano.yaml --target-device cpu --batch-size 1 --seq-len 32 --prefetch 2 --max-steps 2 --headless"
    tiny = {**TINY, "training.batch_size": "", "model.n_kv_heads": 1, "data.dataset_name": folder / "corpus.jsonl"}
    write_corpus(folder / "corpus.jsonl")
    command = ["train", *flags.split(), *options(tiny), "--output-dir", str(folder / "run")]
    code, out, error = finish(command, folder / "cache")
    assert code == 0, error
    events = [json.loads(line) for line in out.splitlines()]
    assert (events[0]["event"], events[-1]["event"], events[-1]["step"]) == ("start", "end", 2)
    assert "configs/nano.yaml is used" in events[1]["message"]


def oxidizr_keys(folder: Path) -> None:
    (folder / "a.yaml").write_text("trainer: {batch_size: 1, gradient_accumulation: 4, target_device: cpu}")
    config, [note] = load_config(folder / "a.yaml")
    training = config.training
    assert (training.batch_size, training.gradient_accumulation_steps, training.device) == (1, 4, "cpu")
    assert "training.gradient_accumulation as gradient_accumulation_steps" in note


def authors_nano(folder: Path) -> None:
    plain = {"hidden_size": 384, "num_layers": 8, "num_heads": 6, "kv_heads": None, "intermediate_size": 1536}
    special = {"mamba_layers": [0, 1], "mamba2_num_heads": 48, "num_experts": 4, "kv_latent_dim": 192}
    file = folder / "nano.yaml"
    file.write_text(yaml.safe_dump({"model": {**plain, **special}}, sort_keys=False))
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    for words in ("model.mamba_layers, model.mamba2_num_heads (Mamba layers are not", *special):
        assert words in str(refused.value)
    file.write_text(yaml.safe_dump({"model": plain}))
    assert load_config(file)[0].model.d_model == 384


def nano_size(_: Path) -> None:
    config = load_config(Path("nano"))[0]
    assert round(sum(task_of(config).costs(config).parameters().values()) / 1e6) == 83
    assert math.isfinite(float(re.search(r"([\d.]+) it/s with", PAGE)[1]))  # type: ignore[index]


def on_gpu(_: Path) -> None:
    assert load_config(Path("nano"), [("device", "cuda")])[0].device == "cuda"
