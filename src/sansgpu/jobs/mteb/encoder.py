"""The interface of mteb's encoders over the engine of `sansgpu embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mteb.models.abs_encoder import get_prompt_name
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.similarity_functions import cos_sim, dot_score, pairwise_cos_sim, pairwise_dot_score
from mteb.types import PromptType

from sansgpu.events.progress import ReportProgress, counting
from sansgpu.models.huggingface.sentence_embedding import PASSAGE_PROMPTS, QUERY_PROMPT
from sansgpu.tasks.task import TrainedModel


class BenchmarkedModel:
    """An implementation of mteb's EncoderProtocol by a model that `jobs.embed.open_encoder` has loaded."""

    def __init__(self, loaded: TrainedModel, progress: ReportProgress) -> None:
        self.loaded, self._progress = loaded, progress
        self.task = ""  # name of the task that is evaluated, for progress
        self.prompts: dict[str, str] = loaded.objective.layout.prompts
        self._is_dot = loaded.objective.layout.similarity == "dot"
        target, step = loaded.source.target, loaded.source.step
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"sansgpu/{Path(target).resolve().name}" if Path(target).exists() else target,
                "revision": None if step is None else f"step-{step:06d}",
                "similarity_fn_name": ScoringFunction.DOT_PRODUCT if self._is_dot else ScoringFunction.COSINE,
                "embed_dim": loaded.objective.width,
                "n_parameters": sum(p.numel() for p in loaded.objective.model.parameters()),
                "framework": ["PyTorch"],
            }
        )

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Returns the embeddings of the texts in batches of `inputs`, (S, D) float32."""
        texts = [text for batch in inputs for text in batch["text"]]
        prompt = self._prompt(task_metadata, prompt_type)
        encoded = counting(self._progress, f"embedding {self.task}", 0, len(texts), "text")
        vectors: np.ndarray = self.loaded.task_class.encode_texts(self.loaded, texts, encoded, prompt)
        return vectors

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        return (dot_score if self._is_dot else cos_sim)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        return (pairwise_dot_score if self._is_dot else pairwise_cos_sim)(embeddings1, embeddings2)

    def _prompt(self, task_metadata: Any, prompt_type: PromptType | None) -> str:
        """Returns the model's prompt for a task or its type, or else for queries or documents, or its default one."""
        layout = self.loaded.objective.layout
        if (name := get_prompt_name(self.prompts, task_metadata, prompt_type)) is not None:
            return self.prompts[name]
        names = {PromptType.query: (QUERY_PROMPT,), PromptType.document: PASSAGE_PROMPTS}
        prompt: str = layout.prompt(*(names[prompt_type] if prompt_type else ()))
        return prompt
