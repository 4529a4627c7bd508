"""The estimated memory of transformers models matches what their blocks save for the backward pass."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.machine.execution import Execution
from sansgpu.models.huggingface.costs import PretrainedCosts, pretrained_shape
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.huggingface.pretrained import Head
from sansgpu.models.modules import blocks_of
from tests.models.families.test_recurrent_layers import DELTA, GQA, HEADS, MAMBA, MAMBA2
from tests.models.kept import kept_bytes_of

TOKENS = 256


def kept_by_a_block(model: Any, execution: Execution) -> int:
    patch_model(model)

    def prepare() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x = torch.randn(1, TOKENS, model.config.hidden_size, requires_grad=True)
        angles = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
        # The memory of `x` is not counted, but that of `x * 1` is: in a model, the previous block computes the input.
        return lambda: model.model.layers[0](x * 1, position_embeddings=angles), [x, *angles]

    return kept_bytes_of(model.train(), execution, prepare)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["Bert", "DistilBert"])
def test_a_fused_encoder_block_saves_the_estimated_bytes(name: str, precision: str, tmp_path: Path) -> None:
    sizes = {"dim": 128, "n_heads": 4, "n_layers": 1, "hidden_dim": 512} if name == "DistilBert" else {}
    given = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, **sizes}
    config = getattr(transformers, f"{name}Config")(vocab_size=64, max_position_embeddings=TOKENS, **given)
    config.save_pretrained(tmp_path)
    settings = ModelConfig(name_or_path=str(tmp_path), vocab_size=64, max_seq_len=TOKENS)
    costs = PretrainedCosts(
        settings, TrainingConfig(), TOKENS, TOKENS, shape=pretrained_shape(settings, Head("masked"))
    )
    model = transformers.AutoModel.from_config(config).train()
    patch_model(model)

    def prepare() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x = torch.randn(1, TOKENS, 128, requires_grad=True)
        return lambda: blocks_of(model)[0](x * 1).sum(), [x]  # summed, so that the block's output is not counted

    execution = Execution(1, 1, precision, "off", "native", "adamw")
    assert costs.saved_bytes(execution) == pytest.approx(kept_bytes_of(model, execution, prepare), rel=0.03)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "width", "inner", "heads"),
    [
        ("qwen2", 256, 512, (4, 4, 64)),
        ("qwen2", 128, 1024, (4, 1, 32)),
        ("llama", 128, 512, (8, 2, 32)),  # attention is wider than the model
        ("qwen3", 128, 512, (8, 4, 32)),  # normalizes queries and keys
        ("gemma2", 128, 512, (4, 1, 64)),
    ],
)
def test_a_fused_block_saves_the_estimated_bytes(
    family: str, width: int, inner: int, heads: tuple[int, int, int], precision: str, tmp_path: Path
) -> None:
    query, key, dim = heads
    config = CONFIG_MAPPING[family](
        vocab_size=64, hidden_size=width, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=query,
        num_key_value_heads=key, head_dim=dim, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = ModelConfig(name_or_path=str(tmp_path), vocab_size=64, max_seq_len=TOKENS)
    shape = pretrained_shape(model, Head("causal"))
    execution = Execution(1, 1, precision, "off", "native", "adamw")
    costs = PretrainedCosts(model, TrainingConfig(), TOKENS, TOKENS, shape=shape)
    kept = kept_by_a_block(transformers.AutoModelForCausalLM.from_config(config), execution)
    assert costs.saved_bytes(execution) == pytest.approx(kept, rel=0.03)
    torch_code = Execution(1, 1, precision, "off", "torch", "adamw")
    assert costs.saved_bytes(execution) < costs.saved_bytes(torch_code)


BLOCKS: dict[str, dict[str, Any]] = {  # the first block and all others of models with recurrent layers
    "qwen3_5_text": {**DELTA, "layer_types": ["full_attention", *["linear_attention"] * 4]},
    "granitemoehybrid": {
        **GQA, **MAMBA2, "layer_types": ["attention", *["mamba"] * 4], "shared_intermediate_size": 96,
        "num_local_experts": 0,
    },
    "mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "falcon_h1": {**HEADS, **MAMBA2, "mamba_d_ssm": 128},
}  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3_5_text" else pytest.mark.long) for name in BLOCKS]
)
def test_models_with_recurrent_layers_save_the_estimated_bytes(family: str, precision: str, tmp_path: Path) -> None:
    lengths = torch.tensor([100, TOKENS - 100])
    execution, saved, estimated = Execution(1, 1, precision, "off", "native", "adamw"), [], []
    for layers in (3, 5):
        given = {key: values[:layers] if key == "layer_types" else values for key, values in BLOCKS[family].items()}
        config = CONFIG_MAPPING[family](vocab_size=64, **{**given, "num_hidden_layers": layers})
        config.save_pretrained(tmp_path)
        settings = ModelConfig(name_or_path=str(tmp_path), vocab_size=64, max_seq_len=TOKENS)
        shape = pretrained_shape(settings.model_copy(update={"revision": str(layers)}), Head("causal"))
        costs = PretrainedCosts(settings, TrainingConfig(), TOKENS, TOKENS, shape=shape)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        patch_model(model)
        unpadded = UnpaddedModel(model, pack=True)
        tokens = torch.arange(TOKENS) % 64
        states = partial(unpadded.hidden_states, tokens, lengths)
        saved.append(kept_bytes_of(model, execution, partial(_summed, states, [tokens, lengths])))
        estimated.append(layers * costs.saved_bytes(execution))
    assert estimated[1] - estimated[0] == pytest.approx(saved[1] - saved[0], rel=0.1)


def _summed(
    states: Callable[[], torch.Tensor], inputs: list[torch.Tensor]
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    return lambda: states().sum(), inputs


def test_blocks_of_different_kinds_count_with_their_own_matrices(tmp_path: Path) -> None:
    kinds = ["mamba", "attention", "mlp"]
    sizes = {"layers_block_type": kinds, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
    config = CONFIG_MAPPING["nemotron_h"](vocab_size=64, **HEADS, **sizes)
    config.save_pretrained(tmp_path)
    settings = ModelConfig(name_or_path=str(tmp_path), vocab_size=64, max_seq_len=TOKENS)
    shape = pretrained_shape(settings, Head("causal"))
    costs = PretrainedCosts(settings, TrainingConfig(), TOKENS, TOKENS, shape=shape)
    width, inner, heads, channels, states = 64, 96, 64, 128, 8
    mamba = width * (2 * channels + 2 * states + 8) + channels * width
    attention = 2 * width * heads + 2 * width * heads // 2
    work = costs.work(1)
    assert work.matmul == 6 * (mamba + attention + 2 * width * inner)
    assert work.attention == 18 * channels * states + 12 * width * (TOKENS + 1) / 2
