"""The models that the benchmarks compare, with their settings for transformers and for sansgpu."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Size:
    """The sizes of a GPT-2 model and of its batch."""

    vocab_size: int
    d_model: int
    n_heads: int
    n_layers: int
    d_ff: int
    window: int
    windows_a_step: int
    dropout: float
    micro_batches: tuple[int, ...]  # tried by the peers; sansgpu chooses its own
    compile: bool = True  # off for toy models, where compilation would take most of the time
    modern_d_ff: int | None = None  # d_ff of a SwiGLU model with as many parameters

    @property
    def tokens_a_step(self) -> int:
        return self.window * self.windows_a_step

    def gpt2(self) -> dict[str, Any]:
        """Returns the arguments of transformers.GPT2Config."""
        return {
            "vocab_size": self.vocab_size,
            "n_embd": self.d_model,
            "n_head": self.n_heads,
            "n_layer": self.n_layers,
            "n_inner": self.d_ff,
            "n_positions": self.window,
            "embd_pdrop": self.dropout,
            "resid_pdrop": self.dropout,
            "attn_pdrop": self.dropout,
            "use_cache": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def model_keys(self) -> dict[str, object]:
        """Returns sansgpu's settings for the same model."""
        return {
            "model.vocab_size": self.vocab_size,
            "model.d_model": self.d_model,
            "model.n_heads": self.n_heads,
            "model.n_layers": self.n_layers,
            "model.d_ff": self.d_ff,
            "model.max_seq_len": self.window,
            "model.dropout": self.dropout,
            "model.attention_dropout": self.dropout,
            "model.activation": "gelu",
            "data.vocab_size": self.vocab_size,
            "training.batch_size": "auto",
            "training.gradient_accumulation_steps": self.windows_a_step,
        }


@dataclass(frozen=True)
class Job:
    """A job for a peer's process."""

    kind: str
    size: Size
    tokens: Path  # train.npy; valid.npy is in the same folder if needed
    micro_batch: int
    steps: int
    output: Path
    minutes: float = 0.0  # training time, if not limited by steps
    valid_bytes: int = 0  # UTF-8 bytes of the text in valid.npy

    @property
    def accumulation(self) -> int:
        """The micro-batches per step."""
        return -(-self.size.windows_a_step // self.micro_batch)

    def write(self, file: Path) -> Path:
        """Writes the job to a JSON file and returns its path."""
        file.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")
        return file

    @staticmethod
    def read(file: Path) -> Job:
        values = json.loads(file.read_text(encoding="utf-8"))
        size = {**values["size"], "micro_batches": tuple(values["size"]["micro_batches"])}
        paths = {key: Path(values[key]) for key in ("tokens", "output")}
        return Job(**{**values, **paths, "size": Size(**size)})


SIZES = {
    "tiny": Size(300, 32, 2, 2, 128, 32, 4, 0.0, (4,), compile=False),
    "cpu_small": Size(32000, 256, 4, 4, 1024, 512, 16, 0.1, (2, 16)),  # configs/cpu_small.yaml
    "m80": Size(8000, 768, 12, 12, 3072, 512, 4, 0.0, (4,), modern_d_ff=2048),
}
LEARNING_RATE = 0.0008  # constant, for every contestant
WEIGHT_DECAY = 0.01
