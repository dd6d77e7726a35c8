"""Every op: its shape function tells the truth, it repeats bit for bit, and it writes only what it
declares."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import graphs.ops  # noqa: F401 - registers the ops
from graphs.op import OPS

SEEDS = range(6)


def _clone(args):
    return pytree.tree_map_only(torch.Tensor, torch.clone, args)


@pytest.mark.parametrize("name", sorted(OPS))
def test_op_contract(name):
    op = OPS[name]
    arguments = op.overload._schema.arguments
    for seed in SEEDS:
        given = op.samples(seed)
        first, second = _clone(given), _clone(given)
        out = op(*first)
        again = op(*second)
        tensors = [t for t in pytree.tree_leaves(out) if t is not None]
        repeated = [t for t in pytree.tree_leaves(again) if t is not None]
        for a, b in zip(tensors, repeated, strict=True):
            assert torch.equal(a, b), "two calls differ"
        for argument, before, after in zip(arguments, given, first, strict=False):
            if isinstance(before, torch.Tensor):
                changed = not torch.equal(before, after)
                assert changed == (argument.name in op.mutates), (
                    f"{argument.name} written: {changed}"
                )
                for t in tensors:
                    assert t.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()
        for t in tensors:  # -inf stands for what is not there, where an op says so
            assert not t.isnan().any()
            assert t.isfinite().all() or name in ("index_scores", "constrain_logits")


@pytest.mark.parametrize("name", sorted(OPS))
def test_shape_function_matches_body(name):
    op = OPS[name]
    for seed in SEEDS:
        given = op.samples(seed)
        out = op(*_clone(given))
        mode = FakeTensorMode()
        fake = op(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
        for real, shape in zip(pytree.tree_leaves(out), pytree.tree_leaves(fake), strict=True):
            if real is None:
                continue
            assert (real.shape, real.dtype, real.stride()) == (
                shape.shape,
                shape.dtype,
                shape.stride(),
            )
