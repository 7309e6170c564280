"""The block pool: every refusal leaves it untouched, every schedule keeps its laws."""

from __future__ import annotations

import random
import tracemalloc
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fanoutkv import (
    AllBlocksCleared,
    BadArgumentError,
    BlockPool,
    BlockRemoved,
    BlockStored,
    DoubleFreeError,
    FanoutKVError,
    FreeBlockQueue,
    InvariantError,
    PoolExhaustedError,
    StaleIndexError,
)


def snapshot(pool: BlockPool) -> tuple[Any, ...]:
    """Return all that the pool knows, as values that do not change with it."""
    queue = pool.free_queue
    return (
        pool.ref_cnt.tolist(),
        pool.block_hash.tolist(),
        pool._is_cached.tolist(),
        queue.uncached_blocks().tolist(),
        queue.cached_blocks().tolist(),
        len(queue),
        {block: dict(keys) for block, keys in pool._partial_keys.items()},
        dict(pool._block_of),
        {key: list(ids) for key, ids in pool._duplicates.items()},
        list(pool._events),
        (pool.stats.queries, pool.stats.hits, pool.stats.evictions),
    )


def pool_in_use() -> BlockPool:
    """Blocks 1 and 2 published and read, 3 private, 4 published and waiting, 5 and 6 free."""
    pool = BlockPool(7, enable_kv_cache_events=True)
    pool.get_new_blocks(4)
    pool.cache_full_blocks([1, 2, 4], [b"1", b"2", b"4"], token_ids=[1, 2, 4])
    pool.cache_partial_block(2, b"2a", 1, token_ids=[2])
    pool.free_blocks([4])
    return pool


