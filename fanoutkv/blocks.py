"""The block ledger of a paged KV cache (chapter 01).

A block is an integer. `BlockPool` keeps what is true of each block in columns: how many requests
read it, under which names a later request can find it, and, when nobody reads it, its place in the
queue of blocks to be reused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class FanoutKVError(Exception):
    """Base of every error of this package; raised before any state has changed."""


class BadArgumentError(FanoutKVError, ValueError):
    """The call could never be right: a wrong type, an id out of range, an id twice."""


class PoolExhaustedError(FanoutKVError):
    """More blocks were asked for than are free."""


class DoubleFreeError(FanoutKVError):
    """A block was given back by somebody who does not hold it."""


class StaleIndexError(FanoutKVError):
    """A block id outlived its meaning: nobody holds the block, and it has no name any more."""


class InvariantError(FanoutKVError, AssertionError):
    """A law of the ledger does not hold: the bookkeeping itself is wrong."""


def is_whole(value: object) -> bool:
    """Whether a value is an integer; True and False are none, although Python says so."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class FreeBlockQueue:
    """The blocks that nobody reads, in the order in which they will be reused.

    Blocks without a name wait on a stack: last freed, first reused, and always before any other.
    Named blocks wait in a line behind it: first freed, first evicted. A block that is hit leaves
    the line from the middle. Each place in the line is numbered; a block's ticket says which place
    is its own; to leave is to lose the ticket, and an empty place is passed over later. So a
    thousand blocks join, leave or are taken in a few array operations.

    The queue trusts its caller: `BlockPool` checks every id first.

    vLLM 0.33 links the same order through the blocks (`vllm/v1/core/kv_cache_utils.py`,
    `FreeKVCacheBlockQueue`).
    """

    def __init__(self, num_blocks: int) -> None:
        """Queue blocks 1 to num_blocks - 1, none of them named, block 1 first."""
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_stacked = num_blocks - 1
        # Twice as many places as blocks: between two tidyings at least num_blocks blocks join,
        # so the cost of tidying, spread over them, is constant.
        self._line = np.zeros(2 * num_blocks, dtype=np.int32)
        self._head = self._tail = 0
        self._num_lined = 0
        self._ticket = np.full(num_blocks, -1, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of blocks that can be handed out, in O(1)."""
        return self._num_stacked + self._num_lined

    def prepend(self, ids: NDArray[np.integer]) -> None:
        """Put blocks without a name at the front; the last of `ids` will be reused first."""
        end = self._num_stacked + len(ids)
        self._stack[self._num_stacked : end] = ids
        self._num_stacked = end

    def append(self, ids: NDArray[np.integer]) -> None:
        """Put named blocks at the back; the first of `ids` will be evicted first."""
        if self._tail + len(ids) > len(self._line):
            self._tidy()
        end = self._tail + len(ids)
        self._line[self._tail : end] = ids
        self._ticket[ids] = np.arange(self._tail, end)
        self._tail = end
        self._num_lined += len(ids)

    def remove(self, ids: NDArray[np.integer]) -> None:
        """Let named blocks leave the line, wherever they stand."""
        self._ticket[ids] = -1
        self._num_lined -= len(ids)

    def popleft(self, n: int) -> NDArray[np.int32]:
        """Take the first n blocks, int32[n] in the order of reuse; n is at most len(self)."""
        start = max(0, self._num_stacked - n)
        taken: NDArray[np.int32] = self._stack[start : self._num_stacked][::-1].copy()
        self._num_stacked = start
        while len(taken) < n:
            taken = np.concatenate([taken, self._pop_line(n - len(taken))])
        return taken

    def _pop_line(self, n: int) -> NDArray[np.int32]:
        """Take up to n blocks from the front of the line; places that were left are passed over."""
        # The window is never tiny, so that a long gap costs few steps.
        window = self._line[self._head : min(self._tail, self._head + max(n, 256))]
        places = self._head + np.arange(len(window))
        filled = np.flatnonzero(self._ticket[window] == places)[:n]
        self._head += int(filled[-1]) + 1 if len(filled) == n else len(window)
        ids: NDArray[np.int32] = window[filled]
        self.remove(ids)
        return ids

    def _tidy(self) -> None:
        """Close the gaps in the line and number it again from zero."""
        waiting = self.cached_blocks()
        self._head, self._tail = 0, len(waiting)
        self._line[: self._tail] = waiting
        self._ticket[waiting] = np.arange(self._tail)

    def uncached_blocks(self) -> NDArray[np.int32]:
        """Return the blocks without a name, int32, next to be reused first."""
        return self._stack[: self._num_stacked][::-1].copy()

    def cached_blocks(self) -> NDArray[np.int32]:
        """Return the named blocks, int32, next to be evicted first."""
        places = np.arange(self._head, self._tail)
        ids: NDArray[np.int32] = self._line[places]
        waiting: NDArray[np.int32] = ids[self._ticket[ids] == places]
        return waiting


@dataclass(frozen=True)
class BlockStored:
    """A name became findable; fields as in vLLM 0.33 (`vllm/distributed/kv_events.py`)."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    lora_id: int | None = None
    medium: str | None = "GPU"


@dataclass(frozen=True)
class BlockRemoved:
    """A name can no longer be found; fields as in vLLM 0.33."""

    block_hashes: list[bytes]
    medium: str | None = "GPU"


@dataclass(frozen=True)
class AllBlocksCleared:
    """No name can be found any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class CacheStats:
    """Counts since the last reset, all in blocks."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Return hits per query, 0.0 before the first query."""
        return self.hits / self.queries if self.queries else 0.0


class BlockPool:
    """The ledger of `num_blocks` KV blocks: who reads them, how they are found, what is reused.

    Block 0 is the null block: it stands in a table where no memory is needed, belongs to nobody
    and is never handed out, so `num_blocks - 1` blocks can be used.

    Args:
        num_blocks: blocks in the pool, the null block among them; at least 2.
        enable_caching: if false, nothing is ever published and every freed block is uncached.
        enable_kv_cache_events: if true, changes of the names are kept for `take_events`.

    Attributes:
        ref_cnt: int32[num_blocks], the readers of each block. Read it; change it by the methods.
        block_hash: object[num_blocks], the full key of each block (bytes), or None.
        free_queue: the blocks whose `ref_cnt` is 0, the null block excepted.
        stats: queries and hits of `find_longest_cache_hit`, and evictions.

    Raises:
        BadArgumentError: fewer than two blocks.

    vLLM 0.33: `vllm/v1/core/block_pool.py`, `BlockPool`.
    """

    null_block = 0

    def __init__(
        self, num_blocks: int, *, enable_caching: bool = True, enable_kv_cache_events: bool = False
    ) -> None:
        """Create a pool in which every block but the null block is free and nameless."""
        if not is_whole(num_blocks) or num_blocks < 2:
            raise BadArgumentError(
                f"a pool of {num_blocks!r} blocks cannot serve anybody: block 0 is the null block, "
                "so ask for at least 2"
            )
        # An int of NumPy's small types would overflow where sizes are computed from it.
        self.num_blocks = num_blocks = int(num_blocks)
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.ref_cnt = np.zeros(num_blocks, dtype=np.int32)
        self.free_queue = FreeBlockQueue(num_blocks)
        self.block_hash = np.full(num_blocks, None, dtype=np.object_)
        self.stats = CacheStats()
        self._is_cached = np.zeros(num_blocks, dtype=np.bool_)
        self._partial_keys: dict[int, dict[bytes, int]] = {}
        self._block_of: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}
        self._events: list[KVCacheEvent] = []
        self._positions = np.arange(num_blocks, dtype=np.int32)
        self._mark = np.zeros(num_blocks, dtype=np.int32)
        self._last_checked = (b"", np.zeros(0, dtype=np.intp))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `get_new_blocks` can hand out now: uncached ones and eviction candidates."""
        return len(self.free_queue)

    @property
    def usage(self) -> float:
        """The share of the pool that somebody reads, 0.0 to 1.0; the null block is left out."""
        return 1.0 - self.num_free_blocks / (self.num_blocks - 1)

    def _checked(self, block_ids: ArrayLike) -> NDArray[np.intp]:
        """Return distinct, existing ids as an index array, or raise `BadArgumentError`."""
        try:
            ids = np.asarray(block_ids)
        except ValueError as ragged:
            raise BadArgumentError(f"block ids must be a flat list: {ragged}") from ragged
        if ids.dtype != np.int32:
            ids = self._as_int32(ids)
        # A fan-out passes the same list again and again; what is true of a list of ids does not
        # depend on the state of the pool, so the last answer is kept.
        raw = ids.tobytes()
        if raw == self._last_checked[0] and ids.ndim == 1:
            return self._last_checked[1]
        if ids.ndim != 1:
            raise BadArgumentError(f"block ids must be a flat list, not of shape {ids.shape}")
        # As uint32 a negative id is a huge one, so one check by NumPy covers both ends.
        index = ids.view(np.uint32).astype(np.intp)
        positions = self._positions[: len(index)]
        try:
            self._mark[index] = positions
            distinct = self._mark[index].tobytes() == positions.tobytes()
        except (IndexError, ValueError):
            distinct = False
        if not distinct:
            raise self._explain(ids)
        self._last_checked = (raw, index)
        return index

    def _as_int32(self, ids: NDArray[Any]) -> NDArray[np.int32]:
        """Convert ids of any integer dtype without wrapping, or raise `BadArgumentError`."""
        if ids.size and ids.dtype.kind not in "iu":
            raise BadArgumentError(f"block ids must be integers, not {ids.dtype}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_blocks):
            raise self._explain(ids)
        return ids.astype(np.int32)

    def _explain(self, ids: NDArray[np.integer]) -> BadArgumentError:
        """Say in a sentence what is wrong with a list of ids: out of range, or one twice."""
        outside = ids[(ids < 0) | (ids >= self.num_blocks)]
        if outside.size:
            return BadArgumentError(
                f"block {outside.flat[0]} does not exist: this pool has blocks 0 to "
                f"{self.num_blocks - 1}"
            )
        values, times = np.unique(ids, return_counts=True)
        return BadArgumentError(
            f"block {values[times > 1][0]} stands in the list more than once: one call speaks "
            "for one reader, who holds a block once"
        )

    def get_new_blocks(self, num_blocks: int) -> NDArray[np.int32]:
        """Hand out the first blocks of the free queue, each with one reader.

        What they held is gone for good: their names are taken from the cache first.

        Args:
            num_blocks: how many; 0 or more.

        Returns:
            int32[num_blocks], the block ids in the order of the queue.

        Raises:
            PoolExhaustedError: fewer blocks are free; nothing has changed.
            BadArgumentError: num_blocks is negative.

        vLLM 0.33: `BlockPool.get_new_blocks`.
        """
        if not is_whole(num_blocks) or num_blocks < 0:
            raise BadArgumentError(
                f"cannot hand out {num_blocks!r} blocks: ask for a whole number, 0 or more"
            )
        if num_blocks > self.num_free_blocks:
            raise PoolExhaustedError(
                f"{num_blocks} blocks were asked for and {self.num_free_blocks} are free: free or "
                "preempt a request, then try again"
            )
        ids = self.free_queue.popleft(num_blocks)
        evicted = ids[self._is_cached[ids]]
        if evicted.size:
            self._evict(evicted)
        self.ref_cnt[ids] = 1
        return ids

    def free_blocks(self, block_ids: ArrayLike) -> None:
        """Take one reader from each block; who has none left joins the free queue.

        A published block goes to the back, in the order given: first freed, first evicted. The
        caller therefore names the tail of a sequence first. An unpublished block goes to the
        front: last freed, first reused.

        Args:
            block_ids: distinct blocks that the caller holds.

        Raises:
            DoubleFreeError: a block has no reader; nothing has changed.
            BadArgumentError: an id is not an integer, does not exist, or stands there twice.

        vLLM 0.33: `BlockPool.free_blocks`.
        """
        index = self._checked(block_ids)
        counts = self.ref_cnt.take(index)
        if np.count_nonzero(counts) < len(counts):
            raise DoubleFreeError(
                f"block {index[counts == 0][0]} cannot be freed: nobody holds it (the null block "
                "never counts as held); some request gave it back twice"
            )
        counts -= 1
        self.ref_cnt[index] = counts
        if np.count_nonzero(counts) < len(counts):
            self._join_queue(index[counts == 0])

    def _join_queue(self, idle: NDArray[np.intp]) -> None:
        """Queue blocks that have just lost their last reader, at the end that suits them."""
        cached = self._is_cached[idle]
        if np.count_nonzero(cached) == len(idle):
            self.free_queue.append(idle)
        else:
            self.free_queue.prepend(idle[~cached])
            self.free_queue.append(idle[cached])

    def cache_full_blocks(
        self,
        block_ids: ArrayLike,
        block_hashes: Sequence[bytes],
        *,
        parent_block_hash: bytes | None = None,
        token_ids: Sequence[int] | NDArray[np.integer] = (),
        lora_name: str | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    ) -> None:
        """Publish full blocks: from now on others find them by these hashes, and none may write.

        Args:
            block_ids: consecutive blocks of one request, held, and without a full key so far.
            block_hashes: their chained hashes, one a block.
            parent_block_hash: the hash of the block before the first, None at the start.
            token_ids: the tokens of all these blocks; needed only when events are enabled.
            lora_name: the adapter, for the event.
            extra_keys: what else went into each hash, for the event.

        Raises:
            BadArgumentError: lengths differ, a hash is not bytes, a block is held by nobody or
                has a full key already; nothing has changed.

        vLLM 0.33: `BlockPool.cache_full_blocks`.
        """
        index = self._checked(block_ids)
        ids = index.tolist()
        self._check_publishable(index, block_hashes)
        if any(key is not None for key in self.block_hash[index[self._is_cached[index]]]):
            raise BadArgumentError(
                "a block already has a full key, and what is published does not change: "
                f"publish only the new ones of {ids}"
            )
        if self._partial_keys and any(
            key in self._partial_keys.get(i, ()) for i, key in zip(ids, block_hashes, strict=True)
        ):
            raise BadArgumentError(
                "a block has this key as a partial key already: a prefix that ends inside a block "
                "and one that ends with it cannot have one name"
            )
        if not self.enable_caching or not ids:
            return
        if self.enable_kv_cache_events and (not len(token_ids) or len(token_ids) % len(ids)):
            raise BadArgumentError(
                f"events are enabled, so {len(ids)} full blocks need their token ids, as many for "
                f"each; {len(token_ids)} were given"
            )
        if extra_keys is not None and len(extra_keys) != len(ids):
            raise BadArgumentError(f"{len(ids)} blocks, and extra keys for {len(extra_keys)}")
        self.block_hash[index] = np.array(block_hashes, dtype=np.object_)
        new = self._insert_keys(block_hashes, ids)
        self._is_cached[index] = True
        if self.enable_kv_cache_events:
            tokens = np.asarray(token_ids).tolist()
            self._emit_stored(block_hashes, new, parent_block_hash, tokens, lora_name, extra_keys)

    def _check_publishable(self, index: NDArray[np.intp], block_hashes: Sequence[bytes]) -> None:
        """Raise `BadArgumentError` unless there is a hash a block and every block is held."""
        if len(index) != len(block_hashes):
            raise BadArgumentError(
                f"{len(index)} blocks were given with {len(block_hashes)} hashes: each needs one"
            )
        if not set(map(type, block_hashes)) <= {bytes}:
            raise BadArgumentError("a block hash must be bytes, as hash_block_tokens returns it")
        counts = self.ref_cnt.take(index)
        if np.count_nonzero(counts) < len(counts):
            raise BadArgumentError(
                f"block {index[counts == 0][0]} cannot be published: nobody holds it, so nobody "
                "can vouch for what is in it"
            )

    def _insert_keys(self, keys: Sequence[bytes], ids: list[int]) -> list[bool]:
        """Make blocks findable under keys; return for each whether nobody had that key before."""
        first = list(map(self._block_of.setdefault, keys, ids))
        if first == ids:
            return [True] * len(first)
        new = [holder == block_id for holder, block_id in zip(first, ids, strict=True)]
        for key, block_id, is_new in zip(keys, ids, new, strict=True):
            if not is_new:
                self._duplicates.setdefault(key, []).append(block_id)
        return new

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """Return a block that holds what the hash names, or None. Touch it before anything else.

        Of several blocks with the same content the one published first is returned.

        vLLM 0.33: `BlockPool.get_cached_block`.
        """
        return self._block_of.get(block_hash)

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes]) -> NDArray[np.int32]:
        """Return the blocks of the longest prefix of `block_hashes` that is in the cache.

        Args:
            block_hashes: chained hashes of a request's full blocks, from the first token on.

        Returns:
            int32[k], k <= len(block_hashes). Nothing is touched yet.

        vLLM 0.33: `vllm/v1/core/single_type_kv_cache_manager.py`,
        `FullAttentionManager.find_longest_cache_hit`.
        """
        hits: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        self.stats.queries += len(block_hashes)
        self.stats.hits += len(hits)
        return np.array(hits, dtype=np.int32)

    def _evict(self, ids: NDArray[np.integer]) -> None:
        """Take all names from published blocks, count it and tell who listens."""
        gone = self._remove_keys(ids)
        self.stats.evictions += len(ids)
        if self.enable_kv_cache_events:
            self._events += [BlockRemoved([key]) for key in gone]

    def _remove_keys(self, ids: NDArray[np.integer]) -> list[bytes]:
        """Take all names from published blocks; return those that nobody can find any more.

        The memory of the blocks is not this method's business.
        """
        self._is_cached[ids] = False
        owners = ids.tolist()
        carried: list[bytes | None] = self.block_hash[ids].tolist()
        self.block_hash[ids] = None
        if self._partial_keys:
            for block_id in ids.tolist():
                for key in self._partial_keys.pop(block_id, ()):
                    owners.append(block_id)
                    carried.append(key)
        if self._duplicates:
            pairs = zip(carried, owners, strict=True)
            return [key for key, i in pairs if key is not None and self._forget(key, i)]
        keys = [key for key in carried if key is not None]
        for key in keys:
            del self._block_of[key]
        return keys

    def _forget(self, key: bytes, block_id: int) -> bool:
        """Take one block from a key; return whether no block is left under it.

        If the block was the first of several, the one that was published next takes its place.
        """
        others = self._duplicates.get(key)
        if others is None:
            del self._block_of[key]
            return True
        if self._block_of[key] == block_id:
            self._block_of[key] = others.pop(0)
        else:
            others.remove(block_id)
        if not others:
            del self._duplicates[key]
        return False

    def touch(self, block_ids: ArrayLike) -> None:
        """Add one reader to each block; a block that nobody read leaves the free queue first.

        Args:
            block_ids: distinct blocks, each held by somebody or published.

        Raises:
            StaleIndexError: a block is neither held nor published; nothing has changed.
            BadArgumentError: an id is not an integer, does not exist, or stands there twice.

        vLLM 0.33: `BlockPool.touch`, which skips the null block; here it is refused.
        """
        index = self._checked(block_ids)
        counts = self.ref_cnt.take(index)
        if np.count_nonzero(counts) < len(counts):
            self._leave_queue(index[counts == 0])
        counts += 1
        self.ref_cnt[index] = counts

    def _leave_queue(self, idle: NDArray[np.intp]) -> None:
        """Take blocks that nobody reads out of the free queue; each must be published."""
        nameless = idle[~self._is_cached[idle]]
        if self.null_block in nameless:
            raise StaleIndexError(
                f"block {self.null_block} cannot be touched: it is the null block, which nobody "
                "reads; leave it out"
            )
        if nameless.size:
            raise StaleIndexError(
                f"block {nameless[0]} cannot be touched: nobody holds it and it has no name, so "
                "what it held is gone; look its hash up again"
            )
        self.free_queue.remove(idle)

    def is_block_writable(self, block_id: int) -> bool:
        """Return whether a holder may write into the block: it is the only one, and it has no name.

        Raises:
            BadArgumentError: there is no such block.

        vLLM 0.33: `BlockPool.is_block_writable`.
        """
        if not is_whole(block_id):
            raise BadArgumentError(f"a block id is an integer, not {block_id!r}")
        if not 0 <= block_id < self.num_blocks:
            raise self._explain(np.array([block_id]))
        return bool(self.ref_cnt[block_id] == 1 and not self._is_cached[block_id])

    def cache_partial_block(
        self,
        block_id: int,
        block_hash: bytes,
        num_tokens: int,
        *,
        parent_block_hash: bytes | None = None,
        token_ids: Sequence[int] | NDArray[np.integer] = (),
        lora_name: str | None = None,
    ) -> None:
        """Make the first tokens of a block findable under a key of their own; nothing is copied.

        A block may have any number of such keys beside its full key. Like any published block it
        can no longer be written. A key that the block already has is left as it is.

        Args:
            block_id: a block that somebody holds.
            block_hash: the chained hash of the prefix that ends inside this block.
            num_tokens: how many tokens of this block that prefix covers; 1 or more.
            parent_block_hash: for the event: the hash of the prefix before `token_ids`.
            token_ids: for the event: the tokens that this key adds to its parent; needed only when
                events are enabled.
            lora_name: the adapter, for the event.

        Raises:
            BadArgumentError: no such block, held by nobody, a hash that is not bytes, or
                num_tokens below 1; nothing has changed.

        vLLM 0.33: `BlockPool.cache_partial_block`.
        """
        index = self._checked([block_id])
        block_id = int(index[0])
        self._check_publishable(index, [block_hash])
        if not is_whole(num_tokens) or num_tokens < 1:
            raise BadArgumentError(f"a partial key covers 1 token or more, not {num_tokens!r}")
        keys = self._partial_keys.get(block_id, {})
        if not self.enable_caching or block_hash in keys or block_hash == self.block_hash[block_id]:
            return
        if self.enable_kv_cache_events and not len(token_ids):
            raise BadArgumentError("events are enabled, so a partial key needs its token ids")
        self._partial_keys.setdefault(block_id, {})[block_hash] = int(num_tokens)
        new = self._insert_keys([block_hash], [block_id])
        self._is_cached[block_id] = True
        if self.enable_kv_cache_events:
            tokens = np.asarray(token_ids).tolist()
            self._emit_stored([block_hash], new, parent_block_hash, tokens, lora_name, None)

    def evict_blocks(self, block_ids: ArrayLike) -> None:
        """Take the names of blocks, not their memory: readers go on, nobody new finds them.

        A block that nobody reads moves to the front of the free queue, since nothing can revive
        it now. Blocks without a name are left as they are.

        Args:
            block_ids: distinct blocks, in use or not.

        Raises:
            BadArgumentError: an id is not an integer, does not exist, or stands there twice.

        vLLM 0.33: `BlockPool.evict_blocks` (there a free block keeps its place in the queue).
        """
        index = self._checked(block_ids)
        cached = index[self._is_cached[index]]
        if not cached.size:
            return
        idle = cached[self.ref_cnt[cached] == 0]
        self.free_queue.remove(idle)
        self.free_queue.prepend(idle)
        self._evict(cached)

    def reset_prefix_cache(self) -> bool:
        """Forget every name, for instance after the model's weights have changed.

        Returns:
            False, and nothing has changed, while any block is in use; else True.

        vLLM 0.33: `BlockPool.reset_prefix_cache`.
        """
        if self.num_free_blocks < self.num_blocks - 1:
            return False
        waiting = self.free_queue.cached_blocks()
        self.free_queue.remove(waiting)
        self.free_queue.prepend(waiting)
        self._remove_keys(waiting)
        self.stats = CacheStats()
        if self.enable_kv_cache_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first, and forget them.

        A key that several blocks share is announced once and withdrawn once, when its last block
        loses it; vLLM 0.33 announces and withdraws it for each block.
        """
        events, self._events = self._events, []
        return events

    def _emit_stored(
        self,
        block_hashes: Sequence[bytes],
        new: Sequence[bool],
        parent: bytes | None,
        token_ids: list[int],
        lora_name: str | None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None,
    ) -> None:
        """Add an event for each name that nobody could find before."""
        size = len(token_ids) // len(block_hashes)
        for i, (block_hash, is_new) in enumerate(zip(block_hashes, new, strict=True)):
            if is_new:
                tokens = token_ids[i * size : (i + 1) * size]
                keys = None if extra_keys is None else [extra_keys[i]]
                stored = BlockStored([block_hash], parent, tokens, size, lora_name, keys)
                self._events.append(stored)
            parent = block_hash

    def check_invariants(self, tables: Iterable[ArrayLike] | None = None) -> None:
        """Prove the laws of the ledger, in O(num_blocks).

        Args:
            tables: the block tables of all requests, if the caller knows them all: then each
                count is compared with the number of tables in which its block stands.

        Raises:
            InvariantError: the first law that is broken, and by which block.
        """
        unread = self.ref_cnt == 0
        unread[self.null_block] = False
        stack, line = self.free_queue.uncached_blocks(), self.free_queue.cached_blocks()
        places = np.bincount(np.concatenate([stack, line]), minlength=self.num_blocks)
        carried = [(key, i) for i, key in enumerate(self.block_hash) if key is not None]
        carried += [(key, i) for i, keys in self._partial_keys.items() for key in keys]
        listed = [*self._block_of.items()]
        listed += [(key, i) for key, others in self._duplicates.items() for i in others]
        named = np.zeros(self.num_blocks, dtype=np.bool_)
        named[[i for _, i in carried]] = True
        laws: dict[str, Sequence[int] | NDArray[np.integer]] = {
            "no count is below zero": np.flatnonzero(self.ref_cnt < 0),
            "the null block has no reader": np.flatnonzero(self.ref_cnt[: self.null_block + 1]),
            "a block is queued, once, just when nobody reads it": np.flatnonzero(places != unread),
            "no named block is queued among the nameless": stack[named[stack]],
            "no nameless block is queued among the named": line[~named[line]],
            "keys and blocks name each other": [i for _, i in set(carried) ^ set(listed)],
            "no block has a key twice": [
                i for (_, i), n in (Counter(listed) | Counter(carried)).items() if n > 1
            ],
            "the column of published blocks is true": np.flatnonzero(self._is_cached != named),
            "nothing published is writable": [
                i for i in np.flatnonzero(named).tolist() if self.is_block_writable(i)
            ],
        }
        if tables is not None:
            held = [np.asarray(table, dtype=np.intp) for table in tables]
            in_tables = np.concatenate([*held, np.zeros(0, dtype=np.intp)])
            if in_tables.size and not (in_tables.min() >= 0 and in_tables.max() < self.num_blocks):
                raise InvariantError(f"a table names a block outside 0 to {self.num_blocks - 1}")
            readers = np.bincount(in_tables, minlength=self.num_blocks)
            readers[self.null_block] = 0
            laws["each count is the number of tables that name the block"] = np.flatnonzero(
                self.ref_cnt != readers
            )
        if len(self.free_queue) != places.sum():
            raise InvariantError(f"the queue says {len(self.free_queue)}, and holds {places.sum()}")
        for law, offenders in laws.items():
            if len(offenders):
                raise InvariantError(f"{law}: not so for block {offenders[0]}")
