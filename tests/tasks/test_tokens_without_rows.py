"""Every command names a token of the tokenizer that has no row in the model's embedding, before it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tools.tiny_model import make_folder

from sansgpu.cli import run as cli
from sansgpu.config import ModelConfig
from sansgpu.kernels.cross_entropy import linear_cross_entropy
from sansgpu.kernels.embedding import add_rows, embed
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from tests.models.formats.gguf_models import write_ours
from tests.models.small import model_of
from tests.processes import write_rows
from tests.tasks.fine_tuned import Captured, sentence, settings
from tests.tasks.folders import chat_rows, conll, labeled_rows, model_folder, preference_rows, squad

pytestmark = pytest.mark.usefixtures("home")

SAID = 'the tokenizer has 1,025 tokens, but the model\'s embedding has 1,024 rows, so token "<red>" (id 1,024) has none'


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")
    labeled_rows(home / "labels.jsonl")
    preference_rows(home / "preferences.jsonl")
    conll(home / "tags.conll")
    squad(home / "squad.json")
    write_rows(home / "pairs.jsonl", [{"anchor": f"red {n}", "positive": f"blue {n}", "text": "a"} for n in range(40)])


def with_token(folder: Path, architecture: str, **changes: Any) -> Path:
    make_folder(folder, architecture)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(changes) if changes else tokenizer.add_tokens(["<red>"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_every_command_names_a_token_without_a_row(home: Path, tmp_path: Path, capsys: Captured) -> None:
    decoder, encoder = with_token(tmp_path / "decoder", "llama"), with_token(tmp_path / "encoder", "bert")
    rows, output = home / "pairs.jsonl", tmp_path / "output"
    names = {"classify": "labels.jsonl", "preference": "preferences.jsonl", "embed": "pairs.jsonl"}
    commands: list[tuple[object, ...]] = []
    for task in ("sft", "preference", "classify", "tokens", "qa", "embed"):
        own = {"data__dataset_name": home / names[task]} if task in names else {}
        model = decoder if task in ("sft", "preference") else encoder
        chosen = settings(home, task, model__name_or_path=model, **own)
        commands += [("train", *chosen, "--output-dir", output)]
    for command in (("generate",), ("chat",)):
        commands += [(*command, decoder, "--prompt", "a <red> house")]
    commands += [("eval", decoder, "--data", home / name) for name in ("chat.jsonl", "pairs.jsonl")]
    commands += [("export", decoder, "--format", "gguf", "--output", output)]
    commands += [("export", encoder, "--format", kind, "--output", output) for kind in ("static", "onnx")]
    commands += [("embed", encoder, "--data", rows, "--output", f"{output}.npy")]
    commands += [("distill", decoder, "--data", rows, "--output", output), ("serve", decoder, "--port", "0")]
    for arguments in commands:
        capsys.readouterr()
        assert cli([str(argument) for argument in arguments]) == 2, arguments
        assert SAID in sentence(capsys), arguments
    assert not list(tmp_path.glob("output*"))


def test_padding_tokens_and_listed_ones_need_rows_and_others_are_plain_text(tmp_path: Path, capsys: Captured) -> None:
    for name, changes in {"pad": {"pad_token": "<red>"}, "extra": {"extra_special_tokens": ["<red>"]}}.items():
        folder = with_token(tmp_path / name, "llama", **changes)
        capsys.readouterr()
        assert cli(["chat", str(folder), "--prompt", "a"]) == 2
        assert SAID in sentence(capsys)
    folder = make_folder(tmp_path / "image", "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<red>"], special_tokens=True)  # as Gemma 3 has a token for images
    tokenizer.save_pretrained(folder)
    assert cli(["generate", str(folder), "--prompt", "a <red> house", "--max-new-tokens", "2"]) == 0
    plain = load_tokenizer_of(ModelConfig(name_or_path=str(model_folder("llama"))))
    assert load_tokenizer_of(ModelConfig(name_or_path=str(folder)))("a <red>").input_ids == plain("a <red>").input_ids


def test_a_gguf_file_with_more_tokens_than_rows_is_refused(tmp_path: Path, capsys: Captured) -> None:
    write_ours(tmp_path / "whole.gguf", model_of("modern", n_layers=1), "f16")
    reader, writer = gguf.GGUFReader(tmp_path / "whole.gguf"), gguf.GGUFWriter(tmp_path / "less.gguf", "qwen3")
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data[:290] if tensor.name == "token_embd.weight" else tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    capsys.readouterr()
    assert cli(["generate", str(tmp_path / "less.gguf"), "--prompt", "a"]) == 2
    assert "tokens, but the model's embedding has 290 rows, so token" in sentence(capsys)


def test_no_kernel_reads_or_writes_past_a_table() -> None:
    table = torch.randn(8, 16, requires_grad=True)
    for bad in (8, -9):
        with pytest.raises(IndexError):
            embed(torch.tensor([[1, bad]]), table)
        with pytest.raises(IndexError):
            linear_cross_entropy(torch.randn(2, 16), table, torch.tensor([1, bad]))
    total = torch.zeros(8, 16)
    add_rows(total, torch.tensor([1, 8]), torch.ones(2, 16))  # writes only the rows that exist
    assert total.sum() == 16
