"""Forked sequences read what they wrote, whatever the others do."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fanoutkv import BadArgumentError, BlockPool, PoolExhaustedError
from fanoutkv.cow import (
    BlockTable,
    alias,
    collect_orphans,
    move_group,
    prepare_write,
    reparent,
    select_beams,
)
from fanoutkv_book.explore import ForkWorld, explore

SIZE = 4


class Memory:
    """K/V in which each token is a number of its own, moved as the ledger says."""

    def __init__(self, num_blocks: int, size: int = SIZE) -> None:
        self.places = np.full((num_blocks, size), -1)

    def copy(self, pairs: np.ndarray, source: Memory | None = None) -> None:
        self.places[pairs[:, 1]] = (source or self).places[pairs[:, 0]]

    def write(self, table: BlockTable, tokens: list[int]) -> None:
        slots = table.slots(table.num_tokens - len(tokens), table.num_tokens)
        self.places.ravel()[slots] = tokens

    def read(self, table: BlockTable) -> list[int]:
        return self.places.ravel()[table.slots(0, table.num_tokens)].tolist()


def started(pool: BlockPool, tokens: int, size: int = SIZE) -> BlockTable:
    table = BlockTable(pool, size)
    prepare_write([table], tokens)
    return table


def state(pool: BlockPool, tables: list[BlockTable]) -> bytes:
    return pickle.dumps((vars(pool)["ref_cnt"], pool.free_queue.uncached_blocks(),
                         pool.free_queue.cached_blocks(), pool._block_of,
                         [(t.block_ids, t.num_tokens) for t in tables]))  # fmt: skip


def test_the_example_of_the_paper() -> None:
    """PagedAttention, figure 8: blocks 7 and 1 hold seven tokens; the first writer copies to 3."""
    pool = BlockPool(9)
    pool.get_new_blocks(8)
    pool.free_blocks([3, 1, 7])
    first = started(pool, 7)
    second = first.fork()
    assert first.block_ids.tolist() == second.block_ids.tolist() == [7, 1]
    assert pool.ref_cnt[[7, 1]].tolist() == [2, 2]
    assert prepare_write([first]).tolist() == [[1, 3]]
    assert first.block_ids.tolist() == [7, 3]
    assert pool.ref_cnt[[7, 1, 3]].tolist() == [2, 1, 1]
    assert prepare_write([second]).tolist() == []
    assert second.block_ids.tolist() == [7, 1]


@pytest.mark.parametrize("readers", [1, 2, 3, 7])
@pytest.mark.parametrize("together", [True, False])
def test_of_n_readers_of_a_tail_all_but_one_copy(readers: int, together: bool) -> None:
    pool = BlockPool(30)
    tables = [started(pool, SIZE + 1)]
    tables += [tables[0].fork() for _ in range(readers - 1)]
    steps = [tables] if together else [[table] for table in tables]
    assert sum(len(prepare_write(step)) for step in steps) == readers - 1
    pool.check_invariants([t.block_ids for t in tables])


@pytest.mark.parametrize("prompt", [100, 1_000, 10_000, 100_000])
def test_the_number_of_copies_does_not_grow_with_the_prompt(prompt: int) -> None:
    pool = BlockPool(prompt // 16 + 200)
    tables = [started(pool, prompt + 1, 16)]
    tables += [tables[0].fork() for _ in range(3)]
    assert sum(len(prepare_write(tables)) for _ in range(40)) == 3


def test_a_full_tail_is_shared_for_good() -> None:
    pool = BlockPool(9)
    one = started(pool, 2 * SIZE)
    two = one.fork()
    assert len(prepare_write([one, two])) == 0
    assert one.block_ids[:2].tolist() == two.block_ids[:2].tolist()
    assert one.block_ids[2] != two.block_ids[2]


def test_a_published_tail_is_copied_even_by_its_only_reader() -> None:
    pool, memory = BlockPool(9), Memory(9)
    table = started(pool, 3)
    memory.write(table, [1, 2, 3])
    published = int(table.block_ids[0])
    pool.cache_partial_block(published, b"three", 3)
    memory.copy(prepare_write([table]))
    memory.write(table, [4])
    assert pool.get_cached_block(b"three") == published
    assert memory.places[published].tolist() == [1, 2, 3, -1]
    assert memory.read(table) == [1, 2, 3, 4]
    assert pool.ref_cnt[published] == 0
    pool.check_invariants([table.block_ids])


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(5)
    tables = [started(pool, 3)]
    tables += [tables[0].fork() for _ in range(4)]
    before = state(pool, tables)
    with pytest.raises(PoolExhaustedError, match="4 of them for copies"):
        prepare_write(tables)
    assert state(pool, tables) == before
    prepare_write(tables[:3])


@pytest.mark.parametrize("break_it", ["none", "twice", "pools", "negative"])
def test_a_senseless_step_is_refused(break_it: str) -> None:
    pool = BlockPool(9)
    one, two = started(pool, 3), started(pool, 3)
    other = started(BlockPool(9), 3)
    before = state(pool, [one, two])
    steps = {"none": [], "twice": [one, two, one], "pools": [one, other], "negative": [one]}
    with pytest.raises(BadArgumentError):
        prepare_write(steps[break_it], -1 if break_it == "negative" else 1)
    if break_it != "negative":
        with pytest.raises(BadArgumentError):
            move_group(steps[break_it], BlockPool(20))
    assert state(pool, [one, two]) == before


def test_a_table_can_be_freed_again_and_grows_as_needed() -> None:
    pool = BlockPool(200)
    table = started(pool, 3)
    for _ in range(300):
        prepare_write([table])
    assert len(table.block_ids) == -(-303 // SIZE)
    assert table.block_ids.dtype == np.int32
    assert table.slots(0, 5).tolist() == [4, 5, 6, 7, 8]
    table.free()
    table.free()
    assert pool.num_free_blocks == 199
    with pytest.raises(BadArgumentError):
        table.slots(0, 1)
    with pytest.raises(BadArgumentError):
        BlockTable(pool, 0)


def test_a_survivor_keeps_what_its_dead_sibling_shared() -> None:
    pool = BlockPool(20)
    tables = [started(pool, SIZE + 1)]
    tables += [tables[0].fork() for _ in range(2)]
    prepare_write(tables)
    rows = [t.block_ids.tolist() for t in tables]
    beams = select_beams(tables, [2, 2, 1])
    assert [b.block_ids.tolist() for b in beams] == [rows[2], rows[2], rows[1]]
    pool.check_invariants([b.block_ids for b in beams])
    before = state(pool, beams)
    for parents in ([0, 3, 1], [-1, 0, 0]):
        with pytest.raises(BadArgumentError):
            select_beams(beams, parents)
    assert state(pool, beams) == before


def test_a_group_moves_with_its_sharing_and_back() -> None:
    gpu, host = BlockPool(20), BlockPool(20)
    on_gpu, on_host = Memory(20), Memory(20)
    tables = [started(gpu, 6)]
    on_gpu.write(tables[0], [1, 2, 3, 4, 5, 6])
    tables += [tables[0].fork() for _ in range(2)]
    on_gpu.copy(prepare_write(tables))
    for i, table in enumerate(tables):
        on_gpu.write(table, [70 + i])
    for source, target, here, there in [(gpu, host, on_gpu, on_host), (host, gpu, on_host, on_gpu)]:
        pairs = move_group(tables, target)
        assert len(pairs) == 4, "one shared block and three tails"
        there.copy(pairs, here)
        here.places[:] = -1
        assert source.num_free_blocks == 19
        target.check_invariants([t.block_ids for t in tables])
        assert [there.read(t) for t in tables] == [[1, 2, 3, 4, 5, 6, 70 + i] for i in range(3)]
    before = state(gpu, tables)
    with pytest.raises(PoolExhaustedError):
        move_group(tables, BlockPool(4))
    assert state(gpu, tables) == before


def test_beams_of_slots_move_no_data_and_free_each_orphan_once() -> None:
    rng = np.random.default_rng(0)
    width, prompt, steps = 4, 5, 30
    rows = np.array([3, 0, 5, 2])
    req_to_token = np.full((6, prompt + steps), -1, dtype=np.int32)
    req_to_token[3, :prompt] = np.arange(prompt)
    alias(req_to_token, rows, leader=3, prompt_len=prompt)
    free, texts = list(range(prompt, 200)), [[] for _ in rows]
    memory: dict[int, int] = {}
    for step in range(steps):
        at = prompt + step
        slots = [free.pop(0) for _ in rows]
        req_to_token[rows, at] = slots
        for slot, text in zip(slots, texts, strict=True):
            memory[slot] = int(rng.integers(1000))
            text.append(memory[slot])
        parents = rng.integers(0, width, width)
        orphans = reparent(req_to_token, rows, parents, prompt, at + 1)
        assert len(set(orphans.tolist())) == len(orphans)
        for slot in orphans.tolist():
            del memory[slot]  # a slot that is freed twice is no longer there
        free += orphans.tolist()
        texts = [list(texts[parent]) for parent in parents]
        for row, text in zip(rows, texts, strict=True):
            assert req_to_token[row, :prompt].tolist() == list(range(prompt))
            assert [memory[slot] for slot in req_to_token[row, prompt : at + 1].tolist()] == text
    last = collect_orphans(req_to_token[rows, prompt:], np.zeros(0, dtype=np.int32))
    assert sorted(free + last.tolist()) == list(range(prompt, 200)), (
        "the group frees its region once"
    )


class Sequences(RuleBasedStateMachine):
    """Forks, writes, publications, beams and moves; each sequence must read its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.memory = BlockPool(14), Memory(14)
        self.tables: list[BlockTable] = []
        self.texts: list[list[int]] = []
        self.next_token = 0

    def rows(self) -> list[np.ndarray]:
        return [table.block_ids for table in self.tables]

    @rule(n=st.integers(0, 9))
    def start(self, n: int) -> None:
        if len(self.tables) < 5:
            self.tables.append(BlockTable(self.pool, SIZE))
            self.texts.append([])
            self.write_to(self.tables[-1:], n)

    def write_to(self, tables: list[BlockTable], n: int) -> None:
        before = state(self.pool, self.tables)
        try:
            pairs = prepare_write(tables, n)
        except PoolExhaustedError:
            assert state(self.pool, self.tables) == before
            return
        self.memory.copy(pairs)
        for table in tables:
            tokens = list(range(self.next_token, self.next_token + n))
            self.next_token += n
            self.memory.write(table, tokens)
            self.texts[self.tables.index(table)] += tokens

    @rule(data=st.data(), n=st.integers(0, 5))
    def append(self, data: st.DataObject, n: int) -> None:
        if self.tables:
            indices = st.integers(0, len(self.tables) - 1)
            chosen = data.draw(st.lists(indices, unique=True, min_size=1))
            self.write_to([self.tables[i] for i in chosen], n)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if 0 < len(self.tables) < 6:
            i = data.draw(st.integers(0, len(self.tables) - 1))
            self.tables.append(self.tables[i].fork())
            self.texts.append(list(self.texts[i]))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.tables:
            i = data.draw(st.integers(0, len(self.tables) - 1))
            self.texts.pop(i)
            self.tables.pop(i).free()

    @rule(data=st.data())
    def beams(self, data: st.DataObject) -> None:
        if self.tables:
            parents = data.draw(st.lists(st.integers(0, len(self.tables) - 1), max_size=5))
            self.tables = select_beams(self.tables, parents)
            self.texts = [list(self.texts[parent]) for parent in parents]

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        named = [t for t in self.tables if len(t.block_ids)]
        if named:
            table = data.draw(st.sampled_from(named))
            self.pool.cache_partial_block(int(table.block_ids[-1]), b"%d" % self.next_token, 1)

    @rule()
    def move_away_and_back(self) -> None:
        if self.tables:
            host, there = BlockPool(14), Memory(14)
            there.copy(move_group(self.tables, host), self.memory)
            self.memory.places[:] = -1
            self.memory.copy(move_group(self.tables, self.pool), there)
            assert host.num_free_blocks == 13
            host.check_invariants([])

    @invariant()
    def everyone_reads_what_it_wrote(self) -> None:
        self.pool.check_invariants(self.rows())
        for table, text in zip(self.tables, self.texts, strict=True):
            assert self.memory.read(table) == text


TestSequences = Sequences.TestCase
TestSequences.settings = settings(
    max_examples=120, stateful_step_count=40, derandomize=True, deadline=None
)


def never_copies(tables: list[BlockTable]) -> np.ndarray:
    return prepare_write(tables)[:0]


def writes_while_shared(tables: list[BlockTable]) -> np.ndarray:
    for table in tables:
        if table.num_tokens % 2 == 0:
            table.append(table.pool.get_new_blocks(1))
        table.num_tokens += 1
    return np.zeros((0, 2), dtype=np.int32)


def test_every_small_world_of_forks_is_right() -> None:
    report = explore(ForkWorld())
    assert not report.fault, report
    assert report.states > 100


@pytest.mark.parametrize("broken", [never_copies, writes_while_shared])
def test_a_world_that_does_not_copy_is_found_out(broken: Callable[..., np.ndarray]) -> None:
    report = explore(ForkWorld(broken))
    assert "wrote" in report.fault
    assert any("forks" in step for step in report.story)
