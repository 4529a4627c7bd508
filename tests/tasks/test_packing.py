"""Packed and padded examples give the same results as single examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MraConfig,
    MraForQuestionAnswering,
)

from sansgpu.cli import run as cli
from sansgpu.config import ModelConfig
from sansgpu.kernels import library
from sansgpu.machine.instruction_sets import InstructionSet, supported
from sansgpu.models.huggingface.generation import slots_work
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from tests.processes import use_cache
from tests.tasks.folders import chat_rows, model_folder, squad
from tests.tasks.test_architectures import settings, task_of

TRAINED = 48  # tokens; beyond this, rotary frequencies depend on the length
PHI3_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.5 + n for n in range(8)]}
SCALED: dict[str, dict[str, Any]] = {
    "phi3": {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": TRAINED,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": TRAINED, **PHI3_FACTORS
        },
    },
    "llama": {
        "max_position_embeddings": TRAINED,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path / "cache")


def scaled_folder(folder: Path, architecture: str) -> Path:
    """Writes a random model whose rotary frequencies depend on the length of its input."""
    made = model_folder(architecture)
    config = {**json.loads((made / "config.json").read_text()), **SCALED[architecture], "initializer_range": 0.2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(made).save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def by_itself(folder: Path, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Returns the summed loss of one example in a newly loaded transformers model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))


@pytest.mark.parametrize(
    ("architecture", "pack"),
    [*((name, True) for name in SCALED), *(pytest.param(name, False, marks=pytest.mark.long) for name in SCALED)],
)
def test_frequencies_that_depend_on_the_length_are_those_of_each_example(
    tmp_path: Path, architecture: str, pack: bool
) -> None:
    chat_rows(tmp_path / "chat.jsonl")
    folder = scaled_folder(tmp_path / "model", architecture)
    task = task_of(tmp_path, settings(tmp_path, architecture, folder, data__pack_sequences=pack))
    assert task.objective.unpadded.packs == pack
    batch = task.batch(0)
    assert batch.lengths.min() < TRAINED < batch.lengths.max()
    examples = zip(batch.tokens.split(batch.lengths.tolist()), batch.targets.split(batch.lengths.tolist()), strict=True)
    expected = sum(by_itself(folder, tokens, targets) for tokens, targets in examples)
    for size in (1, 3, 8):
        with torch.no_grad():
            found = sum(float(task.loss(piece)) for piece in batch.micro_batches(size))
        assert found == pytest.approx(expected, rel=1e-4)


def test_texts_of_any_length_are_evaluated_as_each_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scaled_folder(tmp_path / "model", "phi3")
    texts = ["red house", "blue light is quiet and dark " * 9, "a slow fox " * 22]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = [torch.tensor(AutoTokenizer.from_pretrained(folder)(text).input_ids) for text in texts]
    assert min(map(len, rows)) < TRAINED < max(map(len, rows))
    expected = sum(by_itself(folder, row[:-1], row[1:]) for row in rows) / sum(len(row) - 1 for row in rows)
    capsys.readouterr()
    assert cli(["eval", str(folder), "--data", str(tmp_path / "texts.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_model_whose_positions_begin_elsewhere_is_padded(tmp_path: Path) -> None:
    """MRA's position ids start at 2, but those of packed rows start at 0."""
    folder = model_folder("bert")
    mra = tmp_path / "mra"
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    MraForQuestionAnswering(MraConfig(vocab_size=1024, initializer_range=0.3, **shape)).save_pretrained(mra)
    AutoTokenizer.from_pretrained(folder).save_pretrained(mra)
    squad(tmp_path / "squad.json")
    chosen = settings(tmp_path, "bert", mra)
    task = task_of(tmp_path, chosen)
    assert not task.objective.unpadded.packs
    batch = task.batch(0)
    with torch.no_grad():
        together = float(task.loss(batch))
        apart = sum(float(task.loss(piece)) for piece in batch.micro_batches(1))
    assert together == pytest.approx(apart, rel=1e-4)


@pytest.mark.parametrize(
    ("named", "packs"),
    [({"attention_window": 200}, False), ({"some": {"block_sizes": [16, 200]}}, False), ({"unnamed": 16}, True)],
)
def test_examples_are_tried_beyond_every_window_that_the_configuration_names(
    named: dict[str, Any], packs: bool
) -> None:
    """The model of this test mixes each token with the one 200 positions earlier, even across examples."""
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, use_cache=False, **shape, **named)).eval()

    def mixed(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(output)
        before[:, 200:] = output[:, :-200]
        return output + before

    model.model.embed_tokens.register_forward_hook(mixed)
    assert UnpaddedModel(model, pack=True, longest=512).packs == packs
    assert UnpaddedModel(model, pack=True, longest=100).packs, "mixing does not reach across examples of 100 tokens"


# `make test` compiles the portable kernels and the best ones, `make test-long` all.
SETS = [
    pytest.param(one, id=one.name, marks=() if one in (supported()[0], supported()[-1]) else pytest.mark.long)
    for one in supported()
]


@pytest.mark.parametrize("precision", ["bf16", "int8", pytest.param("int4", marks=pytest.mark.long)])
@pytest.mark.parametrize("instructions", SETS)
def test_a_model_that_amplifies_rounding_is_packed(
    instructions: InstructionSet,
    precision: Literal["bf16", "int8", "int4"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matmuls of few rows round differently, which changes this model's outputs by up to 12% with int4 weights."""
    monkeypatch.setattr(library, "_library", library.load_library(instructions))
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, num_hidden_layers=4, initializer_range=0.5, tie_word_embeddings=True, dtype="bfloat16", **shape
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    given = ModelConfig(name_or_path=str(tmp_path), adapter="lora", base_precision=precision)
    model = load_pretrained(given, Head("causal"), 0)
    patch_model(model)
    for longest in (4, 128):
        unpadded = UnpaddedModel(model, pack=True, longest=longest)
        assert unpadded.packs
        assert slots_work(unpadded)


def test_a_large_model_is_tried_by_its_first_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 5}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, use_cache=False, **shape)).eval()
    for number, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, number=number: seen.append(number))
    monkeypatch.setattr("sansgpu.models.huggingface.probes.PROBE_FLOPS", 1)
    assert UnpaddedModel(model, pack=True).packs
    assert seen.count(1) > seen.count(4)
    assert len(model.model.layers) == 5


def test_rows_may_be_longer_than_the_context_of_a_model() -> None:
    """GPT-Neo's own code has a causal mask of the size of its context."""
    model = load_pretrained(ModelConfig(name_or_path=str(model_folder("gpt_neo"))), Head("causal"), seed=0).eval()
    patch_model(model)
    unpadded = UnpaddedModel(model, pack=True)
    tokens, lengths = torch.arange(600) * 7 % 1000, torch.tensor([300, 300])  # the model's context has 512 tokens
    with torch.no_grad():
        together = unpadded.summed_loss(tokens, lengths, tokens)
        alone = [unpadded.summed_loss(half, torch.tensor([300]), half) for half in tokens.split(300)]
    assert float(together) == pytest.approx(float(sum(alone)), rel=1e-5)
    assert unpadded.packs
