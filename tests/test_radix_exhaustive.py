"""All trees over two letters, with prefixes of up to four of them, and up to three locks.

`explore` searches such trees by their histories, up to depth 3 (see `TreeWorld`). For depth 4 they
are too many to be copied one by one. So each of them is built, and all choices of locks are walked
through in the tree itself: a lock that ends must leave what was there before it.

Letters are only compared, so trees in which two branches change names count as one. That leaves
2,278 trees, or 26,565 with all the ways in which matches may have cut their segments. A reader may
stand wherever a node ends, or at the root, and several may stand there together. Covered are:

- all 26,565, with all choices of up to two locks: 3,849,380 states;
- all 26,565 with three locks, if at each cut that no branch needs one of them stands: 2,497,619
  more. They are all 2,278 trees with all choices of three prefixes, known by a node or not;
- from each of these the end of the first lock, and of the last;
- from all 26,565, without locks, the eviction of each leaf as the first;
- all 2,278, with up to one lock, when all is evicted that can be; and with a lock at a leaf, when
  each prefix is matched, so that all segments under the lock are cut.

Left out at depth 4 are three locks together with a cut at which nobody stands any more. At depth 3
`explore` covers that as well, with every history: 22,212 states.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from math import comb
from operator import add, gt

import pytest

from fanoutkv import MRUStrategy, RadixCache, RadixKey
from fanoutkv_book.explore import explore
from fanoutkv_book.worlds import TreeWorld

DEPTH, LOCKS = 4, 3
TREES, CUT_TREES = 2_278, 26_565

# A shape is whether a node ends here, and the shapes below: none, one, or two.
Shape = tuple[bool, tuple["Shape", ...]]


def shapes(depth: int) -> list[Shape]:
    """All that can stand below a prefix, itself included, on so many levels."""
    below = shapes(depth - 1) if depth > 1 else []
    kids: list[tuple[Shape, ...]] = [(), *((one,) for one in below)]
    kids += [(one, two) for i, one in enumerate(below) for two in below[i:]]
    return [(True, k) for k in kids] + [(False, k) for k in kids if len(k) == 1]


def trees(depth: int) -> Iterator[Shape]:
    """All trees: at the root ends its own node, whatever is below."""
    return (shape for shape in shapes(depth + 1) if shape[0])


def prefixes(shape: Shape, prefix: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Shape]]:
    yield prefix, shape
    for letter, below in enumerate(shape[1]):
        yield from prefixes(below, (*prefix, letter))


class Wood:
    """A tree of a given shape, its nodes in a row, and what must be true of each."""

    def __init__(self, shape: Shape) -> None:
        self.free = list(range(100))
        self.cache = RadixCache(
            free=lambda slots: self.free.extend(slots.tolist()), strategy=MRUStrategy()
        )
        parts = list(prefixes(shape))
        self.leaves = [prefix for prefix, (_, below) in parts if prefix and not below]
        self.cuts = [prefix for prefix, (ends, below) in parts if ends and len(below) == 1]
        self.cuts = [prefix for prefix in self.cuts if prefix]
        for leaf in self.leaves:
            self.insert(leaf)
        for cut in self.cuts:
            self.cache.match_prefix(RadixKey(cut))
        self.ends = [prefix for prefix, (ends, _) in parts if ends]
        self.nodes = [self.cache.match_prefix(RadixKey(end)).node for end in self.ends]
        self.needless = {self.ends.index(cut) for cut in self.cuts}
        self.is_leaf = [prefix in self.leaves for prefix in self.ends]
        self.sizes = [
            0 if not end else len(end) - max(len(e) for e in self.ends if e == end[: len(e)] != end)
            for end in self.ends
        ]
        self.total = sum(self.sizes)
        # The root counts no readers: it holds no slots.
        self.held_by = [
            [int(e != () and e == end[: len(e)]) for e in self.ends] for end in self.ends
        ]

    def insert(self, key: tuple[int, ...]) -> None:
        slots, self.free = self.free[: len(key)], self.free[len(key) :]
        self.free += slots[: self.cache.insert(RadixKey(key), slots)]

    def prove_all(self) -> None:
        self.cache.check_invariants(range(100), self.free)
        assert [self.cache.match_prefix(RadixKey(e)).node for e in self.ends] == self.nodes
        assert sum(1 for _ in self.cache.nodes()) == len(self.ends) - 1
        self.prove([0] * len(self.nodes))

    def prove(self, readers: list[int]) -> None:
        """Compare the counts, the sizes and the leaves with what the readers make of them."""
        assert [node.lock_ref for node in self.nodes] == readers
        held = sum(compress(self.sizes, readers))
        assert self.cache.protected_size == held
        assert self.cache.evictable_size == self.total - held
        # A leaf is 1 and waits if nobody holds it; no other node is more than its readers.
        waiting = list(map(gt, self.is_leaf, readers))
        assert [node._ticket > 0 for node in self.nodes] == waiting
        assert len(self.cache.evictable_leaves) == sum(waiting)


def plus(one: list[int], two: list[int]) -> list[int]:
    return list(map(add, one, two))


def walk_locks(wood: Wood) -> int:
    """Take all choices of up to three locks, and end them in several orders; count the states."""
    cache, nodes, held_by, states = wood.cache, wood.nodes, wood.held_by, 1
    for a in range(len(nodes)):
        first = cache.lock(nodes[a])
        wood.prove(held_by[a])
        states += 1
        for b in range(a, len(nodes)):
            second, two = cache.lock(nodes[b]), plus(held_by[a], held_by[b])
            wood.prove(two)
            states += 1
            for c in range(b, len(nodes)):
                if not wood.needless <= {a, b, c}:
                    continue
                third = cache.lock(nodes[c])
                wood.prove(plus(two, held_by[c]))
                states += 1
                cache.unlock(first)  # the oldest first, then the youngest
                wood.prove(plus(held_by[b], held_by[c]))
                cache.unlock(third)
                wood.prove(held_by[b])
                first = cache.lock(nodes[a])
            cache.unlock(second)
        cache.unlock(first)
    wood.prove_all()
    return states


def evict_each_leaf(wood: Wood) -> None:
    """Evict each leaf alone, whatever its recency was, and bring it back."""
    cache = wood.cache
    for leaf in wood.leaves:
        i = wood.ends.index(leaf)
        cache.match_prefix(RadixKey(leaf))  # the strategy lets the newest go first
        assert cache.evict(1) == wood.sizes[i]
        left = {id(node) for node in cache.nodes()}
        assert left == {id(n) for n in wood.nodes[1:] if n is not wood.nodes[i]}
        above = [e for e in wood.ends if e == leaf[: len(e)] != leaf][-1]
        parent = wood.nodes[wood.ends.index(above)]
        assert (parent._ticket > 0) == (not parent.children and above != ())
        wood.insert(leaf)
        wood.nodes[i] = cache.match_prefix(RadixKey(leaf)).node
    wood.prove_all()


def evict_around(shape: Shape, some: tuple[int, ...]) -> None:
    """Lock some nodes, evict all that can go, let the readers go, and evict the rest."""
    wood = Wood(shape)
    cache = wood.cache
    locks = [cache.lock(wood.nodes[i]) for i in some]
    kept = {j for i in some for j, held in enumerate(wood.held_by[i]) if held}
    tokens = sum(wood.sizes[j] for j in kept)
    assert cache.evict(99) == sum(wood.sizes) - tokens
    assert {id(node) for node in cache.nodes()} == {id(wood.nodes[j]) for j in kept}
    for lock, i in zip(locks, some, strict=True):
        assert len(cache.path_indices(lock.node)) == len(wood.ends[i])
    cache.check_invariants(range(100), wood.free)
    for lock in locks:
        cache.unlock(lock)
    assert cache.evict(99) == tokens
    assert cache.total_size == 0
    assert sorted(wood.free) == list(range(100))


def cut_under_a_reader(shape: Shape) -> None:
    """Lock a leaf, then match every known prefix of the tree, so that all its path is cut."""
    for reader in Wood(shape).leaves:
        wood = Wood(shape)
        lock = wood.cache.lock(wood.cache.match_prefix(RadixKey(reader)).node)
        slots = wood.cache.path_indices(lock.node).tolist()
        for prefix in {leaf[:i] for leaf in wood.leaves for i in range(1, len(leaf))}:
            found = wood.cache.match_prefix(RadixKey(prefix))
            assert found.length == len(prefix)
            assert found.node.lock_ref == (prefix == reader[: len(prefix)])
        assert wood.cache.path_indices(lock.node).tolist() == slots
        assert wood.cache.protected_size == len(reader)
        assert wood.cache.evict(99) == wood.total - len(reader)
        assert sorted(slots + wood.free) == list(range(100))
        wood.cache.unlock(lock)
        assert wood.cache.evict(99) == len(reader)


def is_uncut(shape: Shape) -> bool:
    """Whether nodes end only where a branch or a leaf wants it."""
    return not any(end and len(below) == 1 for prefix, (end, below) in prefixes(shape) if prefix)


def test_all_trees_are_there() -> None:
    """The numbers follow from the numbers for one level less; nothing was listed to get them."""

    def count(cut: bool) -> int:
        below = 0
        for _ in range(DEPTH):
            inner = 1 + below + below * (below + 1) // 2
            below = inner + (below if cut else 0)
        return 1 + below + below * (below + 1) // 2

    assert (count(cut=False), count(cut=True)) == (TREES, CUT_TREES)
    found = list(trees(DEPTH))
    assert len(set(found)) == len(found) == CUT_TREES
    assert sum(map(is_uncut, found)) == TREES


@pytest.mark.parametrize("part", range(3))
def test_all_locks_of_all_trees(part: int) -> None:
    """In parts, so that several processes can share them."""
    some = list(trees(DEPTH))[part::3]
    assert sum(walk_locks(Wood(shape)) for shape in some) == sum(map(lock_choices, some))


def lock_choices(shape: Shape) -> int:
    """How many choices of locks the walk must visit, by the formula for choices with repeats."""
    parts = list(prefixes(shape))
    ends = sum(end for _, (end, _) in parts)
    needless = sum(end and len(below) == 1 and prefix != () for prefix, (end, below) in parts)
    up_to_two = comb(ends + 2, 2)
    # One lock for each needless cut; the others, if any are left, are free.
    return up_to_two + (comb(ends + LOCKS - needless - 1, LOCKS - needless) if needless <= 3 else 0)


def test_every_leaf_of_all_trees_can_go_first() -> None:
    for shape in trees(DEPTH):
        evict_each_leaf(Wood(shape))


def test_what_a_reader_holds_is_what_stays() -> None:
    """All trees without a needless cut, and in each no reader, or one at any node."""
    for shape in filter(is_uncut, trees(DEPTH)):
        nodes = sum(end for _, (end, _) in prefixes(shape))
        for some in [(), *((i,) for i in range(nodes))]:
            evict_around(shape, some)


def test_all_trees_may_be_cut_under_a_reader() -> None:
    for shape in filter(is_uncut, trees(DEPTH)):
        cut_under_a_reader(shape)


@pytest.mark.parametrize(("depth", "locks", "states"), [(2, 3, 396), (3, 3, 22_212)])
def test_all_histories_of_smaller_trees(depth: int, locks: int, states: int) -> None:
    report = explore(TreeWorld(depth=depth, locks=locks))
    assert not report.fault, report
    assert report.states == states
