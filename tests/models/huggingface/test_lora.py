"""Adapters of peft that run with our kernel compute what peft computes; all other adapters run peft's code."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from sansgpu.models.huggingface import lora
from sansgpu.models.huggingface.patches import patch_layers

SIZES = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
TOKENS = torch.arange(22).view(2, 11)
Called = list[object]


def adapted(**changes: Any) -> Any:
    """Returns a model with random LoRA adapters, which peft's own code computes."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SIZES))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **changes)
    wrapped: Any = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1 if "lora_" in name else 0.0)
    patch_layers(wrapped)
    return wrapped.train()


def ours(model: nn.Module) -> Any:
    patched = copy.deepcopy(model)
    lora.patch_adapter(patched)
    return patched


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Records the calls of our kernel, which is then used for any number of rows."""
    calls: Called = []
    original: Callable[..., torch.Tensor] = lora.lora_linear

    def recorded(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(lora, "lora_linear", recorded)
    monkeypatch.setattr(lora, "MIN_ROWS", 1)
    return calls


def results(model: Any) -> list[torch.Tensor]:
    """Returns the loss and the gradients of all trainable parameters."""
    torch.manual_seed(7)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize("changes", [{}, {"lora_dropout": 0.4}, {"use_rslora": True}])
def test_adapters_compute_the_same(changes: dict[str, object], called: Called) -> None:
    plain = adapted(**changes)
    expected, found = results(plain), results(ours(plain))
    assert len(called) == 7
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@contextmanager
def trained(model: Any) -> Iterator[None]:
    yield


@contextmanager
def merged(model: Any) -> Iterator[None]:
    model.merge_adapter()
    yield


@pytest.mark.parametrize(
    ("changes", "state", "fused"),
    [
        ({"use_dora": True}, trained, 0),
        ({"lora_bias": True}, trained, 0),
        ({"bias": "all"}, trained, 4),  # peft computes q, k and v, which have biases
        ({"rank_pattern": {".*": lora.MAX_RANK + 1}}, trained, 0),
        ({}, merged, 0),
        ({}, lambda model: model.disable_adapter(), 0),
    ],
)
def test_other_adapters_run_the_code_of_peft(
    changes: dict[str, object], state: Any, fused: int, called: Called
) -> None:
    plain, logits = adapted(**changes), []
    for model in (plain, ours(plain)):
        with torch.no_grad(), state(model):
            logits.append(model.eval()(input_ids=TOKENS).logits)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)
    assert len(called) == fused
