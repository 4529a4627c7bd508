"""Groups parameters by whether they get weight decay and whether Muon may update them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class ParameterGroups:
    """The trained parameters of a model by role; a tied parameter is in one group only."""

    matrices: Named  # linear weights (outputs, inputs), or stacks (experts, outputs, inputs): decayed, may use Muon
    filters: Named  # convolution filters: decayed, never Muon
    others: Named  # embeddings, output head, norms and biases: not decayed


def parameter_groups(model: nn.Module) -> ParameterGroups:
    """Groups the trained parameters by the role of their modules; each group is in the model's order.

    In transformers, mixture-of-experts models stack the matrices of all experts in parameters (experts, outputs,
    inputs) of a module whose class name contains `Experts`.
    """
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "head", None))()
    tables = {
        id(m.weight) for m in model.modules() if (isinstance(m, nn.Embedding) or m is head) and hasattr(m, "weight")
    }
    matrices: set[int] = set()
    filters: set[int] = set()
    for module in model.modules():
        experts = "Experts" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in tables or parameter.ndim < 2:
                continue
            if name == "weight" and (isinstance(module, _ConvNd) or parameter.ndim > 3):
                filters.add(id(parameter))
            elif name == "weight" or (experts and parameter.ndim == 3):
                matrices.add(id(parameter))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return ParameterGroups(
        [(name, p) for name, p in trained if id(p) in matrices],
        [(name, p) for name, p in trained if id(p) in filters],
        [(name, p) for name, p in trained if id(p) not in matrices | filters],
    )
