"""Random schedules against a naive tree: a dictionary of prefixes, and a list of readers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fanoutkv import (
    ForeignLockError,
    KVCacheManager,
    MatchResult,
    RadixCache,
    RadixKey,
    Request,
    StaleIndexError,
    TreeLock,
)

Prefix = tuple[Any, ...]  # the namespace, then whole pages, each a tuple of its tokens


@dataclass(eq=False)
class Promise:
    """A match that somebody keeps, and what the model knows of it."""

    found: MatchResult
    prefix: Prefix
    slots: list[int]
    is_gone: bool = False
    is_old: bool = False


class Forest(RuleBasedStateMachine):
    """Three namespaces, readers that come and go, and a memory that is too small.

    The model knows prefixes in whole pages. Of each it keeps the slots of its last page, when it
    was used last, and whether a node ends there: a leaf goes whole, up to where the one above it
    ends. All else follows, the sizes and the order of eviction too, without a tree or a count.
    """

    PAGES = 24

    @initialize(page=st.sampled_from([1, 4, 16]), shuffle=st.randoms(use_true_random=False))
    def open(self, page: int, shuffle: random.Random) -> None:
        self.page = page
        self.free_pages = list(range(self.PAGES))
        shuffle.shuffle(self.free_pages)
        self.cache = RadixCache(page, free=self.take_back)
        self.slots: dict[Prefix, list[int]] = {}
        self.used: dict[Prefix, int] = {}
        self.ends: set[Prefix] = set()
        self.readers: list[tuple[TreeLock, Prefix]] = []
        self.ended: list[TreeLock] = []
        self.promises: list[Promise] = []
        self.now = 0
        self.gone: list[int] = []

    def take_back(self, slots: Any) -> None:
        self.gone += slots.tolist()

    # The model

    def prefixes(self, namespace: Any, tokens: list[int]) -> list[Prefix]:
        """The prefixes of a key in whole pages, the shortest first; the empty one is none."""
        cut = [tuple(tokens[i : i + self.page]) for i in range(0, len(tokens), self.page)]
        cut = [page for page in cut if len(page) == self.page]
        return [(namespace, *cut[: i + 1]) for i in range(len(cut))]

    def known(self, prefixes: list[Prefix]) -> list[Prefix]:
        return [prefix for prefix in prefixes if prefix in self.slots]

    def slots_to(self, prefix: Prefix) -> list[int]:
        above = [prefix[:i] for i in range(2, len(prefix) + 1)]
        return [slot for p in above for slot in self.slots[p]]

    def use(self, prefixes: list[Prefix]) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(prefixes, self.now))

    def is_held(self, prefix: Prefix) -> bool:
        return any(held[: len(prefix)] == prefix for _, held in self.readers)

    def leaves(self) -> list[Prefix]:
        inner = {prefix[:-1] for prefix in self.slots}
        return [p for p in self.slots if p not in inner and not self.is_held(p)]

    def forget(self, leaf: Prefix) -> list[int]:
        """Let a leaf go, back to where the node above it ends; return its slots."""
        assert leaf in self.ends, "a node ends at each leaf"
        gone: list[int] = []
        while True:
            gone = [*self.slots.pop(leaf), *gone]
            for promise in self.promises:
                promise.is_gone |= promise.prefix == leaf
            self.ends.discard(leaf)
            leaf = leaf[:-1]
            if len(leaf) == 1 or leaf in self.ends:
                return gone

    # What happens

    @rule(
        namespace=st.sampled_from([None, "a", ("a", 1)]),
        pages=st.lists(st.integers(0, 2), max_size=5),
        rest=st.integers(0, 15),
        count_hit=st.booleans(),
    )
    def match(self, namespace: Any, pages: list[int], rest: int, count_hit: bool) -> None:
        tokens = self.tokens(pages, rest)
        expected = self.known(self.prefixes(namespace, tokens))
        found = self.cache.match_prefix(RadixKey(tokens, namespace), count_hit=count_hit)
        assert found.length == self.page * len(expected)
        end = expected[-1] if expected else (namespace,)
        assert found.indices.tolist() == self.slots_to(end)
        self.ends.update(expected[-1:])
        self.use(expected)
        self.promises.append(Promise(found, end, self.slots_to(end)))

    def tokens(self, pages: list[int], rest: int) -> list[int]:
        """Page 2 differs from page 0 in its last token only; `rest` tokens are cut off."""
        made = [[0] * self.page, [1] * self.page, [0] * (self.page - 1) + [2]]
        tokens = [token for page in pages for token in made[page]]
        return tokens[: max(0, len(tokens) - rest % self.page)]

    @rule(
        namespace=st.sampled_from([None, "a", ("a", 1)]),
        pages=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        rest=st.integers(0, 15),
    )
    def insert(self, namespace: Any, pages: list[int], rest: int) -> None:
        tokens = self.tokens(pages, rest)
        needed = -(-len(tokens) // self.page)
        if needed > len(self.free_pages):
            return
        mine, self.free_pages = self.free_pages[:needed], self.free_pages[needed:]
        slots = [self.page * page + i for page in mine for i in range(self.page)]
        prefixes = self.prefixes(namespace, tokens)
        known = self.known(prefixes)
        answer = self.cache.insert(RadixKey(tokens, namespace), slots[: len(tokens)])
        assert answer == self.page * len(known)
        self.ends.update(known[-1:], prefixes[-1:])
        for i, prefix in enumerate(prefixes):
            if prefix not in self.slots:
                self.slots[prefix] = slots[self.page * i : self.page * (i + 1)]
        self.use(prefixes)
        # The duplicates, and the page that is not full, are still ours.
        self.free_pages += mine[: len(known)] + mine[len(prefixes) :]

    @precondition(lambda self: self.promises and len(self.readers) < 4)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        promise = data.draw(st.sampled_from(self.promises))
        if promise.is_gone:
            with pytest.raises(StaleIndexError):
                self.cache.lock(promise.found.node)
        else:
            self.readers.append((self.cache.lock(promise.found.node), promise.prefix))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.readers) - 1))
        lock, _ = self.readers.pop(i)
        self.cache.unlock(lock)
        self.ended.append(lock)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def unlock_again(self, data: st.DataObject) -> None:
        with pytest.raises(ForeignLockError):
            self.cache.unlock(data.draw(st.sampled_from(self.ended)))

    @rule(pages=st.sampled_from([0, 1, 1, 2, 3, 99]), more=st.integers(0, 15))
    def evict(self, pages: int, more: int) -> None:
        wanted = max(0, pages * self.page - more % self.page)
        expected: list[int] = []
        while len(expected) < wanted and self.leaves():
            expected += self.forget(min(self.leaves(), key=self.used.__getitem__))
        assert self.cache.evict(wanted) == len(expected)
        self.collect(expected, in_order=True)
        for promise in self.promises:
            promise.is_old = True

    @rule()
    def reset(self) -> None:
        if self.readers:
            with pytest.raises(ForeignLockError):
                self.cache.reset()
            return
        expected = [slot for prefix in self.slots for slot in self.slots[prefix]]
        self.slots.clear()
        self.ends.clear()
        self.cache.reset()
        self.collect(expected, in_order=False)
        for promise in self.promises:
            promise.is_gone = promise.is_old = True

    def collect(self, expected: list[int], in_order: bool) -> None:
        """Compare what was given back, and put it into use again."""
        assert self.gone == expected if in_order else sorted(self.gone) == sorted(expected)
        self.free_pages += [slot // self.page for slot in self.gone[:: self.page]]
        self.gone = []

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        outside = [self.page * p + i for p in self.free_pages for i in range(self.page)]
        self.cache.check_invariants(range(self.page * self.PAGES), outside)
        held = sum(self.is_held(prefix) for prefix in self.slots)
        assert self.cache.protected_size == self.page * held
        assert self.cache.evictable_size == self.page * (len(self.slots) - held)
        assert len(self.cache.evictable_leaves) == len(self.leaves())
        for lock, prefix in self.readers:
            assert self.cache.path_indices(lock.node).tolist() == self.slots_to(prefix)
        assert sum(1 for _ in self.cache.nodes()) == len(self.ends)

    @invariant()
    def promises_are_kept_or_broken_aloud(self) -> None:
        for promise in getattr(self, "promises", []):
            nothing = len(promise.prefix) == 1
            held = not promise.is_gone and self.is_held(promise.prefix)
            if promise.is_old and not held and not nothing:
                with pytest.raises(StaleIndexError):
                    _ = promise.found.indices
            elif not (nothing and promise.is_gone):  # the root of before a reset may say either
                assert promise.found.indices.tolist() == promise.slots


TestForest = Forest.TestCase
TestForest.settings = settings(
    max_examples=200, stateful_step_count=40, derandomize=True, deadline=None
)


class Tree:
    """A server of requests whose prefixes are kept in a `RadixCache`."""

    def __init__(self, pages: int, page: int) -> None:
        self.page, self.memory = page, np.full(pages * page, -1)
        self.free = list(range(pages))
        self.cache = RadixCache(page, free=self.take_back)
        self.rows: dict[str, tuple[np.ndarray, TreeLock, list[int]]] = {}

    def take_back(self, slots: Any) -> None:
        self.memory[slots] = -1
        self.free += (np.asarray(slots)[:: self.page] // self.page).tolist()

    def come(self, name: str, tokens: list[int]) -> int | None:
        """Compute a prompt whose prefix may be known; return how much was, or None if no room."""
        key = RadixKey(tokens)
        found = self.cache.match_prefix(key)
        lock = self.cache.lock(found.node)
        missing = -(-len(tokens) // self.page) - found.length // self.page
        self.cache.evict(max(0, missing - len(self.free)) * self.page)
        if missing > len(self.free):
            self.cache.unlock(lock)
            return None
        mine, self.free = self.free[:missing], self.free[missing:]
        new = [self.page * page + i for page in mine for i in range(self.page)]
        row = np.concatenate([found.indices, new])[: len(tokens)].astype(int)
        self.memory[row[found.length :]] = tokens[found.length :]
        assert self.cache.insert(key, row) == found.length
        full = len(tokens) // self.page - found.length // self.page
        after = self.cache.match_prefix(key, count_hit=False)
        self.rows[name] = row, self.cache.lock(after.node), mine[full:]
        self.cache.unlock(lock)
        return found.length

    def read(self, name: str) -> list[int]:
        row, lock, _ = self.rows[name]
        path = self.cache.path_indices(lock.node)
        return self.memory[[*path, *row[len(path) :]]].tolist()

    def leave(self, name: str) -> None:
        _, lock, rest = self.rows.pop(name)
        self.cache.unlock(lock)
        for page in rest:
            self.take_back(np.arange(page * self.page, (page + 1) * self.page))

    def check(self) -> None:
        pages = [*self.free, *(page for _, _, rest in self.rows.values() for page in rest)]
        outside = [self.page * page + i for page in pages for i in range(self.page)]
        self.cache.check_invariants(range(len(self.memory)), outside)


class Blocks:
    """The same, with the manager of chapter 04."""

    def __init__(self, pages: int, page: int) -> None:
        self.page, self.memory = page, np.full((pages + 1, page), -1)
        self.manager = KVCacheManager(pages + 1, page)
        self.requests: dict[str, Request] = {}

    def come(self, name: str, tokens: list[int]) -> int | None:
        request = Request(name, np.array(tokens))
        _, hit = self.manager.get_computed_blocks(request)
        new = len(tokens) - hit
        if self.manager.allocate_slots(request, new, num_new_computed_tokens=hit) is None:
            return None
        table = self.manager.block_ids(request)
        for position in range(hit, len(tokens)):
            self.memory[table[position // self.page], position % self.page] = tokens[position]
        request.num_computed_tokens = len(tokens)
        self.requests[name] = request
        return hit

    def read(self, name: str) -> list[int]:
        request = self.requests[name]
        read = self.memory[self.manager.block_ids(request)].ravel()
        return read[: request.num_tokens].tolist()

    def leave(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))

    def check(self) -> None:
        self.manager.check_invariants()


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_tree_and_blocks_give_every_reader_its_own_tokens(
    page: int, is_small: bool, seed: int
) -> None:
    """In a small memory both evict; in a large one both know just the same prefixes."""
    dice = random.Random(seed)
    pages = 20 if is_small else 4_000
    tree, blocks = Tree(pages, page), Blocks(pages, page)
    texts: dict[str, list[int]] = {}
    hits = evictions = 0
    for number in range(120):
        name = str(number)
        letters = [dice.choice([7, 8]) for _ in range(dice.randint(1, 6))]
        prompt = [letter for letter in letters for _ in range(page)] + [number] * dice.randint(0, 3)
        before = tree.cache.total_size
        answers = tree.come(name, prompt), blocks.come(name, prompt)
        evictions += tree.cache.total_size < before
        texts[name] = prompt
        if not is_small:
            # The manager leaves one token to compute; the tree leaves that to its caller.
            assert answers[0] is not None
            assert answers[1] == min(answers[0], (len(prompt) - 1) // page * page)
        hits += sum(answer or 0 for answer in answers)
        for server in (tree, blocks):
            here = server.rows if isinstance(server, Tree) else server.requests
            for reader in list(here):
                assert server.read(reader) == texts[reader]
            while len(here) > 3 or (here and dice.random() < 0.2):
                server.leave(dice.choice(list(here)))
            server.check()
    assert hits > 0
    assert bool(evictions) == is_small
