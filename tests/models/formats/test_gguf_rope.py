"""Settings of RoPE come back from GGUF files, and files whose RoPE is damaged or computed otherwise are refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from sansgpu.config import ConfigError
from sansgpu.models.formats.gguf_source import open_gguf
from tests.models.formats.gguf_models import base, rewritten, write_base, write_ours
from tests.models.small import model_of

LLAMA_3_1 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("trained", [pytest.param(8192, marks=pytest.mark.long), 64])
def test_llama_3_files_of_others_have_only_the_factors(trained: int, tmp_path: Path) -> None:
    rope = {**LLAMA_3_1, "original_max_position_embeddings": trained}
    model, tokenizer = base(tmp_path / "base", "llama", rope_parameters=rope)
    write_base(tmp_path / "model.gguf", model, tokenizer, "f32")
    others = rewritten(tmp_path / "model.gguf", tmp_path / "other.gguf", "sansgpu.rope_parameters", "llama")
    if trained == 8192:
        assert open_gguf(others).settings["rope_parameters"] == rope
    else:
        with pytest.raises(ConfigError, match="its RoPE scaling is not that of Llama 3"):
            open_gguf(others)


@pytest.mark.parametrize(
    "bad",
    [
        [1.0, 2.0],
        pytest.param([1.0, 2.0, 3.0, 4.0, 5.0, 0.0], marks=pytest.mark.long),
        pytest.param([1.0, 2.0, 3.0, 4.0, 5.0, float("nan")], marks=pytest.mark.long),
    ],
)
def test_bad_factors_of_rope_are_refused(bad: list[float], tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path / "base", "long_longrope")
    write_base(tmp_path / "model.gguf", model, tokenizer, "f32")
    name = "rope_factors_long.weight"
    added = {name: np.array(bad, np.float32)}
    path = rewritten(tmp_path / "model.gguf", tmp_path / "bad.gguf", name, "phi3", **added)
    with pytest.raises(ConfigError, match=r"bad.gguf: its RoPE factors are not 6 positive numbers"):
        open_gguf(path)


def test_rows_of_a_rotary_pair_are_adjacent_in_a_llama_file(tmp_path: Path) -> None:
    model = model_of("llama")
    write_ours(tmp_path / "model.gguf", model, "f32")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    half = model.config.head_dim // 2
    for name, ours in {"attn_q": model.blocks[1].attention.q, "attn_k": model.blocks[1].attention.k}.items():
        written = torch.from_numpy(tensors[f"blk.1.{name}.weight"].copy())
        assert torch.equal(written[0], ours.weight[0])
        assert torch.equal(written[1], ours.weight[half])
        assert torch.equal(written[2], ours.weight[1])
