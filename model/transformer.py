"""The whole text model in three functions: read this first (model.md 2.2).

A step runs `prologue`, then `block` once per layer, then `epilogue`. Each is a family function: it
takes a Scope,
returns named tensors, and is traced once per bucket for all layers of its kind.
"""

import torch
from torch import Tensor

from graphs.ops import (
    constrain_logits,
    embed_streams,
    hc_pre,
    penalize_logits,
    rope_table,
    sample_tokens,
    select_rows,
    token_logprobs,
    top_logprobs,
    write_blocks,
)
from model.attention import attention
from model.engram import hash_rows, inject
from model.hyper_connection import sublayer
from model.layer import LayerSpec
from model.moe import mixture_of_experts
from model.scope import Scope


def prologue(scope: Scope) -> dict[str, Tensor]:
    """Embed the step's tokens and compute what does not depend on a layer.

    Returns:
        streams [num_tokens, hc_mult, hidden]; pre float32 [num_tokens, hc_mult], the first sublayer
        reads stream 0;
        rope.* tables; engram_rows.I int64 [num_tokens, columns] for the I-th Engram layer.
    """
    config = scope.config
    positions = scope["positions"]
    streams, pre = embed_streams(
        scope["token_ids"], scope["embed.weight"], config.hc_mult, scope.act_dtype
    )
    scope.tap("embed", streams[:, 0])
    write_blocks(
        scope["cache.tokens"],
        scope["token_ids"],
        positions,
        scope["slots"],
        scope["block_table"],
        1,
    )
    rope = rope_table(positions, scope["inv_freq.window"], 1)
    out = {"streams": streams, "pre": pre, "rope.window": rope}
    ratios = {config.layer_ratio(layer) for layer in range(config.num_hidden_layers)} - {0}
    for ratio in sorted(ratios | {1} if ratios else ()):  # queries rotate by their own position
        out[f"rope.compress.{ratio}"] = rope_table(positions, scope["inv_freq.compress"], ratio)
    if config.engram_layer_ids:
        rows = hash_rows(scope)
        out |= {f"engram_rows.{index}": part for index, part in enumerate(rows)}
        if scope.taps is not None:
            scope.tap("engram_rows", torch.stack(rows, 1))
    return out


def block(scope: Scope, layer: LayerSpec) -> dict[str, Tensor]:
    """Run one decoder layer: Engram, attention and experts, each written back to the streams.

    Returns:
        streams, pre; indices and candidates where the layer makes them.
    """
    streams = scope["streams"]
    out: dict[str, Tensor] = {}
    if layer.has_engram:
        streams = inject(scope, streams)

    def attend(x_TD: Tensor) -> Tensor:
        result, indices, candidates = attention(scope, layer, x_TD)
        out.update({} if indices is None else {"indices": indices})
        out.update({} if candidates is None else {"candidates": candidates})
        return result

    streams, pre = sublayer(scope, "attn", streams, scope["pre"], attend)
    streams, pre = sublayer(scope, "ffn", streams, pre, lambda x: mixture_of_experts(scope, x))
    scope.tap("streams", streams)
    scope.tap("pre_mix", pre)
    return {"streams": streams, "pre": pre, **out}


def head(scope: Scope, streams_TCD: Tensor, pre_TC: Tensor) -> Tensor:
    """Fold the streams and project to the vocabulary: float32 [num_tokens, vocab]."""
    folded = hc_pre(streams_TCD, pre_TC)
    scope.tap("final_hidden", folded)
    return scope.linear("head", scope.norm("norm", folded), torch.float32)


def sample_epilogue(scope: Scope) -> dict[str, Tensor]:
    """Compute logits of the rows to sample, and sample them.

    Returns:
        logits float32 [num_rows, vocab]; sampled int32 [num_rows].
    """
    rows = scope["logit_rows"]
    logits = head(scope, select_rows(scope["streams"], rows), select_rows(scope["pre"], rows))
    return {"logits": logits, "sampled": _sample(scope, logits)}


def sample_all_epilogue(scope: Scope) -> dict[str, Tensor]:
    """Sample with every parameter a request may have.

    Returns:
        logits, sampled; logprob and rank of the sampled tokens, top_ids and top_logprobs, of the
        unfiltered distribution.
    """
    rows = scope["logit_rows"]
    logits = head(scope, select_rows(scope["streams"], rows), select_rows(scope["pre"], rows))
    return {"logits": logits, **_sample_constrained(scope, logits)}


def sample_prompt_epilogue(scope: Scope) -> dict[str, Tensor]:
    """Sample with every parameter, and report log-probabilities of every row's target.

    Returns:
        as `sample_all_epilogue`, and prompt.logprob, prompt.rank, prompt.top_ids,
        prompt.top_logprobs with one row per token.
    """
    every = head(scope, scope["streams"], scope["pre"])
    logits = select_rows(every, scope["logit_rows"])
    names = ("logprob", "rank", "top_ids", "top_logprobs")
    prompt = zip(names, top_logprobs(every, scope["targets"]), strict=True)
    return {
        "logits": logits,
        **_sample_constrained(scope, logits),
        **{f"prompt.{name}": value for name, value in prompt},
    }


def _sample(scope: Scope, logits_BV: Tensor) -> Tensor:
    names = ("temperature", "top_p", "top_k", "min_p", "seeds", "sample_positions")
    return sample_tokens(logits_BV, *(scope[name] for name in names))


def _sample_constrained(scope: Scope, logits_BV: Tensor) -> dict[str, Tensor]:
    constrained = constrain_logits(
        logits_BV, scope["token_mask"], scope["bias_ids"], scope["bias_values"]
    )
    constrained = penalize_logits(
        constrained,
        scope["cache.tokens"],
        scope["block_table"],
        scope["sample_slots"],
        scope["prompt_lengths"],
        scope["lengths"],
        scope["repetition_penalty"],
        scope["presence_penalty"],
        scope["frequency_penalty"],
    )
    sampled = _sample(scope, constrained)
    logprob, rank, top_ids, top = top_logprobs(logits_BV, sampled)
    return {
        "sampled": sampled,
        "logprob": logprob,
        "rank": rank,
        "top_ids": top_ids,
        "top_logprobs": top,
    }


def score_epilogue(scope: Scope) -> dict[str, Tensor]:
    """Compute logits of every row, and the log-probability of each row's target.

    Returns:
        logits float32 [num_tokens, vocab]; logprobs float32 [num_tokens].
    """
    logits = head(scope, scope["streams"], scope["pre"])
    return {"logits": logits, "logprobs": token_logprobs(logits, scope["targets"])}
