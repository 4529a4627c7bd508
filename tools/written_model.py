"""Writes a model of a published architecture and size with random bf16 weights, and rows to train it on.

python -m tools.written_model FOLDER [--size 3b]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tools.tiny_model import make_tokenizer

_QWEN: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "7b": {  # Qwen2.5-7B
        **_QWEN, "vocab_size": 152064, "tie_word_embeddings": False, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    },
    "3b": {  # Qwen2.5-3B
        **_QWEN, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "1.5b": {  # Qwen2.5-1.5B
        **_QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "0.5b": {  # Qwen2.5-0.5B
        **_QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "135m": {  # SmolLM2-135M
        "model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "tiny": {
        "model_type": "qwen2", "vocab_size": 2048, "tie_word_embeddings": True, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
ROWS, WORDS = 64, 2000


def write_config(folder: Path, size: str) -> transformers.PretrainedConfig:
    """Writes the configuration and a tokenizer, which is enough to plan a run."""
    sizes = dict(SIZES[size])
    tokenizer = make_tokenizer(False)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes, **ends)
    config.architectures, config.dtype = [f"{config.model_type.title()}ForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


def write_model(folder: Path, size: str) -> None:
    """Writes a Hugging Face folder with a shard of weights for each block, and one for the other weights."""
    config = write_config(folder, size)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    shards: dict[str, list[str]] = {}
    for name in shapes:
        number = next((part for part in name.split(".") if part.isdigit()), "rest")
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            shards.setdefault(f"model-{number}.safetensors", []).append(name)
    generator = torch.Generator().manual_seed(0)
    for file, names in shards.items():
        weights = {name: _random(name, shapes[name].shape, generator) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.zeros(shape, dtype=torch.bfloat16) if name.endswith("bias") else torch.ones(shape).bfloat16()
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def write_rows(path: Path) -> None:
    """Writes rows of text that are longer than any measured context."""
    draw = torch.Generator().manual_seed(0)
    lines = (torch.randint(0, 1000, (WORDS,), generator=draw).tolist() for _ in range(ROWS))
    path.write_text("".join(json.dumps({"text": " ".join(map(str, line))}) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="3b")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    write_model(arguments.folder, arguments.size)
    write_rows(arguments.folder / "rows.jsonl")


if __name__ == "__main__":
    main()
