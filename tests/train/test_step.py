"""One step updates the right parameters with the right gradient and reports it."""

import pytest
import torch

from sansgpu.config import ConfigError, ModelConfig, SansGPUError, TrainingConfig
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.machine.execution import Execution
from sansgpu.models import TransformerLM
from sansgpu.train.optim import Optimizer, choose_optimizer, parameter_groups
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step
from sansgpu.train.update_rules import muon_momentum

MODERN = {"vocab_size": 61, "d_model": 32, "n_heads": 2, "n_layers": 2, "d_ff": 48, "max_seq_len": 16}
CLASSIC = {**MODERN, "activation": "gelu", "tie_embeddings": False}


class Memorise:
    """A minimal task with a loss and no additional sums."""

    def __init__(self, model: TransformerLM) -> None:
        self.model = model

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.model.summed_loss(batch.inputs, batch.targets, batch.positions, batch.document_ids)

    def step_sums(self) -> dict[str, float]:
        return {}


def model_of(settings: dict[str, object], seed: int = 3) -> TransformerLM:
    model = TransformerLM(ModelConfig.model_validate(settings), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # zero-initialized projections would hide half of the gradients
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def batch_of(rows: int, seed: int = 0) -> Batch:
    """Returns rows with different numbers of targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(0, 61, (rows, 16), generator=generator) for _ in range(2))
    for row in range(rows):
        targets[row, : 4 * row % 15] = IGNORE
    return Batch(inputs, targets)


def state_of(
    model: TransformerLM, training: TrainingConfig, micro_batch: int = 2, precision: str = "fp32"
) -> TrainState:
    return TrainState.create(model, training, Execution(micro_batch, precision=precision))


def plain_gradients(model: TransformerLM, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the gradients of the mean cross-entropy of the whole batch, computed by torch alone."""
    logits = model(batch.inputs, batch.positions, batch.document_ids).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch", [4, 2, 1, 3])
def test_every_split_of_a_batch_has_the_gradient_of_the_whole(micro_batch: int) -> None:
    # AdamW's first moment after one step is (1 - beta1) times the gradient that the step saw.
    training = TrainingConfig(optimizer="adamw", max_grad_norm=0, beta1=0.5)
    model = model_of(MODERN)
    expected = plain_gradients(model, batch_of(4))
    model.zero_grad()
    state = state_of(model, training, micro_batch)
    train_step(state, Memorise(model), batch_of(4), lr=0.0)
    for name, gradient in expected.items():
        seen = state.optimizer.state_tensors()[f"exp_avg.{name}"] * 2
        assert (seen - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_the_reported_loss_is_the_mean_over_tokens_whatever_the_accumulation() -> None:
    training = TrainingConfig(optimizer="adamw")
    model, batch = model_of(MODERN), batch_of(4)
    logits = model(batch.inputs).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE).item()
    for micro_batch in (4, 1):
        model = model_of(MODERN)
        result = train_step(state_of(model, training, micro_batch), Memorise(model), batch, 0.0)
        assert result.loss_sum / result.tokens == pytest.approx(expected, rel=1e-5)
        assert result.tokens == int((batch.targets != IGNORE).sum())


@pytest.mark.parametrize("settings", [MODERN, CLASSIC])
@pytest.mark.parametrize("optimizer", ["muon", "adamw", "adam"])
def test_every_parameter_is_trained(settings: dict[str, object], optimizer: str) -> None:
    training = TrainingConfig.model_validate({"optimizer": optimizer})
    model = model_of(settings)
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = state_of(model, training)
    assert sum(w.master.numel() for w in state.optimizer.weights) == model.parameter_count
    train_step(state, Memorise(model), batch_of(4), lr=0.01)
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []


@pytest.mark.parametrize("settings", [MODERN, CLASSIC])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_weight_decay_is_for_hidden_matrices_alone(settings: dict[str, object], optimizer: str) -> None:
    training = TrainingConfig.model_validate({"optimizer": optimizer, "weight_decay": 0.5})
    model = model_of(settings)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizers = Optimizer(model, training, torch.float32)
    for weight in optimizers.weights:
        weight.gradient = torch.zeros_like(weight.master)
    optimizers.step(0.1, step=1, scale=1.0)
    for name, parameter in model.named_parameters():
        hidden = name.startswith("blocks") and parameter.ndim == 2
        expected = before[name] * 0.95 if hidden else before[name]
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_the_optimizer_is_chosen_by_what_muon_costs_of_a_step() -> None:
    assert choose_optimizer("auto", step_flops=1e9, muon_flops=1e9) == "adamw"
    assert choose_optimizer("auto", step_flops=1e9, muon_flops=1e8) == "muon"
    assert choose_optimizer("muon", step_flops=1e3, muon_flops=1e9) == "muon"
    with pytest.raises(ValueError, match="auto"):
        Optimizer(model_of(MODERN), TrainingConfig(), torch.float32)


def test_a_tied_matrix_is_trained_once_and_as_an_embedding() -> None:
    groups = parameter_groups(model_of(MODERN))
    assert [name for name, _ in groups.others if "embedding" in name or "head" in name] == ["embedding.weight"]
    assert all(name.startswith("blocks") for name, _ in groups.matrices)


def test_muon_steps_along_the_orthogonalized_momentum() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(12, 20, generator=generator) for _ in range(2)] + [
        torch.randn(20, 12, generator=generator)
    ]
    layers = torch.nn.ModuleList(torch.nn.Linear(g.shape[1], g.shape[0], bias=False) for g in gradients)
    torch.nn.utils.vector_to_parameters(torch.zeros(sum(g.numel() for g in gradients)), layers.parameters())
    training = TrainingConfig(optimizer="muon", weight_decay=0.0)
    optimizer = Optimizer(layers, training, torch.float32)
    for weight, gradient in zip(optimizer.weights, gradients, strict=True):
        weight.gradient = gradient.clone()
    optimizer.step(0.1, step=1, scale=1.0)
    for parameter, gradient in zip(layers.parameters(), gradients, strict=True):
        u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
        direction = -(u @ vh)
        similarity = torch.nn.functional.cosine_similarity(parameter.flatten(), direction.flatten(), dim=0)
        assert similarity > 0.97
        assert float(parameter.detach().norm() / direction.norm()) == pytest.approx(0.1 * 0.2 * 20**0.5, rel=0.25)


