"""Hugging Face folders: transformers and our decoder load each other's folders, and their logits match."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import ApertusConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen3Config

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.models import TransformerLM
from sansgpu.models.formats.decoder_folder import export_model, load_decoder
from sansgpu.models.formats.folders import write_folder_atomically
from sansgpu.models.huggingface.causal_lm import HuggingFaceLM
from tests.models.small import LAYOUTS, TOKENIZER, model_of, tokens

QWEN3 = {
    "vocab_size": 320, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 24, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
APERTUS = {
    **{key: value for key, value in QWEN3.items() if key != "head_dim"}, "hidden_act": "relu2", "rms_norm_eps": 1e-6,
    "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}
}  # fmt: skip
LLAMA = {**QWEN3, "model_type": "llama"}
GPT2 = {
    "vocab_size": 320, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0
}  # fmt: skip


def configuration_of(settings: dict[str, object]) -> transformers.PretrainedConfig:
    if "hidden_size" not in settings:
        return GPT2Config(**settings)
    if settings.get("model_type") == "llama":
        return LlamaConfig(**settings)
    return (Qwen3Config if "head_dim" in settings else ApertusConfig)(**settings)


def theirs_of(settings: dict[str, object]) -> transformers.PreTrainedModel:
    """Returns a transformers model whose random weights are large enough for errors to show in its logits."""
    model = AutoModelForCausalLM.from_config(configuration_of(settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    return model


def assert_alike(ours: TransformerLM, folder: Path) -> None:
    theirs, inputs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokens(2, 24)
    torch.testing.assert_close(ours.eval()(inputs), theirs(inputs).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_computes_the_same_from_the_export(layout: str, tmp_path: Path) -> None:
    model, inputs = model_of(layout), tokens(2, 24)
    export_model(model, TOKENIZER, tmp_path / "final")
    assert_alike(model, tmp_path / "final")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert AutoTokenizer.from_pretrained(tmp_path / "final").encode("naïve 12") == TOKENIZER.encode("naïve 12")
    assert theirs.generation_config.eos_token_id == TOKENIZER.end_id
    assert theirs.num_parameters() == model.parameter_count
    ours = load_decoder(tmp_path / "final")
    assert ours is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    assert torch.equal(ours.eval()(inputs), model(inputs))


@pytest.mark.parametrize("others", [[], ["notes.md", "more/notes.md"]])
def test_an_export_takes_the_place_of_the_one_before(others: list[str], tmp_path: Path) -> None:
    for layout in ("classic", "modern"):
        export_model(model_of(layout), TOKENIZER, tmp_path / "final")
        for name in others:
            (tmp_path / "final" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "final" / name).write_text(f"beside {layout}")
    assert json.loads((tmp_path / "final/config.json").read_text())["model_type"] == "qwen3"
    assert all((tmp_path / "final" / name).read_text() == "beside modern" for name in others)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert not list((tmp_path / "final").glob(".sansgpu-*"))


@pytest.mark.parametrize("others", [False, True])
def test_files_of_the_model_before_are_deleted_and_others_stay(others: bool, tmp_path: Path) -> None:
    def shards(folder: Path) -> None:
        for name in ("config.json", "model-1.safetensors", "more/model-2.safetensors"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"a part: {name}")

    folder = tmp_path / "final"
    write_folder_atomically(folder, shards)
    if others:
        (folder / "notes.md").write_text("mine")
    write_folder_atomically(folder, lambda new: (new / "model.safetensors").touch())
    mark, notes = ".sansgpu.json", ["notes.md"] if others else []
    assert sorted(path.name for path in folder.iterdir()) == [mark, "model.safetensors", *notes]


def test_an_export_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SansGPUError, match=r"file/final cannot be written"):
        export_model(model_of("modern"), TOKENIZER, tmp_path / "file" / "final")


@pytest.mark.parametrize(
    "changes",
    [
        QWEN3,
        {**QWEN3, "tie_word_embeddings": True},
        {**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        APERTUS,
        {**QWEN3, "attention_bias": True},
        {**APERTUS, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {**APERTUS, "attention_bias": True},
        LLAMA,
        {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {**LLAMA, "attention_bias": True},
        {**LLAMA, "attention_bias": True, "mlp_bias": True},
        GPT2,
        {**GPT2, "n_inner": 48, "activation_function": "relu"},
        {**GPT2, "tie_word_embeddings": False},
    ],
    ids=lambda changes: "-".join(map(str, list(changes)[7:])),
)
def test_a_folder_of_transformers_is_computed_alike(tmp_path: Path, changes: dict[str, object]) -> None:
    theirs_of(changes).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_decoder(tmp_path)
    assert ours is not None
    assert_alike(ours, tmp_path)


def test_weights_of_another_precision_are_read_in_fp32(tmp_path: Path) -> None:
    theirs_of(QWEN3).bfloat16().save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    assert ours is not None
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert_alike(ours, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {**QWEN3, "rms_norm_eps": 0.1},
        {**QWEN3, "hidden_act": "gelu"},
        {**QWEN3, "head_dim": 16},
        {**QWEN3, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
        {**QWEN3, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        {**LLAMA, "mlp_bias": True},
        {**LLAMA, "rms_norm_eps": 1e-5},
        {**LLAMA, "hidden_act": "gelu"},
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        {**APERTUS, "hidden_act": "xielu"},
        {**APERTUS, "rope_parameters": None},
        {**GPT2, "layer_norm_epsilon": 0.1},
        {**GPT2, "activation_function": "silu"},
        {**GPT2, "scale_attn_weights": False},
        {**GPT2, "scale_attn_by_inverse_layer_idx": True},
    ],
    ids=lambda changes: "-".join(key for key in changes if changes[key] != {**QWEN3, **APERTUS, **GPT2}.get(key)),
)
def test_what_our_decoder_does_not_compute_is_left_to_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    configuration_of(changes).save_pretrained(tmp_path)
    assert load_decoder(tmp_path) is None


@pytest.mark.parametrize("settings", [GPT2, {**QWEN3, "tie_word_embeddings": True}], ids=["gpt2", "qwen3"])
def test_weights_saved_without_the_head_are_read(tmp_path: Path, settings: dict[str, object]) -> None:
    theirs = theirs_of(settings)
    theirs.save_pretrained(tmp_path)
    theirs.base_model.save_pretrained(tmp_path / "base")
    ours = load_decoder(tmp_path / "base")
    assert ours is not None
    assert_alike(ours, tmp_path)


def test_causal_masks_among_the_weights_are_passed_over(tmp_path: Path) -> None:
    theirs_of(GPT2).base_model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(2):  # GPT-2's files on the Hub contain these buffers
        weights[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
        weights[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = load_decoder(tmp_path)
    assert ours is not None
    assert_alike(ours, tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "contains a value of type list"),
        (b'{"model_type": "qwen3"}', "has no "),
        (json.dumps({**GPT2, "model_type": "gpt2", "n_head": 5}).encode(), "32 is not divisible by n_heads 5"),
    ],
    ids=["empty", "binary", "list", "keys-missing", "impossible"],
)
def test_a_folder_whose_config_makes_no_model_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as error:
        load_decoder(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("rubbish", "is a damaged safetensors file"),
        ("missing", "do not match.*embedding.weight"),
        ("other", "do not match.*blocks.1"),
        ("foreign", "do not match.*layers.0.experts.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, damage: str, named: str) -> None:
    export_model(model_of("modern"), TOKENIZER, tmp_path / "final")
    weights = tmp_path / "final/model.safetensors"
    match damage:
        case "rubbish":
            weights.write_bytes(b"rubbish")
        case "missing":
            weights.unlink()
        case "other":
            export_model(model_of("modern", n_layers=1), TOKENIZER, tmp_path / "other")
            weights.write_bytes((tmp_path / "other/model.safetensors").read_bytes())
        case "foreign":
            save_file({"model.layers.0.experts.weight": torch.zeros(2)}, weights)
    with pytest.raises(ConfigError, match=named) as error:
        load_decoder(tmp_path / "final")
    assert str(tmp_path / "final") in str(error.value)
    assert "\n" not in str(error.value)


def test_another_architecture_is_left_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert load_decoder(tmp_path) is None


def test_any_causal_model_is_measured_as_ours_is(tmp_path: Path) -> None:
    model, inputs, targets = model_of("grouped"), tokens(2, 24), tokens(2, 24, 5)
    targets[0, 3:9] = -100
    export_model(model, TOKENIZER, tmp_path / "final")
    theirs = HuggingFaceLM(str(tmp_path / "final")).eval()
    assert theirs.context == 24
    assert math.isclose(
        theirs.summed_loss(inputs, targets).item(), model.summed_loss(inputs, targets).item(), rel_tol=1e-4
    )
    with pytest.raises(ValueError, match="one document each"):
        theirs.summed_loss(inputs, targets, document_ids=torch.zeros_like(inputs))
