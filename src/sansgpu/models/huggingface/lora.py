"""Computes peft's LoRA layers with our kernel."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import nn

from sansgpu.kernels.frozen_linear import MAX_RANK, Adapter, lora_linear, quantized_lora_linear
from sansgpu.kernels.linear import MIN_ROWS, Linear, autocasted
from sansgpu.kernels.matmul import is_native
from sansgpu.models.quantized_layers import QuantizedLinear


class LoraLinear(PeftLinear):
    """peft's LoRA layer, computed by one kernel together with the frozen layer if possible."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base: Any = self.base_layer
        source, adapter = autocasted(x), self.single_adapter()
        if args or kwargs or adapter is None or source.numel() < MIN_ROWS * base.in_features:
            return super().forward(x, *args, **kwargs)
        quantized, matrices = isinstance(base, QuantizedLinear), (adapter.first, adapter.second)
        if quantized and base.multiplies_codes(source):
            return super().forward(x)
        if len(adapter.first) > MAX_RANK or not is_native(source, *(() if quantized else (base.weight,)), *matrices):
            return super().forward(x)
        source = source.reshape(-1, base.in_features)
        product, weight = (quantized_lora_linear, base.blocks) if quantized else (lora_linear, base.weight)
        dropped = self.lora_dropout[self.active_adapters[0]](source)
        y = product(source, dropped, weight, base.bias, adapter, base.integer)
        return y.view(*x.shape[:-1], base.out_features)

    def single_adapter(self) -> Adapter | None:
        """Returns the adapter; None unless the layer is a frozen one plus one plain LoRA."""
        if self._is_unusual():
            return None
        (name,) = self.active_adapters
        first, second = cast(Any, self.lora_A[name]).weight, cast(Any, self.lora_B[name]).weight
        return Adapter(first, second, self.scaling[name])

    def _is_unusual(self) -> bool:
        """Returns True unless exactly one plain LoRA adapter is active and not merged, on a frozen linear layer."""
        base, names = self.base_layer, self.active_adapters
        if self.disable_adapters or self.merged or self.lora_variant or len(names) != 1:
            return True
        if type(base) not in (Linear, QuantizedLinear):
            return True
        trained = any(parameter.requires_grad for parameter in base.parameters())
        return trained or self.lora_bias[names[0]]


def patch_adapter(model: nn.Module) -> None:
    """Makes the LoRA layers of a model use our kernel, in place."""
    for module in model.modules():
        if type(module) is PeftLinear:
            module.__class__ = LoraLinear
