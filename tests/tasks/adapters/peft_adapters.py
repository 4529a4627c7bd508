"""Random adapters of the tiny Qwen2 as peft writes them, and the logits that peft computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from tests.tasks.folders import model_folder

TOKENS = torch.arange(40).reshape(2, 20) * 23 % 1000
UNTRAINED = {"training__learning_rate": 1e-12, "training__max_steps": 1}


def written_by_peft(folder: Path, **changes: Any) -> Path:
    """Writes an adapter without a tokenizer; `changes` are arguments of peft.LoraConfig."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder("qwen2"))
    chosen = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes}
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**chosen))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    adapted.save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(TOKENS).logits)


def peft_logits(folder: Path) -> torch.Tensor:
    return logits(AutoPeftModelForCausalLM.from_pretrained(folder))
