"""Mixture of experts of one layer (model.md 4).

Letters: T tokens, D hidden.
"""

import torch
from torch import Tensor

from graphs.ops import combine_experts, dispatch_experts, route_experts, routed_experts, swiglu
from model.scope import Scope


def mixture_of_experts(scope: Scope, x_TD: Tensor) -> Tensor:
    """Route every token to its experts and add the shared one.

    Args:
        scope: holds ffn.gate.*, ffn.experts.* (stacked over experts), ffn.shared_experts.* and
            slots.
        x_TD: normalised input, [num_tokens, hidden].
    Returns:
        [num_tokens, hidden].
    """
    config, limit = scope.config, float(scope.config.swiglu_limit)
    logits = scope.linear("ffn.gate", x_TD, torch.float32)
    ids, weights = route_experts(
        logits,
        scope["ffn.gate.bias"],
        scope["slots"],
        config.num_experts_per_tok,
        config.routed_scaling_factor,
    )
    scope.tap("moe_ids", ids)
    scope.tap("moe_weights", weights)
    rows, row_ids, row_weights = dispatch_experts(x_TD, ids, weights)
    routed = routed_experts(
        rows,
        row_ids,
        row_weights,
        *scope.weight("ffn.experts.w1"),
        *scope.weight("ffn.experts.w3"),
        *scope.weight("ffn.experts.w2"),
        scope.compile_config.act_quant,
        limit,
    )
    shared = "ffn.shared_experts"
    inner = swiglu(scope.linear(f"{shared}.w1", x_TD), scope.linear(f"{shared}.w3", x_TD), limit)
    return combine_experts(routed, scope.linear(f"{shared}.w2", inner))
