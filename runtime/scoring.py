"""Teacher-forced evaluation: logits, log-probabilities and taps of given tokens, from the engine's
own units."""

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from graphs.bucket import BucketKey, Variant
from model.config import TextConfig
from runtime.config import SamplingParams
from runtime.engine import Engine
from runtime.errors import NonFiniteLogits, RequestNeverFits
from runtime.launch import pack_tokens, publish_blocks
from runtime.request import Chunk, Request
from runtime.sampler import pack_targets

_SLOT = 1  # prompts are scored one after the other in the first request slot
_RESULT = re.compile(r"value\.(?P<label>.+?)\.tap\.(?P<tap>.+)")


@dataclass(frozen=True, slots=True)
class Score:
    """What scoring one prompt gives.

    Args:
        logprobs: float32 [num_tokens - 1]; of each token after the first, given those before it.
        logits: float32 [num_tokens, vocab].
        taps: intermediate values by the names of tests/golden/README.md; empty unless asked for.
    """

    logprobs: Tensor
    logits: Tensor
    taps: dict[str, Tensor]


def score_prompt(
    engine: Engine,
    token_ids: list[int],
    *,
    chunk_sizes: list[int] | None = None,
    is_decode: bool = False,
    with_taps: bool = False,
) -> Score:
    """Score one prompt.

    Args:
        engine: idle; its state slot 1 and blocks are used.
        token_ids: checked by `check_prompt`.
        chunk_sizes: lengths of the pieces it is fed in; None = as long as a step allows.
        is_decode: feed one token at a time.
        with_taps: also return intermediate values.
    """
    config = engine.plan.config
    limit = config.max_num_batched_tokens
    assert limit is not None
    sizes = chunk_sizes or _even_sizes(len(token_ids), 1 if is_decode else limit)
    request = Request("score", token_ids, SamplingParams(), 0)
    request.slot = _SLOT
    request.block_ids = engine.blocks.allocate(
        engine.blocks.blocks_for(len(token_ids)), request.request_id
    )
    rows: dict[str, list[Tensor]] = defaultdict(list)
    start = 0
    try:
        for size in sizes:
            chunk = Chunk(request, start, size, False)
            for name, value in _score_chunk(engine, chunk, with_taps).items():
                rows[name].append(value)
            start += size
    finally:
        engine.blocks.free(request.block_ids, request.request_id)
    whole = {name: torch.cat(parts) for name, parts in rows.items()}
    finite = whole["value.epilogue.logits"].isfinite().all(-1)
    if not finite.all():
        position = int(finite.logical_not().nonzero()[0])
        raise NonFiniteLogits(request_id="score", position=position)
    taps = _named_taps(whole, engine.plan.model.text_config, len(token_ids)) if with_taps else {}
    return Score(
        whole["value.epilogue.logprobs"][:-1].clone(), whole["value.epilogue.logits"], taps
    )


def check_blocks(engine: Engine, request_id: str, num_tokens: int) -> None:
    """Check that the pool can hold a prompt.

    Raises:
        RequestNeverFits: it has too few blocks.
    """
    needed, usable = engine.blocks.blocks_for(num_tokens), engine.blocks.num_usable
    if needed > usable:
        raise RequestNeverFits(
            request_id=request_id,
            num_prompt_tokens=num_tokens,
            max_tokens=0,
            needed=needed,
            block_size=engine.blocks.block_size,
            usable=usable,
            kv_blocks=needed + 1,
        )


def _even_sizes(total: int, limit: int) -> list[int]:
    return [limit] * (total // limit) + ([total % limit] if total % limit else [])


def _score_chunk(engine: Engine, chunk: Chunk, with_taps: bool) -> dict[str, Tensor]:
    variant = Variant.TAPS if with_taps else Variant.SCORE
    bucket: BucketKey = engine.policy.select(chunk.length, 0, False, variant)
    captured = engine.executor.step(bucket)
    pack_tokens(captured.inputs, [chunk])
    pack_targets(captured.inputs, [chunk])
    publish_blocks(engine.executor.block_table, [chunk])
    engine.executor.replay(captured)
    return {name: value[: chunk.length].clone() for name, value in captured.results.items()}


def _named_taps(rows: dict[str, Tensor], config: TextConfig, length: int) -> dict[str, Tensor]:
    """Give taps their golden names and forms: per entry where the golden data is per entry."""
    taps = {}
    for name, value in rows.items():
        match = _RESULT.fullmatch(name)
        if match is None:
            continue
        label, tap = match["label"], match["tap"]
        if not label.startswith("layers."):
            taps[tap] = value.int() if tap == "engram_rows" else value
            continue
        ratio = config.layer_ratio(int(label.removeprefix("layers.")))
        shaped = _layer_tap(tap, value, config, ratio, length)
        taps[f"{label}.{'candidate_mask' if tap == 'candidate_blocks' else tap}"] = shaped
    return taps


def _layer_tap(tap: str, value: Tensor, config: TextConfig, ratio: int, length: int) -> Tensor:
    groups = length // ratio if ratio else 0
    if tap in ("compressed_kv", "index_k"):
        return value[ratio - 1 :: ratio].contiguous()  # rows of the tokens that end a group
    if tap == "index_scores":
        return value[:, :groups].contiguous()
    if tap == "topk_indices":
        return value[:, : min(config.index_topk, groups)].contiguous()
    if tap == "candidate_blocks":
        size = config.candidate_block_size
        entries = value.long().unsqueeze(-1) * size + torch.arange(size)
        inside = (value >= 0).unsqueeze(-1) & (entries < groups)
        mask = torch.zeros(length, groups + 1, dtype=torch.uint8)
        mask.scatter_(1, torch.where(inside, entries, groups).flatten(1), 1)
        return mask[:, :groups].contiguous()
    return value
