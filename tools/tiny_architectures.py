"""Makes tiny random models of any architecture of transformers, from the defaults of its configuration class."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from sansgpu.models.huggingface.pretrained import AUTO_CLASSES, HeadType
from tools.tiny_model import make_tokenizer

VOCABULARY, CONTEXT, LAYERS = 1024, 128, 4
MAX_PARAMETERS = 4_000_000  # a model with more is not tiny
NOISE = 0.05  # scale of the noise added to all weights; without it, norm weights are all 1 and biases all 0
# The sizes of tiny models by the keys of configurations, as regular expressions. The first match counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(hidden|encoder|decoder|num|^n)_layers?$|^num_layers$", LAYERS),
    (r"attention_heads$|^n_heads?$|^num_heads$", 4),
    (r"(key_value|kv)_heads$", 2),
    (r"^n_group|^topk_group|shared_experts$|n_groups$", 1),
    (r"(?<!shared)(?<!per_tok)_experts$", 4),
    (r"experts_per_tok|^moe_k$|^top_k", 2),
    (r"lora_rank$|head_dim$|^d_kv$|^attention_head_size$|^qk_\w+_head_dim$", 16),
    (r"sliding_window|window_size$|^local_attention$|^attention_chunk_size$|^block_size$", 32),
    (r"^embedding_size$|^hidden_size_per_layer_input$|^pronunciation_embed_dim$|^shape_embed_dim$", 32),
    (r"^(attention_)?hidden_size$|^n_embd$|^d_model$|^(emb_|embed_)?dim$|^lru_width$|^d_latents$", 64),
    (r"intermediate_size|^n_inner$|ffn_(hidden_)?(dim|size)$|^dff$|^d_ff$|^d_inner$|^dim_ff$|^hidden_dim$", 96),
    (r"vocab(_size)?(_\w+)?$|_vocab_size$|^num_hash_buckets$", VOCABULARY),
    (r"position_embeddings$|^n_positions$|^n_ctx$|max_(seq|sequence)_len(gth)?$|^context_length$", CONTEXT),
    (r"^mamba_n_heads$|^rotary_dim$", 8),
    (r"d_state$|^state_size$", 8),
)  # fmt: skip
IDS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
    "sep_token_id": 2,
    "cls_token_id": 1,
}
RANDOM = re.compile(r"drop(out)?(_|$)|pdrop|jitter")  # keys of what makes training random
_SAME_HEADS = {"num_key_value_heads": 4}
# Changes that an architecture needs in addition to the sizes above, by its model_type.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"o_lora_rank": 16},
    "dots3_note_text": _SAME_HEADS,
    "cohere_compass_text": {"layer_types": ["full_attention"] * LAYERS},
    "esmc": _SAME_HEADS,
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * LAYERS, "intermediate_size": 96,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 16, "expert_ffn_hidden_size": 48, "zero_expert_num": 2},
    "luke": {"entity_vocab_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp_text": {"head_dim": 16},
    "reformer": {"is_decoder": False, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48]},
    "squeezebert": {"embedding_size": 64},
    "xlnet": {"d_head": 16, "d_inner": 96},
    "xlstm": {"embedding_dim": 64},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
}  # fmt: skip


class NotTinyError(Exception):
    """transformers cannot build a tiny model of an architecture from these sizes."""


def architectures(head: HeadType) -> dict[str, str]:
    """Returns the class of the model with this head, by model_type."""
    names: Any = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "tokens": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "qa": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        "none": modeling_auto.MODEL_MAPPING_NAMES,
    }[head]
    return {kind: name if isinstance(name, str) else name[0] for kind, name in names.items()}


def is_encoder(model_type: str) -> bool:
    """Returns True unless the architecture is made to continue texts."""
    return model_type in architectures("masked") or model_type not in architectures("causal")


def tiny_config(model_type: str, **changes: Any) -> transformers.PreTrainedConfig:
    """Returns the configuration of a tiny model. `changes` override its keys. Raises NotTinyError."""
    try:
        default = transformers.AutoConfig.for_model(model_type)
        return type(default)(**{**_tiny(default.to_dict(), model_type), **changes})
    except Exception as error:
        raise NotTinyError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _tiny(settings: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Returns those settings that a tiny model changes, also of the configurations inside of it."""
    changed = {**dict(_sizes(settings)), **CHANGES.get(model_type, {})}
    if "kv_lora_rank" in settings:  # with latent attention, keys and values have as many heads as queries
        changed["num_key_value_heads"] = changed.get("num_attention_heads")
    inner = {key: value for key, value in settings.items() if isinstance(value, dict) and "model_type" in value}
    for value in inner.values():
        value.pop("per_layer_config", None)
    return changed | {key: {**value, **_tiny(value, str(value["model_type"]))} for key, value in inner.items()}


def _sizes(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if key == "vocab_size":
            yield key, VOCABULARY  # also where the default is smaller, for the tokens of the tokenizer
        elif key in IDS:
            yield key, IDS[key]
        elif isinstance(value, float) and RANDOM.search(key):
            yield key, 0.0
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size = next((size for pattern, size in SIZES if re.search(pattern, key)), value)
            yield key, min(value, size)
        elif isinstance(value, list) and len(value) == settings.get("num_hidden_layers", 0) > LAYERS:
            yield key, None if key == "layer_types" else value[:LAYERS]


def make_architecture(folder: Path, model_type: str, head: HeadType, tokenizer: Any, **changes: Any) -> Path:
    """Writes a folder with a tiny random model; `changes` override keys of its config.json. Raises NotTinyError."""
    config = tiny_config(model_type, **changes)
    try:
        if head == "sequence":
            config.num_labels = 2
        maker = getattr(transformers, AUTO_CLASSES[head])
        with torch.device("meta"):
            parameters = sum(p.numel() for p in maker.from_config(config).parameters())
        if parameters > MAX_PARAMETERS:
            raise NotTinyError(f"{parameters:,} parameters")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = maker.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=NOISE)
        model.save_pretrained(folder)
    except NotTinyError:
        raise
    except Exception as error:
        raise NotTinyError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_for(model_type: str) -> Any:
    tokenizer = make_tokenizer(is_encoder(model_type), VOCABULARY)
    if is_encoder(model_type):
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer
