"""Exports encoders as ONNX files, and checks the files by running them with onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.errors import require
from sansgpu.config.model import ModelConfig
from sansgpu.config.wording import first_line
from sansgpu.files.reading import read_object
from sansgpu.models.formats.folders import DECODER_CLASSES, validate_model_folder, write_folder_atomically
from sansgpu.models.huggingface.older_versions import complete_config
from sansgpu.models.huggingface.pretrained import AUTO_CLASSES, Head, HeadType, load_pretrained
from sansgpu.models.huggingface.sentence_embedding import (
    EmbeddingLayout,
    LinearHead,
    read_dense,
    read_layout,
    read_linear_head,
    write_layout,
)
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of, save_tokenizer

if TYPE_CHECKING:  # onnxruntime is optional, and transformers takes seconds to import
    from onnxruntime import InferenceSession
    from transformers import PreTrainedModel

FILES = {"f32": "model.onnx", "int8": "model_quantized.onnx"}  # by weight type; named as in Optimum
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # maximum difference between an f32 file and the torch model, relative for outputs above 1
# Names of a transformers model's outputs, by type of head.
_OUTPUTS: dict[HeadType, tuple[str, ...]] = {
    "qa": ("start_logits", "end_logits"),
    "sequence": ("logits",),
    "tokens": ("logits",),
    "masked": ("logits",),
    "none": ("last_hidden_state",),
}
_CHECKED_SHAPES = ((1, 7), (12, 160))  # (batch, tokens); the second exceeds the usual window of local attention
_TRACED_SHAPE = (2, 16)
_SMALLEST_ADDED = 1.01e-8  # onnxscript removes additions of 1e-8 as if they added 0
_RESERVED_POSITIONS = 2  # RoBERTa cannot use the first two positions of its context
_LARGE_BYTES = 3 << 29  # larger models are stored in several files, because an ONNX file is limited to 2 GB

Arrays = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OnnxCheck:
    """How close the outputs of an ONNX file are to the torch model's on random inputs.

    `equal_argmax` is the share of equal predictions of a model with a head, and `lowest_cosine` the lowest
    cosine similarity of the outputs of a model without a head. The respective other is None.
    """

    largest_difference: float
    largest_value: float  # largest absolute value in the torch model's outputs
    equal_argmax: float | None
    lowest_cosine: float | None

    @property
    def is_exact(self) -> bool:
        """Returns whether the outputs are equal up to fp32 rounding."""
        return self.largest_difference <= TOLERANCE * max(1.0, self.largest_value)

    def __str__(self) -> str:
        parts = [f"largest difference {self.largest_difference:.2g}, with values up to {self.largest_value:.3g}"]
        if self.equal_argmax is not None:
            parts.append(f"{self.equal_argmax:.1%} of predictions equal")
        if self.lowest_cosine is not None:
            parts.append(f"lowest cosine similarity {self.lowest_cosine:.4f}")
        return ", ".join(parts)


def require_onnx() -> None:
    """Raises ConfigError if a package that the export needs is not installed."""
    require("--format onnx", *PACKAGES)


def write_onnx(source: Path, name: str, folder: Path, weight_type: str, remote_code: bool) -> OnnxCheck:
    """Exports the encoder in the Hugging Face folder `source` to `folder`, with its config.json and tokenizer.

    `weight_type` is f32 or int8; messages call the model `name`. Raises ConfigError if the model is not an encoder, and
    SansGPUError if an f32 file does not compute the same as torch.
    """
    settings, head = ModelConfig(name_or_path=str(source), trust_remote_code=remote_code), _head_of(source, name)
    tokenizer = load_tokenizer_of(settings)
    model = load_pretrained(settings, Head(head), seed=0).eval()
    model.set_attn_implementation("eager")
    layout, width = read_layout(settings) if head == "none" else None, int(model.config.get_text_config().hidden_size)
    dense = read_dense(settings, layout, width)
    classifier = read_linear_head(settings) if layout else None
    traced = _TracedModel(model, head, tokenizer.model_input_names, layout, dense, classifier).eval()
    found: list[OnnxCheck] = []

    def write(partial: Path) -> None:
        path = partial / FILES["f32"]
        _trace(traced, path, name)
        if weight_type == "int8":
            path = _quantize(path)
        found.append(_compare(traced, path, name))
        if weight_type == "f32" and not found[0].is_exact:
            raise SansGPUError(
                f"{name} cannot be exported as ONNX: the outputs of the file differ from those of torch ({found[0]}); "
                "use --format hf."
            )
        model.config.save_pretrained(partial)
        complete_config(partial)
        save_tokenizer(tokenizer, partial)
        if layout is not None:
            write_layout(layout, width, partial, dense)
        if classifier is not None:
            classifier.save(partial)

    write_folder_atomically(folder, write)
    return found[0]


def _head_of(source: Path, name: str) -> HeadType:
    """Returns the type of the model's head. Raises ConfigError if its config.json does not name an encoder."""
    validate_model_folder(source)
    architectures = read_object(source / "config.json").get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "none"
    endings = {head_type: auto.removeprefix("AutoModel") or "Model" for head_type, auto in AUTO_CLASSES.items()}
    found = next((head_type for head_type in _OUTPUTS if architecture.endswith(endings[head_type])), None)
    if architecture.endswith(DECODER_CLASSES):
        raise decoder_error(name)
    if found is None:
        known = " ".join(f"*{endings[head_type]}" for head_type in _OUTPUTS)
        raise ConfigError(
            f"{name} cannot be exported as ONNX: its architecture in config.json is {architecture}; pass a model with "
            f"one of transformers' {known}, or use --format hf."
        )
    return found


