"""Fused layers of transformers models compute what the original ones do; look-alikes are left alone."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from sansgpu.kernels import library
from sansgpu.kernels.norm import FusedNorm
from sansgpu.models.huggingface import patches
from sansgpu.models.huggingface.fused_layers import FusedGELU, FusedTanhGELU
from sansgpu.models.huggingface.patch_trial import Patch, apply_patches
from sansgpu.models.huggingface.patches import patch_model

SIZES = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
ENCODERS = ("Bert", "Roberta", "DistilBert", "MPNet", "RobertaPreLayerNorm", "ModernBert", "Gte")
BERT_LAYERS = {"SelfAttention", "SelfOutput", "Output", "Layer"}
MODERNBERT = {"num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 2}
DISTILBERT = {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 40}


def tiny(name: str, **changes: object) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if name in ENCODERS else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # so that norm weights differ from 1
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model.train()


def replaced(model: nn.Module, before: nn.Module) -> set[str]:
    """Returns the class names of replaced modules, except for linear, dropout and embedding layers."""
    names = {name: type(module) for name, module in before.named_modules()}
    changed = [name for name, module in model.named_modules() if type(module) is not names[name]]
    return {names[name].__name__ for name in changed} - {"Linear", "Dropout", "Embedding"}


FUSED: list[tuple[str, dict[str, object], set[str]]] = [
    ("Qwen2", {}, {"Qwen2RMSNorm", "Qwen2MLP", "Qwen2DecoderLayer", "Qwen2Attention"}),
    ("Llama", {}, {"LlamaRMSNorm", "LlamaMLP", "LlamaDecoderLayer", "LlamaAttention"}),
    ("Mistral", {}, {"MistralRMSNorm", "MistralMLP", "MistralDecoderLayer", "MistralAttention"}),
    ("Qwen3", {}, {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3DecoderLayer", "Qwen3Attention"}),
    ("Llama", {"hidden_act": "relu"}, {"LlamaRMSNorm", "LlamaDecoderLayer", "LlamaAttention"}),
    (
        "Granite",
        {"residual_multiplier": 0.5},
        {"GraniteRMSNorm", "GraniteMLP", "GraniteDecoderLayer", "GraniteAttention"},
    ),
    ("Olmo2", {}, {"Olmo2RMSNorm", "Olmo2MLP"}),  # its norms come after attention and MLP
    ("Olmo2", {"num_key_value_heads": 2}, {"Olmo2RMSNorm", "Olmo2MLP"}),  # its head norms are as wide as all heads
    ("Gemma", {}, {"GELUTanh", "GemmaRMSNorm", "GemmaMLP", "GemmaDecoderLayer", "GemmaAttention"}),
    (
        "Gemma2",
        {"attn_logit_softcapping": 0.5},
        {"GELUTanh", "Gemma2RMSNorm", "Gemma2MLP", "Gemma2DecoderLayer", "Gemma2Attention"},
    ),
    (
        "VaultGemma",
        {"attn_logit_softcapping": 0.5},
        {"GELUTanh", "VaultGemmaRMSNorm", "VaultGemmaMLP", "VaultGemmaAttention"},
    ),
    (
        "Gemma3Text",
        {"num_hidden_layers": 6, "sliding_window": 8},
        {"GELUTanh", "Gemma3RMSNorm", "Gemma3MLP", "Gemma3DecoderLayer", "Gemma3Attention"},
    ),
    ("Phi3", {}, {"Phi3RMSNorm", "Phi3MLP", "Phi3Attention"}),  # one layer projects queries, keys and values
    ("Phi3", {"num_key_value_heads": 2}, {"Phi3RMSNorm", "Phi3MLP", "Phi3Attention"}),
    (
        "ModernBert",
        MODERNBERT,
        {"LayerNorm", "GELUActivation", "ModernBertMLP", "ModernBertAttention", "ModernBertEncoderLayer"},
    ),
    (
        "ModernBertDecoder",
        MODERNBERT,
        {
            "LayerNorm",
            "GELUActivation",
            "ModernBertDecoderMLP",
            "ModernBertDecoderAttention",
            "ModernBertDecoderLayer",
        },
    ),
    ("Gte", {}, {"LayerNorm", "GELUActivation", "GteMLP", "GteAttention"}),
    ("Nemotron", {}, set()),  # it rotates only half of each head
    ("GPT2", {"n_embd": 16, "n_head": 2, "n_layer": 2}, {"LayerNorm", "NewGELUActivation"}),
    ("Bert", {}, {"LayerNorm", "GELUActivation", *(f"Bert{part}" for part in BERT_LAYERS)}),
    ("Bert", {"hidden_act": "relu"}, {"LayerNorm", "BertSelfAttention", "BertSelfOutput", "BertOutput"}),
    ("Roberta", {}, {"LayerNorm", "GELUActivation", *(f"Roberta{part}" for part in BERT_LAYERS)}),
    (
        "DistilBert",
        DISTILBERT,
        {"LayerNorm", "GELUActivation", "DistilBertSelfAttention", "FFN", "TransformerBlock"},
    ),
    (
        "MPNet",
        {},
        {"LayerNorm", "GELUActivation", "MPNetEncoder", "MPNetSelfAttention", "MPNetOutput", "MPNetLayer"},
    ),
    ("RobertaPreLayerNorm", {}, {"LayerNorm", "GELUActivation", "RobertaPreLayerNormSelfAttention"}),
]
# Tried in bf16 and without kernels even without long tests: a gated decoder, a plain decoder and an encoder.
OFTEN = ("Llama", "GPT2", "Bert")


def tried(how: str, case: tuple[str, dict[str, object], set[str]]) -> object:
    often = how == "fp32" or (case[0] in OFTEN and "hidden_act" not in case[1])
    return pytest.param(*case, how, marks=() if often else pytest.mark.long)


@pytest.mark.parametrize(
    ("name", "changes", "fused", "how"), [tried(how, case) for case in FUSED for how in ("fp32", "bf16", "torch")]
)
def test_a_patched_model_computes_the_same(
    name: str, changes: dict[str, object], fused: set[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "torch":
        monkeypatch.setattr(library, "_loaded", False)
    plain = tiny(name, **changes).eval()
    ours = copy.deepcopy(plain)
    patch_model(ours)
    assert replaced(ours, plain) == fused
    inputs = torch.randint(2, 60, (16, 20), generator=torch.Generator().manual_seed(1))  # enough rows for our matmuls
    found = []
    for model in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bf16"):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.float() for p in model.parameters())])
    tolerance = 3e-2 if how == "bf16" else 1e-5
    for expected, mine in zip(*found, strict=True):
        assert (mine - expected).norm() <= tolerance * (expected.norm() + found[0][1].norm())


@pytest.mark.parametrize(("name", "changes"), [("Bert", {}), ("DistilBert", DISTILBERT)])
@pytest.mark.parametrize("bf16", [True, False])
def test_fused_encoder_layers_drop_what_plain_ones_drop(
    name: str, changes: dict[str, object], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = tiny(name, **changes)
    plain = copy.deepcopy(fused)
    patch_model(fused)
    monkeypatch.setattr(patches, "fuse_encoder_layers", lambda model: None)
    patch_model(plain)
    inputs, found = torch.randint(2, 60, (16, 20), generator=torch.Generator().manual_seed(1)), []
    for model in (plain, fused):
        with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            torch.manual_seed(3)
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.float() for p in model.parameters())])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() <= (2e-2 if bf16 else 1e-5) * (expected.norm() + found[0][1].norm())


@pytest.mark.parametrize(("name", "changes"), [("Bert", {}), ("DistilBert", DISTILBERT)])
def test_fused_encoder_layers_give_equal_bytes_with_any_threads(name: str, changes: dict[str, object]) -> None:
    model, threads = tiny(name, **changes), torch.get_num_threads()
    patch_model(model)
    inputs, found = torch.randint(2, 60, (16, 20), generator=torch.Generator().manual_seed(1)), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            model.zero_grad()
            with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
                torch.manual_seed(3)
                states = model.base_model(input_ids=inputs).last_hidden_state
            states.float().square().sum().backward()
            found.append([states.detach(), *(p.grad for p in model.base_model.parameters() if p.grad is not None)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(mine, other) for others in found[1:] for mine, other in zip(found[0], others, strict=True))


def test_outputs_of_layers_are_still_recorded() -> None:
    plain = tiny("Qwen2").eval()
    ours = copy.deepcopy(plain)
    patch_model(ours)
    inputs = torch.arange(7)[None]
    with torch.no_grad():
        states = [model(input_ids=inputs, output_hidden_states=True).hidden_states for model in (plain, ours)]
    assert len(states[0]) == len(states[1]) == 3
    torch.testing.assert_close(states[1], states[0])


def test_recomputed_activations_give_the_same_gradients() -> None:
    found = []
    for checkpointing in (False, True):
        model = tiny("Qwen3")
        patch_model(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_blocks_read_their_norms_in_bf16() -> None:
    model = tiny("Llama")
    patch_model(model)
    seen = []
    model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = model.model(input_ids=torch.arange(9)[None]).last_hidden_state
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.float32


def test_other_activations_are_left_alone() -> None:
    model: Any = tiny("GPT2", activation_function="quick_gelu", n_embd=16, n_head=2, n_layer=1)
    patch_model(model)
    kinds = {type(module) for module in model.modules()}
    assert not kinds & {FusedGELU, FusedTanhGELU}
    assert any(issubclass(kind, FusedNorm) for kind in kinds)


def test_an_activation_that_all_models_share_stays_as_it_is() -> None:
    model: Any = transformers.XLMModel(transformers.XLMConfig(vocab_size=60, emb_dim=16, n_heads=2, n_layers=1))
    shared = [module for module in model.modules() if module is transformers.activations.gelu]
    assert shared
    kind = type(shared[0])
    patch_model(model)
    assert any(isinstance(module, FusedGELU) for module in model.modules())
    assert type(transformers.activations.gelu) is kind


def test_patches_that_do_not_fit_are_undone() -> None:
    """A patch may change results, or raise an error when it is applied or when its layer runs."""

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class InPlace(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.detach().add_(input))

    def use(kind: type[nn.Module]) -> Patch:
        def patch(model: Any) -> None:
            model.model.layers[1].mlp.up_proj.__class__ = kind
            model.config.use_cache = True

        return patch

    def fails(model: Any) -> None:
        use(nn.Identity)(model)
        raise KeyError

    model = tiny("Llama")
    plain, wrong = copy.deepcopy(model), [use(Doubled), fails, use(InPlace), use(nn.Identity)]
    assert apply_patches(model, [wrong[0], patches.patch_layers, *wrong[1:]]) == wrong
    assert replaced(model, plain) == set()
    assert not model.config.use_cache
    assert type(model.lm_head) is not nn.Linear
    torch.testing.assert_close(model(torch.arange(9)[None]).logits, plain(torch.arange(9)[None]).logits)


def test_norms_with_methods_of_their_own_run_without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny(
        "Gemma3nText", num_kv_shared_layers=0, hidden_size_per_layer_input=8, layer_types=["full_attention"] * 2
    )
    ours = copy.deepcopy(plain)
    monkeypatch.setattr(library, "_loaded", False)
    patch_model(ours)
    assert "Gemma3nRMSNorm" in replaced(ours, plain)
    torch.testing.assert_close(ours(torch.arange(9)[None]).logits, plain(torch.arange(9)[None]).logits)
