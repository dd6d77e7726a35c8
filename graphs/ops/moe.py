"""Mixture of experts: routing, the expert networks, and their combination.

Letters: T tokens, E experts, k experts per token, H hidden, I intermediate.
"""

import torch
from torch import Tensor

from graphs.op import Tolerance, op
from graphs.ops.linear import linear_float32, sample_weight
from graphs.ops.rows import sum_exact, top_indices


def _sample_route(seed: int) -> tuple[Tensor, Tensor, Tensor, int, float]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 12, generator=generator) * 4
    slots = torch.tensor([1, 1, 2, 2, 3, 3, 0], dtype=torch.int32)
    return logits, torch.randn(12, generator=generator), slots, 3, 1.5


@op(
    shape=lambda logits, bias, slots, topk, scale: (
        logits.new_empty((logits.shape[0], topk), dtype=torch.int32),
        logits.new_empty((logits.shape[0], topk)),
    ),
    samples=_sample_route,
)
def route_experts(
    logits_TE: Tensor, bias_E: Tensor, slots_T: Tensor, topk: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts for each token and weight them: scores are sqrt(softplus(logits)).

    Args:
        logits_TE: float32 [num_tokens, num_experts].
        bias_E: added for the selection only, float32 [num_experts].
        slots_T: int32 [num_tokens]; 0 marks a padded row.
        topk: experts per token.
        scale: routed_scaling_factor.
    Returns:
        ids int32 [num_tokens, topk], ascending, ties to the lower id, -1 for padded rows;
        weights float32 [num_tokens, topk], rows sum to scale.
    Source: model.md 4.1.
    """
    logits = logits_TE.double()
    softplus = torch.where(logits > 20, logits, torch.log1p(torch.exp(logits.clamp(max=20))))
    scores = softplus.sqrt().float()
    ids = top_indices(scores + bias_E, topk)
    weights = scores.gather(1, ids.long().clamp(min=0))
    weights = weights / (sum_exact(weights, -1).unsqueeze(-1) + 1e-20) * scale
    return torch.where(slots_T.unsqueeze(-1) > 0, ids, -1), weights


def gated_product(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32; limit 0 = no clamp."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate.double() * torch.sigmoid(gate.double())).float() * up


def _sample_swiglu(seed: int) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(9, 32, generator=generator) * 4 for _ in range(2))
    return gate, up, (0.0, 2.5)[seed % 2]


@op(
    shape=lambda gate, up, limit: torch.empty_like(gate),
    samples=_sample_swiglu,
    tolerance=Tolerance(1e-2, 1e-2),
)
def swiglu(gate_TI: Tensor, up_TI: Tensor, limit: float) -> Tensor:
    """Apply the clamped SwiGLU of the shared expert.

    Args:
        gate_TI, up_TI: [num_tokens, I], bfloat16 or float32.
        limit: swiglu_limit; the gate is clamped from above only, `up` on both sides; 0 = off.
    Returns:
        [num_tokens, I], dtype of the gate; float32 inside.
    Source: model.md 4.2.
    """
    return gated_product(gate_TI, up_TI, limit).to(gate_TI.dtype)


def _sample_experts(seed: int) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(seed)
    kind = ("plain", "fp4")[seed % 2]
    pairs: list[Tensor | None] = []
    for index, (out, inner) in enumerate(((32, 64), (32, 64), (64, 32))):
        made = [sample_weight(seed * 100 + index * 10 + e, out, inner, kind) for e in range(4)]
        scales = [s for _, s in made if s is not None]
        pairs += [torch.stack([w for w, _ in made]), torch.stack(scales) if scales else None]
    ids = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [-1, -1]], dtype=torch.int32)
    x, weights = torch.randn(5, 64, generator=generator), torch.rand(5, 2, generator=generator)
    return x, ids, weights, *pairs, seed % 3 == 0, 2.5


@op(
    shape=lambda x, ids, *_: x.new_empty((x.shape[0], ids.shape[1], x.shape[1])),
    samples=_sample_experts,
    tolerance=Tolerance(2e-2, 1e-2),
)
def routed_experts(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    w1: Tensor,
    w1_scale: Tensor | None,
    w3: Tensor,
    w3_scale: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    act_quant: bool,
    limit: float,
) -> Tensor:
    """Run each token through its experts; the routing weight multiplies before the down projection.

    Args:
        x_TH: [num_tokens, H], bfloat16 or float32.
        ids_Tk: int32 [num_tokens, k], -1 = none.
        weights_Tk: routing weights, float32 [num_tokens, k].
        w1, w3: gate and up projections, packed FP4 uint8 [E, I, H/2] or plain [E, I, H].
        w2: down projection, [E, H, I/2] or [E, H, I].
        w1_scale, w3_scale, w2_scale: E8M0 bytes, or None.
        act_quant: quantise activations per 32 channels to FP8 before each projection.
        limit: swiglu_limit.
    Returns:
        [num_tokens, k, H], dtype of x, zero where there is no expert.
    Source: model.md 4.2.
    """
    out = x_TH.new_zeros((*ids_Tk.shape, x_TH.shape[1]))
    for expert in ids_Tk.unique().tolist():
        if expert < 0:
            continue
        token, place = (ids_Tk == expert).nonzero(as_tuple=True)

        def project(
            x: Tensor, weight: Tensor, scale: Tensor | None, expert: int = expert
        ) -> Tensor:
            picked = None if scale is None else scale[expert]
            return linear_float32(x, weight[expert], picked, act_quant).to(x_TH.dtype)

        x = x_TH[token]
        inner = gated_product(project(x, w1, w1_scale), project(x, w3, w3_scale), limit)
        inner = inner * weights_Tk[token, place].unsqueeze(-1)
        out[token, place] = project(inner.to(x_TH.dtype), w2, w2_scale)
    return out
