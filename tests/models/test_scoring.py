"""Log-probabilities of given tokens, for sequences that share the computation of their beginnings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.models import shared_prefixes
from sansgpu.models.huggingface.causal_lm import transformers_scorer
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.patches import patch_model
from sansgpu.models.scoring import Score, Scorer, ScoreRequest, decoder_scorer
from tests.models.small import model_of

# Few different tokens, so that random sequences have beginnings in common.
SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=20), st.integers(1, 19)), min_size=1, max_size=12
)


def requests_of(drawn: list[tuple[list[int], int]]) -> list[ScoreRequest]:
    return [ScoreRequest(tokens, min(targets, len(tokens) - 1)) for tokens, targets in drawn]


def expected(logits: torch.Tensor, request: ScoreRequest) -> Score:
    """Scores a request from the logits (T, V) of its tokens, in float64."""
    rows = logits.double().log_softmax(dim=1)[:-1][-request.targets :]
    targets = torch.tensor(request.tokens[-request.targets :])
    return Score(float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(dim=1) == targets).all()))


def assert_equal_to_separate_passes(scorer: Scorer, model: torch.nn.Module, requests: list[ScoreRequest]) -> None:
    found = dict(scorer.scores(requests))
    assert sorted(found) == list(range(len(requests)))
    for number, request in enumerate(requests):
        with torch.no_grad():
            output = model(torch.tensor([request.tokens]))
        of_tokens = output if isinstance(output, torch.Tensor) else output.logits
        separate = expected(of_tokens[0], request)
        assert found[number].log_probability == pytest.approx(separate.log_probability, abs=1e-4, rel=1e-5)
        assert found[number].is_greedy == separate.is_greedy


@pytest.mark.parametrize("layout", ["llama", *(pytest.param(n, marks=pytest.mark.long) for n in ("classic", "modern"))])
def test_a_shared_beginning_changes_no_score(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(layout)
    scorer = decoder_scorer(model)
    monkeypatch.setattr(shared_prefixes, "MAX_KEYS", 32)  # several calls of the attention kernel

    @settings(max_examples=30)
    @given(SEQUENCES)
    def check(drawn: list[tuple[list[int], int]]) -> None:
        assert_equal_to_separate_passes(scorer, model, requests_of(drawn))

    check()


def hugging_face_model(**changes: object) -> UnpaddedModel:
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = transformers.MistralConfig(
        vocab_size=60, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, **shape, **changes
    )
    model = transformers.MistralForCausalLM(config).eval()
    patch_model(model)
    return UnpaddedModel(model, pack=True)


@pytest.mark.parametrize("window", [None, 4])
def test_models_of_transformers_share_beginnings(window: int | None) -> None:
    model = hugging_face_model(sliding_window=window)
    scorer = transformers_scorer(model, 64)
    assert scorer.shares

    @settings(max_examples=30)
    @given(SEQUENCES)
    def check(drawn: list[tuple[list[int], int]]) -> None:
        assert_equal_to_separate_passes(scorer, model.model, requests_of(drawn))

    check()
