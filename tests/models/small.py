"""Small decoders of every layout, and a tokenizer for them."""

import torch

from sansgpu.config import ModelConfig
from sansgpu.data.tokenizer import BPETokenizer
from sansgpu.models import TransformerLM
from sansgpu.models.generation.generate import decoder_batch, stream
from sansgpu.models.generation.sampling import Sampling

SHAPE = {"vocab_size": 320, "d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 40, "max_seq_len": 24}
LAYOUTS = {
    "modern": {"activation": "swiglu"},
    "squared": {"activation": "relu2"},
    "grouped": {"activation": "swiglu", "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 500.0},
    "classic": {"activation": "gelu", "dropout": 0.1},
    "relu": {"activation": "relu", "tie_embeddings": False},
    "llama": {"architecture": "llama", "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 500.0},
    "biased": {"architecture": "llama", "bias": "all"},
    "hybrid": {"architecture": "qwen3_5_text"},
    "grouped_hybrid": {"architecture": "qwen3_5_text", "n_layers": 5, "n_kv_heads": 2, "tie_embeddings": False},
    "qkv_biased": {"architecture": "apertus", "bias": "attention", "n_kv_heads": 1},
}
IN_GGUF = [name for name in LAYOUTS if name not in ("relu", "biased", "qkv_biased")]
TEXT = ["The quick brown fox: naïve café, 12 or 345 things.\n"] * 20
TOKENIZER = BPETokenizer.train(TEXT, 300)


def config_of(layout: str, **changes: object) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **LAYOUTS[layout], **changes})


def model_of(layout: str, seed: int = 0, **changes: object) -> TransformerLM:
    """Returns a model in evaluation mode, with noise added to all weights."""
    model = TransformerLM(config_of(layout, **changes), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(seed))


def text_of(model: TransformerLM, prompt: str, count: int, packs: bool = False, **sampling: object) -> str:
    """Returns the text generated after `prompt`; with `packs`, C++ computes whole steps."""
    batch = decoder_batch(model, TOKENIZER, packs)
    return "".join(stream(batch, batch.text_ids(prompt), count, Sampling(**sampling)))  # type: ignore[arg-type]
