"""Estimated costs of a decoder match real models."""

import itertools
from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.kernels import library
from sansgpu.kernels.attention import causal_ranges
from sansgpu.kernels.norm import residual
from sansgpu.machine.execution import Execution
from sansgpu.models import TransformerLM, architectures
from sansgpu.tasks.pretrain.costs import DecoderCosts
from tests.models.kept import kept_bytes_of


def costs(model: ModelConfig, window: int = 16) -> DecoderCosts:
    return DecoderCosts(model, TrainingConfig(), window, window)


ARCHITECTURES = ("qwen3", "llama", "apertus", "qwen3_5_text", "gpt2")


@given(
    st.sampled_from(ARCHITECTURES),
    st.integers(1, 6),
    st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.integers(1, 3),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 2),
)
def test_the_parts_add_up_to_the_model(
    architecture: str, layers: int, heads: tuple[int, int], widths: int, vocabulary: int, tied: bool, bias: int
) -> None:
    biases = architectures.ARCHITECTURES[architecture].bias
    grouped = {} if architecture == "gpt2" else {"n_kv_heads": heads[1]}
    config = ModelConfig.model_validate(
        {
            "architecture": architecture, "n_layers": layers, "n_heads": heads[0], **grouped, "d_model": 8 * heads[0],
            "d_ff": 8 * widths, "bias": biases[bias % len(biases)], "vocab_size": vocabulary,
            "max_seq_len": 16, "tie_embeddings": tied,
        }
    )  # fmt: skip
    parts = costs(config).parameters()
    assert sum(parts.values()) == TransformerLM(config, seed=None).parameter_count
    assert ("head" in parts) == (not tied)


def test_flops_of_a_token_by_hand() -> None:
    modern = ModelConfig(vocab_size=10, d_model=4, n_heads=1, n_layers=1, d_ff=8, max_seq_len=8)
    matmul = 4 * 4 * 4 + 3 * 4 * 8  # q k v o, gate up down
    attention = 3 * 2 * 2 * 4 * (1 + 2 + 3) / 3  # passes, matmuls, FLOPs, d_model, mean number of keys
    work = costs(modern, window=3).work(5)
    assert (work.matmul, work.loss, work.attention) == (5 * 6 * matmul, 5 * 6 * 10 * 4, 5 * attention)
    assert work.needed == 5 * (6 * (matmul + 40) + attention)
    classic = ModelConfig(vocab_size=10, d_model=4, n_heads=1, n_layers=2, d_ff=8, activation="gelu")
    matmul = 2 * (4 * 4 * 4 + 2 * 4 * 8)  # biases and position embeddings are not in matmuls
    assert costs(classic, window=3).work(1).needed == 6 * (matmul + 10 * 4) + 2 * attention


def kept_by_a_block(config: ModelConfig, execution: Execution, window: int, layer: int) -> int:
    model = TransformerLM(config, seed=0).train()

    def prepare() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x = torch.randn(execution.micro_batch, window, config.d_model, requires_grad=True)
        ranges = causal_ranges(torch.zeros(execution.micro_batch, window, dtype=torch.int64))
        rotary = model.rotary(torch.arange(window)[None])

        def run() -> torch.Tensor:
            out, branch = model.blocks[layer](x, rotary, ranges)
            return cast(torch.Tensor, out) if branch is None else residual(out, branch, config.dropout, True)

        return run, [x, ranges, *(rotary or ())]

    return kept_bytes_of(model, execution, prepare)


def test_flops_of_a_hybrid_by_hand() -> None:
    config = {"vocab_size": 10, "d_model": 4, "n_heads": 2, "n_layers": 5, "d_ff": 8, "architecture": "qwen3_5_text"}
    attention = 5 * 4 * 4 + 3 * 4 * 8  # q and its gate, k v o, gate up down
    delta = 5 * 4 * 4 + 2 * 4 * 2 + 3 * 4 * 8  # q k v, gate, out; steps and decays of 2 heads
    work = costs(ModelConfig.model_validate(config), window=3).work(1)
    assert work.matmul == 6 * (attention + 4 * delta)
    assert work.attention == 12 * 4 * 2 + 4 * 18 * 4 * 2  # one layer with attention, and four with states of 2 x 2 x 2


KINDS = [
    *itertools.product(ARCHITECTURES, ["bf16", "fp32"], ["native", "torch"], [0.0]),
    *itertools.product(["llama", "gpt2"], ["bf16", "fp32"], ["torch"], [0.1]),
]


@pytest.mark.parametrize(("architecture", "precision", "kernels", "dropout"), KINDS)
def test_a_block_saves_the_estimated_bytes(
    architecture: str, precision: str, kernels: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_loaded", kernels == "native")
    layers, window = (2, 64) if architecture == "qwen3_5_text" else (1, 128)
    for width, feed_forward, heads, kv_heads in [(128, 512, 2, 2), (256, 256, 4, 2)]:
        config = ModelConfig.model_validate(
            {
                "vocab_size": 64, "d_model": width, "n_heads": heads, "n_layers": layers, "d_ff": feed_forward,
                "max_seq_len": 128, "architecture": architecture, "attention_dropout": dropout,
                **({} if architecture == "gpt2" else {"n_kv_heads": kv_heads}),
            }
        )  # fmt: skip
        execution = Execution(2, 1, precision, "off", kernels, "adamw")
        kept = [kept_by_a_block(config, execution, window, layer) for layer in range(layers)]
        assert costs(config, window).saved_bytes(execution) == pytest.approx(sum(kept) / layers, rel=0.03)


@settings(max_examples=50)
@given(st.sampled_from(ARCHITECTURES), st.sampled_from(["fp32", "bf16"]), st.sampled_from(["muon", "adamw"]))
def test_settings_that_take_more_memory_have_larger_estimates(
    architecture: str, precision: str, optimizer: str
) -> None:
    config = ModelConfig.model_validate({"vocab_size": 1000, "architecture": architecture})
    execution = Execution(4, 1, precision, "off", "native", optimizer)
    memory = costs(config, 256).memory(execution)
    assert sum(value for name, value in memory.to_json().items() if name != "total") == memory.total
    double = costs(config, 256).memory(Execution(8, 1, precision, "off", "native", optimizer))
    frugal = costs(config.model_copy(update={"gradient_checkpointing": True}), 256).memory(
        Execution(8, 1, precision, "off", "native", optimizer)
    )
    plain = costs(config, 256).memory(Execution(4, 1, precision, "off", "torch", optimizer))
    assert frugal.total < double.total
    assert memory.total < double.total
    assert memory.total < plain.total
    if optimizer == "muon":
        adamw = costs(config, 256).memory(Execution(4, 1, precision, "off", "native", "adamw"))
        assert memory.optimizer < adamw.optimizer


def test_narrow_weights_and_moments_take_less_memory() -> None:
    config, execution = ModelConfig(vocab_size=1000), Execution(4, 1, "bf16", "off", "native", "adamw")
    narrow = TrainingConfig(optimizer="adamw", precision="bf16", master_weights="bf16", optimizer_state="8bit")
    wide, less = (DecoderCosts(config, training, 256, 256).memory(execution) for training in (TrainingConfig(), narrow))
    assert less.weights / wide.weights == pytest.approx(1 / 3, rel=0.01)
    assert less.optimizer / wide.optimizer == pytest.approx(1 / 4, rel=0.02)
    assert less.snapshot < wide.snapshot
