"""Which blocks of the cache are free, and which hold tokens that may be used again.

A block has as many references as requests (or offers) that use it. With the prefix cache on, a
full block is published under a digest of all tokens up to its end; when its last reference goes it
stays findable until the space is needed, least recently used first. Not here: the cache itself.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockManager:
    """Hands out the block ids `0 .. num_blocks - 1`."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._published: dict[bytes, int] = {}  # digest -> block
        self._digests: dict[int, bytes] = {}  # the reverse

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None when there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            digest = self._digests.pop(block, None)
            if digest is not None:
                del self._published[digest]
            self._references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives one reference back for each block."""
        # The end of a prompt first: without its beginning it could not be found again.
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if not self._references[block]:
                self._free[block] = None
                if block not in self._digests:
                    self._free.move_to_end(block, last=False)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that already hold the beginning of `tokens`, each with a new reference."""
        found: list[int] = []
        if not self._prefix_cache:
            return found
        for digest in self._chain(tokens):
            block = self._published.get(digest)
            if block is None:
                break
            self._references[block] += 1
            self._free.pop(block, None)
            found.append(block)
        return found

    def publish(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Makes findable the full blocks of `tokens`, whose keys and values are all computed."""
        if not self._prefix_cache:
            return
        for digest, block in zip(self._chain(tokens), blocks, strict=False):
            if digest not in self._published and block not in self._digests:
                self._published[digest] = block
                self._digests[block] = digest

    def _chain(self, tokens: Sequence[int]) -> list[bytes]:
        """A digest for each full block, of all tokens from the first to its last."""
        digests, before = [], b""
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            own = array("q", tokens[end - self.block_size : end]).tobytes()
            before = hashlib.blake2b(before + own, digest_size=16).digest()
            digests.append(before)
        return digests
