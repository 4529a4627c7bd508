"""Text embeddings: pools a model's outputs, and reads and writes Sentence Transformers folders.

A folder may have Dense modules after the pooling, and a linear classifier of the embeddings.

S texts, N tokens in total, D width, L labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.wording import first_line
from sansgpu.files.reading import read_json, read_object, require_regular_file
from sansgpu.models.formats.safetensors_file import load_weights
from sansgpu.models.huggingface.source import model_file

Pooling = Literal["mean", "cls", "last"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot", "euclidean", "manhattan")
# Names of the prompts for queries and passages, as in encode_query and encode_document of Sentence Transformers.
QUERY_PROMPT, PASSAGE_PROMPTS = "query", ("document", "passage", "corpus")
MODULES, POOLING = "modules.json", "1_Pooling"
DENSE_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
)  # files of a Dense module, tried in this order
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda vectors: vectors, "Tanh": torch.tanh, "ReLU": F.relu, "GELU": F.gelu, "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}  # fmt: skip
VERSIONED = "config_sentence_transformers.json"
SETTINGS = "sentence_bert_config.json"  # settings of the Transformer module
LINEAR_HEAD = "head.safetensors"  # a linear classifier of the embeddings
STATIC = "StaticEmbedding"  # module without a transformer: a text's vector is the mean of its tokens' vectors
LOGIT_SCORE = "LogitScore"  # module of cross-encoders that are decoders
# Pooling modes in 1_Pooling/config.json: as keys, which all versions read, and as values from version 5.4 on.
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
    "cls": "cls", "mean": "mean", "lasttoken": "last",
}  # fmt: skip


@dataclass(frozen=True)
class EmbeddingLayout:
    """How a text is embedded."""

    pooling: Pooling
    normalize: bool
    max_length: int | None = None  # tokens to which texts are truncated
    prompts: dict[str, str] = field(default_factory=dict)  # by name; a prompt is prepended to a text
    default_prompt: str | None = None  # name of the prompt for texts if none is selected
    similarity: Similarity = "cosine"  # by which the embeddings are compared
    dense: tuple[str, ...] = ()  # folders of the Dense modules between pooling and normalization

    @property
    def query_prompt(self) -> str:
        return self.prompt(QUERY_PROMPT)

    @property
    def passage_prompt(self) -> str:
        return self.prompt(*PASSAGE_PROMPTS)

    def prompt(self, *names: str) -> str:
        """Returns the first existing prompt of `names`, or else the default prompt, or an empty one."""
        return next((self.prompts[name] for name in (*names, self.default_prompt) if name in self.prompts), "")


def read_layout(model: ModelConfig) -> EmbeddingLayout | None:
    """Reads the layout of a Sentence Transformers model; None if the model is not one.

    Raises ConfigError if it has modules or a pooling mode that sansgpu does not support.
    """
    find = partial(model_file, model)
    if (file := find(MODULES)) is None:
        return None
    modules = _modules(file)
    if STATIC in dict(modules):
        raise ConfigError(f"{model.name_or_path} is a static embedding model; set task to static to train it.")
    known, remedy = ("Transformer", "Pooling", "Dense", "Normalize"), ", or delete it to use only the transformer"
    _require_modules(file, modules, known, remedy)
    if "Dense" in dict(modules) and "Pooling" not in dict(modules):
        raise ConfigError(
            f"{file} names no Pooling, because the model compares the vectors of single tokens (late interaction, as "
            f"in ColBERT), which sansgpu does not support; choose another model{remedy}."
        )
    return _layout(find, modules)


def is_static_folder(folder: Path) -> bool:
    """Returns whether a folder is a static embedding model of Sentence Transformers. Raises ConfigError."""
    return (folder / MODULES).is_file() and STATIC in dict(_modules(folder / MODULES))


def scores_by_logits(modules: Path | None) -> bool:
    """Returns whether a model scores pairs of texts by the logits of two tokens, such as yes and no.

    `modules` is the path of its modules.json, which may not exist. Raises ConfigError if it is damaged.
    """
    return modules is not None and modules.is_file() and LOGIT_SCORE in dict(_modules(modules))


def read_static_layout(folder: Path) -> tuple[EmbeddingLayout, Path]:
    """Returns the layout of a static embedding model, and the folder of its weights and tokenizer.

    Raises ConfigError if the model has modules that sansgpu does not support.
    """
    modules = _modules(folder / MODULES)
    _require_modules(folder / MODULES, modules, (STATIC, "Normalize"))
    inner = folder / dict(modules)[STATIC]

    def find(name: str) -> Path | None:
        return folder / name if (folder / name).is_file() else None

    return _layout(find, modules), inner


def _modules(file: Path) -> list[tuple[str, str]]:
    """Returns the class name and the folder of each module of a model, in order."""
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{file} does not contain a list of modules; fix it or choose another model.")
    found = [(str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    for _, path in found:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(f"{file} names the path {path[:100]}, which is outside its folder; choose another model.")
    return found


def _require_modules(file: Path, modules: Sequence[tuple[str, str]], known: Sequence[str], remedy: str = "") -> None:
    names = [name for name, _ in modules]
    if unknown := next((name for name in names if name not in known), None):
        listed = f"{', '.join(known[:-1])} and {known[-1]}"
        raise ConfigError(
            f"{file} names the module {unknown[:100]}, but sansgpu supports {listed}; choose another model{remedy}."
        )
    if "Dense" in names and names != sorted(names, key=known.index):
        raise ConfigError(
            f"{file} has its modules in the order {' '.join(names)[:100]}, but sansgpu supports Dense only between "
            f"Pooling and Normalize; choose another model{remedy}."
        )


def _layout(find: Callable[[str], Path | None], modules: Sequence[tuple[str, str]]) -> EmbeddingLayout:
    """Reads the files of a model that describe how it embeds texts; `find` returns the path of a file, or None."""
    paths = dict(modules)
    pooling, settings = find(f"{paths.get('Pooling', POOLING)}/config.json"), find(SETTINGS)
    length = read_object(settings).get("max_seq_length") if settings else None
    layout = EmbeddingLayout(
        "mean",
        "Normalize" in paths,
        length if isinstance(length, int) and length >= 2 else None,
        dense=tuple(path for name, path in modules if name == "Dense"),
    )
    if (versioned := find(VERSIONED)) is not None:
        prompts, default = _prompts_of(versioned)
        layout = replace(layout, prompts=prompts, default_prompt=default, similarity=_similarity_of(versioned))
    if pooling is not None:
        layout = replace(layout, pooling=_pooling_of(pooling, with_prompts=any(layout.prompts.values())))
    return layout


def _similarity_of(file: Path) -> Similarity:
    """Returns the similarity by which a model's embeddings are compared. Raises ConfigError if it is unknown."""
    given = read_object(file).get("similarity_fn_name") or "cosine"
    name = given.removesuffix("_product") if isinstance(given, str) else given
    if name not in SIMILARITIES:
        raise ConfigError(
            f"{file} has the similarity_fn_name {str(given)[:100]}, but sansgpu knows {', '.join(SIMILARITIES)}; "
            "correct it."
        )
    return name


