"""Encoders of texts that run ONNX files: onnxruntime and OpenVINO, as peers of `benchmarks.serving.inference`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Feed = dict[str, np.ndarray]  # inputs of a model by name, each (texts, tokens)
Model = Callable[[Feed], np.ndarray]  # returns the vectors (texts, D)
Encoder = tuple[Callable[[], np.ndarray], Callable[[], Any]]  # functions that encode and that only tokenize the texts

OUTPUT = "sentence_embedding"
CALIBRATION_TEXTS = 64  # texts from which static quantization finds the ranges of activations
CALIBRATION_BATCH = 8


class Batches:
    """Tokenizes texts in batches of similar lengths, as Sentence Transformers does, each padded to its longest text."""

    def __init__(self, folder: Path) -> None:
        from sansgpu.config import ModelConfig
        from sansgpu.models.huggingface.sentence_embedding import read_layout
        from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of

        model = ModelConfig(name_or_path=str(folder))
        self.tokenizer, layout = load_tokenizer_of(model), read_layout(model)
        assert layout is not None
        self.max_length = layout.max_length

    def __call__(self, texts: list[str], size: int) -> Iterator[tuple[list[int], Feed]]:
        """Yields the numbers of the texts of each batch, and the inputs of the model."""
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for start in range(0, len(order), size):
            numbers = order[start : start + size]
            feed = self.tokenizer(
                [texts[number] for number in numbers],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="np",
            )
            yield numbers, dict(feed)


def exported(model: Path, folder: Path) -> Path:
    """Returns the f32 file of an encoder in `folder`, after exporting it if it does not exist."""
    from sansgpu.models.huggingface.onnx import FILES, write_onnx

    if not folder.exists():
        write_onnx(model, str(model), folder, "f32", remote_code=False)
    return folder / FILES["f32"]


def quantize_dynamically(source: Path, target: Path) -> Path:
    """Quantizes the weights of all linear layers to 8 bits, and their inputs while the model runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from sansgpu.models.huggingface.onnx import quiet

    if not target.exists():
        with quiet():
            quantize_dynamic(source, target, weight_type=QuantType.QInt8, per_channel=True)
    return target


def quantize_statically(source: Path, target: Path, feeds: Iterator[Feed]) -> Path:
    """Quantizes the weights and inputs of all linear layers to 8 bits, the inputs with ranges observed in `feeds`."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    from sansgpu.models.huggingface.onnx import quiet

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Feed | None:
            return next(feeds, None)

    if not target.exists():
        graph = onnx.load(source).graph
        weights = {tensor.name for tensor in graph.initializer}
        linear = [node.name for node in graph.node if node.op_type in ("MatMul", "Gemm") and weights & {*node.input}]
        with quiet():
            quantize_static(
                source,
                target,
                Reader(),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_quantize=linear,
            )
    return target


def onnxruntime_model(path: Path) -> Model:
    from sansgpu.models.huggingface.onnx import open_session

    session = open_session(path)
    return lambda feed: np.asarray(session.run([OUTPUT], feed)[0])


def openvino_model(path: Path, threads: int, precision: str) -> Model:
    """Loads a file with OpenVINO; `precision`, bf16 or f32, is that of everything that the file does not quantize."""
    import openvino

    core: Any = openvino.Core()
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",  # all threads compute one batch
    }
    model = core.compile_model(core.read_model(path), "CPU", settings)
    return lambda feed: np.asarray(model(feed)[OUTPUT])


def load(job: dict[str, Any], batches: Batches, texts: list[str]) -> Model:
    """Returns the model of a job in the precision of its peer. Raises SystemExit for a precision that it lacks."""
    folder, threads, precision = Path(job["folder"]), job["threads"], job["precision"]
    plain = exported(Path(job["model"]), folder / "onnx")
    if job["peer"] == "onnxruntime":
        if precision not in ("fp32", "int8"):
            raise SystemExit(f"onnxruntime has no {precision} on CPUs; choose fp32 or int8.")
        path = plain if precision == "fp32" else quantize_dynamically(plain, folder / "dynamic-int8.onnx")
        return onnxruntime_model(path)
    if precision != "int8":
        return openvino_model(plain, threads, {"fp32": "f32"}.get(precision, precision))
    feeds = (feed for _, feed in batches(texts[:CALIBRATION_TEXTS], CALIBRATION_BATCH))
    return openvino_model(quantize_statically(plain, folder / "static-int8.onnx", feeds), threads, "f32")


def onnx_encoder(job: dict[str, Any], texts: list[str], batch: int) -> Encoder:
    batches = Batches(Path(job["model"]))
    model = load(job, batches, texts)

    def encode() -> np.ndarray:
        vectors: dict[int, np.ndarray] = {}
        for numbers, feed in batches(texts, batch):
            vectors.update(zip(numbers, model(feed), strict=True))
        return np.stack([vectors[number] for number in range(len(texts))])

    return encode, lambda: list(batches(texts, batch))
