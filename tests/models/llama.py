"""Runs GGUF files in the server of llama.cpp, which the package xllamacpp contains."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

TEXTS_PER_REQUEST = 1000
BETWEEN_TEXTS = -1  # the server returns integers among the texts unchanged
FORCED = 1e6  # bias with which a letter is generated; without whole characters, the server omits the probabilities
STRIDE = 37  # tokens between the positions that are compared


class LlamaFile:
    """Computes tokens and log-probabilities of a file in fp32, optionally with a LoRA adapter."""

    def __init__(self, path: Path, adapter: Path | None = None, context: int = 256) -> None:
        import xllamacpp

        settings: Any = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx, settings.n_parallel = context, 1
        settings.n_gpu_layers, settings.fit_params, settings.warmup, settings.verbosity = 0, False, False, 0
        settings.no_extra_bufts = True  # llama.cpp's AMX kernels for repacked weights crash on some VMs
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it sums in f16
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        if adapter is not None:
            settings.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
        self._server: Any = xllamacpp.Server(settings)
        self._letter = self._tokenize(["a"], add_special=False)[-1]

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text as of a prompt, which start with the model's special tokens."""
        return self._tokenize([text], add_special=True)

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yields the token ids of each text, without special tokens."""
        for first in range(0, len(texts), TEXTS_PER_REQUEST):
            content = [part for text in texts[first : first + TEXTS_PER_REQUEST] for part in (text, BETWEEN_TEXTS)]
            found: list[int] = []
            for token in self._tokenize(content, add_special=False):
                if token != BETWEEN_TEXTS:
                    found.append(token)
                    continue
                yield found
                found = []

    def _tokenize(self, content: Sequence[str | int], add_special: bool) -> list[int]:
        given = {"content": content, "add_special": add_special, "parse_special": False}
        headers = {"Content-Type": "application/json"}
        address = f"{self._server.listening_address}/tokenize"
        with urlopen(Request(address, json.dumps(given).encode(), headers)) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def log_probabilities(self, ids: Sequence[int], vocabulary: int) -> torch.Tensor:
        """Returns those of the tokens (vocabulary,) that may follow `ids`."""
        given = {
            "prompt": list(ids), "n_predict": 1, "n_probs": vocabulary, "cache_prompt": False,
            "logit_bias": [[self._letter, FORCED]],
        }  # fmt: skip
        answer: Any = self._server.handle_completions(given)
        assert "choices" in answer, answer
        rows = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert sorted(row["id"] for row in rows) == list(range(vocabulary))
        found = torch.empty(vocabulary)
        found[[row["id"] for row in rows]] = torch.tensor([row["logprob"] for row in rows])
        return found

    def largest_error(self, logits: torch.Tensor, ids: Sequence[int]) -> float:
        """Returns the largest difference between llama.cpp's log-probabilities and those that `logits` (T, V) give.

        Compares several positions of the text.
        """
        lengths = {1, 2, 3, *range(len(ids), 0, -STRIDE)}
        expected = logits.log_softmax(-1)
        pairs = [(self.log_probabilities(ids[:n], logits.shape[1]), expected[n - 1]) for n in sorted(lengths)]
        return max(float((found - wanted).abs().max()) for found, wanted in pairs)
