"""Models, tokenizers and templates that hang, abort or fill memory are refused with a one-sentence error.

Their time and memory are limited.
"""

import base64
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from sansgpu.data.tokenizer import load_tokenizer
from sansgpu.machine.untrusted.sandbox import Sandbox, SandboxError
from sansgpu.machine.untrusted.templates import UnusableTemplateError, render_prefixes, render_spans
from sansgpu.models.formats.decoder_folder import export_model
from tests.hostile.bounded import assert_refused, outcome
from tests.models.formats.gguf_models import write_ours
from tests.models.small import TOKENIZER, model_of
from tests.processes import as_options
from tests.tasks.folders import chat_rows, model_folder

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_model(model_of("modern", n_layers=1), TOKENIZER, folder)
    return folder


def header(content: object, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


NO_WEIGHTS = "is a damaged safetensors file"
WEIGHTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", NO_WEIGHTS),
    "length of the header": (struct.pack("<Q", 2**64 - 1) + b"{}", NO_WEIGHTS),
    "long header": (header(b" " * (17 << 20)), NO_WEIGHTS),
    "nesting": (header(b"[" * 100_000), NO_WEIGHTS),
    "type": (header({"a": tensor("F999", [1], 0, 4)}, b"0000"), NO_WEIGHTS),
    "type of torch": (header({"a": tensor("F4", [8], 0, 4)}, b"0000"), NO_WEIGHTS),
    "complex": (header({"a": tensor("C64", [1], 0, 8)}, b"00000000"), "complex numbers"),
    "overlap": (header({"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 0, 4)}, b"0000"), NO_WEIGHTS),
    "shape": (header({"a": tensor("F32", [2**62, 2**62], 0, 4)}, b"0000"), NO_WEIGHTS),
    "negative": (header({"a": tensor("F32", [-1], 0, 4)}, b"0000"), NO_WEIGHTS),
    "outside": (header({"a": tensor("F32", [1 << 40], 0, 1 << 42)}, b"0000"), NO_WEIGHTS),
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_a_safetensors_header_is_no_danger(exported: Path, tmp_path: Path, damage: str) -> None:
    content, sentence = WEIGHTS[damage]
    folder = Path(shutil.copytree(exported, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(content)
    assert_refused(sentence, "generate", folder, "--max-new-tokens", 2)


def change(file: str, **values: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**settings, **values}))

    return changed


def instead(file: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(text) and None


def pipe(file: str) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return made


def device(file: str) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to("/dev/zero")

    return made


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights are a pipe": (pipe("model.safetensors"), "is a pipe, a device or a socket"),
    "weights are a device": (device("model.safetensors"), "is a pipe, a device or a socket"),
    "settings are a pipe": (pipe("config.json"), "config.json"),
    "settings are a device": (device("config.json"), "config.json"),
    "tokenizer is a pipe": (pipe("tokenizer.json"), "is a pipe, a device or a socket"),
    "tokenizer's settings are a pipe": (pipe("tokenizer_config.json"), "is a pipe, a device or a socket"),
    "a billion layers": (
        change("config.json", num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000, but models have",
    ),
    "thousands of layers": (change("config.json", num_hidden_layers=9000), "9,000 layers, but 13 weights"),
    "heads that do not fit": (change("config.json", num_key_value_heads=8), "which does not divide"),
    "a wide model": (change("config.json", hidden_size=1 << 50), "but models have at most 16,777,216"),
    "a long vocabulary": (change("config.json", vocab_size=1 << 50), "but models have at most 16,777,216"),
    "a list for a number": (change("config.json", hidden_size=[64]), "config.json has a value of an unexpected type"),
    "nested settings": (instead("config.json", "[" * 100_000), "config.json cannot be read"),
    "a list of settings": (instead("config.json", "[]"), "config.json contains a value of type list"),
    "architectures": (change("config.json", architectures=5, model_type="none"), "model"),
    "an index that leaves the folder": (
        instead("model.safetensors.index.json", json.dumps({"weight_map": {"a": "../model.safetensors"}})),
        "'../model.safetensors', which is not in its folder",
    ),
    "an index of a list": (instead("model.safetensors.index.json", "[1]"), "contains a value of type list"),
    "a tokenizer's settings in a list": (instead("tokenizer_config.json", "[1]"), "contains a value of type list"),
    "an end of text that is a number": (change("tokenizer_config.json", eos_token=5), "eos_token"),
    "an end of text that is half a character": (change("tokenizer_config.json", eos_token="\ud800"), "eos_token"),
    "an end of text without end": (change("tokenizer_config.json", eos_token="x" * 5000), "no end-of-text token"),
}


@pytest.mark.parametrize("damage", FOLDERS)
def test_a_models_folder_is_no_danger(exported: Path, tmp_path: Path, damage: str) -> None:
    make, sentence = FOLDERS[damage]
    folder = Path(shutil.copytree(exported, tmp_path / "model"))
    make(folder)
    assert_refused(sentence, "generate", folder, "--max-new-tokens", 2)


@pytest.mark.parametrize("longest", [[1], "12", float("nan"), float("inf")], ids=str)
def test_a_longest_text_that_is_no_number_is_refused(tmp_path: Path, longest: object) -> None:
    folder = Path(shutil.copytree(model_folder("qwen2"), tmp_path / "model"))
    change("tokenizer_config.json", model_max_length=longest)(folder)
    assert_refused("model_max_length in tokenizer_config.json is", "generate", folder, "--max-new-tokens", 2)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "hidden_act", "x" * 5000),
        ("tokenizer_config.json", "padding_side", "x" * 5000),
    ],
)
def test_what_a_library_says_of_a_setting_is_one_sentence(tmp_path: Path, file: str, key: str, value: object) -> None:
    folder = Path(shutil.copytree(model_folder("qwen2"), tmp_path / "model"))
    change(file, **{key: value})(folder)
    assert_refused("model", "generate", folder, "--max-new-tokens", 2)


def test_a_pipe_is_no_model_and_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_refused("is a pipe, a device or a socket", "generate", tmp_path / "pipe")
    assert_refused("is a pipe, a device or a socket", "tokenizer", "encode", tmp_path / "pipe", "--text", "a")


def charsmap(content: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


STEPS = [replace({"Regex": "q"}, "x" * 10)] * 12
LONGER = {"type": "Sequence", "normalizers": STEPS}
NOWHERE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {},
           "pair": [{"Sequence": {"id": "A", "type_id": 0}}]}  # fmt: skip
TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "normalizer that aborts": ({"normalizer": charsmap(b"\xff" * 64)}, "crashes its library (signal 6)"),
    "normalizer that panics": ({"normalizer": charsmap(b"\0" * 64)}, "index out of bounds"),
    "empty pattern": ({"normalizer": replace({"String": ""}, "x")}, "index out of bounds"),
    "replacements": ({"normalizer": LONGER}, "lengthen a text without limit"),
    "replacements in the decoder": (
        {"decoder": {"type": "Sequence", "decoders": LONGER["normalizers"]}},
        "without limit",
    ),
    "begin": ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, "without limit"),
    "backtracking": ({"pre_tokenizer": split(r"(.*)*(.*)*(.*)*\d\d!")}, "retry-limit-in-match"),
    "pieces of nothing": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
    "post-processor": ({"post_processor": NOWHERE}, "index out of bounds"),
    "prefix": ({"model": {"continuing_subword_prefix": "##"}}, "slice index"),
    "id": ({"model": {"vocab": {"zz": 4294967295}}}, "would need 4,294,967,296 rows"),
    "type": ({"normalizer": {"type": "Nothing"}}, "did not match"),
    "version": ({"version": 5}, "is not a usable tokenizer"),
}
OFTEN = ("normalizer that aborts", "backtracking", "id")  # a crash, a computation that takes too long, and a size


