"""What one step of a request does to the ledger (chapter 04).

`KVCacheManager` puts the pool, the hashes and the block tables together. A request asks what is
in the cache, then for slots; it computes; and in the end it gives everything back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fanoutkv.blocks import BadArgumentError, BlockPool, KVCacheEvent, StaleIndexError
from fanoutkv.cow import BlockTable, places_to_replace, prepare_write
from fanoutkv.hashing import (
    BlockHasher,
    MultiModalFeature,
    full_block_hashes,
    last_partial_key,
    token_array,
)


@dataclass(eq=False)
class Request:
    """One request: its tokens, all else that changes its K/V, and how far it has come.

    Attributes:
        request_id: a name that no other living request has.
        all_token_ids: the prompt, then the output so far; int64. Add to it by `append`.
        num_computed_tokens: tokens whose K/V exist. `allocate_slots` adds what it takes from the
            cache; whoever runs the model adds what it has computed.
        num_preemptions: how often the request was sent away.
        lora_name, cache_salt, mm_features, prompt_embeds: see `hashing.block_extra_keys`.
    """

    request_id: str
    all_token_ids: NDArray[np.int64]
    lora_name: str | None = None
    cache_salt: str | None = None
    mm_features: Sequence[MultiModalFeature] = ()
    prompt_embeds: ArrayLike | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    _hasher: BlockHasher | None = None

    def __post_init__(self) -> None:
        """Check the prompt, and copy it."""
        self.all_token_ids = token_array(self.all_token_ids)
        if not len(self.all_token_ids):
            raise BadArgumentError(f"request {self.request_id!r} has no tokens")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.all_token_ids)

    def append(self, token_ids: ArrayLike) -> None:
        """Add tokens that were sampled and accepted."""
        self.all_token_ids = np.concatenate([self.all_token_ids, token_array(token_ids)])

    def hasher(self, block_size: int, algorithm: str) -> BlockHasher:
        """Return the names of all its prefixes, at every `block_size` tokens, up to date.

        Nothing is hashed twice: the hasher stays with the request, and grows with it.
        """
        if self._hasher is None:
            self._hasher = BlockHasher(
                block_size,
                algorithm=algorithm,
                lora_name=self.lora_name,
                cache_salt=self.cache_salt,
                mm_features=self.mm_features,
                prompt_embeds=self.prompt_embeds,
            )
        self._hasher.extend(self.all_token_ids[self._hasher.num_tokens :])
        return self._hasher


@dataclass
class PrefixCacheStats:
    """How much of the prompts was found, in tokens; each request counts once.

    vLLM 0.33: `vllm/v1/metrics/stats.py`, `PrefixCacheStats`.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per query, without requests that came back from preemption: they hit themselves."""
        return self.hits / self.queries if self.queries else 0.0


@dataclass(eq=False)
class _Held:
    """What the manager keeps of a request that has slots."""

    table: BlockTable
    num_published: int = 0


@dataclass(eq=False)
class _Step:
    """What `allocate_slots` is about to do: the blocks that join and leave, and how far it goes."""

    table: BlockTable
    hits: NDArray[np.int32]
    leaving: NDArray[np.int64]
    computed: int
    total: int


class KVCacheManager:
    """The KV cache of one model on one device, as its scheduler sees it.

    Args:
        num_blocks: blocks of the pool, the null block among them.
        block_size: tokens a block.
        hash_block_size: tokens between two names; a divisor of block_size. Below block_size, the
            last part of a prompt can be found by a partial key, too.
        algorithm: see `hashing.hash_algorithm`.
        sliding_window: how many tokens back attention looks, or None for all.
        enable_caching, enable_kv_cache_events: see `BlockPool`.

    Raises:
        BadArgumentError: sizes that do not fit each other.

    vLLM 0.33: `vllm/v1/core/kv_cache_manager.py`, `KVCacheManager`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        hash_block_size: int | None = None,
        algorithm: str = "sha256",
        sliding_window: int | None = None,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
    ) -> None:
        """Start with an empty pool and no requests."""
        self.block_size = block_size
        self.hash_block_size = hash_block_size or block_size
        full_block_hashes([], self.hash_block_size, block_size)  # refuses sizes that do not fit
        if sliding_window is not None and sliding_window < 1:
            raise BadArgumentError(f"a window holds at least 1 token, not {sliding_window}")
        self.algorithm = algorithm
        self.sliding_window = sliding_window
        self.pool = BlockPool(
            num_blocks, enable_caching=enable_caching, enable_kv_cache_events=enable_kv_cache_events
        )
        self.prefix_cache_stats = PrefixCacheStats()
        self._held: dict[str, _Held] = {}
        self._copies: list[NDArray[np.int32]] = []

    def _hashes(self, request: Request) -> list[bytes]:
        """Return the names of a request's prefixes, one every hash_block_size tokens."""
        return request.hasher(self.hash_block_size, self.algorithm).hashes

    def block_ids(self, request: Request) -> NDArray[np.int32]:
        """The block table of a request, int32[n], as a kernel reads it; empty without slots."""
        held = self._held.get(request.request_id)
        return np.zeros(0, dtype=np.int32) if held is None else held.table.block_ids

    def get_computed_blocks(self, request: Request) -> tuple[NDArray[np.int32], int]:
        """Look for the longest prefix of a request that is in the cache; nothing is touched.

        At least one token is left to compute, since the cache holds no logits.

        Returns:
            int32[n], the blocks, and the number of tokens that they cover: a multiple of
            block_size, or with partial keys of hash_block_size.

        vLLM 0.33: `KVCacheManager.get_computed_blocks`, `max_cache_hit_length`.
        """
        if not self.pool.enable_caching or request.request_id in self._held:
            return np.zeros(0, dtype=np.int32), 0
        return self._find(self._hashes(request), request.num_tokens - 1)

    def _find(self, hashes: Sequence[bytes], limit: int) -> tuple[NDArray[np.int32], int]:
        """Return the blocks of the longest known prefix of at most `limit` tokens."""
        full = full_block_hashes(hashes, self.hash_block_size, self.block_size)
        blocks = self.pool.find_longest_cache_hit(full[: limit // self.block_size])
        found = len(blocks) * self.block_size
        # Inside the next block, the longest partial prefix first.
        last = min(limit, found + self.block_size - 1) // self.hash_block_size
        for end in range(last, found // self.hash_block_size, -1):
            tail = self.pool.get_cached_block(hashes[end - 1])
            if tail is not None:
                return np.append(blocks, np.int32(tail)), end * self.hash_block_size
        return blocks, found

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> NDArray[np.int32] | None:
        """Give a request the slots for its next step, or change nothing.

            | computed | new computed | external | new | lookahead |
            |  has slots  | from the cache | slots to be filled or written |

        Args:
            request: a request with or without slots.
            num_new_tokens: tokens to compute in this step; the last of them may be drafts.
            num_new_computed_tokens: what `get_computed_blocks` has found, on the first call.
            num_external_computed_tokens: tokens whose K/V a connector will bring; they follow the
                computed ones, and count as computed.
            num_lookahead_tokens: further slots for tokens that a draft model may write.
            delay_cache_blocks: publish nothing now; `cache_blocks` will, when the K/V are there.

        Returns:
            int32[n], the blocks that the table gained, or None if the pool is too small: then
            nothing at all has changed, not even the order of the free queue.

        Raises:
            StaleIndexError: what was found is no longer in the cache; look again.
            BadArgumentError: a negative number, no token at all, or a hit for a request that has
                slots.

        vLLM 0.33: `KVCacheManager.allocate_slots`.
        """
        numbers = (num_new_computed_tokens, num_external_computed_tokens, num_lookahead_tokens)
        if min(num_new_tokens, *numbers) < 0 or not num_new_tokens + num_external_computed_tokens:
            raise BadArgumentError(f"a step has 1 or more tokens, not {num_new_tokens}, {numbers}")
        held = self._held.get(request.request_id)
        if held is not None and num_new_computed_tokens:
            raise BadArgumentError(
                f"request {request.request_id!r} has slots: only its first call takes a hit"
            )
        table = BlockTable(self.pool, self.block_size) if held is None else held.table
        hits = self._find_again(request, num_new_computed_tokens)
        computed = request.num_computed_tokens + num_new_computed_tokens
        ready = computed + num_external_computed_tokens
        total = ready + num_new_tokens + num_lookahead_tokens
        step = _Step(table, hits, self._outside_window(table, computed), computed, total)
        if self._shortage(step) > 0:
            return None
        # From here on nothing can fail.
        old = len(table.block_ids) + len(hits)
        self._commit(step)
        table.num_tokens = ready + num_new_tokens
        if held is None:
            self._held[request.request_id] = _Held(table, computed // self.block_size)
            self._record(request, num_new_computed_tokens)
        request.num_computed_tokens = ready
        if not delay_cache_blocks:
            self.cache_blocks(request, ready + num_new_tokens)
        return table.block_ids[old:]

    def _commit(self, step: _Step) -> None:
        """Move the blocks of a step that is known to fit, in the one order that is safe."""
        table = step.table
        # What was hit gets its reader before anything is taken: the taking may evict.
        self.pool.touch(step.hits)
        table.append(step.hits)
        self.pool.free_blocks(table.block_ids[step.leaving][::-1])
        table.block_ids[step.leaving] = self.pool.null_block
        table.num_tokens = step.computed
        self._copies.append(prepare_write([table], step.total - step.computed))

    def _find_again(self, request: Request, num_tokens: int) -> NDArray[np.int32]:
        """Return the blocks of a hit of so many tokens, or raise if it is no longer there."""
        if not num_tokens:
            return np.zeros(0, dtype=np.int32)
        limit = min(num_tokens, request.num_tokens - 1)
        blocks, found = self._find(self._hashes(request), limit)
        if found != num_tokens:
            raise StaleIndexError(
                f"{num_tokens} tokens of request {request.request_id!r} were in the cache, and now "
                f"{found} are: call get_computed_blocks again, right before this"
            )
        return blocks

    def _outside_window(self, table: BlockTable, num_computed_tokens: int) -> NDArray[np.int64]:
        """Return the places in a table that hold a block which no later token will look at."""
        if self.sliding_window is None:
            return np.zeros(0, dtype=np.int64)
        passed = max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size
        return np.flatnonzero(table.block_ids[:passed] != self.pool.null_block)

    def _shortage(self, step: _Step) -> int:
        """Return how many blocks are missing for a step; 0 or less if it fits."""
        count, old = self.pool.ref_cnt, step.table.block_ids
        missing = -(-step.total // self.block_size) - len(old) - len(step.hits)
        # A hit that ends inside a block has a name there; else the table knows its own.
        copies = 1 if len(step.hits) and step.computed % self.block_size else 0
        copies += len(places_to_replace(step.table, step.computed, step.total))
        # A hit that nobody reads stands in the free queue, and will not be free any more.
        idle = np.count_nonzero(count[step.hits] == 0)
        gained = np.count_nonzero(count[old[step.leaving]] == 1)
        return int(max(0, missing) + copies + idle - gained - self.pool.num_free_blocks)

    def _record(self, request: Request, num_hits: int) -> None:
        """Count a request once it has slots: an attempt that failed is not a second request."""
        stats = self.prefix_cache_stats
        if request.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries += request.num_tokens
            stats.preempted_hits += num_hits
        else:
            stats.requests += 1
            stats.queries += request.num_tokens
            stats.hits += num_hits

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks among the first tokens of a request, those that are not yet.

        Draft tokens are not published: only what `request` has accepted has a name.

        vLLM 0.33: `KVCacheManager.cache_blocks`.
        """
        held = self._held[request.request_id]
        start, end = held.num_published, min(num_tokens, request.num_tokens) // self.block_size
        start += int(np.count_nonzero(held.table.block_ids[start:end] == self.pool.null_block))
        if not self.pool.enable_caching or end <= start:
            return
        hasher = request.hasher(self.hash_block_size, self.algorithm)
        hashes = hasher.hashes
        full = full_block_hashes(hashes, self.hash_block_size, self.block_size)
        tokens = request.all_token_ids[start * self.block_size : end * self.block_size]
        self.pool.cache_full_blocks(
            held.table.block_ids[start:end],
            full[start:end],
            parent_block_hash=full[start - 1] if start else None,
            token_ids=tokens.tolist() if self.pool.enable_kv_cache_events else (),
            lora_name=request.lora_name,
            extra_keys=[hasher.extra_keys(i) for i in range(start, end)],
        )
        held.num_published = end

    def fork(self, request: Request, request_id: str) -> Request:
        """Return a request that goes on from this one, sharing all its blocks.

        Raises:
            BadArgumentError: the request has no slots, or the new name is taken.
        """
        held = self._held.get(request.request_id)
        if held is None or request_id in self._held:
            raise BadArgumentError(
                f"cannot fork {request.request_id!r} as {request_id!r}: the one must have slots, "
                "and the other must be new"
            )
        child = Request(
            request_id,
            request.all_token_ids,
            request.lora_name,
            request.cache_salt,
            request.mm_features,
            request.prompt_embeds,
            request.num_computed_tokens,
        )
        self._held[request_id] = _Held(held.table.fork(), held.num_published)
        return child

    def take_block_copies(self) -> NDArray[np.int32]:
        """Return the copies, int32[k, 2], that must run before the next tokens are written."""
        copies, self._copies = self._copies, []
        return np.concatenate([np.zeros((0, 2), dtype=np.int32), *copies])

    def free(self, request: Request) -> None:
        """Let a request go: finished, aborted or preempted. Twice is as good as once.

        Blocks that were published for a step that never ran lose their names. The last part of
        the text gets a partial key, if names are finer than blocks.

        vLLM 0.33: `KVCacheManager.free`.
        """
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        computed = request.num_computed_tokens // self.block_size
        self.pool.evict_blocks(held.table.block_ids[computed : held.num_published])
        if self.hash_block_size < self.block_size and self.pool.enable_caching:
            self._publish_tail(request, held.table)
        held.table.free()
        request.num_computed_tokens = 0

    def _publish_tail(self, request: Request, table: BlockTable) -> None:
        """Give the block that is not full a partial key, as far as its tokens are computed."""
        computed = min(request.num_computed_tokens, request.num_tokens)
        hashes = self._hashes(request)[: computed // self.hash_block_size]
        partial = last_partial_key(hashes, self.hash_block_size, self.block_size)
        if partial is not None and self.pool.is_block_writable(int(table.block_ids[partial[0]])):
            block, num_tokens, key = partial
            full = full_block_hashes(hashes, self.hash_block_size, self.block_size)
            start = block * self.block_size
            self.pool.cache_partial_block(
                int(table.block_ids[block]),
                key,
                num_tokens,
                parent_block_hash=full[block - 1] if block else None,
                token_ids=request.all_token_ids[start : start + num_tokens],
                lora_name=request.lora_name,
            )

    def preempt(self, request: Request) -> None:
        """Send a request away to make room; it will come back and look for its own blocks."""
        self.free(request)
        request.num_preemptions += 1

    def reset_prefix_cache(self) -> bool:
        """Forget all names and counts, unless a request has slots; see `BlockPool`."""
        if not self.pool.reset_prefix_cache():
            return False
        self.prefix_cache_stats = PrefixCacheStats()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of the pool since the last call."""
        return self.pool.take_events()

    def check_invariants(self) -> None:
        """Prove the pool's laws against the tables of all requests; raises `InvariantError`."""
        self.pool.check_invariants([held.table.block_ids for held in self._held.values()])