def _prompts_of(file: Path) -> tuple[dict[str, str], str | None]:
    """Returns the prompts and the name of the default one. Raises ConfigError if they are invalid."""
    found = read_object(file)
    prompts, default = found.get("prompts") or {}, found.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ConfigError(f"{file}: prompts is not an object with strings; fix or remove it.")
    if default is not None and default not in prompts:
        raise ConfigError(f"{file}: the default prompt {str(default)[:100]} is missing; add it to prompts.")
    return {name: text or "" for name, text in prompts.items()}, default


def _pooling_of(file: Path, with_prompts: bool) -> Pooling:
    found: dict[str, Any] = read_object(file)
    if with_prompts and not found.get("include_prompt", True):
        raise ConfigError(
            f"{file} excludes prompts from pooling (include_prompt: false), which sansgpu does not support; choose "
            "another model."
        )
    given = found.get("pooling_mode", [key for key, value in found.items() if key.startswith("pooling_") and value])
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes))[:100] or "nothing"
        raise ConfigError(
            f"{file} sets the pooling {shown}, but sansgpu supports only one of mean, cls and lasttoken; choose "
            "another model."
        )
    return _MODES[modes[0]]


class Dense(nn.Module):
    """A Dense module of Sentence Transformers: a linear layer of the embeddings with an activation, in fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float().contiguous())  # (outputs, inputs)
        self.bias = None if bias is None else nn.Parameter(bias.float().contiguous())
        self.activation = activation

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        with torch.autocast(vectors.device.type, enabled=False):
            weight = self.weight.to(vectors.dtype)  # `narrow_matrices` may have converted it
            return _ACTIVATIONS[self.activation](F.linear(vectors, weight, self.bias))

    def save(self, folder: Path) -> None:
        tensors = {"linear.weight": self.weight.detach().float().cpu()}
        if self.bias is not None:
            tensors["linear.bias"] = self.bias.detach().float().cpu()
        outputs, inputs = self.weight.shape
        place = "linear" if self.activation == "Identity" else "activation"
        settings = {"in_features": inputs, "out_features": outputs, "bias": self.bias is not None,
                    "activation_function": f"torch.nn.modules.{place}.{self.activation}"}  # fmt: skip
        _write({"config.json": settings}, folder)
        save_file(tensors, folder / DENSE_WEIGHTS[0], metadata={"format": "pt"})


def read_dense(model: ModelConfig, layout: EmbeddingLayout | None, width: int) -> nn.Sequential:
    """Reads the Dense modules of a model with embeddings of `width` features. Raises ConfigError if one is invalid."""
    found = []
    for path in layout.dense if layout is not None else ():
        found.append(_read_dense(partial(model_file, model), path))
        outputs, inputs = found[-1].weight.shape
        if inputs != width:
            raise ConfigError(f"{model.name_or_path}: {path} takes {inputs} features, got {width}; download it again.")
        width = outputs
    return nn.Sequential(*found)


def _read_dense(find: Callable[[str], Path | None], path: str) -> Dense:
    files = [find(f"{path}/{name}") for name in ("config.json", *DENSE_WEIGHTS)]
    config, weights = files[0], next(filter(None, files[1:]), None)
    if config is None or weights is None:
        raise ConfigError(f"the model has no complete folder {path}; download it again.")
    settings = read_object(config)
    name = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
    places = {settings.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")}
    if name not in _ACTIVATIONS or places != {"sentence_embedding"} or settings.get("use_residual"):
        raise ConfigError(
            f"{config} has settings that sansgpu does not support: the activation must be one of "
            f"{', '.join(_ACTIVATIONS)}, its input sentence_embedding, and use_residual false; choose another model."
        )
    tensors = load_weights(weights) if weights.suffix == ".safetensors" else _unpickled(weights)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ConfigError(f"{weights} lacks a matrix `linear.weight` or has another bias; download it again.")
    return Dense(weight, bias, name)


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    """Loads tensors from a pickle file without running code in it."""
    require_regular_file(file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises various classes for damaged files and for code
        raise ConfigError(
            f"{file} is no file of tensors ({first_line(error)}); use the model in safetensors format."
        ) from None
    return found if isinstance(found, dict) else {}


def pool(
    hidden: torch.Tensor, lengths: torch.Tensor, layout: EmbeddingLayout, dense: nn.Module | None = None
) -> torch.Tensor:
    """Pools the hidden states (N, D) of concatenated texts to one embedding per text, (S, D) fp32."""
    ends = lengths.cumsum(0)
    if layout.pooling == "mean":
        texts = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        sums = hidden.new_zeros(len(lengths), hidden.shape[1], dtype=torch.promote_types(hidden.dtype, torch.float32))
        vectors = sums.index_add(0, texts, hidden.to(sums.dtype)) / lengths[:, None]
    else:
        vectors = hidden[ends - 1 if layout.pooling == "last" else ends - lengths]
    vectors = vectors.to(torch.promote_types(hidden.dtype, torch.float32))
    if dense is not None:
        vectors = dense(vectors)
    return F.normalize(vectors, dim=-1) if layout.normalize else vectors


def write_layout(layout: EmbeddingLayout, width: int, folder: Path, dense: Iterable[nn.Module] = ()) -> None:
    """Adds the files with which Sentence Transformers 2 or later loads a folder with a transformers model.

    `width` is that of the hidden states; `dense` are the Dense modules after the pooling.
    """
    modes = {key: layout.pooling == mode for key, mode in _MODES.items() if key.startswith("pooling_")}
    modules = [("Transformer", ""), ("Pooling", POOLING)]
    for number, module in enumerate(dense, len(modules)):
        assert isinstance(module, Dense)
        modules.append(("Dense", f"{number}_Dense"))
        (folder / modules[-1][1]).mkdir(exist_ok=True)
        module.save(folder / modules[-1][1])
    files: dict[str, Any] = {
        f"{POOLING}/config.json": {"word_embedding_dimension": width, **modes},
        SETTINGS: {"max_seq_length": layout.max_length, "do_lower_case": False},
        **_described(modules, layout),
    }
    _write(files, folder)


def write_static_layout(layout: EmbeddingLayout, folder: Path) -> None:
    """Adds the files with which Sentence Transformers 3.2 or later loads a static embedding model."""
    _write(_described([(STATIC, "")], layout), folder)


def _described(modules: list[tuple[str, str]], layout: EmbeddingLayout) -> dict[str, Any]:
    """Returns the contents of the files that name the modules and prompts; `modules` are (class, folder)."""
    if layout.normalize:
        modules = [*modules, ("Normalize", f"{max(len(modules), 2)}_Normalize")]
    described = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(modules)
    ]
    versioned = {
        "prompts": layout.prompts,
        "default_prompt_name": layout.default_prompt,
        "similarity_fn_name": layout.similarity,
    }
    return {MODULES: described, VERSIONED: versioned}


def _write(files: dict[str, Any], folder: Path) -> None:
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class LinearHead:
    """A linear classifier of embeddings. Its logits are `embedding @ weight.T + bias`."""

    weight: torch.Tensor  # (L, D) float32
    bias: torch.Tensor  # (L,) float32

    def save(self, folder: Path) -> None:
        save_file({"weight": self.weight, "bias": self.bias}, folder / LINEAR_HEAD, metadata={"format": "pt"})


def read_linear_head(model: ModelConfig) -> LinearHead | None:
    """Reads the linear classifier of a model; None if it has none. Raises ConfigError if it is damaged."""
    if (file := model_file(model, LINEAR_HEAD)) is None:
        return None
    found = load_weights(file)
    weight, bias = found.get("weight"), found.get("bias")
    if weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ConfigError(
            f"{file} lacks a matrix `weight` and a vector `bias` with one row per label; export it again."
        )
    return LinearHead(weight.float(), bias.float())