def odd_tokenizer(parts: dict[str, Any]) -> str:
    raw = json.loads(TOKENIZER.backend.to_str())
    model = {**raw["model"], **parts.get("model", {})}
    model["vocab"] = {**raw["model"]["vocab"], **model["vocab"]}
    return json.dumps({**raw, **parts, "model": model})


def with_odd_tokenizer(exported: Path, folder: Path, oddity: str) -> tuple[Path, str]:
    """Copies a model's folder with an odd tokenizer; returns the copy and what is said of it."""
    parts, sentence = TOKENIZERS[oddity]
    shutil.copytree(exported, folder)
    (folder / "tokenizer.json").write_text(odd_tokenizer(parts))
    return folder, sentence


@pytest.mark.parametrize("oddity", TOKENIZERS)
def test_a_tokenizer_is_tried_before_it_is_loaded(exported: Path, tmp_path: Path, oddity: str) -> None:
    folder, sentence = with_odd_tokenizer(exported, tmp_path / "model", oddity)
    assert_refused(sentence, "tokenizer", "encode", folder, "--text", "hello")


@pytest.mark.parametrize("oddity", [pytest.param(o, marks=() if o in OFTEN else pytest.mark.long) for o in TOKENIZERS])
def test_a_tokenizer_is_tried_before_transformers_loads_it(exported: Path, tmp_path: Path, oddity: str) -> None:
    folder, sentence = with_odd_tokenizer(exported, tmp_path / "model", oddity)
    rows = chat_rows(tmp_path / "rows.jsonl")
    given = ("task=sft", f"model.name_or_path={folder}", f"data.dataset_name={rows}", "training.threads=1")
    changes = as_options(given)
    assert_refused(sentence, "train", "--dry-run", "--output-dir", tmp_path / "run", *changes)


