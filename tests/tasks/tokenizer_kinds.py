"""Tiny Hugging Face folders whose tokenizers add different special tokens around a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "The naïve café sells 3 crêpes, and Zoë's dog. " * 3 + "▁ Ünïcödé 世界 end."
# The template of the post-processor, which adds special tokens; None: no post-processor.
KINDS = {
    "llama": "<s> $A",
    "gemma": "<s> $A",
    "gpt2": None,
    "qwen": None,
    "ends": "<s> $A </s>",
    "glm": "<s> <t> $A",
    "wordpiece": "<s> $A </s>",
}
SPECIAL = ["<unk>", "<s>", "</s>", "<t>", "<|endoftext|>"]


def tokenizer_of(kind: str) -> Tokenizer:
    """Returns a tokenizer of a kind in KINDS, trained on TEXT without its Chinese characters."""
    texts, trainer = [TEXT.replace("世界", "")] * 3, trainers.BpeTrainer
    more: dict[str, Any] = {}
    if kind in ("gpt2", "qwen"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.normalizer = normalizers.NFC() if kind == "qwen" else None
        more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    elif kind == "wordpiece":
        made, trainer = Tokenizer(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        spaces = normalizers.Replace(" ", "▁")
        made.normalizer = spaces if kind == "gemma" else normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = SPECIAL if "initial_alphabet" in more else [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(texts, trainer(vocab_size=420, special_tokens=names, show_progress=False, **more))
    if "initial_alphabet" not in more:  # bytes are ordinary tokens, not special ones
        written = json.loads(made.to_str())
        written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] in SPECIAL]
        made = Tokenizer.from_str(json.dumps(written))
    if (single := KINDS[kind]) is not None:
        ids = [(name, made.token_to_id(name)) for name in SPECIAL]
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return made


def folder_of(folder: Path, kind: str) -> Path:
    """Writes a random Llama model with a tokenizer of this kind, and returns its folder."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if kind in ("gpt2", "qwen"):
        names = {"eos_token": "<|endoftext|>", **({"bos_token": "<|endoftext|>"} if kind == "gpt2" else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(kind), **names)
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer) + 2, max_position_embeddings=512, initializer_range=0.4, **shape)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
