"""Print the table of every golden case: python -m tests.golden.report [--decode]."""

import argparse
import sys
from collections import defaultdict

import torch

from runtime.scoring import score_prompt
from tests.golden.test_text_goldens import (
    CASES,
    LIMITS,
    TAP_LIMIT,
    engine_of,
    expected_of,
    kl_of_rows,
    prompts_of,
)


def logit_rows(case, variant, is_decode):
    """Yield one table row per prompt of a case."""
    engine, expected = engine_of(case, variant), expected_of(case, variant)
    for k, ids in enumerate(prompts_of(expected)):
        wanted = expected[f"p{k}.logits"]
        got = score_prompt(engine, ids, is_decode=is_decode).logits
        difference, kl = (got - wanted).abs(), kl_of_rows(wanted, got)
        agreement = (got.argmax(-1) == wanted.argmax(-1)).float().mean()
        yield (
            f"| {case} | {variant} | p{k} | {len(ids)} | {difference.max():.1e} "
            f"| {difference.median():.1e} | {kl.mean():.1e} | {kl.max():.1e} | {agreement:.2%} |"
        )


def tap_errors(case):
    """Return tap -> (number compared, largest error; differing entries for ids and masks)."""
    engine, expected = engine_of(case, "kvquant"), expected_of(case, "kvquant")
    errors = defaultdict(list)
    for k, ids in enumerate(prompts_of(expected)):
        taps = score_prompt(engine, ids, with_taps=True).taps
        for name, wanted in expected.items():
            prefix = f"p{k}.taps."
            if name.startswith(prefix):
                tap = name.removeprefix(prefix)
                errors[f"p{k}", tap.split(".")[-1]].append(tap_error(tap, wanted, taps[tap]))
    return errors


def tap_error(name, wanted, got):
    """Return the largest error relative to the root mean square, or the number of differing ids."""
    got = got[-wanted.shape[0] :]
    if name.endswith(("moe_ids", "moe_weights")):
        wanted, got = wanted.sort(-1).values, got.sort(-1).values
    if not wanted.dtype.is_floating_point:
        return int((got.to(wanted.dtype) != wanted).sum())
    finite = wanted.isfinite()
    if not finite.any():
        return 0.0
    scale = wanted[finite].square().mean().sqrt()
    return float((got[finite] - wanted[finite]).abs().max() / scale)


def main():
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", action="store_true", help="feed one token at a time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = sys.stdout
    mode = "decode" if args.decode else "prefill"
    out.write(f"{mode}; limits (max, median, mean KL, row KL, top-1): {LIMITS}\n")
    out.write("| case | variant | prompt | L | max abs | median | mean KL | row KL | top-1 |\n")
    out.write("|---|---|---|---|---|---|---|---|---|\n")
    for case, variant in CASES:
        for row in logit_rows(case, variant, args.decode):
            out.write(row + "\n")
    if args.decode:
        return
    out.write(f"\ntaps, kvquant; limit {TAP_LIMIT} of the rms, ids and masks: differing entries\n")
    for case in ("text-fp32", "text-quant"):
        errors = tap_errors(case)
        for tap in sorted({tap for _, tap in errors}):
            cells = [f"{k} {max(v):.1e}" for (k, name), v in errors.items() if name == tap]
            out.write(f"{case} {tap}: {', '.join(cells)}\n")


if __name__ == "__main__":
    main()
