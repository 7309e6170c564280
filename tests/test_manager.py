"""The manager: hits are real, steps are all or nothing, and every request reads its own tokens."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fanoutkv import (
    AllBlocksCleared,
    BadArgumentError,
    BlockRemoved,
    BlockStored,
    KVCacheManager,
    MultiModalFeature,
    Request,
    StaleIndexError,
)
from fanoutkv_book.explore import explore
from fanoutkv_book.worlds import ManagerWorld

SIZE = 4


def request(name: str, tokens: Any, **more: Any) -> Request:
    return Request(name, list(tokens), **more)


def admit(manager: KVCacheManager, req: Request, new: int | None = None, **more: Any) -> int | None:
    """Take the hit and slots for the rest of the prompt; return the tokens hit, or None."""
    _, hit = manager.get_computed_blocks(req)
    new = req.num_tokens - hit if new is None else new
    if manager.allocate_slots(req, new, num_new_computed_tokens=hit, **more) is None:
        return None
    req.num_computed_tokens += new
    return hit


def snapshot(manager: KVCacheManager) -> bytes:
    pool = manager.pool
    return pickle.dumps((
        pool.ref_cnt, pool.free_queue.uncached_blocks(), pool.free_queue.cached_blocks(),
        pool.block_hash.tolist(), pool._partial_keys, pool._block_of, pool._duplicates,
        manager.prefix_cache_stats, [(k, h.table.block_ids, h.table.num_tokens, h.num_published)
                                     for k, h in manager._held.items()],
        [copies.tolist() for copies in manager._copies], pool._events,
    ))  # fmt: skip


def test_the_second_request_hits_what_the_first_computed() -> None:
    manager = KVCacheManager(20, SIZE)
    one, two = request("1", range(11)), request("2", [*range(9), 99, 99, 99])
    assert admit(manager, one) == 0
    blocks, hit = manager.get_computed_blocks(two)
    assert (blocks.tolist(), hit) == ([1, 2], 8)
    assert admit(manager, two) == 8
    assert manager.block_ids(two)[:2].tolist() == manager.block_ids(one)[:2].tolist()
    assert manager.pool.ref_cnt[[1, 2, 3]].tolist() == [2, 2, 1]
    manager.check_invariants()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_one_token_is_always_left_to_compute(length: int) -> None:
    manager = KVCacheManager(20, SIZE)
    admit(manager, request("1", range(length)))
    _, hit = manager.get_computed_blocks(request("2", range(length)))
    assert hit == (length - 1) // SIZE * SIZE


def test_partial_keys_leave_less_to_compute() -> None:
    manager = KVCacheManager(20, 16, hash_block_size=4)
    one = request("1", range(30))
    admit(manager, one)
    manager.free(one)
    two = request("2", range(30))
    blocks, hit = manager.get_computed_blocks(two)
    assert hit == 28
    assert admit(manager, two) == 28
    copies = manager.take_block_copies()
    assert copies.tolist() == [[blocks[1], manager.block_ids(two)[1]]], (
        "it goes on inside the block"
    )
    assert manager.take_block_copies().tolist() == []
    manager.check_invariants()


@pytest.mark.parametrize(
    "more",
    [
        {"lora_name": "pirate"},
        {"cache_salt": "s"},
        {"mm_features": [MultiModalFeature("cat", 2, 1)]},
        {"prompt_embeds": np.ones((9, 2), dtype=np.float32)},
    ],
)
def test_what_changes_kv_keeps_requests_apart(more: dict[str, Any]) -> None:
    manager = KVCacheManager(20, SIZE)
    admit(manager, request("1", range(9)))
    assert manager.get_computed_blocks(request("2", range(9), **more))[1] == 0
    admit(manager, request("3", range(9), **more))
    assert manager.get_computed_blocks(request("4", range(9), **more))[1] == 8


@pytest.mark.parametrize("hit_first", [False, True])
def test_what_does_not_fit_changes_nothing(hit_first: bool) -> None:
    manager = KVCacheManager(8, SIZE, enable_kv_cache_events=True)
    one = request("1", range(12))
    admit(manager, one)
    manager.free(one)
    filler = request("f", [50, 51, 52, 53, 54])
    admit(manager, filler)
    two = request("2", [*(range(12) if hit_first else range(100, 112)), *range(60, 80)])
    _, hit = manager.get_computed_blocks(two)
    assert hit == (12 if hit_first else 0)
    before = snapshot(manager)
    kwargs = {"num_new_computed_tokens": hit}
    assert manager.allocate_slots(two, 32 - hit, **kwargs) is None
    assert snapshot(manager) == before
    assert two.num_computed_tokens == 0
    manager.free(filler)
    assert manager.allocate_slots(two, 28 - hit, **kwargs) is not None


def test_hits_that_wait_in_the_queue_are_not_room() -> None:
    """Five blocks are free, and three of them are the hit itself: three more do not fit."""
    manager = KVCacheManager(6, SIZE)
    one = request("1", range(12))
    admit(manager, one)
    manager.free(one)
    assert manager.pool.num_free_blocks == 5
    two = request("2", range(22))
    _, hit = manager.get_computed_blocks(two)
    assert hit == 12
    assert manager.allocate_slots(two, 10, num_new_computed_tokens=hit) is None
    assert manager.allocate_slots(two, 8, num_new_computed_tokens=hit) is not None


def test_a_hit_that_is_gone_is_noticed() -> None:
    manager = KVCacheManager(20, SIZE)
    one = request("1", range(9))
    admit(manager, one)
    two = request("2", range(9))
    blocks, hit = manager.get_computed_blocks(two)
    manager.pool.evict_blocks(blocks)
    before = snapshot(manager)
    with pytest.raises(StaleIndexError):
        manager.allocate_slots(two, 1, num_new_computed_tokens=hit)
    assert snapshot(manager) == before


def test_each_request_counts_once() -> None:
    manager = KVCacheManager(6, SIZE)
    one = request("1", range(9))
    admit(manager, one)
    two = request("2", [*range(8), 70, 71, 72, 73, 74, 75, 76, 77, 78])
    for _ in range(3):
        assert admit(manager, two) is None
    stats = manager.prefix_cache_stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 9, 0)
    manager.preempt(one)
    assert admit(manager, two) == 8
    assert (stats.requests, stats.queries, stats.hits) == (2, 26, 8)
    manager.free(two)
    assert admit(manager, one) == 8
    assert (stats.requests, stats.hits) == (2, 8)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 9, 8)


def test_drafts_get_slots_but_no_names() -> None:
    manager = KVCacheManager(20, SIZE)
    req = request("1", range(6))
    admit(manager, req, num_lookahead_tokens=3)
    assert len(manager.block_ids(req)) == 3
    assert manager.allocate_slots(req, 4) is not None  # one real token, three drafts
    req.append([6])
    assert manager.get_computed_blocks(request("2", [0, 1, 2, 3, 4, 5, 6, 7, 8]))[1] == 4
    req.num_computed_tokens = 7  # the drafts were rejected
    req.append([7, 8])
    manager.allocate_slots(req, 2)
    assert manager.get_computed_blocks(request("2", range(9)))[1] == 8
    assert len(manager.block_ids(req)) == 3, "the reserve was used"
    manager.check_invariants()


def test_external_tokens_are_published_when_they_have_come() -> None:
    manager = KVCacheManager(20, SIZE)
    req = request("1", range(13))
    new = manager.allocate_slots(req, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
    assert new is not None
    assert len(new) == 3
    assert req.num_computed_tokens == 12
    assert manager.get_computed_blocks(request("2", range(13)))[1] == 0
    manager.cache_blocks(req, 12)
    assert manager.get_computed_blocks(request("2", range(13)))[1] == 12


def test_a_step_that_never_ran_leaves_no_names() -> None:
    manager = KVCacheManager(20, SIZE)
    req = request("1", range(12))
    manager.allocate_slots(req, 6)
    req.num_computed_tokens += 6
    manager.allocate_slots(req, 6)
    manager.free(req)  # aborted before the second step
    assert manager.get_computed_blocks(request("2", range(12)))[1] == 4
    manager.check_invariants()


def test_blocks_behind_the_window_become_null() -> None:
    manager = KVCacheManager(20, SIZE, sliding_window=5)
    req = request("1", range(20))
    for _ in range(5):
        manager.allocate_slots(req, 4)
        req.num_computed_tokens += 4
        manager.check_invariants()
    table = manager.block_ids(req)
    # At the last step 16 tokens were computed: the first new one looks back to token 12.
    assert (table == 0).tolist() == [True] * 3 + [False] * 2
    manager.free(req)
    assert manager.pool.num_free_blocks == 19


def test_a_window_makes_room_for_its_own_step() -> None:
    manager = KVCacheManager(4, SIZE, sliding_window=4)
    req = request("1", range(40))
    for _ in range(10):
        assert manager.allocate_slots(req, 4) is not None
        req.num_computed_tokens += 4


def test_a_window_gains_nothing_from_blocks_that_others_read() -> None:
    manager = KVCacheManager(5, SIZE, sliding_window=4)
    one = request("1", range(8))
    admit(manager, one)
    two = manager.fork(one, "2")
    two.append(range(50, 62))
    before = snapshot(manager)
    assert manager.allocate_slots(two, 12) is None, "two are free, and three are needed"
    assert snapshot(manager) == before
    assert manager.allocate_slots(two, 8) is not None


def test_names_that_come_late_pass_over_the_window() -> None:
    manager = KVCacheManager(9, SIZE, sliding_window=4)
    req = request("1", range(16))
    for _ in range(4):
        manager.allocate_slots(req, 4, delay_cache_blocks=True)
        req.num_computed_tokens += 4
    assert (manager.block_ids(req) == 0).tolist() == [True, True, False, False]
    manager.cache_blocks(req, 16)
    manager.check_invariants()
    assert sum(key is not None for key in manager.pool.block_hash) == 2


def test_two_who_compute_the_same_at_once_both_stay_right() -> None:
    manager = KVCacheManager(20, SIZE)
    one, two = request("1", range(9)), request("2", range(9))
    for req in (one, two):
        manager.allocate_slots(req, 9, delay_cache_blocks=True)
        req.num_computed_tokens += 9
    for req in (one, two):
        manager.cache_blocks(req, 9)
    manager.check_invariants()
    assert manager.get_computed_blocks(request("3", range(9)))[0].tolist() == [1, 2]
    manager.free(one)
    manager.pool.evict_blocks([1, 2])
    assert manager.get_computed_blocks(request("3", range(9)))[0].tolist() == [4, 5]


def test_forks_share_and_then_copy() -> None:
    manager = KVCacheManager(20, SIZE)
    one = request("1", range(6))
    admit(manager, one)
    two = manager.fork(one, "2")
    for req, token in ((one, 50), (two, 60)):
        req.append([token])
        manager.allocate_slots(req, 1)
    assert manager.take_block_copies().tolist() == [[2, 3]]
    assert manager.block_ids(one).tolist() == [1, 3]
    assert manager.block_ids(two).tolist() == [1, 2]
    manager.check_invariants()
    with pytest.raises(BadArgumentError):
        manager.fork(one, "2")
    with pytest.raises(BadArgumentError):
        manager.fork(request("x", [1]), "3")


@pytest.mark.parametrize("blocks", [8, 7])
def test_a_fork_and_then_a_step_back(blocks: int) -> None:
    """Guesses were written, the request forked, and then both go back behind the guesses."""
    manager = KVCacheManager(blocks, SIZE)
    one = request("1", range(3))
    manager.allocate_slots(one, 3, num_lookahead_tokens=2)
    one.num_computed_tokens = 3
    manager.allocate_slots(one, 5)  # all of them guesses
    one.num_computed_tokens = 8
    two = manager.fork(one, "2")
    for req, start in ((one, 50), (two, 60)):
        req.num_computed_tokens = 3
        req.append(range(start, start + 5))
        assert manager.allocate_slots(req, 5) is not None
        manager.check_invariants()
    rows = [manager.block_ids(req).tolist() for req in (one, two)]
    assert not set(rows[0]) & set(rows[1]), "each wrote into every one of its blocks"


def test_letting_go_twice_is_as_good_as_once() -> None:
    manager = KVCacheManager(20, SIZE)
    req = request("1", range(9))
    admit(manager, req)
    manager.free(req)
    before = snapshot(manager)
    manager.free(req)
    assert snapshot(manager) == before
    assert len(manager.block_ids(req)) == 0


def test_events_and_reset() -> None:
    manager = KVCacheManager(4, SIZE, enable_kv_cache_events=True)
    req = request("1", range(9), lora_name="pirate")
    admit(manager, req)
    first, second = manager.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0]
    assert (first.token_ids, second.token_ids) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert first.extra_keys == [(("lora", "pirate"),)]
    assert not manager.reset_prefix_cache()
    manager.free(req)
    admit(manager, request("2", range(50, 62)))
    assert sum(isinstance(event, BlockRemoved) for event in manager.take_events()) == 2
    manager.free(request("2", [1]))
    assert manager.reset_prefix_cache()
    assert manager.take_events()[-1] == AllBlocksCleared()
    assert manager.prefix_cache_stats.requests == 0


@pytest.mark.parametrize(
    ("tokens", "kwargs"),
    [(-1, {}), (0, {}), (1, {"num_lookahead_tokens": -1}), (1, {"num_new_computed_tokens": 4})],
)
def test_senseless_steps_are_refused(tokens: int, kwargs: dict[str, int]) -> None:
    manager = KVCacheManager(20, SIZE)
    req = request("1", range(9))
    admit(manager, req)
    before = snapshot(manager)
    with pytest.raises(BadArgumentError):
        manager.allocate_slots(req, tokens, **kwargs)
    assert snapshot(manager) == before


def test_senseless_managers_and_requests_are_refused() -> None:
    for kwargs in ({"hash_block_size": 3}, {"sliding_window": 0}):
        with pytest.raises(BadArgumentError):
            KVCacheManager(20, SIZE, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(BadArgumentError):
        request("1", [])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 2}])
def test_every_small_world_of_requests_is_right(options: dict[str, int]) -> None:
    report = explore(ManagerWorld(**options))
    assert not report.fault, report
    assert report.states > 1000


class Serving(RuleBasedStateMachine):
    """Requests with common prefixes come, compute in chunks, fork, are preempted, and leave.

    Each place of the memory holds the token that was written there. A request must read its own
    tokens up to where it has computed, except behind its window.
    """

    @initialize(fine=st.booleans(), window=st.sampled_from([None, None, 5]), events=st.booleans())
    def open(self, fine: bool, window: int | None, events: bool) -> None:
        self.manager = KVCacheManager(
            12, SIZE, hash_block_size=2 if fine else SIZE, sliding_window=window,
            enable_kv_cache_events=events,
        )  # fmt: skip
        self.memory = np.full((12, SIZE), -1)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.names = 0

    @rule(prefix=st.integers(0, 10), own=st.integers(1, 6), kind=st.sampled_from([0, 0, 1]))
    def come(self, prefix: int, own: int, kind: int) -> None:
        self.names += 1
        tokens = [*range(100 * kind, 100 * kind + prefix), *[1000 + self.names] * own]
        lora = "pirate" if kind else None
        self.waiting.append(Request(str(self.names), tokens, lora_name=lora))

    @rule(data=st.data(), chunk=st.integers(1, 8), lookahead=st.integers(0, 3), delay=st.booleans())
    def step(self, data: st.DataObject, chunk: int, lookahead: int, delay: bool) -> None:
        if not self.waiting + self.running:
            return
        req = data.draw(st.sampled_from(self.waiting + self.running))
        blocks, hit = self.manager.get_computed_blocks(req)
        assert hit < req.num_tokens
        if hit:
            read = self.memory[blocks].ravel()[:hit]
            assert read.tolist() == req.all_token_ids[:hit].tolist(), "a hit holds these tokens"
        new = min(chunk, req.num_tokens - req.num_computed_tokens - hit)
        if not new:
            req.append([2000 + self.names])
            new = 1
        before, state = snapshot(self.manager), req.num_computed_tokens
        got = self.manager.allocate_slots(
            req, new, num_new_computed_tokens=hit, num_lookahead_tokens=lookahead,
            delay_cache_blocks=delay,
        )  # fmt: skip
        if got is None:
            assert snapshot(self.manager) == before
            assert req.num_computed_tokens == state
            return
        pairs = self.manager.take_block_copies()
        self.memory[pairs[:, 1]] = self.memory[pairs[:, 0]]
        self.write(req, new)
        if delay:
            self.manager.cache_blocks(req, req.num_computed_tokens)
        if req in self.waiting:
            self.waiting.remove(req)
            self.running.append(req)

    def write(self, req: Request, new: int) -> None:
        start, end = req.num_computed_tokens, req.num_computed_tokens + new
        table, window = self.manager.block_ids(req), self.manager.sliding_window
        seen = range(0 if window is None else max(0, start - window + 1), start)
        read = [self.memory[table[p // SIZE], p % SIZE] for p in seen if table[p // SIZE]]
        assert read == [req.all_token_ids[p] for p in seen], "the first new token looks at these"
        for position in range(start, end):
            block = table[position // SIZE]
            assert block != 0
            self.memory[block, position % SIZE] = req.all_token_ids[position]
        req.num_computed_tokens = end

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if self.running:
            self.names += 1
            parent = data.draw(st.sampled_from(self.running))
            child = self.manager.fork(parent, str(self.names))
            child.append([3000 + self.names])
            self.running.append(child)

    @rule(data=st.data(), twice=st.booleans())
    def leave(self, data: st.DataObject, twice: bool) -> None:
        if self.running:
            req = data.draw(st.sampled_from(self.running))
            self.running.remove(req)
            self.manager.free(req)
            if twice:
                self.manager.free(req)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if self.running:
            req = data.draw(st.sampled_from(self.running))
            self.running.remove(req)
            self.manager.preempt(req)
            self.waiting.append(req)

    @rule(blocks=st.lists(st.integers(1, 11), unique=True, max_size=3))
    def evict(self, blocks: list[int]) -> None:
        self.manager.pool.evict_blocks(blocks)

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() is not bool(self.running)

    @invariant()
    def everyone_reads_its_own_tokens(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        window = self.manager.sliding_window
        for req in self.running:
            done = req.num_computed_tokens
            start = 0 if window is None else max(0, done - window + 1)
            table = self.manager.block_ids(req)
            read = self.memory[table].ravel()[start:done]
            assert read.tolist() == req.all_token_ids[start:done].tolist()

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for req in self.running:
                self.manager.free(req)
            assert self.manager.pool.num_free_blocks == 11, "a block has leaked"


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=200, stateful_step_count=40, derandomize=True, deadline=None
)
