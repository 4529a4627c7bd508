"""Prompts in a batch give the same texts as each alone, for any number of slots and in any order."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from sansgpu.config import ModelConfig
from sansgpu.kernels import library
from sansgpu.machine.probe import has_bf16_tensors
from sansgpu.models.generation import generate as batched
from sansgpu.models.generation.generate import (
    BatchModel,
    Completion,
    DecoderReader,
    complete,
    decoder_batch,
    generate,
    stream,
)
from sansgpu.models.generation.sampling import Sampling, sample_tokens
from sansgpu.models.huggingface import cached_reader
from sansgpu.models.huggingface.adapters import add_adapter
from sansgpu.models.huggingface.cached_reader import PretrainedReader, cache_use
from sansgpu.models.huggingface.generation import (
    PretrainedSlots,
    pretrained_batch,
    pretrained_single,
    pretrained_step,
)
from sansgpu.models.huggingface.lora import patch_adapter
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.models.modules import narrow_matrices, set_matmul_precision
from sansgpu.models.quantized_layers import QuantizedLinear
from tests.kernels.test_integer_matmul import rotated
from tests.models.small import TEXT, TOKENIZER, model_of
from tests.tasks.folders import model_folder

GREEDY, RANDOM = Sampling(temperature=0), Sampling(temperature=1.0, top_p=0.95, seed=3)
WORDS = TEXT[0].split()
PROMPTS = [" ".join(WORDS[: 1 + number % 7] * (1 + number % 3)) for number in range(9)]
CONTEXT = 96
# Gemma 2, Gemma 3 and Mistral have sliding windows that are shorter than some prompts.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2", "phi", "gemma", "gemma2", "gemma3_text", "mistral")
OFTEN = ("gpt2",)


def pretrained(architecture: str, **changes: Any) -> tuple[UnpaddedModel, Any]:
    """Returns a model and its tokenizer; an adapter has random matrices, as after training."""
    settings = ModelConfig(name_or_path=str(model_folder(architecture)), **changes)
    model = load_pretrained(settings, Head("causal"), seed=0).eval()
    patch_model(model)
    if settings.adapter != "none":
        patch_adapter(add_adapter(model, settings, 0).eval())
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return UnpaddedModel(model, pack=True), load_tokenizer_of(settings, None)


def completions(
    model: BatchModel, slots: int, sampling: Sampling, first: int = 0, prompts: list[str] = PROMPTS
) -> list[Completion]:
    ids = [model.text_ids(prompt) for prompt in prompts]
    limits = [min(5 + 3 * number, model.context - len(ids[number])) for number in range(len(prompts))]
    reader = model.open_reader(slots, max(len(row) + limit for row, limit in zip(ids, limits, strict=True)))
    with torch.inference_mode():
        return sorted(complete(reader, ids, model.ends, limits, sampling, first))


@pytest.mark.parametrize("layout", ["modern", "classic", "grouped", "hybrid", "grouped_hybrid"])
def test_a_batch_of_our_decoder_writes_what_each_prompt_gives_alone(layout: str) -> None:
    model = model_of(layout, vocab_size=300, max_seq_len=CONTEXT)
    batch = decoder_batch(model, TOKENIZER)
    alone = ["".join(generate(model, TOKENIZER, p, 5 + 3 * n, GREEDY)) for n, p in enumerate(PROMPTS)]
    assert any(alone)
    for slots in (1, 4, 20):  # fewer slots than prompts, so that slots are reused, and more
        assert [TOKENIZER.decode(row.ids) for row in completions(batch, slots, GREEDY)] == alone


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=[] if a in OFTEN else pytest.mark.long) for a in ARCHITECTURES]
)
def test_a_batch_of_a_transformers_model_writes_what_each_prompt_gives_alone(architecture: str) -> None:
    unpadded, tokenizer = pretrained(architecture)
    batch, single = pretrained_batch(unpadded, tokenizer), pretrained_single(unpadded.model, tokenizer)
    assert batch.together or not library.available()
    together = completions(batch, 4, GREEDY)
    for number, prompt in enumerate(PROMPTS):
        ids = unpadded.model.generate(
            torch.tensor([batch.text_ids(prompt)]), max_new_tokens=5 + 3 * number, do_sample=False, pad_token_id=0
        )[0, len(batch.text_ids(prompt)) :]
        assert batch.decode(together[number].ids) == tokenizer.decode(ids, skip_special_tokens=True)
        for model in (batch, single):
            pieces = stream(model, model.text_ids(prompt), 5 + 3 * number, GREEDY)
            assert "".join(pieces) == batch.decode(together[number].ids)
        assert together[number].reason == ("length" if len(together[number].ids) == 5 + 3 * number else "stop")


@pytest.mark.parametrize(
    ("architecture", "narrow"), [("qwen2", False), ("qwen2", True), pytest.param("phi", True, marks=pytest.mark.long)]
)
def test_texts_depend_on_seed_and_row_but_not_on_the_batch(architecture: str, narrow: bool) -> None:
    """Phi is tested in bf16 because its rotary embedding then returns fp32 keys."""
    unpadded, tokenizer = pretrained(architecture)
    if narrow:
        narrow_matrices(unpadded.model)
    batch = pretrained_batch(unpadded, tokenizer)
    assert batch.together or not library.available()
    expected = completions(batch, 9, RANDOM)
    for slots in (1, 2, 5):
        assert completions(batch, slots, RANDOM) == expected
    limits = [5 + 3 * number for number in range(4, 9)]
    ids = [batch.text_ids(prompt) for prompt in PROMPTS[4:]]
    with torch.inference_mode():
        later = complete(batch.open_reader(3, CONTEXT), ids, batch.ends, limits, RANDOM, first=4)
        assert sorted(later) == expected[4:]  # an interrupted job continues with the later rows
    other = completions(batch, 9, Sampling(temperature=1.0, top_p=0.95, seed=4))
    assert [row.ids for row in other] != [row.ids for row in expected]
    same = completions(batch, 9, RANDOM, prompts=[PROMPTS[0]] * 9)
    assert len({tuple(row.ids[:5]) for row in same}) > 1


STEPS = list(product(("llama", "qwen2", "qwen3"), ("fp32", "bf16", "int8")))
OFTEN = (("llama", "int8"), ("qwen2", "bf16"), ("qwen3", "fp32"))  # the other pairs are tested before a release


@pytest.mark.parametrize(
    ("architecture", "precision"), [pytest.param(*s, marks=() if s in OFTEN else pytest.mark.long) for s in STEPS]
)
def test_a_step_in_one_call_gives_the_same_bits_as_the_layers(architecture: str, precision: str) -> None:
    unpadded, _ = pretrained(architecture)
    with torch.no_grad():
        for name, parameter in unpadded.model.named_parameters():
            if parameter.ndim == 1:  # norms and biases
                parameter.normal_(0.5, 0.5, generator=torch.Generator().manual_seed(len(name)))
    if has_bf16_tensors(precision):
        narrow_matrices(unpadded.model)
    set_matmul_precision(unpadded.model, precision)
    fused = pretrained_step(unpadded.model)
    assert fused is not None
    readers = [PretrainedSlots(unpadded, 40, CONTEXT, one) for one in (fused, None)]
    prompts = [[7 * n % 250 + length for n in range(length)] for length in range(1, 41)]
    for reader in readers:
        reader.add(prompts)
    for step, count in enumerate((40, 40, 17, 3, 1)):
        tokens = [(11 * row + step) % 300 for row in range(count)]
        logits = []
        for reader in readers:
            reader.keep(range(count))
            logits.append(reader.step(tokens))
        assert torch.equal(*logits)


def test_an_exact_step_in_integers_rounds_only_the_weights() -> None:
    unpadded, _ = pretrained("llama")
    with torch.no_grad():
        for name, parameter in unpadded.model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:  # numbers that 8-bit integers represent
                whole = torch.randint(-127, 128, parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                whole[:, ::256] = 127
                parameter.copy_(rotated(whole * 2.0**-13, back=True))
    set_matmul_precision(unpadded.model, "int8")
    step = pretrained_step(unpadded.model)
    assert step is not None
    set_matmul_precision(unpadded.model, "fp32")
    logits = []
    for fused in (None, step, step.exact()):
        reader = PretrainedSlots(unpadded, 2, CONTEXT, fused)
        reader.add([[5, 6, 7], [8]])
        logits.append(reader.step([9, 10]))
    largest = float(logits[0].abs().max())
    errors = [float((found - logits[0]).abs().max()) / largest for found in logits[1:]]
    assert errors[1] < 1e-3 < errors[0]


@pytest.mark.parametrize(
    ("base", "precision"), [("int8", "bf16"), ("int4", "bf16"), ("bf16", "bf16"), ("int4", "int8")]
)
def test_a_step_in_one_call_computes_quantized_weights_and_adapters(base: str, precision: str) -> None:
    adapter = {"adapter": "lora", "lora_rank": 5, "lora_alpha": 10, "lora_targets": ["v_proj", "up_proj", "down_proj"]}
    unpadded, tokenizer = pretrained("llama", base_precision=base, **adapter)
    narrow_matrices(unpadded.model)
    set_matmul_precision(unpadded.model, precision)
    fused = pretrained_step(unpadded.model)
    assert fused is not None
    steps = {}
    for slots in (20, 1):
        readers = [PretrainedSlots(unpadded, slots, CONTEXT, one) for one in (fused, None)]
        for reader in readers:
            reader.add([[7 * n % 250 + row for n in range(9)] for row in range(slots)])
        found, expected = (reader.step(range(1, slots + 1)) for reader in readers)
        torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0)
        steps[slots] = found[:1]
    assert torch.equal(steps[20], steps[1])
    batch = pretrained_batch(unpadded, tokenizer)
    texts = [completions(batch, slots, GREEDY) for slots in (1, 4)]
    assert texts[0] == texts[1]
    for layer in unpadded.model.modules():
        if hasattr(layer, "lora_A"):
            layer.enable_adapters(False)
    unadapted = PretrainedSlots(unpadded, 1, CONTEXT, None)
    unadapted.add([[7 * n % 250 for n in range(9)]])
    assert (unadapted.step([1]) - steps[1]).abs().max() > 0.2 * steps[1].abs().max()


def test_quantized_weights_are_not_copied_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    unpadded, _ = pretrained("llama", base_precision="int8", adapter="lora")
    logits = []
    for ratio in (1.0, 0.0):
        monkeypatch.setattr("sansgpu.kernels.frozen_linear.PACKED_RATIO", ratio)
        step = pretrained_step(unpadded.model)
        assert step is not None
        reader = PretrainedSlots(unpadded, 2, CONTEXT, step)
        reader.add([[5, 6, 7], [8]])
        logits.append(reader.step([9, 10]))
    assert not torch.equal(*logits)
    torch.testing.assert_close(*logits, rtol=0, atol=0.05 * float(logits[0].abs().max()))  # activations in bf16


@pytest.mark.parametrize("adapted", [False, True])
def test_families_without_a_fused_step_multiply_codes_of_quantized_weights(
    monkeypatch: pytest.MonkeyPatch, adapted: bool
) -> None:
    unpadded, tokenizer = pretrained("gemma3_text", base_precision="int8", adapter="lora")
    for layer in unpadded.model.modules():
        if hasattr(layer, "lora_A"):
            layer.enable_adapters(adapted)
    texts, logits = [], []
    for ratio in (0.0, 1.0):
        monkeypatch.setattr("sansgpu.kernels.frozen_linear.PACKED_RATIO", ratio)
        batch = pretrained_batch(unpadded, tokenizer)
        layers = [layer for layer in unpadded.model.modules() if isinstance(layer, QuantizedLinear)]
        assert layers
        assert all((layer.codes is not None) == bool(ratio) for layer in layers)
        logits.append(batch.open_reader(3, CONTEXT).add([[5, 6, 7], [8, 9]]))
        texts.append([completions(batch, slots, GREEDY) for slots in (1, 4)])
    assert not torch.equal(*logits)
    torch.testing.assert_close(*logits, rtol=0, atol=0.05 * float(logits[0].abs().max()))  # activations in bf16
    assert texts[1][0] == texts[1][1]


def test_long_prompts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, (unpadded, tokenizer) = model_of("modern", vocab_size=300, max_seq_len=CONTEXT), pretrained("llama")
    for batch, reader in (
        (decoder_batch(decoder, TOKENIZER), DecoderReader(decoder)),
        (pretrained_batch(unpadded, tokenizer), PretrainedReader(unpadded.model, cache_use(unpadded.model))),
    ):
        prompts = [[7 * n % 250 + 1 for n in range(length)] for length in (70, 3, 50, 33, 17)]
        monkeypatch.setattr(batched, "PROMPT_TOKENS", 24)
        monkeypatch.setattr(cached_reader, "PROMPT_TOKENS", 24)
        with torch.inference_mode():
            found = batch.open_reader(5, CONTEXT).add(prompts)
            for row, prompt in zip(found, prompts, strict=True):
                torch.testing.assert_close(row, reader.add([prompt])[0], atol=2e-5, rtol=1e-4)
        monkeypatch.undo()


def test_rows_end_at_the_context() -> None:
    model = model_of("modern", vocab_size=300, max_seq_len=24)
    with torch.no_grad():
        model.head_weight[TOKENIZER.end_id] = -model.head_weight[7]
    batch, prompts = decoder_batch(model, TOKENIZER), [[5] * 23, [6] * 20, [7] * 2]
    limits = [batch.context - len(prompt) for prompt in prompts]
    with torch.inference_mode():
        found = sorted(complete(batch.open_reader(2, 24), prompts, (), limits, GREEDY))
    assert [(len(row.ids), row.reason) for row in found] == [(1, "length"), (4, "length"), (22, "length")]


def test_a_rows_draw_does_not_depend_on_other_rows() -> None:
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(0)) * 3

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(row) for row in range(6)]

    for sampling in (Sampling(0.7), Sampling(1.0, top_k=5), Sampling(2.0, top_p=0.999), Sampling(1.0, 50, 0.8)):
        together = batched.sample_tokens(logits, sampling, generators())
        alone = [
            sample_tokens(row[None], sampling, [draws])[0] for row, draws in zip(logits, generators(), strict=True)
        ]
        assert together == alone


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_equal_prompts_that_are_processed_once_continue_as_separate_ones_do(architecture: str) -> None:
    batch = pretrained_batch(*pretrained(architecture))
    short, long = [5, 9, 7], list(range(20, 60))
    together = [short, long, short, short, long]
    shared, separate = (batch.open_reader(len(together), CONTEXT) for _ in range(2))
    expected = [separate.add([prompt]) for prompt in together]
    assert torch.equal(shared.add(together), torch.cat(expected))
    for tokens in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]):
        assert torch.equal(shared.step(tokens), separate.step(tokens))
    shared.keep([0, 3])
    separate.keep([0, 3])
    assert torch.equal(shared.add([long, long]), torch.cat([separate.add([long]), separate.add([long])]))
    assert torch.equal(shared.step([1, 2, 3, 4]), separate.step([1, 2, 3, 4]))
