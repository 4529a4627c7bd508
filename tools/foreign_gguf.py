"""Writes a GGUF file of a Hugging Face folder with the names that llama.cpp's converter gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch


def write_foreign_gguf(path: Path, folder: Path, architecture: str) -> None:
    """Writes a GGUF file of llama.cpp's `architecture`. Tensors that llama.cpp does not know keep their names."""
    import transformers

    from sansgpu.models.formats.gguf_tokenizer import write_tokenizer
    from sansgpu.models.huggingface.tokenizer_files import tokenizer_parts

    encoder = not transformers.AutoConfig.from_pretrained(folder).architectures[0].endswith("LM")
    auto: Any = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    config = model.config.get_text_config().per_layer_config[0]  # a file has one value for all layers
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config)
    write_tokenizer(writer, tokenizer_parts(transformers.AutoTokenizer.from_pretrained(folder)), config.vocab_size)
    arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")) or name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    if getattr(config, "num_attention_heads", None):
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    if getattr(config, "max_position_embeddings", None):
        writer.add_context_length(config.max_position_embeddings)
    if getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    if getattr(config, "rms_norm_eps", None):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if theta := (getattr(config, "rope_parameters", None) or {}).get("rope_theta"):
        writer.add_rope_freq_base(theta)
