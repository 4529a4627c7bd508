"""Makes small Hugging Face folders with a random model of any architecture, a tokenizer and a chat template.

python -m tools.tiny_model FOLDER [--architecture qwen2]
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from sansgpu.config import DataConfig
from sansgpu.data.sources import open_sources
from sansgpu.data.tokenizer import BPETokenizer
from sansgpu.models import families
from sansgpu.models.family import TINY_CONTEXT, TINY_HEAD_DIM, Family

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 1024
TOKENS_PER_PIECE = 25  # a tokenizer is trained on (vocabulary size / this) pieces of Python's standard library
# Families without rules of their own, whose caches tests try.
_OTHERS = {
    "minimax": Family(
        tiny={
            **TINY_HEAD_DIM, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"],
            "block_size": 16,
        }
    ),
    "openai-gpt": Family(tiny={"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": TINY_CONTEXT}),
    "rwkv": Family(
        tiny={
            "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "context_length": TINY_CONTEXT,
        }
    ),
}  # fmt: skip
TINY = {family.model_type: family for family in families.every() if family.tiny} | _OTHERS


def is_encoder(model_type: str) -> bool:
    return TINY[model_type].is_encoder


@cache
def _trained(vocabulary: int) -> str:
    """Returns the JSON of a byte-level tokenizer that is trained on part of Python's standard library."""
    pieces = open_sources(DataConfig()).train.read()
    texts = [piece.text for piece in islice(pieces, vocabulary // TOKENS_PER_PIECE)]
    text: str = BPETokenizer.train(texts, vocabulary - len(SPECIAL) + 1).backend.to_str()
    return text


def make_tokenizer(encoder: bool, vocabulary: int = VOCABULARY) -> Any:
    """Returns a byte-level tokenizer with the tokens of chats. For an encoder, it adds [CLS] and [SEP]."""
    backend = tokenizers.Tokenizer.from_str(_trained(vocabulary))
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
    bf16: bool = False,
    **changes: Any,
) -> Path:
    """Writes a folder that transformers can load, in fp32 or bf16. `changes` override keys of config.json."""
    encoder = is_encoder(architecture)
    tokenizer = make_tokenizer(encoder, vocabulary)
    if encoder and architecture not in ("bert", "modernbert"):
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    sizes = {"vocab_size": vocabulary, **TINY[architecture].tiny, **changes}
    kind = sizes.pop("model_type", architecture)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    tokens = {"pad_token_id": tokenizer.pad_token_id} if encoder else ends
    config = transformers.AutoConfig.for_model(kind, **{**tokens, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maker = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
        model = maker.from_config(config, dtype=torch.bfloat16 if bf16 else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=[*TINY], default="qwen2")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="vocabulary size")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON object with keys of config.json")
    parser.add_argument("--bf16", action="store_true", help="save weights in bf16")
    arguments = parser.parse_args()
    sizes = {"vocabulary": arguments.vocabulary, "bf16": arguments.bf16, **arguments.shape}
    print(make_folder(arguments.folder, arguments.architecture, **sizes))


if __name__ == "__main__":
    main()
