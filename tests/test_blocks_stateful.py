"""The block pool, pressed: every bad list in every method, long queues, schedules of batches."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_blocks import pool_in_use, snapshot

from fanoutkv import (
    AllBlocksCleared,
    BadArgumentError,
    BlockPool,
    BlockRemoved,
    BlockStored,
    FreeBlockQueue,
    PoolExhaustedError,
    StaleIndexError,
)

SIGNED = [np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)]
UNSIGNED = [np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)]

# Block 3 of `pool_in_use` may be touched, freed, evicted and published; what stands beside it
# is what must be refused. A function, because a generator can be read only once.
BAD_IDS: dict[str, Callable[[], Any]] = {
    "past the end": lambda: [3, 7],
    "past the end, a tuple": lambda: (3, 7),
    "negative": lambda: [3, -1],
    "negative, a tuple": lambda: (3, -4),
    "wraps to 3 in 32 bits": lambda: [2**32 + 3],
    "past 64 bits": lambda: [2**70],
    "twice": lambda: [3, 3],
    "twice, apart": lambda: [3, 2, 3],
    "a bool": lambda: [True],
    "a float": lambda: [3.0],
    "a string": lambda: ["3"],
    "None": lambda: None,
    "2-D": lambda: [[3]],
    "2-D and empty": lambda: np.zeros((0, 3), dtype=np.int32),
    "a generator": lambda: (i for i in [3]),
    "a set": lambda: {3},
    "a bare int": lambda: 3,
    "a bare int of 32 bits": lambda: np.int32(3),
}
for dtype in [*SIGNED, *UNSIGNED]:
    BAD_IDS[f"past the end, {dtype}"] = lambda d=dtype: np.array([3, 7], dtype=d)
    BAD_IDS[f"the largest {dtype}"] = lambda d=dtype: np.array([3, np.iinfo(d).max], dtype=d)
    BAD_IDS[f"twice, {dtype}"] = lambda d=dtype: np.array([3, 3], dtype=d)
for dtype in SIGNED:
    BAD_IDS[f"negative, {dtype}"] = lambda d=dtype: np.array([3, -1], dtype=d)
    BAD_IDS[f"the least {dtype}"] = lambda d=dtype: np.array([3, np.iinfo(d).min], dtype=d)

TAKES_IDS: dict[str, Callable[[BlockPool, Any], object]] = {
    "touch": lambda pool, ids: pool.touch(ids),
    "free_blocks": lambda pool, ids: pool.free_blocks(ids),
    "evict_blocks": lambda pool, ids: pool.evict_blocks(ids),
    "cache_full_blocks": lambda pool, ids: pool.cache_full_blocks(ids, [b"x"], token_ids=[1]),
}


@pytest.mark.parametrize("method", TAKES_IDS)
@pytest.mark.parametrize("ids", BAD_IDS)
def test_no_method_takes_bad_ids(method: str, ids: str) -> None:
    pool = pool_in_use()
    before = snapshot(pool)
    pool.evict_blocks([3])  # The last good list is remembered: a bad one may have the same bytes.
    with pytest.raises(BadArgumentError, match=r"^block ids must |^block -?\d+ (does|stands) "):
        TAKES_IDS[method](pool, BAD_IDS[ids]())
    assert snapshot(pool) == before


@pytest.mark.parametrize("method", TAKES_IDS)
@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED, np.dtype(">i4")], ids=str)
def test_every_method_takes_ids_of_every_integer_kind(method: str, dtype: Any) -> None:
    expected, pool = pool_in_use(), pool_in_use()
    TAKES_IDS[method](expected, [3])
    TAKES_IDS[method](pool, np.array([3, 0, 0], dtype=dtype)[::3])
    assert snapshot(pool) == snapshot(expected)


def test_the_first_and_the_last_block_exist() -> None:
    pool = BlockPool(300)
    pool.evict_blocks([0, 299])
    pool.evict_blocks(np.array([0, 255], dtype=np.uint8))
    with pytest.raises(BadArgumentError, match="block 300 does not exist"):
        pool.evict_blocks([0, 300])
    with pytest.raises(BadArgumentError, match="block 5 stands in the list more than once"):
        pool.evict_blocks([0, 9, 5, 5])


def test_who_touches_the_null_block_is_told_so() -> None:
    with pytest.raises(StaleIndexError, match=r"block 0 .* is the null block"):
        pool_in_use().touch([5, 0])


def test_no_event_can_be_changed_once_it_is_told() -> None:
    for event, name in (
        (BlockStored([b"1"], None, [1], 1), "block_size"),
        (BlockRemoved([b"1"]), "medium"),
        (AllBlocksCleared(), "anything"),
    ):
        with pytest.raises(FrozenInstanceError):
            setattr(event, name, 2)


def test_the_hit_rate_is_hits_per_query() -> None:
    pool = pool_in_use()
    pool.find_longest_cache_hit([b"1", b"2", b"4", b"5"])
    assert pool.stats.hit_rate == 3 / 4


def test_a_hit_stops_at_the_first_block_that_is_missing() -> None:
    pool = pool_in_use()
    assert pool.find_longest_cache_hit([b"4", b"?", b"1"]).tolist() == [4]


def test_what_was_handed_out_does_not_change_later() -> None:
    pool = BlockPool(6)
    waiting = pool.free_queue.uncached_blocks()
    ids = pool.get_new_blocks(4)
    pool.free_blocks([2, 1, 4, 3])
    assert (ids.tolist(), waiting.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert pool.get_new_blocks(5).tolist() == [3, 4, 1, 2, 5]


def test_a_block_is_found_as_a_plain_int_however_it_was_published() -> None:
    pool = BlockPool(4)
    ids = pool.get_new_blocks(2)
    pool.cache_full_blocks(ids[:1], [b"full"])
    pool.cache_partial_block(ids[1], b"part", 1)
    found = [pool.get_cached_block(key) for key in (b"full", b"part")]
    assert [(block, type(block)) for block in found] == [(1, int), (2, int)]


@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_tokens_that_do_not_divide_into_blocks_are_refused(num_tokens: int) -> None:
    pool = BlockPool(4, enable_kv_cache_events=True)
    pool.get_new_blocks(2)
    before = snapshot(pool)
    with pytest.raises(BadArgumentError, match=f"{num_tokens} were given"):
        pool.cache_full_blocks([1, 2], [b"1", b"2"], token_ids=[7] * num_tokens)
    assert snapshot(pool) == before


def test_one_request_may_be_served_from_both_halves_of_the_queue() -> None:
    queue = FreeBlockQueue(8)
    queue.append(queue.popleft(6)[::-1])
    assert queue.popleft(3).tolist() == [7, 6, 5]
    assert queue.cached_blocks().tolist() == [4, 3, 2, 1]
    assert len(queue) == 4


class CountingQueue(FreeBlockQueue):
    """Counts the steps whose number must stay small."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.looks = self.tidyings = 0

    def _pop_line(self, n: int) -> Any:
        self.looks += 1
        return super()._pop_line(n)

    def _tidy(self) -> None:
        self.tidyings += 1
        super()._tidy()