def test_weights_beside_muon_move_three_times_as_far() -> None:
    lengths = {}
    for optimizer in ("muon", "adamw"):
        embedding, matrix = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.zeros_(embedding.weight)
        trained = Optimizer(
            torch.nn.ModuleList([embedding, matrix]),
            TrainingConfig.model_validate({"optimizer": optimizer}),
            torch.float32,
        )
        for weight in trained.weights:
            weight.gradient = torch.ones_like(weight.master)
        trained.step(0.1, step=1, scale=1.0)
        lengths[optimizer] = float(embedding.weight.detach().norm())
    assert lengths["muon"] == pytest.approx(3 * lengths["adamw"])


def test_the_momentum_of_muon_rises_with_the_steps() -> None:
    training = TrainingConfig(muon_momentum_start=0.75)
    assert muon_momentum(training, 1) == pytest.approx(0.75, abs=1e-3)
    assert muon_momentum(training, 1000) == pytest.approx(0.85)
    assert muon_momentum(training, 2000) == muon_momentum(training, 10**6) == 0.95


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "adam", "sgd"])
def test_moments_survive_a_snapshot_bit_for_bit(optimizer: str) -> None:
    training = TrainingConfig.model_validate({"optimizer": optimizer})

    def steps(state: TrainState, first: int, last: int) -> None:
        for step in range(first, last):
            state.progress.step = step
            train_step(state, Memorise(state.model), batch_of(4, seed=step), lr=0.01)

    straight = state_of(model_of(MODERN), training)
    steps(straight, 0, 6)
    halfway = state_of(model_of(MODERN), training)
    steps(halfway, 0, 3)
    again = state_of(model_of(MODERN, seed=9), training)
    for name, tensor in {**halfway.weights(), **halfway.moments()}.items():
        again.load(name, tensor.clone())
    steps(again, 3, 6)
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    for name, tensor in straight.optimizer.state_tensors().items():
        assert torch.equal(tensor, again.optimizer.state_tensors()[name]), name


