"""GGUF files of small models, in our layouts and in the architectures supported for fine-tuning."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import Keys, TokenType
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tools.tiny_model import make_folder
from transformers import PreTrainedModel

from sansgpu.config import ModelConfig
from sansgpu.data.tokenizer import Tokenizer
from sansgpu.models import TransformerLM, families
from sansgpu.models.family import Settings
from sansgpu.models.formats.decoder_weights import hugging_face_config, to_hugging_face
from sansgpu.models.formats.gguf_file import ModelDescription, write_gguf
from sansgpu.models.formats.gguf_reader import EncodingChoice, GGUFType
from sansgpu.models.formats.gguf_tokenizer import read_tokenizer
from sansgpu.models.formats.tokenizers import TokenizerParts
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of, tokenizer_parts
from tests.models.small import TEXT, TOKENIZER

ABOUT = ModelDescription("small", "Made by a test.", "words", "base")
_ROPE = {"rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3: dict[str, Any] = {
    "rope_parameters": {"rope_type": "llama3", **_ROPE, "original_max_position_embeddings": 64},
    "rms_norm_eps": 1e-5,
}


def longrope(trained: int) -> dict[str, Any]:
    """Returns LongRoPE like Phi-4-mini's, with other factors for examples of more than `trained` tokens."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.5, 2, 3, 4, 5, 6.7]}
    return {
        "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.75, **factors},
        "original_max_position_embeddings": trained,
        "tie_word_embeddings": True,
    }


YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 16.0, "attention_factor": 1.3,
    }
}  # fmt: skip


BASES: dict[str, tuple[str, Settings]] = {  # name: (model_type, changes to its tiny config.json)
    **{family.model_type: (family.model_type, family.tiny_exported) for family in families.with_gguf()},
    "tied": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", LLAMA3),
    "xielu": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "relu2": ("apertus", {"hidden_act": "relu2", "tie_word_embeddings": True, **LLAMA3}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 7}),
    "layered": ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "short_longrope": ("phi3", longrope(256)),
    "long_longrope": ("phi3", longrope(64)),
    "two_norms_falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_of_heads": ("falcon", {"multi_query": False}),
    "grouped_bamba": ("bamba", {"mamba_n_groups": 2}),
    "sequential": ("gpt_neox", {"use_parallel_residual": False}),
    **{f"{name}_yarn": (name, YARN) for name in ("llama", "qwen2", "qwen3", "olmo2", "phi", "gpt_oss")},
    "tied_qwen2_moe": ("qwen2_moe", {"tie_word_embeddings": True}),
    "dense_granite4": ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
    "normed_falcon_h1": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
}


_CASED = (  # parts of the patterns of Phi-4-mini's and Mistral Nemo's tokenizer.json
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_ENDING, _LAST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = rf"{_CASED[0]}{_ENDING}|{_CASED[1]}{_ENDING}|\p{{N}}{{1,3}}{_LAST}"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}{_LAST}"


def sentence_piece(adds_space: bool) -> Tokenizer:
    """Returns a tokenizer like Gemma's or, if it starts each text with a space, Llama 2's, with 300 merged tokens."""
    words = Backend(models.BPE())
    words.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=["▁"])
    words.train_from_iterator([*TEXT, "def add(a, b):\n    return a + b\n" * 9], trainer)
    pieces = sorted(words.get_vocab().items(), key=lambda pair: pair[1])
    names = ["<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256)), *(name for name, _ in pieces)]
    types = [TokenType.CONTROL, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)]
    metadata = {
        Keys.Tokenizer.MODEL: "llama", Keys.Tokenizer.LIST: names, Keys.Tokenizer.TOKEN_TYPE: types,
        Keys.Tokenizer.SCORES: [-float(place) for place in range(len(names))], Keys.Tokenizer.ADD_PREFIX: adds_space,
    }  # fmt: skip
    return Tokenizer(Backend.from_str(read_tokenizer(metadata).json))


def split(
    *patterns: str,
    use_regex: bool = False,
    ignore_merges: bool = False,
    inverted: bool = False,
    tokenizer: Tokenizer = TOKENIZER,
) -> Tokenizer:
    """Returns a tokenizer that divides texts by patterns. `inverted` writes them as Phi-4-mini's files do."""
    raw = json.loads(tokenizer.backend.to_str())
    raw["model"]["ignore_merges"] = ignore_merges
    kind = {"behavior": "Removed", "invert": True} if inverted else {"behavior": "Isolated", "invert": False}
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, **kind} for pattern in patterns]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, as_bytes]}
    return Tokenizer(Backend.from_str(json.dumps(raw)))


def falcon() -> Tokenizer:
    """Returns a tokenizer that divides texts as Falcon's does: two of its steps divide bytes instead of characters."""
    backend = Backend(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_digits = [pre_tokenizers.Digits(), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), as_bytes, *of_digits])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([*TEXT, "naïve, 12345 $5.00+ ò½ def add(a, b): return a + b\n" * 9], trainer)
    return Tokenizer(backend)


def parts_of(tokenizer: Tokenizer) -> TokenizerParts:
    end = tokenizer.end_id
    return TokenizerParts(tokenizer.backend, end, end, end, adds_bos=True)


def write_ours(
    path: Path, model: TransformerLM, kind: GGUFType, tokenizer: Tokenizer = TOKENIZER
) -> dict[str, EncodingChoice]:
    settings = hugging_face_config(model.config, tokenizer.end_id)
    return write_gguf(
        path, settings, to_hugging_face(model.config, model.state_dict()), parts_of(tokenizer), kind, ABOUT
    )


def base(folder: Path, name: str, **more: Any) -> tuple[PreTrainedModel, Any]:
    """Returns a transformers model, with noise added to all weights so that errors show, and its tokenizer."""
    architecture, changes = deepcopy(BASES[name])  # transformers adds to the settings of RoPE that it is given
    given = ModelConfig(name_or_path=str(make_folder(folder, architecture, **changes, **more)))
    model = load_pretrained(given, Head("causal"), 0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        if architecture == "youtu":  # transformers zeroes the embedding of its padding token whenever it loads a model
            model.get_input_embeddings().weight[model.config.pad_token_id] = 0.0
    return model, load_tokenizer_of(given)


def write_base(path: Path, model: PreTrainedModel, tokenizer: Any, kind: GGUFType) -> dict[str, EncodingChoice]:
    return write_gguf(path, model.config.to_dict(), model.state_dict(), tokenizer_parts(tokenizer), kind, ABOUT)


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Returns the logits (T, V) of our model or a transformers model."""
    out = model(torch.tensor([ids]))
    logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return logits[0]


def metadata(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def rewritten(source: Path, path: Path, leave_out: str = "", architecture: str = "qwen3", **more: object) -> Path:
    """Rewrites a file without a tensor or key, with another architecture, or with more metadata or tensors."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name not in ("general.architecture", leave_out) and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if tensor.name != leave_out:
            writer.add_tensor(tensor.name, tensor.data)
    for name, value in more.items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds.get(type(value), writer.add_tensor)(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
