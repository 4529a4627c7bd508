"""The gated delta rule (arXiv 2412.06464), and linear attention with decays as in Mamba 2 (arXiv 2405.21060).

Each head has a state S (d, e), a memory from which a query reads q S. Token t first lets it decay, S *= exp(decay_t),
then writes v_t at its key k_t: S += k_t^T x_t with x_t = v_t or, with the delta rule, x_t = beta_t (v_t - k_t S), which
is the part of the value that the state does not predict. B rows, T tokens, N = B T, H value heads, K key heads of which
each serves H / K consecutive value heads, d features of queries and keys, e of values, S sequences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import structs
from sansgpu.kernels.recurrent.sequences import States, addresses, by_token, sequence_starts

_NORM_EPS = 1e-6  # added to the squared L2 norm, as NORM_EPS in delta_rule.h


class DeltaRuleOptions(NamedTuple):
    """The options of `delta_rule`."""

    starts: torch.Tensor | None = None  # (S + 1,) int64: first token of each sequence, then N; None: rows are sequences
    scale: float = 1.0  # factor of queries
    normalized: bool = False  # divides queries and keys by their L2 norms
    returns_states: bool = False


_DEFAULTS = DeltaRuleOptions()


def reference_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    options: DeltaRuleOptions = _DEFAULTS,
    initial: torch.Tensor | None = None,
) -> States:
    """Computes `delta_rule` token by token, in any dtype."""
    batch, time, heads, values = v.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2).flatten(0, 1) for x in (q, k))
    if options.normalized:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS) for x in (q, k))
    v, decay, beta = v.flatten(0, 1), decay.flatten(0, 1), None if beta is None else beta.flatten(0, 1)
    bounds = sequence_starts(options.starts, batch, time).tolist()
    outs, last = [], []
    for number, (first, end) in enumerate(pairwise(bounds)):
        state = v.new_zeros(heads, q.shape[-1], values) if initial is None else initial[number]
        for t in range(first, end):
            state = state * decay[t].exp()[:, None, None]
            written = v[t]
            if beta is not None:
                written = beta[t][:, None] * (written - torch.einsum("hd,hde->he", k[t], state))
            state = state + k[t][:, :, None] * written[:, None]
            outs.append(torch.einsum("hd,hde->he", options.scale * q[t], state))
        last.append(state)
    out = torch.stack(outs) if outs else v.new_zeros(v.shape)
    return States(out.view(batch, time, heads, values), torch.stack(last) if options.returns_states else None)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    options: DeltaRuleOptions = _DEFAULTS,
    initial: torch.Tensor | None = None,
) -> States:
    """Computes the gated delta rule or, without `beta`, linear attention with decays. Needs the kernels (`takes`).

    q and k (B, T, K, d), v (B, T, H, e) in fp32 or bf16, decay (B, T, H) in log, at most 0, beta (B, T, H). `initial`
    (S, H, d, e) fp32 are the states before the sequences, default zeros; gradients then cannot be computed.
    """
    batch, time, heads, _ = v.shape
    if q.shape != k.shape or q.shape[:2] != (batch, time) or heads % q.shape[2] or decay.shape != (batch, time, heads):
        raise RuntimeError(
            f"the delta rule expects q and k of shape (B, T, K, d), v (B, T, H, e) and decay (B, T, H), got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and {tuple(decay.shape)}."
        )
    if initial is not None and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, decay)):
        raise RuntimeError("the delta rule has gradients only for sequences that begin with a state of zeros.")
    starts = sequence_starts(options.starts, batch, time)
    results = _DeltaRule.apply(q, k, v, decay, beta, options._replace(starts=starts), initial)
    return States(*cast(tuple[torch.Tensor, torch.Tensor | None], results))


class _DeltaRuleInputs(NamedTuple):
    """The inputs of the kernels, which must stay alive while these run."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None
    starts: torch.Tensor

    def struct(self, normalized: bool) -> Any:
        """Returns the struct DeltaRule of native.h."""
        (batch, time, key_heads, dim), (heads, values) = self.q.shape, self.v.shape[2:]
        return structs()["DeltaRule"](
            N=batch * time, S=len(self.starts) - 1, H=heads, K=key_heads, d=dim, e=values,
            narrow=self.q.dtype == torch.bfloat16, normalized=normalized,
            q_time=self.q.stride(1), k_time=self.k.stride(1), v_time=self.v.stride(1), **addresses(self._asdict()),
        )  # fmt: skip


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, decay, beta, options, initial = arguments
        assert options.starts is not None
        ctx.dtypes = [x.dtype for x in (decay, decay if beta is None else beta)]
        wide = None if beta is None else beta.float().contiguous()
        inputs = _DeltaRuleInputs(
            by_token(q), by_token(k.to(q.dtype)), by_token(v.to(q.dtype)), decay.float().contiguous(), wide,
            options.starts,
        )  # fmt: skip
        out, last = q.new_empty(v.shape), None
        if options.returns_states:
            last = torch.empty(len(options.starts) - 1, v.shape[2], q.shape[3], v.shape[3])
        before = None if initial is None else initial.float().contiguous()
        library.call("delta_rule_forward", inputs.struct(options.normalized), options.scale, before, out, last)
        ctx.options = options
        ctx.save_for_backward(*inputs)
        return out, last

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs, grad = _DeltaRuleInputs(*ctx.saved_tensors), grad_outputs[0]
        assert grad is not None
        struct = inputs.struct(ctx.options.normalized)
        parts = library.call("delta_rule_parts", struct)
        scratch = [torch.empty(parts, *inputs.q.shape) for _ in range(2)]
        grads = [x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v, inputs.decay)]
        beta = None if inputs.beta is None else torch.empty_like(inputs.beta)
        given = grad.to(inputs.q.dtype).contiguous()
        library.call("delta_rule_backward", struct, ctx.options.scale, given, *scratch, *grads, beta)
        *rest, decay = grads
        return *rest, decay.to(ctx.dtypes[0]), None if beta is None else beta.to(ctx.dtypes[1]), None, None