@pytest.mark.parametrize("limit", [0.0, 1e-3, 1e3])
def test_clipping_scales_the_whole_gradient_down_to_its_limit(limit: float) -> None:
    training = TrainingConfig(optimizer="adamw", max_grad_norm=limit)
    state = state_of(model_of(MODERN), training)
    norm = train_step(state, Memorise(state.model), batch_of(4), lr=0.0).grad_norm
    free = state_of(model_of(MODERN), TrainingConfig(optimizer="adamw", max_grad_norm=0.0))
    train_step(free, Memorise(free.model), batch_of(4), 0.0)
    expected = min(1.0, limit / norm) if limit else 1.0
    for name, moment in state.optimizer.state_tensors().items():
        if name.startswith("exp_avg."):
            torch.testing.assert_close(moment, free.optimizer.state_tensors()[name] * expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bf16_copies_follow_fp32_masters(size: int) -> None:
    training = TrainingConfig(optimizer="adamw")
    model = model_of(MODERN)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = state_of(model, training, size, "bf16")
    for step in range(3):
        state.progress.step = step
        train_step(state, Memorise(model), batch_of(4), lr=1e-4)
    for name, parameter in model.named_parameters():
        master = state.weights()[name]
        assert master.dtype == torch.float32
        assert parameter.dtype == (torch.bfloat16 if parameter.ndim > 1 else torch.float32)
        assert torch.equal(parameter.detach(), master.to(parameter.dtype))
        assert 0 < float((master - before[name]).abs().max()) < 1e-3  # steps that bf16 alone would lose
    state.optimizer.release_state()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_loss_that_is_not_finite_names_the_step_and_changes_nothing() -> None:
    training = TrainingConfig(optimizer="muon")
    model = model_of(MODERN)
    state = state_of(model, training)
    state.progress.step = 6
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(SansGPUError, match="step 7"):
        train_step(state, Memorise(model), batch_of(2), 0.1)
    assert all(torch.equal(p.nan_to_num(), before[name].nan_to_num()) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("settings", "optimizer"), [(MODERN, "muon"), pytest.param(CLASSIC, "adamw", marks=pytest.mark.long)]
)
def test_one_batch_is_memorised(settings: dict[str, object], optimizer: str) -> None:
    training = TrainingConfig.model_validate({"optimizer": optimizer, "weight_decay": 0.0})
    model = TransformerLM(ModelConfig.model_validate(settings), 1)
    state = state_of(model, training, micro_batch=4)
    for step in range(300):
        state.progress.step = step
        result = train_step(state, Memorise(model), batch_of(4, seed=5), lr=0.01)
        if result.loss_sum / result.tokens < 0.01:
            break
    assert result.loss_sum / result.tokens < 0.01


def test_dropout_depends_on_the_step_and_on_nothing_left_over() -> None:
    training = TrainingConfig(optimizer="muon")

    def loss(step: int, disturb: int) -> float:
        torch.manual_seed(disturb)
        model = model_of({**MODERN, "dropout": 0.3})
        state = state_of(model, training)
        state.progress.step = step
        return train_step(state, Memorise(model), batch_of(2), 0.0).loss_sum

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert loss(3, disturb=1) == loss(3, disturb=2)
    torch.manual_seed(1)
    first = loss(3, disturb=1)
    assert torch.equal(torch.rand(1), expected), "a step must not use the global random state"
    assert len({first, loss(4, disturb=1)}) == 2


class Scattered(Memorise):
    """Computes its loss with an operation that torch refuses where results must be deterministic, as on a GPU."""

    def loss(self, batch: Batch) -> torch.Tensor:
        loss = super().loss(batch)
        return loss + torch.zeros(1).put_(torch.zeros(1, dtype=torch.int64), loss.detach()[None]).sum()


def test_an_operation_that_is_not_deterministic_is_named() -> None:
    task = Scattered(model_of(MODERN))
    state = state_of(task.model, TrainingConfig(optimizer="adamw"))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ConfigError, match="the model uses put_, which is not deterministic on a GPU"):
            train_step(state, task, batch_of(2), lr=0.0)
    finally:
        torch.use_deterministic_algorithms(False)
