"""A model in several GGUF files is read from any of them; files that are not models are named with what to give."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from sansgpu.cli import run as cli
from sansgpu.train.loading import ModelRequest, open_model
from tests.models.formats.gguf_models import base, rewritten, write_base, write_ours
from tests.models.small import model_of
from tests.processes import options
from tests.tasks.fine_tuned import Captured, sentence
from tests.tasks.folders import chat_rows, model_folder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea423c2713d436b5ee5\nsize 12345\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "whole.gguf"
    write_ours(path, model_of("modern", n_layers=1), "f16")
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_base(folder / "llama.gguf", *base(folder / "base", "llama"), "f32")
    return folder / "llama.gguf"


def refused(capsys: Captured, *arguments: object) -> str:
    capsys.readouterr()
    assert cli([str(argument) for argument in arguments]) == 2
    return sentence(capsys)


def in_parts(source: Path, folder: Path, count: int) -> list[Path]:
    """Splits a file like llama-gguf-split: all metadata are in the first part, tensors in the later ones, too."""
    reader = gguf.GGUFReader(source)
    paths = [folder / f"model-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "qwen3")
        for name, field in reader.fields.items() if number == 0 else ():
            if name != "general.architecture" and not name.startswith("GGUF."):
                writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        written(writer)
    return paths


def written(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(open_model(ModelRequest(str(path)), "generate", pytest.fail).objective.model.state_dict())


def test_all_parts_are_read_from_any_of_them(whole: Path, tmp_path: Path, capsys: Captured) -> None:
    first, second, third = in_parts(whole, tmp_path, 3)
    expected = weights_of(whole)
    for path in (first, third):
        found = weights_of(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    renamed = Path(shutil.copy(second, tmp_path / "second.gguf"))
    assert "second.gguf is part 2 of 3 of a model, but its name does not say so" in refused(capsys, "generate", renamed)
    aside = Path(shutil.move(third, tmp_path / "aside.gguf"))
    said = refused(capsys, "generate", first)
    assert "is part 1 of 3 of a model, and 1 part is missing beside it; download model-00003-of-00003.gguf" in said
    shutil.copy(second, third)
    assert "model-00003-of-00003.gguf is not part 3 of 3" in refused(capsys, "generate", first)
    shutil.move(aside, third)
    shutil.copy(in_parts(write_more(tmp_path), tmp_path / "more", 3)[1], second)
    assert "belong to different models" in refused(capsys, "generate", third)


def write_more(folder: Path) -> Path:
    path = folder / "more/deeper.gguf"
    path.parent.mkdir()
    write_ours(path, model_of("modern", n_layers=2), "f16")
    return path


def test_a_file_that_is_not_a_model_is_named(whole: Path, tmp_path: Path, capsys: Captured) -> None:
    kinds = {
        "adapter": ("qwen3", "a LoRA adapter"), "mmproj": ("clip", "a projector of images"),
        "imatrix": ("", "an importance matrix"), "vocab": ("qwen3", "only a vocabulary"),
    }  # fmt: skip
    for kind, (architecture, words) in kinds.items():
        path = tmp_path / f"{kind}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_type(kind)
        writer.add_tensor("a.weight", torch.ones(4).numpy())
        written(writer)
        for command in ("generate", "chat", "eval"):
            said = refused(capsys, command, path, *(("--data", whole) if command == "eval" else ()))
            assert f"{kind}.gguf is not a model, but {words}" in said
            assert "pass the GGUF file of the model" in said
    piece = tmp_path / "whole.gguf-split-a"
    piece.write_bytes(whole.read_bytes()[:9000])
    assert "join them: cat whole.gguf?* > whole.gguf" in refused(capsys, "generate", piece)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "model.gguf").write_text(POINTER)
    rows = chat_rows(tmp_path / "chat.jsonl")
    for name in ("model.gguf", "model.safetensors", "tokenizer.json"):
        target = tmp_path / name
        if target.suffix != ".gguf":
            target = Path(shutil.copytree(model_folder("qwen2"), tmp_path / f"with-{name}"))
            (target / name).write_text(POINTER)
        training = ("train", *options({"task": "sft", "model.name_or_path": target, "data.dataset_name": rows}))
        for command in (("generate", target), (*training, "--output-dir", tmp_path / "run")):
            said = refused(capsys, *command)
            assert f"{name} is not the file itself, but a Git LFS pointer to it; run `git lfs pull`" in said
    (tmp_path / "rows.jsonl").write_text(POINTER)
    assert "a Git LFS pointer" in refused(capsys, "eval", model_folder("qwen2"), "--data", tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [
        ("qwen3", "qwen3.embedding_length", 0, "qwen3.embedding_length 0, but token_embd.weight has the shape"),
        ("qwen3", "qwen3.embedding_length", 64, "qwen3.embedding_length 64, but token_embd.weight has the shape"),
        ("qwen3", "qwen3.feed_forward_length", 7, "qwen3.feed_forward_length 7, but blk.0.ffn_down.weight has"),
        ("llama", "llama.embedding_length", 32, "llama.embedding_length 32, but token_embd.weight has the shape"),
        ("llama", "llama.attention.head_count", 8, "head_count 8 x llama.attention.key_length 16, but blk.0.attn_"),
        ("llama", "llama.attention.head_count_kv", 4, "head_count_kv 4 x llama.attention.key_length 16, but blk.0"),
        ("llama", "llama.attention.key_length", 32, "attention.key_length 32, but blk.0.attn_"),
        ("llama", "llama.attention.value_length", 8, "attention.value_length 8, but blk.0.attn_"),
        ("llama", "llama.rope.dimension_count", 17, "RoPE rotates 17 of 16 elements"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", -1.0, "the epsilon of its norms is -1.0"),
        ("llama", "llama.context_length", 0, "its context has 0 tokens"),
        ("llama", "llama.rope.freq_base", float("nan"), "elements of a head with base nan"),
    ],
)
def test_metadata_that_do_not_match_the_tensors_are_named(
    whole: Path, llama: Path, tmp_path: Path, capsys: Captured, family: str, key: str, value: Any, words: str
) -> None:
    source = whole
    if family == "llama":
        source = llama
    path = rewritten(source, tmp_path / "odd.gguf", leave_out=key, architecture=family, **{key: value})
    for command in (("generate", path), ("eval", path, "--data", source)):
        assert words in refused(capsys, *command)


def test_heads_that_cannot_be_reordered_are_refused(llama: Path, tmp_path: Path, capsys: Captured) -> None:
    path = rewritten(llama, tmp_path / "odd.gguf", "llama.attention.key_length", "llama")
    content = path.read_bytes()  # without this key, the head dimension follows from the number of heads
    key = b"llama.attention.head_count"
    place = content.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    path.write_bytes(content[:place] + struct.pack("<I", 8) + content[place + 4 :])
    assert "blk.0.attn_" in refused(capsys, "generate", path)
