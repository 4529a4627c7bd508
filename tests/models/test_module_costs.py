"""The estimated memory of transformers models matches what their blocks save for the backward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.machine.execution import Execution
from sansgpu.models.huggingface.costs import PretrainedCosts, pretrained_shape
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.huggingface.pretrained import Head
from sansgpu.models.modules import blocks_of
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
def test_a_fused_block_saves_the_estimated_bytes(precision: str, tmp_path: Path) -> None:
    for width, inner in [(256, 512), (128, 1024)]:
        config = transformers.Qwen2Config(
            vocab_size=64, hidden_size=width, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=TOKENS, use_cache=False,
        )  # fmt: skip
        config.save_pretrained(tmp_path)
        model = ModelConfig(name_or_path=str(tmp_path), vocab_size=64, max_seq_len=TOKENS)
        # The results of `pretrained_shape` are cached by ModelConfig, and both models have the same path.
        shape = pretrained_shape(model.model_copy(update={"d_ff": width}), Head("causal"))
        execution = Execution(1, 1, precision, "off", "native", "adamw")
        costs = PretrainedCosts(model, TrainingConfig(), TOKENS, TOKENS, shape=shape)
        kept = kept_by_a_block(transformers.AutoModelForCausalLM.from_config(config), execution)
        assert costs.saved_bytes(execution) == pytest.approx(kept, rel=0.03)
        torch_code = Execution(1, 1, precision, "off", "torch", "adamw")
        assert costs.saved_bytes(execution) < costs.saved_bytes(torch_code)