@pytest.mark.parametrize("gap", [1, 255, 256, 257, 5000])
def test_a_long_gap_in_the_line_is_passed_over_in_few_steps(gap: int) -> None:
    queue = CountingQueue(gap + 4)
    everybody = queue.popleft(gap + 3)
    queue.append(everybody)
    queue.remove(everybody[:gap])
    assert queue.popleft(2).tolist() == everybody[gap : gap + 2].tolist()
    assert queue.looks <= 2 + gap / 200
    queue.looks = 0
    assert queue.popleft(1).tolist() == everybody[gap + 2 :].tolist()
    assert queue.looks == 1, "a gap that was passed is not looked at again"
    assert len(queue) == 0


def test_tidying_is_paid_for_by_as_many_joins_as_there_are_blocks() -> None:
    queue, blocks, joins = CountingQueue(100), 100, 0
    held = queue.popleft(99)
    for turn in range(2000):
        some = held[turn % 90 : turn % 90 + 7]
        queue.append(some)
        joins += len(some)
        queue.remove(some)
    assert 0 < queue.tidyings <= joins / blocks


def test_one_block_costs_alike_in_a_small_pool_and_in_a_large_one() -> None:
    """Counted in memory, because every array operation makes an array."""
    pool = BlockPool(200_001)
    ids = pool.get_new_blocks(200_000)
    pool.cache_full_blocks(ids, [b"%d" % i for i in range(1, 200_001)])
    pool.free_blocks(ids)
    tracemalloc.start()
    pool.touch([100_000])
    pool.free_blocks([100_000])
    pool.get_new_blocks(1)
    pool.evict_blocks([150_000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000, "bytes; one array over all blocks has 200,000 or more"


KEYS = [b"A", b"B", b"C", b"D"]


class Batches(RuleBasedStateMachine):
    """Requests that hit, publish and free several blocks at once, against a naive ledger.

    The model keeps the readers as a list of names, the queue as one list in the order of reuse,
    and under each key the blocks that have it, first published first.
    """

    BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.BLOCKS + 1, enable_kv_cache_events=True)
        self.tables: dict[int, list[int]] = {}
        self.queue = list(range(1, self.BLOCKS + 1))
        self.owners: dict[bytes, list[int]] = {}
        self.queries = self.hits = self.evictions = 0
        self.announced: list[bytes] = []
        self.next_request = 0

    def is_read(self, block: int) -> bool:
        return any(block in table for table in self.tables.values())

    def is_named(self, block: int) -> bool:
        return any(block in blocks for blocks in self.owners.values())

    def is_full(self, block: int) -> bool:
        return any(block in self.owners.get(key, []) for key in KEYS)

    def forget(self, block: int) -> None:
        self.evictions += self.is_named(block)
        for key in list(self.owners):
            if block in self.owners[key]:
                self.owners[key].remove(block)
            if not self.owners[key]:
                del self.owners[key]

    def arrive(self, table: list[int]) -> None:
        self.tables[self.next_request] = table
        self.next_request += 1

    def a_table(self, data: st.DataObject) -> list[int]:
        return self.tables[data.draw(st.sampled_from(sorted(self.tables)))]

    @rule(n=st.integers(0, BLOCKS + 1))
    def take(self, n: int) -> None:
        if n > len(self.queue):
            before = snapshot(self.pool)
            with pytest.raises(PoolExhaustedError):
                self.pool.get_new_blocks(n)
            assert snapshot(self.pool) == before
            return
        taken, self.queue = self.queue[:n], self.queue[n:]
        for block in taken:
            self.forget(block)
        assert self.pool.get_new_blocks(n).tolist() == taken
        self.arrive(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish_several(self, data: st.DataObject) -> None:
        blocks = [b for b in self.a_table(data) if not self.is_full(b)]
        keys = data.draw(
            st.lists(st.sampled_from(KEYS), min_size=len(blocks), max_size=len(blocks))
        )
        if not blocks:
            return
        tokens = [token for i in range(len(blocks)) for token in (i, -i)]
        self.listen()
        self.pool.cache_full_blocks(blocks, keys, parent_block_hash=b"0", token_ids=tokens)
        expected = []
        for i, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            if key not in self.owners:
                parent = keys[i - 1] if i else b"0"
                expected.append(BlockStored([key], parent, [i, -i], 2))
            self.owners.setdefault(key, []).append(block)
        events = self.pool.take_events()
        assert events == expected
        self.announced += [event.block_hashes[0] for event in expected]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish_a_part(self, data: st.DataObject, key: bytes) -> None:
        for block in self.a_table(data)[:1]:
            self.pool.cache_partial_block(block, key.lower(), 1, token_ids=[1])
            owners = self.owners.setdefault(key.lower(), [])
            if block not in owners:
                owners.append(block)

    @rule(keys=st.lists(st.sampled_from([*KEYS, b"a"]), unique=True))
    def hit_several(self, keys: list[bytes]) -> None:
        expected: list[int] = []
        for key in keys:
            if key not in self.owners:
                break
            expected.append(self.owners[key][0])
        self.queries += len(keys)
        self.hits += len(expected)
        assert self.pool.find_longest_cache_hit(keys).tolist() == expected
        if len(set(expected)) == len(expected):
            self.pool.touch(expected)
            self.queue = [block for block in self.queue if block not in expected]
            self.arrive(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_a_part(self, data: st.DataObject) -> None:
        table = self.a_table(data)
        part = data.draw(st.permutations(table))[: data.draw(st.integers(0, len(table)))]
        self.pool.free_blocks(part)
        for block in part:
            table.remove(block)
        for block in part:
            if not self.is_read(block):
                self.queue.insert(len(self.queue) if self.is_named(block) else 0, block)

    @rule(blocks=st.lists(st.integers(0, BLOCKS), unique=True))
    def evict(self, blocks: list[int]) -> None:
        self.pool.evict_blocks(blocks)
        for block in blocks:
            if block in self.queue and self.is_named(block):
                self.queue.remove(block)
                self.queue.insert(0, block)
            self.forget(block)

    @precondition(lambda self: len(self.queue) >= self.BLOCKS - 2)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() is (len(self.queue) == self.BLOCKS)
        if len(self.queue) == self.BLOCKS:
            named = [block for block in self.queue if self.is_named(block)]
            self.queue = named[::-1] + [b for b in self.queue if b not in named]
            self.owners, self.queries, self.hits, self.evictions = {}, 0, 0, 0

    @rule(
        method=st.sampled_from(sorted(TAKES_IDS)),
        good=st.lists(st.integers(1, BLOCKS), max_size=2),
        bad=st.sampled_from([-1, BLOCKS + 1, 2**33]),
    )
    def misuse(self, method: str, good: list[int], bad: int) -> None:
        before = snapshot(self.pool)
        with pytest.raises(BadArgumentError):
            TAKES_IDS[method](self.pool, [*good, bad])
        assert snapshot(self.pool) == before

    def listen(self) -> None:
        """Do what a consumer of the events does."""
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                self.announced += event.block_hashes
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    self.announced.remove(key)
            else:
                self.announced = []

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants(list(self.tables.values()))
        queue = self.pool.free_queue
        assert [*queue.uncached_blocks(), *queue.cached_blocks()] == self.queue
        assert self.pool.num_free_blocks == len(self.queue)
        assert self.pool.usage == pytest.approx(1 - len(self.queue) / self.BLOCKS)
        for key in [*KEYS, *map(bytes.lower, KEYS)]:
            assert self.pool.get_cached_block(key) == self.owners.get(key, [None])[0]
        for block in range(self.BLOCKS + 1):
            readers = sum(block in table for table in self.tables.values())
            assert self.pool.ref_cnt[block] == readers
            assert self.pool.is_block_writable(block) is (readers == 1 and not self.is_named(block))
        stats = self.pool.stats
        assert (stats.queries, stats.hits) == (self.queries, self.hits)
        assert stats.evictions == self.evictions
        self.listen()
        assert sorted(self.announced) == sorted(self.owners)


TestBatches = Batches.TestCase
TestBatches.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None
)
