"""Identifies the weights of a model."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from sansgpu.kernels.block_quantization import QuantizedWeight


def weights_sha256(model: nn.Module) -> str:
    """Returns a hash of all weights in memory, which takes less time than reading a model, on torch's threads."""
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        quantized = {key: value for key, value in vars(module).items() if isinstance(value, QuantizedWeight)}
        tensors |= {f"{name}.{key} {value.format.name}": value.data for key, value in quantized.items()}
    names = sorted(tensors)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        hashes = pool.map(lambda name: _sha256(name, tensors[name]), names)
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _sha256(name: str, tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
