"""Runs GGUF files in llama.cpp through its C interface, as the `Llama` class cannot disable repacked weights."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch


class LlamaFile:
    """Computes tokens and logits of a file. Weights are not repacked: llama.cpp's AMX kernels crash on some VMs."""

    def __init__(self, path: Path, context: int = 0) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        llama_cpp.llama_log_set(_SILENT, None)
        settings = llama_cpp.llama_model_default_params()
        settings.use_extra_bufts = False
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._context = context

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Returns the token ids of a text; with `special`, they start with the model's special tokens."""
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 2))()
        count = self._api.llama_tokenize(self._vocabulary, raw, len(raw), ids, len(ids), special, False)
        assert count >= 0
        return list(ids[:count])

    def logits(self, ids: list[int], adapter: Path | None = None) -> torch.Tensor:
        """Returns the logits after every token, (T, V), with an f32 key-value cache; optionally with a LoRA adapter."""
        api = self._api
        settings = api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = len(ids)
        settings.n_threads = settings.n_threads_batch = 1
        settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it sums in f16
        settings.type_k = settings.type_v = api.GGML_TYPE_F32
        context = api.llama_init_from_model(self._model, settings)
        if adapter is not None:
            loaded = api.llama_adapter_lora_init(self._model, str(adapter).encode())
            assert loaded, f"llama.cpp does not load {adapter}"
            adapters, scales = (type(loaded) * 1)(loaded), (ctypes.c_float * 1)(1.0)
            assert api.llama_set_adapters_lora(context, adapters, 1, scales) == 0
        batch = api.llama_batch_init(len(ids), 0, 1)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        batch.n_tokens = len(ids)
        assert api.llama_decode(context, batch) == 0
        rows = api.llama_vocab_n_tokens(self._vocabulary)
        out = np.ctypeslib.as_array(api.llama_get_logits(context), (len(ids), rows)).copy()
        api.llama_batch_free(batch)
        api.llama_free(context)
        return torch.from_numpy(out)


def _silent(level: int, text: bytes, data: Any) -> None:
    pass


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_silent)
