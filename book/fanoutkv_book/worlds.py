"""Small worlds for `explore`: a ledger, forked sequences, a manager with its requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from fanoutkv import (
    BlockPool,
    BlockTable,
    InvariantError,
    KVCacheManager,
    PoolExhaustedError,
    Request,
    prepare_write,
)
from fanoutkv_book.explore import Move


class LedgerWorld:
    """A pool and a few requests, each with a block table; the hash of a block is one letter.

    A request holds at most `longest` blocks. It may take one, find one by its letter, publish its
    last one, make the letter's lower case lead to it too (a partial key), and leave. Somebody may
    evict a name from outside, or reset the cache. Two blocks may carry one letter, as when two
    requests have computed the same prefix at once.
    """

    def __init__(
        self,
        pool_class: type[BlockPool] = BlockPool,
        *,
        requests: int = 3,
        blocks: int = 4,
        longest: int = 2,
        letter: str = "A",
    ) -> None:
        """Build a pool of `blocks` usable blocks (and the null block) and idle requests."""
        self.pool = pool_class(blocks + 1)
        self.tables: list[list[int]] = [[] for _ in range(requests)]
        self.longest, self.letter = longest, letter

    def moves(self) -> Iterator[Move]:
        """Yield every operation that the ledger must allow in this state."""
        for r, table in enumerate(self.tables):
            who = f"request {r + 1}"
            if table:
                yield f"{who} leaves", lambda w, r=r: w.leave(r)
                yield from self._publications(r, who)
            if len(table) < self.longest:
                if self.pool.num_free_blocks:
                    yield f"{who} takes a new block", lambda w, r=r: w.take(r)
                for key in self._keys():
                    block = self.pool.get_cached_block(key)
                    if block is not None and block not in table:
                        yield (f"{who} hits {key.decode()!r}", lambda w, r=r, k=key: w.hit(r, k))
        for block in np.flatnonzero(self.pool._is_cached).tolist():
            yield (f"block {block} is evicted by name", lambda w, b=block: w.pool.evict_blocks([b]))
        if self.pool.num_free_blocks == self.pool.num_blocks - 1:
            yield "the cache is reset", lambda w: w.reset()

    def _keys(self) -> tuple[bytes, bytes]:
        return self.letter.encode(), self.letter.lower().encode()

    def _publications(self, r: int, who: str) -> Iterator[Move]:
        full, partial = self._keys()
        last = self.tables[r][-1]
        if self.pool.block_hash[last] is None:
            yield (f"{who} publishes its last block as {full.decode()!r}", lambda w: w.publish(r))
        elif last not in self.pool._partial_keys:
            yield (f"{who} adds the partial key {partial.decode()!r}", lambda w: w.publish_part(r))

    def take(self, r: int) -> None:
        """Request r takes a block that must have belonged to nobody."""
        self.tables[r] += self.pool.get_new_blocks(1).tolist()

    def hit(self, r: int, key: bytes) -> None:
        """Request r finds a block by its key and reads it from now on."""
        block = self.pool.get_cached_block(key)
        assert block is not None
        self.pool.touch([block])
        self.tables[r].append(block)

    def publish(self, r: int) -> None:
        """Request r publishes its last block."""
        self.pool.cache_full_blocks(self.tables[r][-1:], [self._keys()[0]])

    def publish_part(self, r: int) -> None:
        """Request r makes a part of its last block findable too."""
        self.pool.cache_partial_block(self.tables[r][-1], self._keys()[1], 1)

    def leave(self, r: int) -> None:
        """Request r gives all its blocks back, the last one first."""
        self.pool.free_blocks(self.tables[r][::-1])
        self.tables[r] = []

    def reset(self) -> None:
        """Forget all names; nobody is there, so it must succeed."""
        if not self.pool.reset_prefix_cache():
            raise InvariantError("nobody reads a block, and yet the reset was refused")

    def check(self) -> None:
        """Prove the pool's laws, and that its counts agree with the tables."""
        self.pool.check_invariants(self.tables)

    def canonical(self) -> Hashable:
        """Describe the state with blocks renamed in order of appearance and requests unordered."""
        pool = self.pool
        stack, line = (pool.free_queue.uncached_blocks(), pool.free_queue.cached_blocks().tolist())
        # All that the ledger says of a block goes in, so that no false state passes for a true one.
        columns = [pool.ref_cnt, pool._is_cached, np.bincount(stack, minlength=pool.num_blocks)]
        facts = [*zip(*(column.tolist() for column in columns), strict=True)]
        keys = [(pool.block_hash[b], *pool._partial_keys.get(b, ())) for b in range(len(facts))]
        found = [(k, [b, *pool._duplicates.get(k, ())]) for k, b in sorted(pool._block_of.items())]
        described = []
        for tables in set(permutations(map(tuple, self.tables))):
            seen = [pool.null_block, *line, *(block for table in tables for block in table)]
            order = list(dict.fromkeys(seen))
            name = {block: i for i, block in enumerate(order)}.get
            rest = sorted(
                map(repr, (facts[b] + keys[b] for b in range(len(facts)) if name(b) is None))
            )
            named = [facts[b] + keys[b] for b in order]
            parts = [[[*map(name, t)] for t in tables], [(k, [*map(name, bs)]) for k, bs in found]]
            described.append(repr((len(line), named, parts, rest)))
        return min(described)


