"""Makes small Hugging Face folders with a random model of any architecture, a tokenizer and a chat template.

python -m tools.tiny_model FOLDER [--architecture qwen2]
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from sansgpu.config import DataConfig
from sansgpu.data.sources import open_sources
from sansgpu.data.tokenizer import BPETokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY, CONTEXT = 1024, 512
TOKENS_PER_PIECE = 25  # a tokenizer is trained on (vocabulary size / this) pieces of Python's standard library
_LAYERED = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
_GROUPED = {**_LAYERED, "num_key_value_heads": 2, "head_dim": 16}
# Small models of about the same size, by the configuration keys of each architecture.
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "tie_word_embeddings": False},
    "smollm": {**_GROUPED, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_LAYERED, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": _GROUPED,
    "gemma": _GROUPED,
    "gemma2": {**_GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3_text": {**_GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "mistral": {**_GROUPED, "sliding_window": 32},
    "phi": _LAYERED,
    "phi3": {**_LAYERED, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "qwen2_moe": {
        **_LAYERED, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
    },
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}  # fmt: skip
# More architectures for `supported_models`, which fewer tests use.
MORE_CAUSAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "window_size": 32,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": CONTEXT,
    },
    "gpt_neox": _LAYERED,
    "smollm3": {**_GROUPED, "no_rope_layer_interval": 2},
    "olmo2": {**_LAYERED, "num_key_value_heads": 2},
    "granite": {
        **_LAYERED, "num_key_value_heads": 2, "embedding_multiplier": 2.0, "attention_multiplier": 0.5,
        "residual_multiplier": 0.5, "logits_scaling": 2.0,
    },
    "granitemoe": {
        **_LAYERED, "num_key_value_heads": 2, "embedding_multiplier": 2.0, "attention_multiplier": 0.5,
        "residual_multiplier": 0.5, "logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "apertus": _GROUPED,
    "olmoe": {**_LAYERED, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "lfm2": {**_LAYERED, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "falcon_mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2,
        "chunk_size": 16,
    },
    "rwkv": {
        "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "context_length": CONTEXT,
    },
    "minimax": {
        **_GROUPED, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"], "block_size": 16,
    },
    "falcon_h1": {
        **_GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "bamba": {
        **_LAYERED, "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 8, "mamba_chunk_size": 16,
    },
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "recurrent_gemma": {
        **_LAYERED, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 32,
    },
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _LAYERED,
    "roberta": {**_LAYERED, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1},  # position ids start after it
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": CONTEXT},
    "modernbert": {**_LAYERED, "local_attention": 32, "global_attn_every_n_layers": 2},
    "mpnet": {**_LAYERED, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1},
    "deberta-v2": {
        **_LAYERED, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
    },
}  # fmt: skip
MORE_ENCODERS: dict[str, dict[str, Any]] = {
    "xlm-roberta": ENCODERS["roberta"],
    "eurobert": {  # The defaults of its special tokens exceed a small vocabulary.
        **_LAYERED, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "mask_token_id": 0,
    },
    "nomic_bert": _LAYERED,
    "gte": _LAYERED,
    "jina_embeddings_v3": _LAYERED,
    "electra": {**_LAYERED, "embedding_size": 32},
    "albert": {**_LAYERED, "embedding_size": 32},
}  # fmt: skip
_ALL_ENCODERS = {**ENCODERS, **MORE_ENCODERS}
_ALL = {**CAUSAL, **MORE_CAUSAL, **_ALL_ENCODERS}


def has_chat_template(architecture: str) -> bool:
    return architecture not in _ALL_ENCODERS


def make_tokenizer(encoder: bool, vocabulary: int = VOCABULARY) -> Any:
    """Trains a byte-level tokenizer on part of Python's standard library. For an encoder, it adds [CLS] and [SEP]."""
    pieces = open_sources(DataConfig()).train.read()
    texts = [piece.text for piece in islice(pieces, vocabulary // TOKENS_PER_PIECE)]
    backend = BPETokenizer.train(texts, vocabulary - len(SPECIAL) + 1).backend
    backend.add_special_tokens(list(SPECIAL))
    backend.encode_special_tokens = False
    if encoder:
        places = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=places
        )
    names = (
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"} if encoder else {"eos_token": "<|im_end|>"}
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", **names)
    if not encoder:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_folder(
    folder: Path,
    architecture: str = "qwen2",
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    narrow: bool = False,
    **changes: Any,
) -> Path:
    """Writes a folder that transformers can load; with `narrow` in bf16. `changes` override keys of config.json."""
    encoder = architecture in _ALL_ENCODERS
    tokenizer = make_tokenizer(encoder, vocabulary)
    if encoder and architecture not in ("bert", "modernbert"):
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    sizes = {"vocab_size": vocabulary, **_ALL[architecture], **changes}
    kind = sizes.pop("model_type", architecture)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    tokens = {"pad_token_id": tokenizer.pad_token_id} if encoder else ends
    config = transformers.AutoConfig.for_model(kind, **{**tokens, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maker = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
        model = maker.from_config(config, dtype=torch.bfloat16 if narrow else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=[*_ALL], default="qwen2")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="vocabulary size")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON object with keys of config.json")
    parser.add_argument("--bf16", action="store_true", help="save weights in bf16")
    arguments = parser.parse_args()
    sizes = {"vocabulary": arguments.vocabulary, "narrow": arguments.bf16, **arguments.shape}
    print(make_folder(arguments.folder, arguments.architecture, **sizes))


if __name__ == "__main__":
    main()
