"""Measures one contestant of inference.py: `python -m benchmarks.serving.inference_worker JOB`.

Prints a JSON line per measured pass. The first contestant writes its results to a file, and those of the others are
compared with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.contest import read_job
from benchmarks.serving.onnx_encoders import onnx_encoder

Job = dict[str, Any]
Results = np.ndarray  # vectors (texts, D), or the label of each text


def dtype_of(job: Job) -> torch.dtype:
    return torch.bfloat16 if job["precision"] == "bf16" else torch.float32


def our_encoder(job: Job, texts: list[str]) -> tuple[Callable[[], Results], Callable[[], Any]]:
    """Returns functions that encode and that only tokenize the texts."""
    from sansgpu.jobs.embed import open_encoder
    from sansgpu.tasks.embed.data import tokenize
    from sansgpu.train.loading import ModelRequest

    loaded = open_encoder(ModelRequest(job["model"], precision=job["precision"]), print, lambda *_: None)
    return lambda: loaded.task_class.encode_texts(loaded, texts), lambda: tokenize(
        texts, loaded.tokenizer, loaded.config.window, ""
    )


def their_encoder(job: Job, texts: list[str], batch: int) -> tuple[Callable[[], Results], Callable[[], Any]]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(job["model"], device="cpu", model_kwargs={"dtype": dtype_of(job)})

    def tokenize() -> None:
        by_length = sorted(texts, key=len, reverse=True)
        for start in range(0, len(by_length), batch):
            model.preprocess(by_length[start : start + batch])

    return lambda: np.asarray(model.encode(texts, batch_size=batch, show_progress_bar=False), np.float32), tokenize


def our_predictor(job: Job, texts: list[str]) -> tuple[Callable[[], Results], None]:
    from sansgpu.machine.probe import mixed_precision
    from sansgpu.tasks.inference import CHUNK_ROWS
    from sansgpu.train.loading import ModelRequest, open_model

    assert len(texts) <= CHUNK_ROWS
    loaded = open_model(ModelRequest(job["model"], precision=job["precision"]), "predict", print, lambda *_: None)
    task_class: Any = loaded.task_class

    def predict() -> Results:
        with torch.no_grad(), mixed_precision(loaded.device, loaded.precision):
            return np.array([one["label"] for one in task_class.predict(loaded, [{"text": text} for text in texts])])

    return predict, None


def their_predictor(job: Job, texts: list[str], batch: int) -> tuple[Callable[[], Results], None]:
    from transformers import pipeline

    pipe: Any = pipeline("text-classification", model=job["model"], device="cpu", dtype=dtype_of(job))

    def predict() -> Results:
        return np.array([one["label"] for one in pipe(texts, batch_size=batch, truncation=True, max_length=256)])

    return predict, None


OURS: dict[str, Callable[..., Any]] = {"encode": our_encoder, "predict": our_predictor}
THEIRS: dict[str, Callable[..., Any]] = {
    "sentence-transformers": their_encoder,
    "onnxruntime": onnx_encoder,
    "openvino": onnx_encoder,
    "pipeline": their_predictor,
}


def agreement(found: Results, expected: Results) -> float:
    """Returns the mean cosine similarity of the two vectors of a text, or the share of equal labels."""
    if found.ndim == 1:
        return float((found == expected).mean())
    return float(F.cosine_similarity(torch.from_numpy(found), torch.from_numpy(expected)).mean())


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    folder = Path(job["folder"])
    texts, first, peer = json.loads((folder / "texts.json").read_text()), folder / "first.npy", job["peer"]
    for batch in job["batches"] if peer else [None]:
        run, tokenize = THEIRS[peer](job, texts, batch) if peer else OURS[job["task"]](job, texts)
        results = run()
        if not first.exists():
            np.save(first, results)
        event: Job = {"event": "pass", "batch": batch, "agreement": agreement(results, np.load(first))}
        start = time.perf_counter()
        if tokenize is not None:
            tokenize()
        event["tokenizing_seconds"] = time.perf_counter() - start if tokenize is not None else None
        for _ in range(job["passes"]):
            start, cpu = time.perf_counter(), time.process_time()
            run()
            spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
            print(json.dumps({**event, **spent}), flush=True)


if __name__ == "__main__":
    main()