class ForkWorld:
    """Up to three sequences of up to three tokens, in blocks of two: start, fork, append, free.

    K/V are kept as numbers and moved as the ledger says, and each sequence must read its own.

    Args:
        prepare: what decides about ownership before a step; `fanoutkv.cow.prepare_write`.
    """

    def __init__(self, prepare: Callable[[list[BlockTable]], Any] = prepare_write) -> None:
        """Begin with four usable blocks and no sequence."""
        self.pool, self.places = BlockPool(5), np.full((5, 2), -1)
        self.tables: list[BlockTable] = []
        self.texts: list[list[int]] = []
        self.prepare = prepare

    def moves(self) -> Iterator[Move]:
        """Yield every step: also one that appends to all sequences at once."""
        if len(self.tables) < 3:
            yield "a sequence starts", lambda w: w.start()
            for i in range(len(self.tables)):
                yield f"sequence {i} forks", lambda w, i=i: w.fork(i)
        short = [i for i, table in enumerate(self.tables) if table.num_tokens < 3]
        for i in range(len(self.tables)):
            yield f"sequence {i} is freed", lambda w, i=i: w.free(i)
        for chosen in [*([i] for i in short), *([short] if len(short) > 1 else [])]:
            yield f"sequences {chosen} append", lambda w, chosen=tuple(chosen): w.append(chosen)

    def start(self) -> None:
        """Add an empty sequence."""
        self.tables.append(BlockTable(self.pool, 2))
        self.texts.append([])

    def fork(self, i: int) -> None:
        """Add a sequence that goes on from sequence i."""
        self.tables.append(self.tables[i].fork())
        self.texts.append(list(self.texts[i]))

    def free(self, i: int) -> None:
        """Remove sequence i."""
        self.tables.pop(i).free()
        self.texts.pop(i)

    def append(self, chosen: Sequence[int]) -> None:
        """Write one more token to some sequences, in one step; or nothing, if it does not fit."""
        try:
            pairs = self.prepare([self.tables[i] for i in chosen])
        except PoolExhaustedError:
            return
        self.places[pairs[:, 1]] = self.places[pairs[:, 0]]
        for i in chosen:
            token = 10 * i + len(self.texts[i])
            self.texts[i].append(token)
            end = self.tables[i].num_tokens
            self.places.ravel()[self.tables[i].slots(end - 1, end)] = token

    def check(self) -> None:
        """Prove the ledger's laws, and that everybody reads what it wrote."""
        self.pool.check_invariants([table.block_ids for table in self.tables])
        for i, (table, text) in enumerate(zip(self.tables, self.texts, strict=True)):
            read = self.places.ravel()[table.slots(0, table.num_tokens)].tolist()
            if read != text:
                raise InvariantError(f"sequence {i} wrote {text} and reads {read}")

    def canonical(self) -> Hashable:
        """Describe the state with blocks renamed in order of appearance."""
        rows = [table.block_ids.tolist() for table in self.tables]
        name = {b: i for i, b in enumerate(dict.fromkeys(b for row in rows for b in row))}
        held = [(name[b], int(self.pool.ref_cnt[b])) for b in name]
        return repr(
            ([[name[b] for b in r] for r in rows], self.texts, held, len(self.pool.free_queue))
        )


