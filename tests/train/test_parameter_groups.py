"""Weight decay and Muon depend on the role of a parameter, including in mixtures of experts and convolutions."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tools.tiny_model import make_folder
from torch import nn
from transformers import AutoModelForCausalLM

from sansgpu.config import ConfigError, TrainingConfig
from sansgpu.events.event import EventBuffer
from sansgpu.jobs.train import TrainRequest, train
from sansgpu.kernels.newton_schulz import newton_schulz
from sansgpu.train.optim import Optimizer
from tests.processes import use_cache
from tests.tasks.folders import chat_rows

MOE = {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
       "shared_expert_intermediate_size": 40}  # fmt: skip
LFM = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
MODELS: dict[str, dict[str, Any]] = {"qwen2_moe": MOE, "lfm2": LFM}
NAMES = ["qwen2_moe", pytest.param("lfm2", marks=pytest.mark.long)]
SETTINGS = [
    "task=sft", "training.max_steps=2", "training.batch_size=2", "training.gradient_accumulation_steps=2",
    "training.learning_rate=0.01", "training.warmup_steps=0", "training.weight_decay=0.1",
    "training.lr_scheduler=constant", "training.compile=off", "training.report_to=none", "training.threads=1",
    "training.eval_steps=0", "device=cpu",
]  # fmt: skip


@cache
def folder_of(name: str) -> Path:
    return make_folder(Path(mkdtemp(prefix=f"tiny-{name}-")), "qwen2", **MODELS[name])


def is_table_or_vector(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim < 2 or "embed_tokens" in name or "lm_head" in name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("name", NAMES)
def test_decay_is_for_all_that_multiplies_and_muon_for_matrices(name: str, optimizer: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder_of(name))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    values = {"optimizer": optimizer, "weight_decay": 0.5, "muon_embedding_rate": 1.0}
    training = TrainingConfig.model_validate(values)
    updates = Optimizer(model, training, torch.float32)
    draw = torch.Generator().manual_seed(0)
    gradients = {w.name: torch.randn(w.master.shape, generator=draw) for w in updates.weights}
    for weight in updates.weights:
        weight.gradient = gradients[weight.name].clone()
    updates.step(0.01, step=1, scale=1.0)
    for n, parameter in model.named_parameters():
        decay = 1.0 if is_table_or_vector(n, parameter) else 1 - 0.01 * 0.5
        step = (parameter.detach() - before[n] * decay) / 0.01
        if is_table_or_vector(n, parameter) or "conv.conv" in n or optimizer == "adamw":
            expected = -gradients[n].sign()  # the first step of AdamW
        else:  # Muon updates each matrix of a stack separately
            stack = gradients[n].view(-1, *gradients[n].shape[-2:])
            expected = -torch.stack([newton_schulz(matrix[None], torch.float32)[0] for matrix in stack])
            expected = expected.view_as(step) * 0.2 * math.sqrt(max(stack.shape[1:]))
        torch.testing.assert_close(step, expected, rtol=2e-3, atol=2e-3, msg=n)


@pytest.mark.parametrize("name", NAMES)
def test_muon_trains_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    rows, folder, sink = chat_rows(tmp_path / "chat.jsonl"), folder_of(name), EventBuffer()
    given = [f"model.name_or_path={folder}", f"data.dataset_name={rows}", "data.max_length=64"]
    train(TrainRequest(None, (*SETTINGS, *given, "training.optimizer=muon"), tmp_path / "run"), [sink], lambda *_: None)
    moments = load_file(tmp_path / "run/snapshots/step-000002/optimizer.safetensors")
    experts = {n for n in moments if ".experts." in n}
    assert all(n.startswith("momentum.") for n in experts)
    assert bool(experts) == (name == "qwen2_moe")
    assert all(n.startswith("exp_avg") for n in moments if "conv.conv" in n)
    losses = [e["loss"] for e in sink.events if e["event"] == "step"]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)


def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has no trainable matrices; set it to adamw"):
        Optimizer(nn.Embedding(5, 3), TrainingConfig(optimizer="muon"), torch.float32)