REFUSED: dict[str, tuple[type[FanoutKVError], Callable[[BlockPool], object]]] = {
    "free what nobody holds": (DoubleFreeError, lambda p: p.free_blocks([5])),
    "free what waits": (DoubleFreeError, lambda p: p.free_blocks([4])),
    "free one that is held and one that is not": (DoubleFreeError, lambda p: p.free_blocks([1, 5])),
    "free the null block": (DoubleFreeError, lambda p: p.free_blocks([0])),
    "free twice in one call": (BadArgumentError, lambda p: p.free_blocks([1, 3, 1])),
    "touch what is neither held nor named": (StaleIndexError, lambda p: p.touch([1, 5])),
    "touch the null block": (StaleIndexError, lambda p: p.touch([0])),
    "touch twice in one call": (BadArgumentError, lambda p: p.touch([4, 4])),
    "touch a block that is not there": (BadArgumentError, lambda p: p.touch([1, 7])),
    "touch a negative id": (BadArgumentError, lambda p: p.touch([-1])),
    "touch a negative id in 64 bits": (BadArgumentError, lambda p: p.touch(np.array([-1]))),
    "touch an id that wraps in 32 bits": (BadArgumentError, lambda p: p.touch([2**32 + 1])),
    "touch an id of 32 bits that is not there": (
        BadArgumentError,
        lambda p: p.touch(np.array([1, 7], dtype=np.int32)),
    ),
    "touch a negative id of 32 bits": (
        BadArgumentError,
        lambda p: p.touch(np.array([1, -1], dtype=np.int32)),
    ),
    "touch twice in 32 bits": (
        BadArgumentError,
        lambda p: p.touch(np.array([1, 2, 1], dtype=np.int32)),
    ),
    "touch a huge id": (BadArgumentError, lambda p: p.touch([2**70])),
    "touch a float": (BadArgumentError, lambda p: p.touch([1.0])),
    "touch a bool": (BadArgumentError, lambda p: p.touch([True])),
    "touch a string": (BadArgumentError, lambda p: p.touch(["1"])),
    "touch a bare number": (BadArgumentError, lambda p: p.touch(1)),
    "touch a bare number of 32 bits": (BadArgumentError, lambda p: p.touch(np.int32(1))),
    "touch a table of tables": (BadArgumentError, lambda p: p.touch([[1, 2]])),
    "touch a generator": (BadArgumentError, lambda p: p.touch(i for i in [1, 2])),  # type: ignore[arg-type]
    "ask for too many": (PoolExhaustedError, lambda p: p.get_new_blocks(4)),
    "ask for fewer than none": (BadArgumentError, lambda p: p.get_new_blocks(-1)),
    "ask for half a block": (BadArgumentError, lambda p: p.get_new_blocks(1.5)),  # type: ignore[arg-type]
    "publish twice": (
        BadArgumentError,
        lambda p: p.cache_full_blocks([3, 1], [b"x", b"y"], token_ids=[1, 2]),
    ),
    "publish what nobody holds": (
        BadArgumentError,
        lambda p: p.cache_full_blocks([3, 4], [b"x", b"y"], token_ids=[1, 2]),
    ),
    "publish with too few hashes": (
        BadArgumentError,
        lambda p: p.cache_full_blocks([3], [], token_ids=[1]),
    ),
    "publish under a string": (
        BadArgumentError,
        lambda p: p.cache_full_blocks([3], ["x"], token_ids=[1]),  # type: ignore[list-item]
    ),
    "publish without tokens for the event": (
        BadArgumentError,
        lambda p: p.cache_full_blocks([3], [b"x"]),
    ),
    "publish a part that nobody holds": (
        BadArgumentError,
        lambda p: p.cache_partial_block(4, b"x", 1),
    ),
    "publish a part of no tokens": (BadArgumentError, lambda p: p.cache_partial_block(1, b"x", 0)),
    "publish a part under a string": (
        BadArgumentError,
        lambda p: p.cache_partial_block(1, "x", 1),  # type: ignore[arg-type]
    ),
    "evict a block that is not there": (BadArgumentError, lambda p: p.evict_blocks([1, 9])),
    "evict twice in one call": (BadArgumentError, lambda p: p.evict_blocks([1, 1])),
    "ask whether a block that is not there is writable": (
        BadArgumentError,
        lambda p: p.is_block_writable(7),
    ),
    "ask whether block -1 is writable": (BadArgumentError, lambda p: p.is_block_writable(-1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing_and_says_why(name: str) -> None:
    error, call = REFUSED[name]
    pool = pool_in_use()
    before = snapshot(pool)
    with pytest.raises(error) as caught:
        call(pool)
    assert len(str(caught.value).split()) >= 5, "an error is a sentence"
    assert snapshot(pool) == before
    pool.check_invariants()


@pytest.mark.parametrize("blocks", [1, 0, -5, 2.5, "7"])
def test_a_pool_needs_two_blocks(blocks: Any) -> None:
    with pytest.raises(BadArgumentError):
        BlockPool(blocks)


@pytest.mark.parametrize(
    "kind", [list, tuple, *(f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64))]
)
def test_ids_of_every_integer_kind_are_the_same_ids(kind: Any) -> None:
    pool = BlockPool(9)
    pool.get_new_blocks(5)
    pool.touch(kind([2, 4]) if callable(kind) else np.array([2, 4], dtype=kind))
    assert pool.ref_cnt.tolist() == [0, 1, 2, 1, 2, 1, 0, 0, 0]


def test_the_smallest_pool_has_one_block_to_give() -> None:
    pool = BlockPool(2)
    assert pool.get_new_blocks(1).tolist() == [1]
    assert not pool.is_block_writable(0), "the null block is nobody's to write"
    assert pool.is_block_writable(1)


def test_a_publication_that_cannot_be_announced_is_refused_whole() -> None:
    for publish in (
        lambda p: p.cache_full_blocks([3], [b"x"], token_ids=[3], extra_keys=[]),
        lambda p: p.cache_full_blocks([3], [b"x"], token_ids=[3], extra_keys=[None, None]),
        lambda p: p.cache_full_blocks([3], [b"x"], token_ids=np.array([], dtype=int)),
        lambda p: p.cache_partial_block(3, b"x", 1),
        lambda p: p.cache_partial_block(3, b"x", 1.5, token_ids=[3]),
        lambda p: p.cache_partial_block(3, b"x", "1", token_ids=[3]),
    ):
        pool = pool_in_use()
        before = snapshot(pool)
        with pytest.raises(BadArgumentError):
            publish(pool)
        assert snapshot(pool) == before


def test_tokens_may_come_as_an_array_and_leave_as_plain_numbers() -> None:
    pool = pool_in_use()
    pool.take_events()
    pool.cache_full_blocks([3], [b"x"], token_ids=np.array([7, 8], dtype=np.int32))
    pool.cache_partial_block(3, b"y", np.int64(1), token_ids=np.array([7]))
    tokens = [event.token_ids for event in pool.take_events() if isinstance(event, BlockStored)]
    assert tokens == [[7, 8], [7]]
    assert {type(token) for row in tokens for token in row} == {int}


def test_to_publish_nothing_needs_nothing() -> None:
    pool = pool_in_use()
    before = snapshot(pool)
    pool.cache_full_blocks([], [])
    assert snapshot(pool) == before
    quiet = BlockPool(4, enable_caching=False, enable_kv_cache_events=True)
    quiet.cache_full_blocks(quiet.get_new_blocks(1), [b"x"])
    assert quiet.take_events() == []


@pytest.mark.parametrize("block", [1.5, True, "x", None])
def test_what_is_no_block_id_is_not_writable_or_not(block: Any) -> None:
    with pytest.raises(BadArgumentError):
        pool_in_use().is_block_writable(block)


def test_odd_numbers_of_blocks() -> None:
    assert BlockPool(np.int8(100)).num_free_blocks == 99  # type: ignore[arg-type]
    for call in (lambda p: p.get_new_blocks(True), lambda p: p.touch([[1], [2, 3]])):
        with pytest.raises(BadArgumentError):
            call(pool_in_use())
    for table in ([-1], [7]):
        with pytest.raises(InvariantError, match="outside"):
            pool_in_use().check_invariants([[1, 2, 3], table])


def test_a_list_that_was_checked_once_is_checked_against_the_state_again() -> None:
    pool = BlockPool(5)
    ids = pool.get_new_blocks(2)
    pool.free_blocks(ids)
    with pytest.raises(DoubleFreeError):
        pool.free_blocks(ids)
    assert pool.num_free_blocks == 4


def test_nothing_is_a_list_too() -> None:
    pool = pool_in_use()
    before = snapshot(pool)
    for call in (pool.touch, pool.free_blocks, pool.evict_blocks):
        call([])
    assert len(pool.get_new_blocks(0)) == 0
    assert snapshot(pool) == before


def test_uncached_blocks_come_back_last_freed_first() -> None:
    pool = BlockPool(6)
    pool.get_new_blocks(5)
    pool.free_blocks([2, 4])
    pool.free_blocks([1])
    assert pool.get_new_blocks(3).tolist() == [1, 4, 2]


def test_cached_blocks_come_back_first_freed_first_and_after_all_others() -> None:
    pool = BlockPool(6)
    pool.get_new_blocks(5)
    pool.cache_full_blocks([1, 2, 3], [b"1", b"2", b"3"])
    pool.free_blocks([3, 5, 1])
    pool.free_blocks([2, 4])
    assert pool.get_new_blocks(5).tolist() == [4, 5, 3, 1, 2]


def test_a_hit_leaves_from_the_middle() -> None:
    pool = BlockPool(6)
    pool.get_new_blocks(5)
    pool.cache_full_blocks([1, 2, 3, 4, 5], [b"1", b"2", b"3", b"4", b"5"])
    pool.free_blocks([1, 2, 3, 4, 5])
    pool.touch([3, 2])
    assert pool.get_new_blocks(3).tolist() == [1, 4, 5]


def test_the_queue_keeps_its_order_through_many_rounds() -> None:
    queue, rng, size = FreeBlockQueue(20), random.Random(0), 0
    model: deque[int] = deque()
    held = queue.popleft(19).tolist()
    for _ in range(3000):
        if held and rng.random() < 0.5:
            joins = rng.sample(held, rng.randint(1, len(held)))
            held = [block for block in held if block not in joins]
            queue.append(np.array(joins))
            model.extend(joins)
        elif model and rng.random() < 0.5:
            leaves = rng.sample(sorted(model), rng.randint(1, len(model)))
            queue.remove(np.array(leaves))
            for block in leaves:
                model.remove(block)
            held += leaves
        elif model:
            taken = queue.popleft(rng.randint(1, len(model))).tolist()
            assert taken == [model.popleft() for _ in taken]
            held += taken
            size += len(taken)
        assert queue.cached_blocks().tolist() == list(model)
        assert len(queue) == len(model)
    assert size > 10 * 20


def test_blocks_with_one_name_take_over_in_the_order_of_publication() -> None:
    pool = BlockPool(5)
    pool.get_new_blocks(4)
    for block in (2, 4, 1, 3):
        pool.cache_full_blocks([block], [b"same"])
    found = []
    for gone in (4, 2, 1, 3):
        found.append(pool.get_cached_block(b"same"))
        pool.evict_blocks([gone])
        pool.check_invariants()
    assert found == [2, 2, 1, 3]
    assert pool.get_cached_block(b"same") is None


def test_a_name_of_one_block_goes_while_another_name_has_two() -> None:
    pool = BlockPool(5, enable_kv_cache_events=True)
    pool.get_new_blocks(3)
    pool.cache_full_blocks([1, 2, 3], [b"same", b"same", b"own"], token_ids=[1, 1, 2])
    pool.take_events()
    pool.evict_blocks([3])
    assert pool.get_cached_block(b"own") is None
    assert pool.take_events() == [BlockRemoved([b"own"])]
    pool.check_invariants()


def test_all_names_of_a_block_go_together() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(2)
    pool.cache_partial_block(1, b"a", 1)
    pool.cache_full_blocks([1], [b"full"])
    pool.cache_partial_block(1, b"b", 2)
    pool.cache_partial_block(1, b"b", 2)  # again: no change
    pool.cache_partial_block(1, b"full", 4)  # it has that name
    pool.check_invariants()
    assert {pool.get_cached_block(key) for key in (b"a", b"b", b"full")} == {1}
    pool.free_blocks([1, 2])
    assert pool.get_new_blocks(2).tolist() == [2, 1]
    assert [pool.get_cached_block(key) for key in (b"a", b"b", b"full")] == [None] * 3
    pool.check_invariants()


def test_a_partial_key_cannot_become_the_full_key_of_its_block() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(2)
    pool.cache_partial_block(2, b"k", 1)
    before = snapshot(pool)
    with pytest.raises(BadArgumentError, match="partial key already"):
        pool.cache_full_blocks([1, 2], [b"other", b"k"])
    assert snapshot(pool) == before
    pool.free_blocks([1, 2])
    pool.get_new_blocks(2)
    pool.check_invariants()


def test_a_block_with_a_partial_key_only_is_cached_and_frozen() -> None:
    pool = BlockPool(3)
    pool.get_new_blocks(2)
    assert pool.is_block_writable(1)
    pool.cache_partial_block(1, b"a", 1)
    assert not pool.is_block_writable(1)
    pool.free_blocks([1, 2])
    assert pool.free_queue.cached_blocks().tolist() == [1]
    pool.touch([1])
    assert pool.ref_cnt[1] == 1


def test_eviction_by_name_leaves_readers_alone() -> None:
    pool = BlockPool(6)
    pool.get_new_blocks(4)
    pool.cache_full_blocks([1, 2, 3], [b"1", b"2", b"3"])
    pool.free_blocks([2, 3])
    pool.evict_blocks([1, 2, 4, 5])
    assert pool.ref_cnt.tolist() == [0, 1, 0, 0, 1, 0]
    assert [pool.get_cached_block(key) for key in (b"1", b"2", b"3")] == [None, None, 3]
    assert pool.free_queue.uncached_blocks().tolist() == [2, 5]
    assert pool.free_queue.cached_blocks().tolist() == [3]
    assert pool.is_block_writable(1)
    assert pool.stats.evictions == 2
    pool.check_invariants()


def test_a_reset_is_refused_while_anybody_reads() -> None:
    pool = pool_in_use()
    before = snapshot(pool)
    assert pool.reset_prefix_cache() is False
    assert snapshot(pool) == before
    pool.free_blocks([3, 2, 1])
    pool.find_longest_cache_hit([b"1"])
    pool.take_events()
    assert pool.reset_prefix_cache() is True
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.get_cached_block(b"1") is None
    assert pool.stats.queries == 0
    assert len(pool.get_new_blocks(6)) == 6
    pool.check_invariants()


def test_without_caching_nothing_is_published() -> None:
    pool = BlockPool(4, enable_caching=False)
    pool.get_new_blocks(2)
    pool.cache_full_blocks([1], [b"1"])
    pool.cache_partial_block(2, b"2", 1)
    assert pool.get_cached_block(b"1") is None
    assert pool.get_cached_block(b"2") is None
    pool.free_blocks([1, 2])
    assert pool.free_queue.uncached_blocks().tolist() == [2, 1, 3]


def test_usage_and_hits_are_counted() -> None:
    pool = BlockPool(5)
    assert pool.usage == 0.0
    assert pool.stats.hit_rate == 0.0
    pool.get_new_blocks(3)
    assert pool.usage == 0.75
    pool.cache_full_blocks([1, 2], [b"1", b"2"])
    assert pool.find_longest_cache_hit([b"1", b"2", b"x", b"1"]).tolist() == [1, 2]
    assert pool.find_longest_cache_hit([b"x", b"1"]).tolist() == []
    assert (pool.stats.queries, pool.stats.hits) == (6, 2)
    assert pool.find_longest_cache_hit([]).dtype == np.int32


def test_an_event_carries_what_a_listener_needs() -> None:
    pool = BlockPool(9, enable_kv_cache_events=True)
    pool.get_new_blocks(6)
    pool.cache_full_blocks([2], [b"B"], parent_block_hash=b"A", token_ids=[3, 4])
    pool.take_events()
    pool.cache_full_blocks(
        [1, 3, 4],
        [b"A", b"B", b"C"],
        parent_block_hash=b"root",
        token_ids=[1, 2, 3, 4, 5, 6],
        lora_name="pirate",
        extra_keys=[("x",), None, ("z",)],
    )
    pool.cache_partial_block(4, b"C-", 1, parent_block_hash=b"B", token_ids=[5])
    pool.evict_blocks([3])
    assert pool.take_events() == [
        BlockStored([b"A"], b"root", [1, 2], 2, "pirate", [("x",)]),
        BlockStored([b"C"], b"B", [5, 6], 2, "pirate", [("z",)]),
        BlockStored([b"C-"], b"B", [5], 1),
    ], "B was known already, and block 2 still has it"
    pool.evict_blocks([2, 4])
    assert pool.take_events() == [BlockRemoved([b"B"]), BlockRemoved([b"C"]), BlockRemoved([b"C-"])]
    assert pool.take_events() == []


@pytest.mark.parametrize(
    ("law", "break_it"),
    [
        ("below zero", lambda p: p.ref_cnt.__setitem__(3, -1)),
        ("null block", lambda p: p.ref_cnt.__setitem__(0, 1)),
        ("queued", lambda p: p.ref_cnt.__setitem__(5, 1)),
        ("queued", lambda p: p.ref_cnt.__setitem__(3, 0)),
        ("among the nameless", lambda p: p.cache_full_blocks([3], [b"3"], token_ids=[3])
         or p.free_queue.prepend(np.array([3])) or p.ref_cnt.__setitem__(3, 0)),
        ("among the named", lambda p: p.free_queue.append(np.array([3]))
         or p.ref_cnt.__setitem__(3, 0)),
        ("name each other", lambda p: p.block_hash.__setitem__(1, None)),
        ("name each other", lambda p: p._block_of.__setitem__(b"1", 2)),
        ("name each other", lambda p: p._partial_keys.clear()),
        ("key twice", lambda p: p._duplicates.__setitem__(b"1", [1])),
        ("column of published", lambda p: p._is_cached.__setitem__(3, True)),
        ("column of published", lambda p: p._is_cached.__setitem__(1, False)),
        ("queue says", lambda p: setattr(p.free_queue, "_num_lined", 0)),
    ],
)  # fmt: skip
def test_every_law_can_be_broken(law: str, break_it: Callable[[BlockPool], object]) -> None:
    pool = pool_in_use()
    pool.check_invariants([[1, 2, 3]])
    break_it(pool)
    with pytest.raises(InvariantError, match=law):
        pool.check_invariants()


def test_the_law_of_tables_can_be_broken() -> None:
    pool = pool_in_use()
    pool.check_invariants([[1, 2], [3, 0, 0]])
    for tables in ([[1, 2]], [[1, 2, 3], [1]], [[1, 2, 3, 5]]):
        with pytest.raises(InvariantError, match="number of tables"):
            pool.check_invariants(tables)


def test_a_million_blocks_are_small() -> None:
    tracemalloc.start()
    pool = BlockPool(1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400e6
    assert pool.num_free_blocks == 999_999


class Ledger(RuleBasedStateMachine):
    """Random schedules against a model made of lists, which is obviously right and slow.

    The model: readers by block, names by block in order of publication, and the queue as two
    plain lists, next to be reused first.
    """

    BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.BLOCKS + 1, enable_kv_cache_events=True)
        self.tables: list[list[int]] = []
        self.nameless = list(range(1, self.BLOCKS + 1))
        self.named: list[int] = []
        self.names: list[tuple[bytes, int]] = []
        self.full: set[int] = set()
        self.heard: set[bytes] = set()

    def readers(self, block: int) -> int:
        return sum(block in table for table in self.tables)

    def has_name(self, block: int) -> bool:
        return any(owner == block for _, owner in self.names)

    def lose_names(self, blocks: list[int]) -> None:
        self.names = [(key, owner) for key, owner in self.names if owner not in blocks]
        self.full -= set(blocks)

    @rule(n=st.integers(0, 4))
    def take(self, n: int) -> None:
        if n > len(self.nameless) + len(self.named):
            before = snapshot(self.pool)
            with pytest.raises(PoolExhaustedError):
                self.pool.get_new_blocks(n)
            assert snapshot(self.pool) == before
            return
        expected = (self.nameless + self.named)[:n]
        assert self.pool.get_new_blocks(n).tolist() == expected
        self.nameless = [b for b in self.nameless if b not in expected]
        self.named = [b for b in self.named if b not in expected]
        self.lose_names(expected)
        self.tables.append(expected)

    @rule(data=st.data(), partial=st.booleans(), key=st.sampled_from([b"A", b"B", b"C"]))
    def publish(self, data: st.DataObject, partial: bool, key: bytes) -> None:
        held = sorted({block for table in self.tables for block in table})
        if not held:
            return
        block = data.draw(st.sampled_from(held))
        if partial:
            key = key.lower()
            self.pool.cache_partial_block(block, key, 1, token_ids=[1])
        elif block in self.full:
            with pytest.raises(BadArgumentError):
                self.pool.cache_full_blocks([block], [key], token_ids=[1])
            return
        else:
            self.pool.cache_full_blocks([block], [key], token_ids=[1])
            self.full.add(block)
        if (key, block) not in self.names:
            self.names.append((key, block))

    @rule(key=st.sampled_from([b"A", b"B", b"C", b"a", b"b", b"c"]), new_table=st.booleans())
    def hit(self, key: bytes, new_table: bool) -> None:
        expected = next((owner for name, owner in self.names if name == key), None)
        assert self.pool.get_cached_block(key) == expected
        if expected is None:
            return
        table = None if new_table else next((t for t in self.tables if expected not in t), None)
        self.pool.touch([expected])
        if expected in self.named:
            self.named.remove(expected)
        if table is None:
            self.tables.append([expected])
        else:
            table.append(expected)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if not self.tables:
            return
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        order = data.draw(st.permutations(table))
        self.pool.free_blocks(order)
        idle = [block for block in order if not self.readers(block)]
        for block in idle:
            if self.has_name(block):
                self.named.append(block)
            else:
                self.nameless.insert(0, block)

    @rule(blocks=st.lists(st.integers(1, BLOCKS), unique=True, max_size=3))
    def evict(self, blocks: list[int]) -> None:
        self.pool.evict_blocks(blocks)
        for block in blocks:
            if block in self.named:
                self.named.remove(block)
                self.nameless.insert(0, block)
        self.lose_names(blocks)

    @rule()
    def reset(self) -> None:
        in_use = any(self.tables)
        assert self.pool.reset_prefix_cache() is not in_use
        if not in_use:
            self.nameless = [*self.named[::-1], *self.nameless]
            self.named, self.names, self.full = [], [], set()

    @rule(blocks=st.lists(st.integers(-1, BLOCKS + 1), min_size=1, max_size=3))
    def misuse(self, blocks: list[int]) -> None:
        """Free what nobody holds and touch what nobody knows, among things that are fine."""
        before = snapshot(self.pool)
        inside = len(set(blocks)) == len(blocks) and all(0 < b <= self.BLOCKS for b in blocks)
        if not inside or not all(self.readers(b) for b in blocks):
            with pytest.raises(FanoutKVError):
                self.pool.free_blocks(blocks)
        if not inside or not all(self.readers(b) or self.has_name(b) for b in blocks):
            with pytest.raises(FanoutKVError):
                self.pool.touch(blocks)
        assert snapshot(self.pool) == before

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants(self.tables)
        assert self.pool.ref_cnt[1:].tolist() == [
            self.readers(b) for b in range(1, self.BLOCKS + 1)
        ]
        assert self.pool.free_queue.uncached_blocks().tolist() == self.nameless
        assert self.pool.free_queue.cached_blocks().tolist() == self.named
        for block in range(1, self.BLOCKS + 1):
            alone = self.readers(block) == 1 and not self.has_name(block)
            assert self.pool.is_block_writable(block) is alone

    @invariant()
    def a_listener_knows_what_can_be_found(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                assert not self.heard & set(event.block_hashes), "announced twice"
                self.heard |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.heard >= set(event.block_hashes), "withdrawn twice"
                self.heard -= set(event.block_hashes)
            else:
                self.heard.clear()
        assert self.heard == {key for key, _ in self.names}


TestLedger = Ledger.TestCase
TestLedger.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None
)
