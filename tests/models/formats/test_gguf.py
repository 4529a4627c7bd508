"""GGUF files are read back as written, up to the precision of their encoding; damaged files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.config import ConfigError, ModelConfig, SansGPUError
from sansgpu.kernels.block_quantization import QuantizedWeight, dequantize_rows
from sansgpu.models import TransformerLM
from sansgpu.models.formats.decoder_folder import load_gguf_decoder
from sansgpu.models.formats.decoder_weights import hugging_face_config, to_hugging_face
from sansgpu.models.formats.gguf_file import write_gguf
from sansgpu.models.formats.gguf_layout import has_own_layout
from sansgpu.models.formats.gguf_reader import GGUFType, describe_substitutes
from sansgpu.models.formats.gguf_source import open_gguf
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of, tokenizer_parts
from sansgpu.models.quantized_layers import dequantize_layers
from sansgpu.train.loading import ModelRequest, open_model
from tests.models.formats.gguf_models import (
    ABOUT,
    BASES,
    base,
    logits_of,
    metadata,
    parts_of,
    rewritten,
    write_base,
    write_ours,
)
from tests.models.small import IN_GGUF, TOKENIZER, model_of, tokens

# (share, count) for the maximum rounding error of a number x: share * |x| + count * 2^-25, where 2^-25 is half of f16's
# smallest positive number. For q8_0, x is the largest number in the block of 32, whose scale is stored in f16.
HALF_STEPS = {"f32": (0, 0), "f16": (2**-11, 1), "bf16": (2**-8, 0), "q8_0": (0.5 / 127 + 2**-11, 127)}

# The other bases are read back before a release.
OFTEN = (
    "llama3",
    "qwen2_yarn",
    "gpt2",
    "gemma3_text",
    "tied_qwen2_moe",
    "granitemoe",
    "qwen3_5_text",
    "qwen3_next",
)


def read(path: Path) -> TransformerLM:
    """Returns the decoder of a GGUF file, with all quantized layers dequantized to fp32."""
    decoder = load_gguf_decoder(open_gguf(path))
    assert decoder is not None
    dequantize_layers(decoder, torch.float32)
    return decoder.eval()


# Weights of a hybrid for which GGUF files contain 1 + weight and -exp(A_log).
REWRITTEN = ("norm.weight", "A_log")


def bound(tensor: torch.Tensor, kind: GGUFType) -> torch.Tensor:
    size, (share, smallest) = tensor.abs(), HALF_STEPS[kind]
    if kind == "q8_0":
        blocks = size.unflatten(-1, (-1, 32))
        size = blocks.amax(-1, keepdim=True).expand_as(blocks).flatten(-2)
    return size * share + smallest * 2**-25


@pytest.mark.parametrize("kind", HALF_STEPS)
@pytest.mark.parametrize("layout", IN_GGUF)
def test_a_model_comes_back_within_what_its_numbers_hold(layout: str, kind: GGUFType, tmp_path: Path) -> None:
    model, inputs = model_of(layout, d_ff=64), tokens(2, 24)
    assert describe_substitutes(write_ours(tmp_path / "model.gguf", model, kind)) is None
    back = read(tmp_path / "model.gguf")
    for name, tensor in back.state_dict().items():
        written = model.state_dict()[name]
        exact = kind == "f32" or tensor.ndim < 2 or name == "position.weight" or "convolution" in name
        if name.endswith(REWRITTEN) and "hybrid" in layout:
            torch.testing.assert_close(tensor, written, atol=1e-6, rtol=1e-6)
            continue
        assert torch.equal(tensor, written) == exact, name
        assert exact or bool(((tensor - written).abs() <= bound(written, kind)).all()), name
    apart = float((back(inputs) - model(inputs)).detach().abs().max())
    assert apart <= {"f32": 1e-5 if "hybrid" in layout else 0, "f16": 4e-3, "bf16": 3e-2, "q8_0": 0.1}[kind]


@settings(max_examples=25)
@given(
    architecture=st.sampled_from(["llama", "qwen3", "apertus", "gpt2"]),
    heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    half=st.integers(1, 5),
    layers=st.integers(1, 3),
    d_ff=st.integers(1, 40),
    context=st.integers(2, 50),
    tied=st.booleans(),
    theta=st.floats(10, 1e6, width=32),
)
def test_any_shape_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    heads: int,
    shared: int,
    half: int,
    layers: int,
    d_ff: int,
    context: int,
    tied: bool,
    theta: float,
) -> None:
    modern = architecture != "gpt2"
    shape = {
        "vocab_size": 320, "d_model": 2 * half * heads * (shared if modern else 1), "n_layers": layers, "d_ff": d_ff,
        "n_heads": heads * (shared if modern else 1), "n_kv_heads": heads if modern else None,
        "architecture": architecture, "max_seq_len": context, "tie_embeddings": tied,
        **({"rope_theta": float(str(theta))} if modern else {}),
    }  # fmt: skip
    model = TransformerLM(ModelConfig.model_validate(shape), 1).eval()
    path = tmp_path_factory.mktemp("shape") / "model.gguf"
    write_ours(path, model, "f32")
    back, inputs = read(path), tokens(1, min(context, 9))
    assert back.config.tie_embeddings == tied
    assert back.config.max_seq_len == context
    assert torch.equal(back(inputs), model(inputs))


def test_what_the_file_says_of_itself(tmp_path: Path) -> None:
    write_ours(tmp_path / "model.gguf", model_of("grouped"), "f16")
    said = metadata(tmp_path / "model.gguf")
    assert said["general.architecture"] == "qwen3"
    assert (said["general.name"], said["general.description"]) == (ABOUT.name, ABOUT.description)
    assert (said["general.dataset.0.name"], said["general.base_model.0.name"]) == (ABOUT.dataset, ABOUT.base_model)
    assert said["qwen3.attention.head_count_kv"] == 2
    assert said["qwen3.rope.freq_base"] == 500
    assert said["tokenizer.ggml.bos_token_id"] == said["tokenizer.ggml.eos_token_id"] == TOKENIZER.end_id
    assert said["tokenizer.ggml.add_bos_token"] is True
    types = dict(zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"], strict=True))
    assert len(types) == 320  # llama.cpp requires all tokens to be different
    assert types["<|endoftext|>"] == gguf.TokenType.CONTROL
    assert types["[PAD319]"] == gguf.TokenType.UNUSED


def test_rows_that_q8_0_cannot_hold_are_f16(tmp_path: Path) -> None:
    choices = write_ours(tmp_path / "model.gguf", model_of("modern"), "q8_0")  # d_ff is 40, not a multiple of 32
    apart = [name for name, choice in choices.items() if choice.used != choice.wanted]
    assert apart == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert {name for name, kind in types.items() if kind == "F16"} == set(apart)
    assert types["blk.0.ffn_up.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("kind", ["q4_1", pytest.param("q8_0", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", ["tied", "gpt2", *(pytest.param(n, marks=pytest.mark.long) for n in ("llama", "qwen3"))]
)
def test_a_quantized_file_stays_quantized_in_our_decoder(name: str, kind: GGUFType, tmp_path: Path) -> None:
    """The logits equal those of transformers with dequantized weights, also with an unusual epsilon in the norms."""
    model, tokenizer = base(tmp_path / "base", name)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3
    if hasattr(model.config, "rms_norm_eps"):
        model.config.rms_norm_eps = 1e-3
    path, ids = tmp_path / "model.gguf", [number * 23 % 1000 for number in range(40)]
    write_base(path, model, tokenizer, kind)
    ours = load_gguf_decoder(open_gguf(path))
    assert ours is not None
    assert not [name for name, weight in ours.named_parameters() if weight.ndim > 1 and "position" not in name]
    plain = load_pretrained(ModelConfig(name_or_path=str(path)), Head("causal"), 0).eval()
    expected = logits_of(plain, ids)
    assert (logits_of(ours.eval(), ids) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.long) for n in BASES])
def test_a_model_of_transformers_comes_back(name: str, tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path / "base", name)
    write_base(tmp_path / "model.gguf", model, tokenizer, "f32")
    given_file = ModelConfig(name_or_path=str(tmp_path / "model.gguf"))
    back, its_tokenizer = load_pretrained(given_file, Head("causal"), 0).eval(), load_tokenizer_of(given_file)
    ids = tokenizer("naïve <|im_end|> 12").input_ids
    settings, found, expected = model.config.to_dict(), logits_of(back, ids), logits_of(model, ids)
    rounds = type(back) is not type(model) or any(has_own_layout(weight, settings) for weight in model.state_dict())
    assert float((found - expected).abs().max()) <= (1e-5 if rounds else 0.0)
    assert its_tokenizer("naïve <|im_end|> 12").input_ids == ids
    assert its_tokenizer.chat_template == tokenizer.chat_template
    assert its_tokenizer.eos_token == tokenizer.eos_token == "<|im_end|>"
    assert metadata(tmp_path / "model.gguf")["tokenizer.ggml.add_bos_token"] is False


QWEN3 = hugging_face_config(model_of("grouped").config, 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "rwkv"}, "this model has the architecture rwkv"),
        ({"hidden_act": "gelu"}, "supports only silu in qwen3, but this model uses gelu"),
        ({"use_sliding_window": True}, "does not support use_sliding_window"),
        ({"attention_bias": True}, "does not support attention_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "does not support rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "truncate": False}}, "rounds the limits of YaRN"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "does not support rope_parameters"),
        ({"num_hidden_layers": 1}, "has no weight model.layers.1."),
    ],
    ids=lambda changes: "-".join(changes) if isinstance(changes, dict) else "",
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    changes: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    model = model_of("grouped")
    weights = to_hugging_face(model.config, model.state_dict())
    with pytest.raises(ConfigError, match=sentence):
        write_gguf(tmp_path / "model.gguf", {**QWEN3, **changes}, weights, parts_of(TOKENIZER), "f32", ABOUT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar 144 in gemma2"),
        ("phi3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "does not support rope_parameters"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping None in gemma2"),
                ("gemma", {"tie_word_embeddings": False}, "tie_word_embeddings False in gemma"),
                ("gemma", {"hidden_act": "gelu"}, "supports only gelu_pytorch_tanh in gemma, but this model uses gelu"),
                ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, r"no_rope_layers \[1, 1, 0, 1, 1\] in smollm3"),
                ("olmo2", {"head_dim": 32}, "head_dim 32 in olmo2"),
                ("exaone4", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types .* in exaone4"),
                ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic"}}, "does not support rope_parameters"),
                ("lfm2", {"conv_bias": True}, "conv_bias True in lfm2"),
                ("minicpm3", {"rope_parameters": {"rope_type": "yarn"}}, "does not support rope_parameters"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_llama_cpp_would_compute_otherwise_in_a_family_is_refused(
    family: str, changes: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    model, tokenizer = base(tmp_path / "base", family)
    given = {**model.config.to_dict(), **changes}
    with pytest.raises(ConfigError, match=sentence):
        write_gguf(tmp_path / "model.gguf", given, model.state_dict(), tokenizer_parts(tokenizer), "f32", ABOUT)


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_window_that_llama_cpp_ignores_limits_the_context(family: str, tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path / "base", family)
    settings = {**model.config.to_dict(), "sliding_window": 100}
    write_gguf(tmp_path / "model.gguf", settings, model.state_dict(), tokenizer_parts(tokenizer), "f32", ABOUT)
    assert open_gguf(tmp_path / "model.gguf").settings["max_position_embeddings"] == 100


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("relu", "this model uses relu"),
        ("biased", "GGUF does not support attention_bias True in llama"),
        ("qkv_biased", "GGUF does not support attention_bias True in apertus"),
    ],
)
def test_what_gguf_cannot_express_of_our_layouts_is_refused(layout: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{sentence}; use --format hf"):
        write_ours(tmp_path / "model.gguf", model_of(layout), "f32")


def test_parts_of_a_quantized_weight_are_joined_as_they_are(tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path / "base", "qwen3_next")
    write_base(tmp_path / "model.gguf", model, tokenizer, "q8_0")
    file, name = open_gguf(tmp_path / "model.gguf"), "model.layers.0.linear_attn.in_proj_qkvz.weight"
    joined = file.matrices()[name]
    assert isinstance(joined, QuantizedWeight)
    assert torch.equal(dequantize_rows(joined.data, joined.format), file.weights()[name])
    assert float((file.weights()[name] - model.state_dict()[name]).abs().max()) < 2e-3


def test_a_mixture_of_experts_is_not_read_as_youtu(tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path / "base", "youtu")
    write_base(tmp_path / "model.gguf", model, tokenizer, "f32")
    experts = {"deepseek2.expert_count": 4}
    path = rewritten(tmp_path / "model.gguf", tmp_path / "experts.gguf", architecture="deepseek2", **experts)
    with pytest.raises(ConfigError, match=r"experts\.gguf has another kind of deepseek2 than Youtu"):
        open_gguf(path)


def test_a_number_that_f16_cannot_hold_leaves_the_file_before_as_it_was(tmp_path: Path) -> None:
    model, path = model_of("modern"), tmp_path / "model.gguf"
    write_ours(path, model, "f16")
    before = path.read_bytes()
    with torch.no_grad():
        model.embedding.weight[3, 4] = 1e5
    with pytest.raises(
        ConfigError, match=r"token_embd.weight contains values that are too large for f16; choose --type bf16"
    ):
        write_ours(path, model, "f16")
    assert path.read_bytes() == before
    write_ours(path, model, "bf16")
    assert float(read(path).embedding.weight[3, 4].detach()) == pytest.approx(1e5, rel=2**-8)
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SansGPUError, match=r"file/model.gguf cannot be written"):
        write_ours(tmp_path / "file/model.gguf", model_of("modern"), "f32")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_ours(path, model_of("modern", n_layers=1), "f16")
    return path


@settings(max_examples=25)
@given(data=st.data())
def test_a_torn_file_is_refused(whole: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = whole.read_bytes()
    cut = data.draw(st.integers(0, len(content) - gguf.GGUF_DEFAULT_ALIGNMENT))
    path = tmp_path_factory.mktemp("torn") / "model.gguf"
    path.write_bytes(content[:cut])
    with pytest.raises(ConfigError, match="is a damaged GGUF file" if cut >= 4 else "is not a GGUF file") as error:
        open_gguf(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architecture": "rwkv6"}, "has the unsupported architecture rwkv6; use a model with one of apertus"),
        ({"leave_out": "blk.0.attn_q.weight"}, "do not match the model's config.*blocks.0.attention.q.weight"),
        ({"leave_out": "token_embd.weight"}, "the model's metadata are incomplete"),
        ({"leave_out": "qwen3.block_count"}, "the model's metadata are incomplete .'qwen3.block_count' is missing"),
        ({"leave_out": "qwen3.attention.head_count"}, "the model's metadata are incomplete"),
        ({"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}, "RoPE scaling type linear"),
        ({"odd.weight": torch.ones(3).numpy()}, "the weight odd.weight does not belong to the architecture qwen3"),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) if isinstance(changes, dict) else "",
)
def test_a_file_that_makes_no_model_is_refused(
    whole: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = rewritten(whole, tmp_path / "other.gguf", **changes)
    with pytest.raises(ConfigError, match=sentence) as error:
        open_model(ModelRequest(str(path)), "generate", pytest.fail)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    for layout in ("modern", "classic"):
        write_ours(tmp_path / "model.gguf", model_of(layout), "f32")
        assert read(tmp_path / "model.gguf").config.activation == model_of(layout).config.activation


def test_a_causal_model_answers_no_questions(whole: Path) -> None:
    with pytest.raises(ConfigError, match="contains a causal language model"):
        load_pretrained(ModelConfig(name_or_path=str(whole)), Head("qa"), 0)
