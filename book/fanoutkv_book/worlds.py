"""Small worlds for `explore`: a ledger, forked sequences, a manager, a tree with its locks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fanoutkv import (
    BlockPool,
    BlockTable,
    InvariantError,
    KVCacheManager,
    PoolExhaustedError,
    RadixCache,
    RadixKey,
    Request,
    TreeLock,
    TreeNode,
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


def _newest_first(node: TreeNode) -> int:
    """Let the leaf go first that was used last."""
    return -node.last_access_time


class TreeWorld:
    """A tree over two letters, prefixes of up to `depth` of them, and up to `locks` readers.

    Keys are inserted, matched inside a segment, locked, unlocked and evicted, and the cache is
    reset. Each slot holds the prefix that was written there, and a slot that is freed is wiped, so
    a reader whose slots were given away reads it at once. A prefix is a number here: a 1, then its
    letters as binary digits, so 1 is the empty one, and 5 is (0, 1).

    Letters are only compared, so two branches may change names below any prefix. States that
    differ in no more than that count as one, and of two unknown branches the first is tried for
    both. An eviction matches the leaf that is to go and takes the newest leaf: so from every state
    each evictable leaf is evicted, in every order, whatever its recency was.

    What is then searched: all trees, with all the ways in which matches may have cut their
    segments, each with all choices of locks. Those are 171 states for depth 2 and 2 locks, 396
    for 2 and 3, 6,396 for 3 and 2, 22,212 for 3 and 3, and 26,565 for 4 without locks.
    """

    def __init__(
        self, cache_class: type[RadixCache] = RadixCache, *, depth: int = 3, locks: int = 2
    ) -> None:
        """Begin with an empty tree, and slots for a full one and one more key."""
        self.cache = cache_class(free=self.wipe, strategy=_newest_first)
        self.depth, self.max_locks = depth, locks
        self.places = np.full(2 ** (depth + 1) - 2 + depth, -1)
        self.free = list(range(len(self.places)))
        self.locks: list[tuple[TreeLock, int]] = []

    def wipe(self, slots: ArrayLike) -> None:
        """Take slots back, and forget what was in them."""
        self.free += np.asarray(slots).tolist()
        self.places[np.asarray(slots)] = -1

    def walk(self) -> Iterator[tuple[int, TreeNode]]:
        """Yield each prefix at which a node ends, and the node; the root first."""
        waiting = [(1, self.cache.root)]
        while waiting:
            prefix, node = waiting.pop()
            yield prefix, node
            for child in node.children.values():
                waiting.append((_prefixes(child.key, prefix)[-1], child))

    def moves(self) -> Iterator[Move]:
        """Yield every step, of steps that are alike one."""
        found = dict(self.walk())
        inside = {p >> i for p, node in found.items() for i in range(1, len(node.value))}
        for prefix in sorted(inside):
            yield f"{_shown(prefix)} is matched", lambda w, p=prefix: w.match(p)
            yield f"{_shown(prefix)} is inserted", lambda w, p=prefix: w.insert(p)
        known = found.keys() | inside
        for prefix in sorted(known):
            branches = [b for b in (2 * prefix, 2 * prefix + 1) if b not in known]
            for depth in range(prefix.bit_length(), self.depth + 1) if branches else ():
                key = branches[0] << (depth - prefix.bit_length())
                yield f"{_shown(key)} is inserted", lambda w, p=key: w.insert(p)
        if len(self.locks) < self.max_locks:
            for prefix in sorted(known):
                yield f"{_shown(prefix)} is locked", lambda w, p=prefix: w.lock(p)
        for i, (_, prefix) in enumerate(self.locks):
            if prefix not in (other for _, other in self.locks[:i]):
                yield f"a lock of {_shown(prefix)} ends", lambda w, i=i: w.unlock(i)
        for prefix, node in found.items():
            if node in self.cache.evictable_leaves:
                yield f"{_shown(prefix)} is evicted", lambda w, p=prefix: w.evict(p)
        yield "all is evicted that can be", lambda w: w.evict_all()
        if not self.locks:
            yield "the cache is reset", lambda w: w.cache.reset()

    def key(self, prefix: int) -> RadixKey:
        """Return the letters of a prefix, as the kind of key that this cache uses itself."""
        return type(self.cache.root.key)([int(letter) for letter in f"{prefix:b}"[1:]])

    def match(self, prefix: int) -> TreeNode:
        """Look up a prefix that is known."""
        found = self.cache.match_prefix(self.key(prefix))
        self._expect("the length found", found.length, prefix.bit_length() - 1)
        return found.node

    def insert(self, prefix: int) -> None:
        """Compute a prefix, write it into new slots, and give back what the tree had already."""
        written = _prefixes(self.key(prefix), 1)
        slots, self.free = np.array(self.free[: len(written)]), self.free[len(written) :]
        self.places[slots] = written
        self.wipe(slots[: self.cache.insert(self.key(prefix), slots)])

    def lock(self, prefix: int) -> None:
        """Become a reader of a prefix that is known."""
        self.locks.append((self.cache.lock(self.match(prefix)), prefix))

    def unlock(self, i: int) -> None:
        """Let reader i go."""
        self.cache.unlock(self.locks.pop(i)[0])

    def evict(self, prefix: int) -> None:
        """Evict the leaf that ends with a prefix, and no other."""
        size = len(self.match(prefix).value)
        self._expect("the tokens evicted", self.cache.evict(1), size)
        self._expect("the leaf is known", prefix in dict(self.walk()), False)

    def evict_all(self) -> None:
        """Evict all that is evictable, and no more."""
        size = self.cache.evictable_size
        self._expect("the tokens evicted", self.cache.evict(len(self.places)), size)

    def _expect(self, what: str, seen: int, expected: int) -> None:
        if seen != expected:
            raise InvariantError(f"{what}: {seen}, and {expected} would be right")

    def check(self) -> None:
        """Prove the tree's laws, and that every reader and every node reads its own prefix."""
        self.cache.check_invariants(range(len(self.places)), self.free)
        readers = [(lock.node, prefix) for lock, prefix in self.locks]
        for node, prefix in [*readers, *((node, prefix) for prefix, node in self.walk())]:
            read = self.places[self.cache.path_indices(node)].tolist()
            if read != _prefixes(self.key(prefix), 1):
                raise InvariantError(f"who wants {_shown(prefix)} reads the prefixes {read}")

    def canonical(self) -> Hashable:
        """Describe the state: neither slots nor times, nor which branch is called 0."""
        cache, readers = self.cache, [id(lock.node) for lock, _ in self.locks]
        waiting = {id(node) for node in cache.evictable_leaves}

        def described(node: TreeNode, prefix: int) -> tuple[Any, ...]:
            spelled = _prefixes(node.key, prefix)
            # As above: no false state may pass for a true one.
            facts = (
                len(spelled),
                readers.count(id(node)),
                node.lock_ref,
                id(node) in waiting,
                self.places[node.value].tolist() == spelled,
                node._tree is cache._tree,
            )
            end = spelled[-1] if spelled else prefix
            return *facts, *sorted(described(child, end) for child in node.children.values())

        sizes = cache.evictable_size, cache.protected_size, len(self.free), len(readers)
        return sizes, described(cache.root, 1)


def _prefixes(key: RadixKey, above: int) -> list[int]:
    """Return what stands in each slot of a segment that begins behind the prefix `above`."""
    return [above := 2 * above + letter for letter in key.token_ids.tolist()]


def _shown(prefix: int) -> str:
    """Return a prefix as a reader writes it."""
    return repr(f"{prefix:b}"[1:])