def decoder_error(name: str) -> ConfigError:
    """Returns the error for a model that is a decoder."""
    return ConfigError(f"{name} is a decoder, but --format onnx needs an encoder; export its run with --format gguf.")


class _TracedModel(torch.nn.Module):
    """Wraps a transformers model for tracing: takes tensors with the tokenizer's names, and returns a tuple."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: HeadType,
        inputs: list[str],
        layout: EmbeddingLayout | None,
        dense: torch.nn.Sequential,
        classifier: LinearHead | None,
    ) -> None:
        super().__init__()
        self.model, self.head, self.layout, self.classifier = model, head, layout, classifier
        self.dense = dense
        more = [*(["sentence_embedding"] if layout else []), *(["logits"] if classifier else [])]
        self.outputs = (*_OUTPUTS[head], *more)
        self.inputs = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in inputs]

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        found: Any = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **types)
        tensors = tuple(found[name] for name in _OUTPUTS[self.head])
        if self.layout is None:
            return tensors
        vectors = _pool(tensors[0], attention_mask, self.layout, self.dense)
        if self.classifier is None:
            return (*tensors, vectors)
        return (*tensors, vectors, F.linear(vectors, self.classifier.weight, self.classifier.bias))

    def random_inputs(self, texts: int, tokens: int) -> Arrays:
        """Returns a random batch of `texts` rows and `tokens` columns, fewer if the model's context is shorter.

        All rows but the first end with padding.
        """
        config, draws = self.model.config, torch.Generator().manual_seed(tokens)
        tokens = min(tokens, getattr(config, "max_position_embeddings", tokens) - _RESERVED_POSITIONS)
        padding = int(getattr(config, "pad_token_id", None) or 0)
        ids = torch.randint(0, config.get_text_config().vocab_size - 1, (texts, tokens), generator=draws)
        ids += ids >= padding  # avoids the padding token, whose position some models skip
        lengths = torch.linspace(tokens, 1, texts).long()
        mask = torch.arange(tokens) < lengths[:, None]
        inputs = {"input_ids": ids.where(mask, padding), "attention_mask": mask.long()}
        return {name: inputs.get(name, torch.zeros_like(ids)) for name in self.inputs}

    def predictions(self, output: torch.Tensor, inputs: Arrays) -> list[torch.Tensor]:
        """Splits an output into vectors without padding, one per prediction.

        These are the logits of a row or token, the start or end logits of a row, or the embedding of a row.
        """
        mask = inputs["attention_mask"].bool()
        if self.head == "qa":  # (B, T): start or end logits
            return [row[known] for row, known in zip(output, mask, strict=True)]
        if output.ndim == 2:  # (B, L) or (B, D)
            return list(output)
        return list(output[mask])  # (B, T, L)


def _pool(
    hidden: torch.Tensor, mask: torch.Tensor, layout: EmbeddingLayout, dense: torch.nn.Sequential
) -> torch.Tensor:
    """Pools hidden states (B, T, D) with padding at the end to one embedding per row, (B, D)."""
    mask = mask.to(hidden.dtype)[..., None]
    if layout.pooling == "mean":
        vectors = (hidden * mask).sum(1) / mask.sum(1)
    elif layout.pooling == "cls":
        vectors = hidden[:, 0]
    else:  # the last token before the padding
        vectors = (hidden * (mask - F.pad(mask[:, 1:], (0, 0, 0, 1)))).sum(1)
    vectors = dense(vectors)
    return F.normalize(vectors, dim=-1) if layout.normalize else vectors


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings of the exporter and the quantizer about their own code."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _trace(model: _TracedModel, path: Path, name: str) -> None:
    """Writes an f32 file with dynamic batch size and sequence length. Raises ConfigError if tracing fails."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    _raise_epsilons(model)
    with quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                model,
                tuple(model.random_inputs(*_TRACED_SHAPE).values()),
                dynamo=True,
                verbose=False,
                input_names=model.inputs,
                output_names=model.outputs,
                dynamic_shapes=tuple(sizes for _ in model.inputs),
            )
        except (torch.onnx.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name} cannot be exported as ONNX ({_reason(error)}); use --format hf.") from None
        assert program is not None
        ClearMetadataAndDocStringPass()(program.model)  # removes stack traces with paths of this machine
        program.save(path)


