"""Writes any module as a folder with its weights, settings and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_model
from torch import nn

from sansgpu.config import ModelConfig
from sansgpu.models.folder_writer import write_folder_atomically


class SavedTokenizer(Protocol):
    """A tokenizer that can be written to a folder."""

    def save(self, folder: Path) -> None: ...


def export_module(model: nn.Module, config: ModelConfig, tokenizer: SavedTokenizer, folder: Path) -> None:
    """Writes model.safetensors, config.json and the tokenizer. The module's own class reads them."""
    settings = {"architectures": [type(model).__name__], **config.model_dump(mode="json", exclude_defaults=True)}

    def write(partial: Path) -> None:
        save_model(model, str(partial / "model.safetensors"), metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        tokenizer.save(partial)

    write_folder_atomically(folder, write)
