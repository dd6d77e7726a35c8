"""Who holds which key/value block and which state slot.

Only numbers are kept here; the tensors belong to the executor. Index 0 of both pools is reserved
for padded rows and is never handed out. Which index a request gets is deterministic, and no result
may depend on it.
"""

from collections.abc import Iterable

from runtime.errors import PoolCorrupt, PoolExhausted, PoolLeak


class _Pool:
    """Hand out the integers 1 .. total-1 and remember who holds them."""

    unit = ""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(
            range(total - 1, 0, -1)
        )  # a stack: the lowest index first, then the warmest
        self._holders: dict[int, str] = {}

    @property
    def num_usable(self) -> int:
        """How many there are without the reserved one."""
        return self.total - 1

    @property
    def num_free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def _take(self, count: int, owner: str) -> list[int]:
        if count > len(self._free):
            raise PoolExhausted(
                owner=owner,
                count=count,
                unit=self.unit,
                free=len(self._free),
                total=self.num_usable,
            )
        taken = [self._free.pop() for _ in range(count)]
        for index in taken:
            self._holders[index] = owner
        return taken

    def _give_back(self, indices: Iterable[int], owner: str) -> None:
        for index in indices:
            holder = self._holders.get(index)
            if holder != owner:
                raise PoolCorrupt(
                    owner=owner,
                    unit=self.unit,
                    index=index,
                    holder="nobody" if holder is None else f"request '{holder}'",
                )
            del self._holders[index]
            self._free.append(index)

    def check_idle(self) -> None:
        """Check that nothing is held.

        Raises:
            PoolLeak: something is; the message lists it by request.
        """
        if not self._holders and len(self._free) == self.num_usable:
            return
        held: dict[str, list[int]] = {}
        for index, owner in sorted(self._holders.items()):
            held.setdefault(owner, []).append(index)
        raise PoolLeak(
            num_held=len(self._holders),
            total=self.num_usable,
            unit=self.unit,
            free=len(self._free),
            held=", ".join(f"'{owner}' {indices}" for owner, indices in held.items())
            or "none known",
        )


class BlockPool(_Pool):
    """The key/value blocks.

    Args:
        num_blocks: blocks in all, the reserved block 0 included.
        block_size: tokens of one block.
    """

    unit = "block"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold the first `num_tokens` tokens of a request."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int, owner: str) -> list[int]:
        """Hand out `count` blocks to a request.

        Raises:
            PoolExhausted: fewer are free; nothing was handed out.
        """
        return self._take(count, owner)

    def free(self, block_ids: Iterable[int], owner: str) -> None:
        """Take blocks back.

        Raises:
            PoolCorrupt: a block is not held by `owner`.
        """
        self._give_back(block_ids, owner)


class SlotPool(_Pool):
    """The per-request state slots, numbered 1 .. max_num_seqs.

    Args:
        max_num_seqs: requests that may run at the same time.
    """

    unit = "slot"

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs + 1)

    def allocate(self, owner: str) -> int:
        """Hand out one slot to a request.

        Raises:
            PoolExhausted: none is free.
        """
        return self._take(1, owner)[0]

    def free(self, slot: int, owner: str) -> None:
        """Take a slot back.

        Raises:
            PoolCorrupt: the slot is not held by `owner`.
        """
        self._give_back((slot,), owner)