def test_a_text_that_makes_a_tokenizer_panic_is_an_error_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(odd_tokenizer({"pre_tokenizer": split(r"(q+q+)+z")}))
    load_tokenizer(tmp_path)
    code, said = outcome("tokenizer", "encode", tmp_path, "--text", "q" * 60)
    assert code == 2, said
    assert "the tokenizer fails on this text" in said
    assert "Traceback" not in said


TEMPLATES: dict[str, tuple[str, str]] = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    "power": ("{{ 10 ** (10 ** 9) }}", "takes more than"),
    "product": ("{{ messages[0].content * 10 ** 10 }}", "memory"),
    "doubling": (
        "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "the chat template ",  # needs more than 1 GB, which a slow machine does not reach within the 2 seconds
    ),
    "long text": ("{{ 'x' * (70 * 1024 * 1024) }}", "more than 64 million characters"),
    "recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    "syntax": ("{% for %}", "line 1 of the chat template is not valid Jinja"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.long if f in ("power", "doubling") else ()) for f in TEMPLATES]
)
def test_a_chat_template_is_rendered_within_bounds(tmp_path: Path, fault: str) -> None:
    template, sentence = TEMPLATES[fault]
    folder = Path(shutil.copytree(model_folder("qwen2"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(template)
    rows = chat_rows(tmp_path / "rows.jsonl")
    given = ("task=sft", f"model.name_or_path={folder}", f"data.dataset_name={rows}", "training.threads=1")
    changes = as_options(given)
    assert_refused(sentence, "train", "--dry-run", "--output-dir", tmp_path / "run", *changes)


@pytest.mark.long
def test_a_chat_with_a_template_that_does_not_end_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder("qwen2"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATES["loops"][0])
    assert_refused("takes more than 2 seconds", "chat", folder, "--prompt", "hello")


def test_after_a_template_that_did_not_end_the_next_one_is_rendered() -> None:
    with pytest.raises(UnusableTemplateError, match="takes more than"):
        render_prefixes(TEMPLATES["loops"][0], {}, TURNS, [(2, False)])
    found = render_prefixes("{% for m in messages %}{{ m.content }}{{ s }}{% endfor %}", {"s": "|"}, TURNS,
                            [(2, False), (1, True), (0, False)])  # fmt: skip
    assert [one.text for one in found] == ["hello|you|", "hello|", ""]
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert render_spans(marked, {}, TURNS).spans == ((0, 5), (5, 8))


def test_a_contained_function_answers_again_after_idling_and_after_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sansgpu.machine.untrusted.sandbox.IDLE_SECONDS", 0.01)
    work: dict[bytes, Callable[[], bytes]] = {
        b"abort": lambda: os.abort(),  # type: ignore[dict-item]
        b"fill": lambda: b"x" * (3 << 30),
        b"raise": lambda: b"" + 1,  # type: ignore[operator]
        b"answer": lambda: str(os.getpid()).encode(),
    }
    child = Sandbox(lambda request: work[request](), 5)
    for request, reason in ((b"abort", "signal 6"), (b"fill", "more than 1 GB of memory"), (b"raise", "crashes")):
        assert child.call(b"answer") != str(os.getpid()).encode()
        with pytest.raises(SandboxError, match=reason):
            child.call(request)
    child.close()


def pairs(*values: tuple[str, int, bytes]) -> bytes:
    text = b"".join(struct.pack("<Q", len(k)) + k.encode() + struct.pack("<I", kind) + v for k, kind, v in values)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + text


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


FILES: dict[str, bytes] = {
    "array of texts": pairs(("a", 9, array(8, 2**60))),
    "array of numbers": pairs(("a", 9, array(4, 2**62))),
    "array of bytes": pairs(("a", 9, array(0, 9_000_000, b"\0" * 9_000_000))),
    "arrays of arrays": pairs(("a", 9, array(9, 5, array(9, 5)))),
    "empty texts": pairs(("a", 9, array(8, 9_000_000, b"\0" * 72_000_000))),
    "text": pairs(("a", 8, struct.pack("<Q", 2**63))),
    "kind": pairs(("a", 99, b"")),
    "keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "dimensions": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<I", 2**31),
    "shape": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0),
    "place": b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 1, 0, 2**63),
    "alignment": pairs(("general.alignment", 4, struct.pack("<I", 0))),
    "key twice": pairs(("a", 4, b"0000"), ("a", 4, b"0000")),
    "version": b"GGUF" + struct.pack("<IQQ", 77, 0, 0),
}