def _raise_epsilons(model: torch.nn.Module) -> None:
    """Keeps the exporter from removing the epsilon of norms, as in Helium, so that padding would give NaN."""
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            value = getattr(module, name, None)
            if isinstance(value, float) and 0 < value < _SMALLEST_ADDED:
                setattr(module, name, _SMALLEST_ADDED)


def _reason(error: BaseException) -> str:
    """Returns what the exporter's innermost error says; the outer ones give advice to PyTorch's developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error).split(". ")[0]


def _quantize(path: Path) -> Path:
    """Replaces a file with a dynamically quantized int8 version, and returns its path.

    Each column of a matrix has its own scale. Weights use only 7 bits, because CPUs without VNNI instructions would
    saturate sums of 8-bit products.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    data = path.with_name(f"{path.name}.data")
    size = sum(file.stat().st_size for file in (path, data) if file.exists())
    quantized = path.with_name(FILES["int8"])
    with quiet():
        quantize_dynamic(
            path,
            quantized,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            use_external_data_format=size > _LARGE_BYTES,
        )
    path.unlink()
    data.unlink(missing_ok=True)
    return quantized


def open_session(path: Path) -> InferenceSession:
    """Opens a file with onnxruntime, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _compare(model: _TracedModel, path: Path, name: str) -> OnnxCheck:
    """Runs a file and the torch model on random inputs of two shapes, with padding.

    Raises ConfigError if the file takes only inputs of one shape.
    """
    session = open_session(path)
    unrolled = ConfigError(
        f"{name} cannot be exported as ONNX: the exporter unrolls its recurrence, so that the file would take only "
        "texts of one length; use --format hf."
    )
    if any(isinstance(size, int) for given in session.get_inputs() for size in given.shape):
        raise unrolled
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for shape in _CHECKED_SHAPES:
        inputs = model.random_inputs(*shape)
        try:
            results = session.run(model.outputs, {name: value.numpy() for name, value in inputs.items()})
        except Exception:  # onnxruntime's errors have no class of their own
            raise unrolled from None
        with torch.no_grad():
            expected = model(*inputs.values())
        for found, wanted in zip(map(torch.from_numpy, results), expected, strict=True):
            pairs += zip(model.predictions(found, inputs), model.predictions(wanted, inputs), strict=True)
    equal = torch.stack([(found.argmax() == wanted.argmax()).float() for found, wanted in pairs])
    cosine = torch.stack([F.cosine_similarity(found, wanted, dim=0) for found, wanted in pairs])
    return OnnxCheck(
        largest_difference=float(torch.stack([(found - wanted).abs().max() for found, wanted in pairs]).max()),
        largest_value=float(torch.stack([wanted.abs().max() for _, wanted in pairs]).max()),
        equal_argmax=None if model.head == "none" else float(equal.mean()),
        lowest_cosine=float(cosine.min()) if model.head == "none" else None,
    )
