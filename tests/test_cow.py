"""Forked sequences read what they wrote, whatever the others do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import product

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
from fanoutkv_book.explore import Move, explore
from fanoutkv_book.worlds import ForkWorld

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


class BeamWorld:
    """Two sequences of up to three tokens, in blocks of two: publish, beams and all the rest.

    Beside what `ForkWorld` asks, a published text must stay as it was, a step that does not fit
    must change nothing, and no block is copied that nobody needs afterwards. Each sequence may
    once take back its second token, as after a rejected draft, and then it writes others. Without
    that, a writer that ignores names harms nobody: a key vouches for tokens that are there.
    """

    def __init__(
        self,
        prepare: Callable[..., np.ndarray] = prepare_write,
        select: Callable[..., list[BlockTable]] = select_beams,
        blocks: int = 4,
    ) -> None:
        self.pool, self.memory = BlockPool(blocks + 1), Memory(blocks + 1, 2)
        self.tables: list[BlockTable] = []
        self.texts: list[list[int]] = []
        self.published: list[int] = []
        self.mood: list[int] = []
        self.prepare, self.select = prepare, select

    def moves(self) -> Iterator[Move]:
        if len(self.tables) < 2:
            yield "a sequence starts", lambda w: w.start()
            for i in range(len(self.tables)):
                yield f"sequence {i} forks", lambda w, i=i: w.fork(i)
        short = [i for i, text in enumerate(self.texts) if len(text) < 3]
        for chosen in [*([i] for i in short), *([short] if len(short) > 1 else [])]:
            yield f"sequences {chosen} append", lambda w, c=tuple(chosen): w.append(c)
        for i in range(len(self.tables)):
            yield f"sequence {i} is freed", lambda w, i=i: w.free(i)
            if self.may_take_back(i):
                yield f"sequence {i} takes a token back", lambda w, i=i: w.take_back(i)
            if self.texts[i] and self.pool.get_cached_block(b"tail") is None:
                yield f"sequence {i} publishes its tail", lambda w, i=i: w.publish(i)
        for parents in product(range(len(self.tables)), repeat=2):
            yield f"beams continue {parents}", lambda w, p=parents: w.beams(p)

    def start(self) -> None:
        self.tables.append(BlockTable(self.pool, 2))
        self.texts.append([])
        self.mood.append(0)

    def fork(self, i: int) -> None:
        self.tables.append(self.tables[i].fork())
        self.texts.append(list(self.texts[i]))
        self.mood.append(self.mood[i])

    def free(self, i: int) -> None:
        self.tables.pop(i).free()
        self.texts.pop(i)
        self.mood.pop(i)

    def may_take_back(self, i: int) -> bool:
        """A full, published block that nobody else reads: the case in which a name matters."""
        full = len(self.texts[i]) == 2 and not self.mood[i]
        tail = int(self.tables[i].block_ids[-1]) if full else 0
        return bool(self.pool._is_cached[tail] and self.pool.ref_cnt[tail] == 1)

    def take_back(self, i: int) -> None:
        self.tables[i].num_tokens -= 1
        self.texts[i].pop()
        self.mood[i] = 100

    def publish(self, i: int) -> None:
        tail = int(self.tables[i].block_ids[-1])
        self.published = self.texts[i][len(self.texts[i]) - 1 & ~1 :]
        self.pool.cache_partial_block(tail, b"tail", len(self.published))

    def beams(self, parents: tuple[int, ...]) -> None:
        self.tables = self.select(self.tables, parents)
        self.texts = [list(self.texts[parent]) for parent in parents]
        self.mood = [self.mood[parent] for parent in parents]

    def append(self, chosen: tuple[int, ...]) -> None:
        before = state(self.pool, self.tables)
        try:
            pairs = self.prepare([self.tables[i] for i in chosen])
        except PoolExhaustedError:
            assert state(self.pool, self.tables) == before, "a refused step has changed something"
            return
        for source in pairs[:, 0]:
            needed = self.pool.ref_cnt[source] or self.pool._is_cached[source]
            assert needed, f"block {source} was copied, and nobody needs it any more"
        self.memory.copy(pairs)
        for i in chosen:
            self.texts[i].append(self.mood[i] + 10 * i + len(self.texts[i]))
            self.memory.write(self.tables[i], self.texts[i][-1:])

    def check(self) -> None:
        self.pool.check_invariants([table.block_ids for table in self.tables])
        for table, text in zip(self.tables, self.texts, strict=True):
            assert self.memory.read(table) == text, f"wrote {text}, reads {self.memory.read(table)}"
        block = self.pool.get_cached_block(b"tail")
        if block is not None:
            found = self.memory.places[block, : len(self.published)].tolist()
            assert found == self.published, f"published {self.published}, found {found}"

    def canonical(self) -> str:
        rows = [table.block_ids.tolist() for table in self.tables]
        block = self.pool.get_cached_block(b"tail")
        seen = [b for row in rows for b in row] + ([] if block is None else [block])
        name = {b: i for i, b in enumerate(dict.fromkeys(seen))}
        held = [(int(self.pool.ref_cnt[b]), bool(self.pool._is_cached[b])) for b in name]
        renamed = [[name[b] for b in row] for row in rows]
        public = None if block is None else (name[block], self.published)
        return repr((renamed, self.texts, self.mood, held, public, len(self.pool.free_queue)))


def table_by_table(
    tables: list[BlockTable], copies: Callable[[BlockTable, int], bool]
) -> np.ndarray:
    """Make a step under another rule of when a tail is copied; decided for all, then done."""
    tails = [int(t.block_ids[-1]) if t.num_tokens % t.block_size else -1 for t in tables]
    decided = [tail >= 0 and copies(t, tail) for t, tail in zip(tables, tails, strict=True)]
    new = iter(tables[0].pool.get_new_blocks(sum(decided) + tails.count(-1)))
    pairs = []
    for table, tail, copy in zip(tables, tails, decided, strict=True):
        if tail < 0:
            table.append([next(new)])
        elif copy:
            table.block_ids[-1] = next(new)
            table.pool.free_blocks([tail])
            pairs.append((tail, table.block_ids[-1]))
        table.num_tokens += 1
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def with_the_true_rule(tables: list[BlockTable]) -> np.ndarray:
    return np.concatenate(
        [
            table_by_table([one], lambda t, tail: not t.pool.is_block_writable(tail))
            for one in tables
        ]
    )


def alone_is_enough(tables: list[BlockTable]) -> np.ndarray:
    step = [table_by_table([one], lambda t, tail: t.pool.ref_cnt[tail] > 1) for one in tables]
    return np.concatenate(step)


def everybody_copies(tables: list[BlockTable]) -> np.ndarray:
    return table_by_table(tables, lambda t, tail: not t.pool.is_block_writable(tail))


def takes_as_it_goes(tables: list[BlockTable]) -> np.ndarray:
    return np.concatenate([prepare_write([table]) for table in tables])


def without_copies(tables: list[BlockTable]) -> np.ndarray:
    return prepare_write(tables)[:0]


def frees_first(tables: list[BlockTable], parents: tuple[int, ...]) -> list[BlockTable]:
    rows = [(table.block_ids.copy(), table.num_tokens) for table in tables]
    for table in tables:
        table.free()
    survivors = []
    for parent in parents:
        survivors.append(BlockTable(tables[0].pool, tables[0].block_size))
        tables[0].pool.touch(rows[parent][0])
        survivors[-1].append(rows[parent][0])
        survivors[-1].num_tokens = rows[parent][1]
    return survivors


@pytest.mark.parametrize(("blocks", "states"), [(3, 500), (4, 2000)])
def test_every_small_world_of_beams_and_names_is_right(blocks: int, states: int) -> None:
    report = explore(BeamWorld(blocks=blocks))
    print(report)
    assert not report.fault, report
    assert report.states > states


def test_the_broken_rules_are_built_on_one_that_works() -> None:
    assert not explore(BeamWorld(with_the_true_rule)).fault


@pytest.mark.parametrize(
    ("world", "fault"),
    [
        (BeamWorld(alone_is_enough), "published"),
        (BeamWorld(everybody_copies), "nobody needs it"),
        (BeamWorld(takes_as_it_goes, blocks=3), "a refused step"),
        (BeamWorld(without_copies), "wrote"),
        (BeamWorld(select=frees_first), "cannot be touched"),
    ],
    ids=["ref_cnt alone", "n copies", "not all or nothing", "no copy", "free before touch"],
)
def test_a_broken_rule_is_found_out(world: BeamWorld, fault: str) -> None:
    report = explore(world)
    print(report)
    assert fault in report.fault


def keep_duplicates(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return before[~np.isin(before, after)]


def slots_of_the_dead(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    changed = (before != after).any(axis=1)
    return np.unique(before[changed])


def orphans_of(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return collect_orphans(before, after)


class SlotWorld:
    """Three rows, up to two steps of every possible ancestry; at the end the group frees once."""

    def __init__(self, collect: Callable[..., np.ndarray] = orphans_of) -> None:
        self.rows = np.full((3, 3), -1, dtype=np.int32)
        self.rows[0, 0] = 0
        alias(self.rows, [1, 2], leader=0, prompt_len=1)
        self.free, self.length, self.collect = set(range(1, 10)), 1, collect
        self.memory: dict[int, str] = {0: "p"}
        self.texts = ["p"] * 3

    def moves(self) -> Iterator[Move]:
        if 0 < self.length < 3:
            for parents in product(range(3), repeat=3):
                yield f"continue {parents}", lambda w, p=parents: w.step(p)
        if self.length > 1:
            yield "the group ends", lambda w: w.end()

    def step(self, parents: tuple[int, ...]) -> None:
        for i in range(3):
            slot = min(self.free)
            self.free.remove(slot)
            self.rows[i, self.length] = slot
            self.memory[slot] = "abc"[i]
            self.texts[i] += "abc"[i]
        self.length += 1
        before = self.rows[:, 1 : self.length].copy()
        returned = reparent(self.rows, [0, 1, 2], parents, 1, self.length)
        orphans = self.collect(before, self.rows[:, 1 : self.length])
        if self.collect is orphans_of:
            assert returned.tolist() == orphans.tolist()
        self.give_back(orphans)
        self.texts = [self.texts[parent] for parent in parents]

    def end(self) -> None:
        region = self.rows[:, 1 : self.length]
        self.give_back(self.collect(region, region[:0]))
        self.rows[:], self.length, self.texts = -1, 0, []

    def give_back(self, slots: np.ndarray) -> None:
        for slot in slots.ravel().tolist():
            assert slot not in self.free, f"slot {slot} is freed twice"
            self.free.add(slot)

    def check(self) -> None:
        named = set(self.rows[:, 1 : max(1, self.length)].ravel().tolist())
        assert not named & self.free, f"slots {named & self.free} are free and in use"
        assert named | self.free == set(range(1, 10)), "a slot is lost"
        for row, text in zip(self.rows, self.texts, strict=False):
            read = "".join(self.memory[slot] for slot in row[: self.length].tolist())
            assert read == text, f"wrote {text}, reads {read}"

    def canonical(self) -> str:
        return repr((self.rows.tolist(), self.texts, sorted(self.free)))


def test_every_ancestry_of_slots_is_right() -> None:
    report = explore(SlotWorld())
    print(report)
    assert not report.fault, report


@pytest.mark.parametrize(
    ("collect", "fault"), [(keep_duplicates, "freed twice"), (slots_of_the_dead, "free and in use")]
)
def test_orphans_that_are_not_a_set_difference_are_found_out(
    collect: Callable[..., np.ndarray], fault: str
) -> None:
    report = explore(SlotWorld(collect))
    assert fault in report.fault


class FailingPool(BlockPool):
    """A pool whose n-th allocation from now on fails."""

    countdown = 0

    def get_new_blocks(self, num_blocks: int) -> np.ndarray:
        self.countdown -= 1
        if not self.countdown:
            raise PoolExhaustedError("this allocation was made to fail")
        return super().get_new_blocks(num_blocks)


@pytest.mark.parametrize("nth", range(1, 9))
def test_an_allocation_that_fails_leaves_nothing_changed(nth: int) -> None:
    gpu, host = FailingPool(40), FailingPool(40)
    gpu.countdown = host.countdown = nth
    tables = [BlockTable(gpu, SIZE), BlockTable(gpu, SIZE)]
    texts: list[list[int]] = [[], []]
    memories, failures = {id(gpu): Memory(40), id(host): Memory(40)}, 0
    for n in (3, 1, 2, 5):
        while True:
            pool, target = (gpu, host) if tables[0].pool is gpu else (host, gpu)
            before = (state(gpu, tables), state(host, tables))
            try:
                pairs = prepare_write(tables, n)
                break
            except PoolExhaustedError:
                failures += 1
                assert (state(gpu, tables), state(host, tables)) == before
        memories[id(pool)].copy(pairs)
        for i, table in enumerate(tables):
            tokens = [1000 * i + len(texts[i]) + j for j in range(n)]
            memories[id(pool)].write(table, tokens)
            texts[i] += tokens
        tables.append(tables[0].fork())
        texts.append(list(texts[0]))
        before = (state(gpu, tables), state(host, tables))
        try:
            memories[id(target)].copy(move_group(tables, target), memories[id(pool)])
        except PoolExhaustedError:
            failures += 1
            assert (state(gpu, tables), state(host, tables)) == before
    home = tables[0].pool
    home.check_invariants([table.block_ids for table in tables])
    assert [memories[id(home)].read(table) for table in tables] == texts
    assert failures or nth > 4


def test_a_fork_does_not_share_blocks_in_reserve() -> None:
    pool, memory = BlockPool(9), Memory(9)
    table = started(pool, SIZE)
    memory.write(table, [1, 2, 3, 4])
    table.append(pool.get_new_blocks(1))  # for a token that is only guessed
    pair = [table, table.fork()]
    memory.copy(prepare_write(pair))
    for i, each in enumerate(pair):
        memory.write(each, [50 + i])
    assert [memory.read(each)[-1] for each in pair] == [50, 51]
    pool.check_invariants([each.block_ids for each in pair])


def test_a_table_with_a_reserve_beside_a_needy_one() -> None:
    pool = BlockPool(20)
    rich, poor = BlockTable(pool, SIZE), BlockTable(pool, SIZE)
    rich.append(pool.get_new_blocks(3))
    prepare_write([rich, poor], 2 * SIZE)
    assert [len(rich.block_ids), len(poor.block_ids)] == [3, 2]
    pool.check_invariants([rich.block_ids, poor.block_ids])


@pytest.mark.parametrize("parents", [[-1, 0, 0], [3, 0, 0], [1], [1, 1], [1.5, 1, 1]])
def test_parents_that_are_not_members_are_refused(parents: list[int]) -> None:
    table = np.arange(24, dtype=np.int32).reshape(3, 8)
    before = table.copy()
    with pytest.raises(BadArgumentError):
        reparent(table, [0, 1, 2], parents, 4, 5)
    for start, stop in ((4, 9), (5, 4), (-1, 3)):
        with pytest.raises(BadArgumentError):
            reparent(table, [0, 1, 2], [0, 1, 2], start, stop)
    for rows, leader, prompt in (([1], 3, 2), ([1], -1, 2), ([3], 0, 2), ([1], 0, 9)):
        with pytest.raises(BadArgumentError):
            alias(table, rows, leader, prompt)
    assert (table == before).all()


def test_tokens_that_were_taken_back_are_not_written_over_in_shared_blocks() -> None:
    pool, memory = BlockPool(9), Memory(9)
    table = started(pool, 2 * SIZE)
    memory.write(table, [1, 2, 3, 4, 5, 6, 7, 8])
    other = table.fork()
    table.num_tokens = SIZE - 1  # five tokens are taken back
    copies = prepare_write([table], SIZE)
    assert copies.tolist() == [[1, 3]], "the second block holds nothing of this table any more"
    memory.copy(copies)
    memory.write(table, [94, 95, 96, 97])
    assert memory.read(table) == [1, 2, 3, 94, 95, 96, 97]
    assert memory.read(other) == [1, 2, 3, 4, 5, 6, 7, 8]
    pool.check_invariants([table.block_ids, other.block_ids])


@pytest.mark.parametrize("ids", [[1.5], [9], [-1], [2**40 + 3], ["1"]])
def test_what_is_no_block_does_not_enter_a_table(ids: list[int]) -> None:
    table = started(BlockPool(9), 3)
    before = table.block_ids.tolist()
    with pytest.raises(BadArgumentError):
        table.append(ids)
    assert table.block_ids.tolist() == before


def test_nobody_writes_behind_the_window() -> None:
    pool = BlockPool(9)
    table = started(pool, 6)
    pool.free_blocks(table.block_ids[:1])
    table.block_ids[0] = pool.null_block
    table.num_tokens = 3
    before = state(pool, [table])
    with pytest.raises(BadArgumentError, match="window"):
        prepare_write([table])
    assert state(pool, [table]) == before
