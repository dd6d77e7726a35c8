"""Engines over test checkpoints, and what tests read out of them."""

from collections import defaultdict
from pathlib import Path

import torch

from runtime.config import EngineConfig, SamplingParams
from runtime.engine import Engine, plan_engine, step
from runtime.metrics import Metrics
from runtime.request import Request
from tests.helpers.goldens import golden_dir

VARIANTS = {
    "noquant": {"cache_quant": False, "act_quant": False},
    "kvquant": {"cache_quant": True, "act_quant": False},
    "actquant": {"cache_quant": True, "act_quant": True},
}


def make_engine(model: str | Path, **settings) -> Engine:
    """Load an engine; a name without a slash is a golden case."""
    directory = golden_dir(model) if isinstance(model, str) and "/" not in model else model
    defaults = {"max_num_seqs": 4, "max_model_len": 256, "block_size": 16, "num_threads": 1}
    config = EngineConfig(model=str(directory), **(defaults | settings))
    return Engine(plan_engine(config), Metrics())


def run_requests(engine: Engine, prompts: list[list[int]], params: SamplingParams):
    """Run prompts to their end together.

    Returns:
        per prompt: output token ids, and the logits [num_outputs, vocab] they were sampled from.
    """
    requests = [Request(str(i), ids, params, seed=1000 + i) for i, ids in enumerate(prompts)]
    logits: dict[str, list[torch.Tensor]] = defaultdict(list)
    last_step = []
    replay, retire = engine.executor.replay, engine.scheduler.retire

    def watched_replay(captured):
        last_step[:] = [captured]
        replay(captured)

    def watched_retire(plan, sampled):
        rows = last_step[0].results["value.epilogue.logits"]
        for row, request in enumerate(plan.sampled_requests):
            logits[request.request_id].append(rows[row].clone())
        return retire(plan, sampled)

    engine.executor.replay, engine.scheduler.retire = watched_replay, watched_retire
    try:
        for request in requests:
            engine.scheduler.add(request)
        while engine.scheduler.has_work:
            step(engine)
    finally:
        engine.executor.replay, engine.scheduler.retire = replay, retire
    engine.blocks.check_idle()
    engine.slots.check_idle()
    return [(r.output_token_ids, torch.stack(logits[r.request_id])) for r in requests]