@pytest.mark.parametrize("damage", FILES)
def test_counts_in_a_gguf_file_are_checked_before_anything_loops(tmp_path: Path, damage: str) -> None:
    (tmp_path / "model.gguf").write_bytes(FILES[damage])
    assert_refused("is a damaged GGUF file", "generate", tmp_path / "model.gguf", "--max-new-tokens", 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [("qwen3.block_count", 2**31), ("tokenizer.huggingface.json", odd_tokenizer(TOKENIZERS["prefix"][0]))],
)
def test_metadata_of_a_whole_gguf_file_are_no_danger(tmp_path: Path, key: str, value: object) -> None:
    write_ours(tmp_path / "whole.gguf", model_of("modern", n_layers=1), "f16")
    reader, writer = gguf.GGUFReader(tmp_path / "whole.gguf"), gguf.GGUFWriter(tmp_path / "odd.gguf", "qwen3")
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            writer.add_key_value(name, value if name == key else field.contents(), field.types[0], field.types[-1])
    for part in reader.tensors:
        writer.add_tensor(part.name, part.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_refused("odd.gguf: its", "generate", tmp_path / "odd.gguf", "--max-new-tokens", 2)


def test_a_weight_that_torch_cannot_convert_is_named(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "model"))
    save_file({"model.norm.weight": torch.zeros(2, dtype=torch.complex64)}, folder / "model.safetensors")
    assert_refused("model.norm.weight contains complex numbers", "generate", folder)
