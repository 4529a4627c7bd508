"""Saves graph encoders in BERT's layout if possible, or else in sansgpu's own layout, and loads the latter.

transformers can load BERT's layout. It requires an encoder of plain text, i.e. without leaves, with learned positions
and normalized embeddings and without attention decay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from sansgpu.config import ConfigError
from sansgpu.config.section import problems
from sansgpu.models.formats.folders import GRAPH_MODEL_TYPE, folder_settings, require_layers, write_folder_atomically
from sansgpu.models.formats.safetensors_file import load_weights
from sansgpu.models.modules import INIT_STD
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.tasks.configuration import ModelConfig as FullModelConfig
from sansgpu.tasks.graph.encoder import GraphEncoder
from sansgpu.tasks.graph.entities import NORM_EPS
from sansgpu.tasks.graph.settings import GraphModelConfig

Weights = dict[str, torch.Tensor]

# GraphEncoder's parameter names -> BERT's names. `{}` is the layer's number.
_BERT = {
    "embedding": "bert.embeddings.word_embeddings",
    "position": "bert.embeddings.position_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "blocks.{}.attention.q": "bert.encoder.layer.{}.attention.self.query",
    "blocks.{}.attention.k": "bert.encoder.layer.{}.attention.self.key",
    "blocks.{}.attention.v": "bert.encoder.layer.{}.attention.self.value",
    "blocks.{}.attention.o": "bert.encoder.layer.{}.attention.output.dense",
    "blocks.{}.attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "blocks.{}.up": "bert.encoder.layer.{}.intermediate.dense",
    "blocks.{}.down": "bert.encoder.layer.{}.output.dense",
    "blocks.{}.feed_forward_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
}
_LAYER = re.compile(r"(?<=^blocks\.)\d+")


class Codec(Protocol):
    """The interface of a tokenizer that can be saved, such as `GraphCodec`."""

    @property
    def pad_id(self) -> int:
        """The id of the padding token."""

    def save(self, folder: Path) -> None:
        """Writes the files from which transformers loads the tokenizer."""


def export_graph_model(
    model: GraphEncoder, codec: Codec, folder: Path, sections: Mapping[str, Any] | None = None
) -> None:
    """Writes a model folder atomically. sansgpu's own layout also records `sections` of the configuration.

    Omits the head of the span boundary objective, which only training needs.
    """
    weights = {name: t.detach().cpu().float() for name, t in model.state_dict().items() if "boundary." not in name}
    config = model.config

    def write(partial: Path) -> None:
        if config.is_plain_bert:
            settings, named = _bert_config(config, codec.pad_id), _to_bert(config, weights)
        else:
            shape = config.model_dump(mode="json", exclude_defaults=True)
            settings, named = {"model_type": GRAPH_MODEL_TYPE, "model": shape, **(sections or {})}, weights
        save_file(named, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
        codec.save(partial)

    write_folder_atomically(folder, write)


def load_graph_folder(folder: Path) -> tuple[GraphEncoder, dict[str, Any]]:
    """Loads a folder in sansgpu's own layout; returns the encoder and the recorded sections of the configuration.

    Raises ConfigError if a weight is missing or has the wrong shape.
    """
    settings = folder_settings(folder)
    try:
        config = FullModelConfig.model_validate(settings["model"])
        assert isinstance(config, GraphModelConfig)
        weights = load_weights(folder / "model.safetensors")
        require_layers(config.n_layers, len(weights), folder)
        model = GraphEncoder(config, seed=None)
        model.load_state_dict(weights, assign=True)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is not a graph encoder folder: {error}; export the model again.") from None
    except ValidationError as error:
        raise ConfigError(
            f"{folder}: config.json is not valid ({'; '.join(problems(error, SCHEMA))}); export the model again."
        ) from None
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{folder}: the weights do not match config.json ({reason.removesuffix('.')}); export the model again."
        ) from None
    return model, {name: settings[name] for name in ("data", "training") if name in settings}


def _to_bert(config: GraphModelConfig, weights: Mapping[str, torch.Tensor]) -> Weights:
    renamed: Weights = {}
    for name, tensor in weights.items():
        module, _, parameter = name.rpartition(".")
        layer = _LAYER.search(module)
        bert_module = _BERT[_LAYER.sub("{}", module)].format(layer.group() if layer else "")
        renamed[f"{bert_module}.{parameter}"] = tensor.contiguous()
    renamed["bert.embeddings.token_type_embeddings.weight"] = torch.zeros(2, config.d_model)
    renamed["cls.predictions.bias"] = torch.zeros(len(weights["embedding.weight"]))
    return renamed


def _bert_config(config: GraphModelConfig, pad_id: int) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_seq_len,
        "type_vocab_size": 2,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "initializer_range": INIT_STD,
        "layer_norm_eps": NORM_EPS,
        "tie_word_embeddings": True,
        "pad_token_id": pad_id,
        "torch_dtype": "float32",
    }
