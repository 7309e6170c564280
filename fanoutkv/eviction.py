"""Which prefix goes first, and what the choice is worth (chapter 06).

A strategy is a function of a `TreeNode`: of all leaves without a lock, the one with the lowest
value goes first. `simulate` replays requests through a tree, `optimal_hits` is the limit.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from fanoutkv.blocks import BadArgumentError, BlockPool, is_whole
from fanoutkv.radix import LRUStrategy, RadixCache, RadixKey, Strategy, TreeLock, TreeNode


class MRUStrategy:
    """Most recently used first.

    SGLang 0.5.23: `sglang/srt/mem_cache/evict_policy.py`, as all strategies here but one.
    """

    def __call__(self, node: TreeNode) -> int:
        """Return the time of the last use, the latest lowest."""
        return -node.last_access_time


class FIFOStrategy:
    """Oldest first, used or not."""

    def __call__(self, node: TreeNode) -> int:
        """Return the time at which the tokens were inserted."""
        return node.creation_time


class FILOStrategy:
    """Youngest first."""

    def __call__(self, node: TreeNode) -> int:
        """Return the time of insertion, the latest lowest."""
        return -node.creation_time


class LFUStrategy:
    """Least often used first; of these, least recently used first."""

    def __call__(self, node: TreeNode) -> tuple[int, int]:
        """Return how many matches used the node, and when the last did."""
        return node.hit_count, node.last_access_time


@dataclass(frozen=True)
class SLRUStrategy:
    """Segmented LRU: what was never asked for again goes before all that was.

    Args:
        protected_threshold: matches from which on a node is protected. SGLang's default, 2, counts
            the insertion as well, so it is our 1.

    Source: Karedla, Love and Wherry, IEEE Computer 27(3), 1994.
    """

    protected_threshold: int = 1

    def __call__(self, node: TreeNode) -> tuple[bool, int]:
        """Return the segment, and the time of the last use."""
        return node.hit_count >= self.protected_threshold, node.last_access_time


class PriorityStrategy:
    """Lowest priority first; of these, least recently used first.

    What nobody asks for any more stays for ever, if its priority is high; see
    `AgingPriorityStrategy`.
    """

    def __call__(self, node: TreeNode) -> tuple[int, int]:
        """Return the priority, and the time of the last use."""
        return node.priority, node.last_access_time


@dataclass(frozen=True)
class AgingPriorityStrategy:
    """Priority as a head start: one level is worth so many ticks of recency, and no more.

    The value of a node never changes while it waits, and yet everything new overtakes it in time.

    Args:
        ticks: matches and insertions by which a level delays eviction.
    """

    ticks: int

    def __call__(self, node: TreeNode) -> int:
        """Return the time of the last use, plus the head start."""
        return node.last_access_time + self.ticks * node.priority


@dataclass(frozen=True)
class TLRUStrategy:
    """Tail-optimized LRU: first what a conversation can lose without missing its time limit.

    A prompt of L tokens of history and Q new ones meets its limit if no more than `threshold` of
    them must be computed. So L + Q - threshold cached tokens are enough, and those behind are
    free to go, before all others.

    Args:
        threshold: tokens that can be computed within the limit.
        next_prompt_estimate: tokens that the next prompt is expected to add, Q.

    Source: Zhang, Li, Moallemi and Peng, arXiv 2510.15152; SGLang 0.5.23, `TLRUStrategy`.
    """

    threshold: int
    next_prompt_estimate: int = 0

    def __call__(self, node: TreeNode) -> tuple[bool, int]:
        """Return whether the node is needed for the limit, and the time of its last use."""
        enough = node.history_len + self.next_prompt_estimate - self.threshold
        return node.depth - len(node.value) < enough, node.last_access_time


@dataclass
class Simulation:
    """What a replay has seen, in blocks; the lists hold a value for each request."""

    queries: int = 0
    hits: int = 0
    waits: int = 0
    missed: list[int] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)
    evictable: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Hits per query."""
        return self.hits / self.queries if self.queries else 0.0


def simulate(
    requests: Iterable[ArrayLike],
    capacity: int,
    strategy: Strategy | None = None,
    *,
    concurrency: int = 1,
) -> Simulation:
    """Replay requests through a `RadixCache` whose tokens are whole blocks.

    Args:
        requests: for each, the ids of its blocks, chained: an id stands for its whole prefix.
        capacity: blocks in memory.
        strategy: who is evicted first; LRU if None.
        concurrency: requests that run, and hold their locks, at the same time. Where the next does
            not fit, the oldest finish earlier, and that is counted in `waits`.

    Returns:
        the counts. A request of more than `capacity` blocks is computed outside, without a hit.

    Raises:
        BadArgumentError: a capacity or concurrency below 1.
    """
    if not (is_whole(capacity) and is_whole(concurrency) and min(capacity, concurrency) > 0):
        raise BadArgumentError(
            f"capacity and concurrency are 1 or more, not {capacity!r} and {concurrency!r}"
        )
    pool = BlockPool(capacity + 1, enable_caching=False)
    cache = RadixCache(free=pool.free_blocks, strategy=strategy)
    running: deque[TreeLock] = deque()
    seen = Simulation()
    for blocks in requests:
        key = RadixKey(blocks)
        seen.queries += len(key)
        if len(key) > capacity:
            seen.missed.append(len(key))
            continue
        if len(running) == concurrency:
            cache.unlock(running.popleft())
        found = cache.match_prefix(key)
        lock = cache.lock(found.node)
        new = len(key) - found.length
        # Locked first, counted then: the hit itself is not room any more.
        while new > pool.num_free_blocks + cache.evictable_size:
            cache.unlock(running.popleft())
            seen.waits += 1
        cache.evict(max(0, new - pool.num_free_blocks))
        cache.insert(key, np.concatenate([found.indices, pool.get_new_blocks(new)]))
        running.append(cache.lock(cache.match_prefix(key, count_hit=False).node))
        cache.unlock(lock)
        seen.hits += found.length
        seen.missed.append(new)
        seen.protected.append(cache.protected_size)
        seen.evictable.append(cache.evictable_size)
    return seen


def optimal_hits(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """Return how many blocks would be hits if the future were known: no strategy finds more.

    The block whose next use is farthest away goes first, and may go at once. Of the blocks of one
    request the deepest goes first, so what stays is always a set of whole prefixes.

    Args:
        requests: as for `simulate`.
        capacity: blocks in memory.

    Source: Belady, IBM Systems Journal 5(2), 1966.
    """
    never = len(requests)
    next_use: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(never - 1, -1, -1):
        next_use.append([seen.get(block, never) for block in requests[number]])
        seen.update(dict.fromkeys(requests[number], number))
    cached: dict[int, int] = {}  # a block in memory, and its next use
    farthest: list[tuple[int, int, int]] = []  # next use and depth, negative, and the block
    hits = 0
    for blocks, uses in zip(requests, reversed(next_use), strict=True):
        for depth, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            hits += block in cached
            if use == never:
                cached.pop(block, None)
                continue
            cached[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
            while len(cached) > capacity:
                use, _, gone = heapq.heappop(farthest)
                if cached.get(gone) == -use:
                    del cached[gone]
    return hits


__all__ = [
    "AgingPriorityStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "PriorityStrategy",
    "SLRUStrategy",
    "Simulation",
    "TLRUStrategy",
    "optimal_hits",
    "simulate",
]