class ManagerWorld:
    """Two requests at most, with prompts of four tokens that share two, in blocks of two.

    They come, compute so many tokens a step, are preempted, and leave; a block may lose its name.
    K/V are numbers that really move, and each request must read its own tokens.
    """

    PROMPTS = ((0, 0, 0, 0), (0, 0, 1, 1))

    def __init__(
        self,
        manager_class: type[KVCacheManager] = KVCacheManager,
        *,
        chunks: Sequence[int] = (2,),
        **options: Any,
    ) -> None:
        """Begin with four usable blocks and nobody."""
        self.manager, self.chunks = manager_class(5, 2, **options), chunks
        self.places = np.full((5, 2), -1)
        self.requests: list[Request] = []
        self.next_name = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave the hashers out: they can be made again, and cannot be copied."""
        for request in self.requests:
            request._hasher = None
        return vars(self)

    def moves(self) -> Iterator[Move]:
        """Yield every step."""
        if len(self.requests) < 2:
            for prompt in self.PROMPTS:
                yield f"a request comes with {prompt}", lambda w, p=prompt: w.come(p)
        for i, request in enumerate(self.requests):
            yield f"request {i} leaves", lambda w, i=i: w.leave(i)
            if len(self.manager.block_ids(request)):
                yield f"request {i} is preempted", lambda w, i=i: w.preempt(i)
            for new in self.chunks:
                yield f"request {i} asks for {new}", lambda w, i=i, new=new: w.step(i, new)
        for block in np.flatnonzero(self.manager.pool._is_cached).tolist():
            yield (
                f"block {block} is evicted by name",
                lambda w, b=block: w.manager.pool.evict_blocks([b]),
            )

    def come(self, prompt: Sequence[int]) -> None:
        """Add a request that has no slots yet."""
        self.requests.append(Request(str(self.next_name), np.array(prompt)))
        self.next_name += 1

    def leave(self, i: int) -> None:
        """Let a request go."""
        self.manager.free(self.requests.pop(i))

    def preempt(self, i: int) -> None:
        """Send a request away."""
        self.manager.preempt(self.requests[i])

    def step(self, i: int, wanted: int) -> None:
        """Compute up to `wanted` tokens of the prompt, if they fit and are not computed yet."""
        request = self.requests[i]
        _, hit = self.manager.get_computed_blocks(request)
        new = min(wanted, request.num_tokens - request.num_computed_tokens - hit)
        if request.num_computed_tokens == request.num_tokens:
            return
        if self.manager.allocate_slots(request, new, num_new_computed_tokens=hit) is None:
            return
        pairs = self.manager.take_block_copies()
        self.places[pairs[:, 1]] = self.places[pairs[:, 0]]
        start, end = request.num_computed_tokens, request.num_computed_tokens + new
        rows = self.manager.block_ids(request)
        for position in range(start, end):
            self.places[rows[position // 2], position % 2] = request.all_token_ids[position]
        request.num_computed_tokens = end

    def check(self) -> None:
        """Prove the ledger's laws, and that everybody reads its own tokens."""
        self.manager.check_invariants()
        for request in self.requests:
            done = request.num_computed_tokens
            read = self.places[self.manager.block_ids(request)].ravel()[:done].tolist()
            if read != request.all_token_ids[:done].tolist():
                raise InvariantError(f"{request.all_token_ids[:done]} is read as {read}")

    def canonical(self) -> Hashable:
        """Describe the state with blocks renamed in order of appearance."""
        pool = self.manager.pool
        line = pool.free_queue.cached_blocks().tolist()
        rows = [self.manager.block_ids(request).tolist() for request in self.requests]
        order = list(dict.fromkeys([*line, *(block for row in rows for block in row)]))
        name = {block: i for i, block in enumerate(order)}
        blocks = [
            (int(pool.ref_cnt[b]), pool.block_hash[b], self.places[b].tolist()) for b in order
        ]
        people = [
            (r.all_token_ids.tolist(), r.num_computed_tokens, bool(r.num_preemptions))
            for r in self.requests
        ]
        found = sorted((key, name.get(b, -1)) for key, b in pool._block_of.items())
        return repr((len(line), [[name[b] for b in row] for row in rows], blocks, people, found))
