"""Pools: what is handed out, what comes back, and that faults are found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import PoolCorrupt, PoolExhausted, PoolLeak
from runtime.kv_cache import BlockPool, SlotPool


def test_all_but_the_reserved_block_are_handed_out_once():
    pool = BlockPool(5, 8)
    assert pool.num_usable == pool.num_free == 4
    taken = pool.allocate(3, "a") + pool.allocate(1, "b")
    assert sorted(taken) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_asking_for_too_many_takes_nothing():
    pool = BlockPool(5, 8)
    pool.allocate(2, "a")
    with pytest.raises(PoolExhausted, match=r"'b' asked for 3 blocks, 2 of 4 are free"):
        pool.allocate(3, "b")
    assert pool.num_free == 2
    assert len(pool.allocate(2, "b")) == 2


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)]
)
def test_blocks_for_rounds_up(num_tokens, num_blocks):
    assert BlockPool(9, 8).blocks_for(num_tokens) == num_blocks


def test_freeing_twice_is_found():
    pool = BlockPool(5, 8)
    blocks = pool.allocate(2, "a")
    pool.free(blocks, "a")
    with pytest.raises(PoolCorrupt, match=r"'a' frees block \d, which belongs to nobody"):
        pool.free(blocks[:1], "a")


def test_freeing_a_block_of_another_request_is_found():
    pool = BlockPool(5, 8)
    blocks = pool.allocate(1, "a")
    with pytest.raises(PoolCorrupt, match="'b' frees block 1, which belongs to request 'a'"):
        pool.free(blocks, "b")


def test_the_reserved_block_cannot_be_freed_into_circulation():
    with pytest.raises(PoolCorrupt, match="block 0"):
        BlockPool(5, 8).free([0], "a")


def test_a_leak_is_named_by_request():
    pool = BlockPool(5, 8)
    pool.check_idle()
    pool.allocate(2, "a")
    last = pool.allocate(1, "b")
    with pytest.raises(PoolLeak, match=r"3 of 4 blocks .*'a' \[1, 2\], 'b' \[3\]"):
        pool.check_idle()
    pool.free(last, "b")
    pool.free([2, 1], "a")
    pool.check_idle()


def test_slots_start_at_one_and_run_out():
    pool = SlotPool(2)
    assert [pool.allocate("a"), pool.allocate("b")] == [1, 2]
    with pytest.raises(PoolExhausted, match="slot"):
        pool.allocate("c")
    pool.free(1, "a")
    assert pool.allocate("c") == 1
    with pytest.raises(PoolLeak, match=r"'c' \[1\], 'b' \[2\]"):
        pool.check_idle()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=40))
def test_free_and_held_blocks_always_add_up(operations):
    pool = BlockPool(9, 4)
    held: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for owner, count in operations:
        if count == 0:
            pool.free(held.pop(owner), owner)
            held[owner] = []
        elif count <= pool.num_free:
            held[owner] += pool.allocate(count, owner)
        everything = [block for blocks in held.values() for block in blocks]
        assert len(set(everything)) == len(everything)
        assert 0 not in everything
        assert pool.num_free + len(everything) == pool.num_usable
    for owner, blocks in held.items():
        pool.free(blocks, owner)
    pool.check_idle()
