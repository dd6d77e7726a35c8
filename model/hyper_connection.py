"""One sublayer inside manifold-constrained hyper-connections (model.md 2.2 - 2.4).

The mix that folds the streams into a sublayer's input was computed by the sublayer before it; the
sublayer's own
mix goes to the next one.
"""

from collections.abc import Callable

from torch import Tensor

from graphs.ops import hc_mixes, hc_post, hc_pre
from model.scope import Scope


def sublayer(
    scope: Scope,
    name: str,
    streams_TCD: Tensor,
    pre_TC: Tensor,
    body: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Run `body` on the folded, normalised streams and write its output back.

    Args:
        scope: holds hc_{name}_fn, hc_{name}_scale, hc_{name}_base and {name}_norm.
        name: "attn" or "ffn".
        streams_TCD: [num_tokens, hc_mult, hidden].
        pre_TC: mix made by the previous sublayer, float32 [num_tokens, hc_mult].
        body: sublayer, [num_tokens, hidden] -> [num_tokens, hidden].
    Returns:
        New streams, and the mix for the next sublayer.
    """
    config = scope.config
    own_pre, post, comb = hc_mixes(
        streams_TCD,
        scope[f"hc_{name}_fn"],
        scope[f"hc_{name}_scale"],
        scope[f"hc_{name}_base"],
        config.hc_sinkhorn_iters,
        config.hc_eps,
        config.rms_norm_eps,
    )
    out = body(scope.norm(f"{name}_norm", hc_pre(streams_TCD, pre_TC)))
    scope.tap(f"{name}_out", out)
    return hc_post(out, streams_TCD, post, comb), own_pre
