"""The tree of prefixes: what a match promises, what a lock holds, and what is evicted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from fanoutkv import (
    BadArgumentError,
    FIFOStrategy,
    ForeignLockError,
    InvariantError,
    PriorityStrategy,
    RadixCache,
    RadixKey,
    StaleIndexError,
    TreeNode,
)
from fanoutkv.radix import LRUStrategy
from fanoutkv_book.explore import explore
from fanoutkv_book.worlds import TreeWorld


def slots_of(first_page: int, tokens: int, page: int = 1) -> np.ndarray:
    """Slots of pages in a row, as many as so many tokens need."""
    return np.arange(first_page * page, first_page * page + tokens)


class Tree(RadixCache):
    """A tree that remembers what it gave back."""

    def __init__(self, page_size: int = 1, **more: Any) -> None:
        self.given_back: list[int] = []
        super().__init__(page_size, free=lambda slots: self.given_back.extend(slots), **more)

    def put(self, tokens: Any, first_page: int, **more: Any) -> int:
        key = RadixKey(tokens, more.pop("extra_key", None))
        return self.insert(key, slots_of(first_page, len(key), self.page_size), **more)

    def find(self, tokens: Any, **more: Any) -> Any:
        return self.match_prefix(RadixKey(tokens, more.pop("extra_key", None)), **more)


def snapshot(cache: RadixCache) -> Any:
    """All that a refused call must leave alone, also what is no part of the tree's shape."""

    def seen(node: TreeNode) -> Any:
        return (
            id(node), node.key.data, node.key.extra_key, node.value.tolist(), node.lock_ref,
            node.hit_count, node.last_access_time, node.creation_time, node.priority,
            node.history_len, node.depth, node._ticket, id(node.parent), node._tree is cache._tree,
            [(name, seen(child)) for name, child in node.children.items()],
        )  # fmt: skip

    return (
        seen(cache.root), cache.evictable_size, cache.protected_size, cache._clock, cache._epoch,
        {id(lock) for lock in cache._locks}, np.flatnonzero(cache._in_tree).tolist(),
        [entry[:2] for entry in cache.evictable_leaves._heap], len(cache.evictable_leaves),
        list(getattr(cache, "given_back", [])),
    )  # fmt: skip


def refused(cache: RadixCache, error: type[Exception], call: Any, match: str | None = None) -> None:
    """Demand that a call raises and changes nothing."""
    before = snapshot(cache)
    with pytest.raises(error, match=match):
        call()
    assert snapshot(cache) == before
    cache.check_invariants()


def shape(cache: RadixCache) -> list[tuple[list[int], int]]:
    """The segments of a tree and their depths, in an order of their own."""
    return sorted((node.key.token_ids.tolist(), node.depth) for node in cache.nodes())


# Keys


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_a_key_has_the_same_tokens_from_any_integers(dtype: Any) -> None:
    strided = np.array([[7, 0], [8, 0], [9, 0]], dtype=dtype)[:, 0]
    for tokens in ([7, 8, 9], (7, 8, 9), strided):
        key = RadixKey(tokens)
        assert key.token_ids.tolist() == [7, 8, 9]
        assert key.token_ids.dtype == np.int32
        assert len(key) == 3


def test_a_key_is_a_copy_that_cannot_be_written_to() -> None:
    tokens = np.array([1, 2, 3], dtype=np.int32)
    key = RadixKey(tokens)
    tokens[0] = 9
    assert key.token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        key.token_ids[0] = 9


def test_tokens_may_use_all_of_32_bits_and_no_more() -> None:
    ends = [2**31 - 1, -(2**31)]
    assert RadixKey(ends).token_ids.tolist() == ends
    for tokens in (
        [2**31], [-(2**31) - 1], [2**32], [2**64], np.array([2**63], dtype=np.uint64),
        [0.0], [True], [[1, 2]], [[1], [2, 3]], 5, "abc", None, np.array([1.0]), np.zeros((0, 2)),
    ):  # fmt: skip
        with pytest.raises(BadArgumentError):
            RadixKey(tokens)


@pytest.mark.parametrize("extra", [[], {}, set(), (1, [2]), np.zeros(2)])
def test_an_extra_key_that_cannot_be_hashed_is_refused(extra: Any) -> None:
    with pytest.raises(BadArgumentError, match="hashable"):
        RadixKey([1], extra)


def test_a_part_of_a_key_stays_in_its_namespace() -> None:
    key = RadixKey(range_list(6), "pirate")
    part = key[2:5]
    assert (part.token_ids.tolist(), part.extra_key) == ([2, 3, 4], "pirate")
    assert key[:-1].token_ids.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(BadArgumentError):
        key[::2]


def range_list(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


@pytest.mark.parametrize("differs_at", [0, 1, 63, 64, 65, 191, 192, 193, 299])
@pytest.mark.parametrize("start", [0, 5])
def test_two_keys_agree_up_to_the_first_difference(differs_at: int, start: int) -> None:
    mine, theirs = range_list(300), range_list(300)
    theirs[differs_at] = -1
    assert RadixKey(mine).match(RadixKey([9] * start + theirs), start) == differs_at


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([], [1], 0), ([1], [], 0), ([1], [1], 1)],
)
def test_the_shorter_key_ends_the_comparison(
    mine: list[int], theirs: list[int], common: int
) -> None:
    assert RadixKey(mine).match(RadixKey(theirs)) == common


def test_bytes_that_agree_by_halves_are_no_common_token() -> None:
    assert RadixKey([0x0102]).match(RadixKey([0x0302])) == 0
    assert RadixKey([1, 256]).match(RadixKey([1, 512])) == 1


@pytest.mark.parametrize("other", [None, "b", ("a",), ("a", "a")])
def test_keys_of_two_namespaces_have_nothing_to_compare(other: Any) -> None:
    with pytest.raises(BadArgumentError, match="namespaces"):
        RadixKey([1], "a").match(RadixKey([1], other))


# Matches and inserts


def test_an_empty_tree_knows_the_empty_prefix() -> None:
    tree = Tree()
    for tokens in ([], [1, 2]):
        found = tree.find(tokens)
        assert (found.length, found.node, found.indices.tolist()) == (0, tree.root, [])
        assert found.indices.dtype == np.int32
    assert tree.put([], 0) == 0
    assert (shape(tree), tree.total_size) == ([], 0)
    tree.check_invariants()


def test_a_match_cuts_a_segment_where_it_ends() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4], 10)
    whole = tree.find([1, 2, 3, 4])
    found = tree.find([1, 2, 9])
    assert (found.length, found.indices.tolist()) == (2, [10, 11])
    assert shape(tree) == [([1, 2], 2), ([3, 4], 4)]
    assert (whole.length, whole.indices.tolist()) == (4, [10, 11, 12, 13])
    assert whole.node.parent is found.node
    assert tree.total_size == tree.evictable_size == 4
    tree.find([1, 2, 9])
    assert shape(tree) == [([1, 2], 2), ([3, 4], 4)], "there is nothing to cut any more"
    tree.check_invariants(range(10, 14))


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("more", [0, 1, 3, 5, 15, 17, 40])
def test_prefixes_are_known_in_whole_pages(page: int, more: int) -> None:
    tree, length = Tree(page), 48
    tree.put(range_list(length), 5)
    found = tree.find([*range_list(more), -1, *range_list(60)])
    expected = more // page * page
    assert found.length == expected
    assert found.indices.tolist() == range_list(expected, 5 * page)
    tree.check_invariants(range(5 * page, 5 * page + length))


@pytest.mark.parametrize("page", [4, 16])
def test_a_key_below_a_page_is_the_empty_prefix(page: int) -> None:
    tree = Tree(page)
    assert tree.put(range_list(page - 1), 3) == 0
    assert tree.total_size == 0
    tree.put(range_list(page), 3)
    assert tree.find(range_list(page - 1)).length == 0
    assert tree.find(range_list(page)).length == page
    assert tree.find([-1, *range_list(page - 1, 1)]).length == 0


def test_siblings_may_share_tokens_below_a_page() -> None:
    tree = Tree(4)
    tree.put([1, 1, 1, 1], 0)
    assert tree.put([1, 1, 1, 2], 1) == 0
    assert shape(tree) == [([1, 1, 1, 1], 4), ([1, 1, 1, 2], 4)]
    assert tree.find([1, 1, 1, 2, 5]).indices.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("page", [1, 4])
def test_an_insert_says_what_was_known_and_owns_the_rest(page: int) -> None:
    tree = Tree(page)
    assert tree.put(range_list(2 * page), 0) == 0
    longer = [*range_list(2 * page), *range_list(page, 50)]
    assert tree.put(longer, 10) == 2 * page
    assert tree.find(longer).indices.tolist() == [*range(2 * page), *range(12 * page, 13 * page)]
    assert tree.put(longer, 20) == 3 * page
    other = [*range_list(page), *range_list(page, 90)]
    assert tree.put(other, 30) == page
    assert tree.total_size == 4 * page
    owned = [*range(2 * page), *range(12 * page, 13 * page), *range(31 * page, 32 * page)]
    tree.check_invariants(owned)
    assert tree.given_back == [], "duplicates are the caller's, not the tree's to free"


@pytest.mark.parametrize("rest", [1, 2, 3])
def test_the_last_part_of_a_page_stays_the_callers(rest: int) -> None:
    tree = Tree(4)
    assert tree.put(range_list(8 + rest), 2) == 0
    assert tree.total_size == 8
    tree.check_invariants(range(8, 20), outside=[16, 17, 18, 19])
    assert tree.put(range_list(8 + rest), 7) == 8
    assert tree.put(range_list(12), 7) == 8


def test_what_is_known_needs_no_good_slots() -> None:
    """Nobody becomes the owner of them, so they may be anywhere, even the tree's own."""
    tree = Tree(2)
    tree.put([1, 2, 3, 4], 0)
    assert tree.insert(RadixKey([1, 2, 3, 4]), [0, 1, 2, 3]) == 4
    assert tree.insert(RadixKey([1, 2, 3, 4, 5, 6]), [0, 1, 2, 3, 8, 9]) == 4
    tree.check_invariants([0, 1, 2, 3, 8, 9])


def test_namespaces_never_share() -> None:
    tree = Tree()
    spaces = [None, "a", "b", ("a", "bc"), ("ab", "c"), 0, ""]
    for number, space in enumerate(spaces):
        assert tree.put([1, 2, 3], 10 * number, extra_key=space) == 0
    for number, space in enumerate(spaces):
        found = tree.find([1, 2, 9], extra_key=space)
        assert found.indices.tolist() == [10 * number, 10 * number + 1]
    assert tree.find([1, 2, 3], extra_key="c").length == 0
    assert tree.total_size == 3 * len(spaces)
    tree.check_invariants()


def test_a_name_of_bytes_is_no_page_of_another_namespace() -> None:
    """The tree files both under a dictionary key of bytes; they must not meet."""
    tree = Tree()
    page = RadixKey([1]).data
    tree.put([1], 0)
    tree.put([1], 1, extra_key=page)
    tree.put([1], 2, extra_key=(page,))
    assert tree.find([1]).indices.tolist() == [0]
    assert tree.find([1], extra_key=page).indices.tolist() == [1]


def test_the_tree_does_not_write_into_what_it_was_given() -> None:
    tree, slots = Tree(), np.array([5, 6, 7], dtype=np.int32)
    tree.insert(RadixKey([1, 2, 3]), slots)
    slots[:] = 0
    found = tree.find([1, 2, 3])
    assert found.indices.tolist() == [5, 6, 7]
    found.indices[:] = 0
    assert found.indices.tolist() == [5, 6, 7]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64, np.uint64])
def test_slots_may_be_any_integers(dtype: Any) -> None:
    tree = Tree(2)
    assert tree.insert(RadixKey([1, 2, 3, 4]), np.arange(4, 8).astype(dtype)) == 0
    assert tree.insert(RadixKey([5, 6]), np.array([[0, 9], [1, 9]], dtype=dtype)[:, 0]) == 0
    assert tree.find([1, 2, 3, 4]).indices.dtype == np.int32
    tree.check_invariants(range(8), outside=[2, 3])


BAD_SLOTS = {
    "too few": [20, 21, 22],
    "too many": [20, 21, 22, 23, 24],
    "of two dimensions": [[20, 21, 22, 23]],
    "floats": [20.0, 21.0, 22.0, 23.0],
    "bools": [True, False, True, False],
    "text": ["20", "21", "22", "23"],
    "nothing": None,
    "ragged": [[20], [21, 22], 23, 24],
    "a negative page": [20, 21, -2, -1],
    "the lowest int64": np.array([20, 21, -(2**63), -(2**63) + 1]),
    "beyond 32 bits": [20, 21, 2**31, 2**31 + 1],
    "what wraps to a good slot in 32 bits": [20, 21, 2**32 + 22, 2**32 + 23],
    "beyond 63 bits": np.array([20, 21, 2**63, 2**63 + 1], dtype=np.uint64),
    "beyond 64 bits": [20, 21, 2**64, 2**64 + 1],
    "in the tree already": [20, 21, 2, 3],
    "a page that does not begin at its multiple": [20, 21, 23, 24],
    "a page backwards": [20, 21, 23, 22],
    "a page with a hole": [20, 21, 22, 24],
}


@pytest.mark.parametrize("name", BAD_SLOTS)
@pytest.mark.parametrize("key", [[1, 2, 9, 9], [1, 2, 3, 3], [9, 9, 9, 9]])
def test_bad_slots_are_refused_and_nothing_has_changed(name: str, key: list[int]) -> None:
    tree = Tree(2)
    tree.put([1, 2, 3, 4, 5, 6], 0)
    # Where [1, 2] is known already, the bad slots are those of the second page: no matter.
    refused(tree, BadArgumentError, lambda: tree.insert(RadixKey(key), BAD_SLOTS[name]))
    assert tree.insert(RadixKey(key), [20, 21, 22, 23]) == (0 if key[0] == 9 else 2)


def test_an_index_is_checked_for_a_page_of_one_token_too() -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    for slots in ([5, 5], [5, 1], [-1, 5], [5, 2**31]):
        refused(tree, BadArgumentError, lambda slots=slots: tree.insert(RadixKey([8, 9]), slots))


def test_a_page_has_one_place() -> None:
    tree = Tree(2)
    key = RadixKey([8, 8, 9, 9])
    refused(tree, BadArgumentError, lambda: tree.insert(key, [20, 21, 20, 21]), match="twice")


@pytest.mark.parametrize("priority", [None, "high", np.nan, [1]])
def test_a_priority_that_orders_nothing_is_refused(priority: Any) -> None:
    tree = Tree(strategy=PriorityStrategy())
    tree.put([1, 2, 3], 0)
    key = RadixKey([1, 2, 9])
    refused(tree, BadArgumentError, lambda: tree.insert(key, [9, 10, 11], priority=priority))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_page_size_of_a_small_type_does_not_wrap() -> None:
    tree = Tree(np.uint8(200))
    assert tree.insert(RadixKey(range_list(400)), slots_of(0, 400)) == 0
    assert tree.find(range_list(399)).length == 200


def test_a_namespace_must_be_equal_to_itself() -> None:
    with pytest.raises(BadArgumentError):
        RadixKey([1], float("nan"))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_a_page_may_be_longer_than_the_type_of_its_slots_counts(dtype: Any) -> None:
    page = int(np.iinfo(dtype).max) + 1
    tree = Tree(page)
    assert tree.insert(RadixKey(range_list(page)), np.arange(page).astype(dtype)) == 0
    tree.check_invariants(range(page))


@pytest.mark.parametrize("call", ["match_prefix", "insert"])
@pytest.mark.parametrize("key", [[1, 2], None, b"12345678", np.array([1, 2])])
def test_what_is_no_key_is_refused(call: str, key: Any) -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    more = ([5, 6],) if call == "insert" else ()
    refused(tree, BadArgumentError, lambda: getattr(tree, call)(key, *more), match="RadixKey")


@pytest.mark.parametrize("page", [0, -1, 1.0, True, None, "4"])
def test_senseless_page_sizes_are_refused(page: Any) -> None:
    with pytest.raises(BadArgumentError):
        RadixCache(page)


def test_a_class_is_no_strategy() -> None:
    with pytest.raises(BadArgumentError, match=r"LRUStrategy\(\)"):
        RadixCache(strategy=LRUStrategy)  # type: ignore[arg-type]


# Locks


def refs(tree: RadixCache) -> dict[tuple[int, ...], int]:
    return {tuple(n.key.token_ids.tolist()): n.lock_ref for n in tree.nodes()}


def test_a_lock_holds_its_whole_path_and_nothing_else() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4], 0)
    tree.put([1, 2, 5], 10)
    lock = tree.lock(tree.find([1, 2, 3]).node)
    assert refs(tree) == {(1, 2): 1, (3,): 1, (4,): 0, (5,): 0}
    assert (tree.protected_size, tree.evictable_size, tree.total_size) == (3, 2, 5)
    second = tree.lock(tree.find([1, 2, 5]).node)
    assert refs(tree) == {(1, 2): 2, (3,): 1, (4,): 0, (5,): 1}
    assert (tree.protected_size, tree.evictable_size) == (4, 1)
    tree.unlock(lock)
    assert refs(tree) == {(1, 2): 1, (3,): 0, (4,): 0, (5,): 1}
    assert (tree.protected_size, tree.evictable_size) == (3, 2)
    assert tree.evict(99) == 2
    assert sorted(tree.given_back) == [2, 3]
    tree.unlock(second)
    assert (tree.protected_size, tree.evictable_size) == (0, 3)
    tree.check_invariants()


def test_each_lock_counts_though_the_node_is_the_same() -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    node = tree.find([1, 2]).node
    locks = [tree.lock(node) for _ in range(3)]
    assert node.lock_ref == 3
    for left, lock in zip((2, 1, 0), locks, strict=True):
        assert tree.evict(2) == 0
        tree.unlock(lock)
        assert node.lock_ref == left
    assert tree.evict(2) == 2


def test_a_lock_of_the_root_holds_nothing_and_forbids_a_reset() -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    lock = tree.lock(tree.find([9]).node)
    assert (lock.node, tree.protected_size, tree.root.lock_ref) == (tree.root, 0, 0)
    refused(tree, ForeignLockError, tree.reset)
    assert tree.evict(2) == 2
    tree.unlock(lock)
    assert len(tree.evictable_leaves) == 0, "the root is no leaf that could go"
    assert tree.evict(1) == 0
    tree.check_invariants()


def test_a_lock_survives_what_others_do_to_its_path() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4, 5, 6], 0)
    found = tree.find([1, 2, 3, 4])
    lock = tree.lock(found.node)
    tree.find([1])  # above, by a match
    tree.put([1, 2, 8], 20)  # above, by an insert
    tree.find([1, 2, 3, 4, 5])  # below
    tree.put([1, 2, 3, 4, 9], 30)
    assert refs(tree) == {(1,): 1, (2,): 1, (3, 4): 1, (5,): 0, (6,): 0, (8,): 0, (9,): 0}
    assert found.indices.tolist() == tree.path_indices(lock.node).tolist() == [0, 1, 2, 3]
    assert tree.evict(99) == 4
    assert found.indices.tolist() == [0, 1, 2, 3], "locked, so an eviction makes nothing stale"
    assert tree.protected_size == 4
    tree.unlock(lock)
    assert (tree.protected_size, tree.evictable_size) == (0, 4)
    assert tree.evict(99) == 4
    tree.check_invariants()


def test_a_node_whose_children_are_gone_can_go_after_its_unlock() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4], 0)
    lock = tree.lock(tree.find([1, 2]).node)
    assert (tree.evict(99), tree.given_back) == (2, [2, 3])
    assert len(tree.evictable_leaves) == 0
    tree.unlock(lock)
    assert [node.key.token_ids.tolist() for node in tree.evictable_leaves] == [[1, 2]]
    assert (tree.evict(99), tree.given_back) == (2, [2, 3, 0, 1])


def test_an_unlocked_node_with_children_does_not_go_before_them() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4], 0)
    tree.unlock(tree.lock(tree.find([1, 2]).node))
    assert (tree.evict(1), tree.given_back) == (2, [2, 3])


def bad_locks(tree: Tree) -> dict[str, Any]:
    """What does not end a lock of this tree, though most of it looks as if."""
    node = tree.find([1, 2]).node
    ended = tree.lock(node)
    tree.unlock(ended)
    other = Tree()
    other.put([1, 2], 0)
    copy = type(ended)(tree.lock(node).node)
    return {
        "ended before": ended,
        "of another tree": other.lock(other.find([1, 2]).node),
        "made by hand": copy,
        "a node": node,
        "a match": tree.find([1, 2]),
        "nothing": None,
        "a list": [],
    }


@pytest.mark.parametrize("name", ["ended before", "of another tree", "made by hand", "a node",
                                  "a match", "nothing", "a list"])  # fmt: skip
def test_what_ends_no_lock_is_refused(name: str) -> None:
    tree = Tree()
    tree.put([1, 2, 3], 0)
    lock = bad_locks(tree)[name]
    refused(tree, ForeignLockError, lambda: tree.unlock(lock))


def test_after_a_reset_nothing_of_before_is_good() -> None:
    tree = Tree(2)
    tree.put([1, 2, 3, 4], 0)
    found = tree.find([1, 2])
    old_root = tree.find([9]).node
    lock = tree.lock(found.node)
    refused(tree, ForeignLockError, tree.reset, match="1 locks")
    tree.unlock(lock)
    tree.reset()
    assert sorted(tree.given_back) == [0, 1, 2, 3]
    assert (tree.total_size, shape(tree)) == (0, [])
    tree.put([1, 2, 3, 4], 0)  # the slots are free again, so they may come back
    for node in (found.node, old_root):
        refused(tree, StaleIndexError, lambda node=node: tree.lock(node))
        refused(tree, StaleIndexError, lambda node=node: tree.path_indices(node))
    refused(tree, ForeignLockError, lambda: tree.unlock(lock))
    refused(tree, StaleIndexError, lambda: found.indices)


def test_an_evicted_node_is_refused() -> None:
    tree = Tree()
    tree.put([1, 2, 3], 0)
    inner, leaf = tree.find([1]).node, tree.find([1, 2, 3]).node
    tree.evict(1)
    assert leaf.parent is None, "whoever keeps the node must not keep all above it alive"
    refused(tree, StaleIndexError, lambda: tree.lock(leaf))
    refused(tree, StaleIndexError, lambda: tree.path_indices(leaf))
    assert tree.path_indices(inner).tolist() == [0]
    tree.evict(1)
    refused(tree, StaleIndexError, lambda: tree.lock(inner))
    other = Tree()
    other.put([1], 0)
    refused(tree, StaleIndexError, lambda: tree.lock(other.find([1]).node))


@pytest.mark.parametrize("node", [None, 3, "node", RadixKey([1])])
@pytest.mark.parametrize("call", ["lock", "path_indices"])
def test_what_is_no_node_is_refused(call: str, node: Any) -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    refused(tree, BadArgumentError, lambda: getattr(tree, call)(node))


# Eviction


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_match_without_a_lock_is_good_until_memory_is_taken(wanted: int) -> None:
    tree = Tree()
    tree.put([1, 2, 3], 0)
    tree.put([7], 7)
    found, nothing = tree.find([1, 2]), tree.find([8])
    tree.find([1])
    tree.put([1, 5], 10)
    assert found.indices.tolist() == [0, 1], "matches and inserts take nothing"
    tree.evict(wanted)
    with pytest.raises(StaleIndexError, match="match again"):
        _ = found.indices
    assert nothing.indices.tolist() == []
    assert tree.find([1, 2]).indices.tolist() == [0, 1]
    lock = tree.lock(found.node)  # it is still in the tree, so a lock makes it good again
    assert found.indices.tolist() == [0, 1]
    tree.evict(wanted)
    assert found.indices.tolist() == [0, 1]
    tree.unlock(lock)


@pytest.mark.parametrize("number", [-1, 1.0, True, False, None, "1", np.float64(1), np.nan])
def test_senseless_numbers_of_tokens_are_refused(number: Any) -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    refused(tree, BadArgumentError, lambda: tree.evict(number))


def test_an_eviction_takes_whole_leaves_and_each_slot_once() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4], 0)
    tree.put([1, 2, 5], 10)
    tree.put([6, 7], 20)
    tree.find([1, 2, 3, 4])
    assert tree.evict(0) == 0
    assert (tree.evict(np.int64(1)), tree.given_back) == (1, [12]), "[5] was used first"
    assert (tree.evict(1), tree.given_back) == (2, [12, 20, 21])
    assert tree.total_size == 4
    assert tree.evict(1000) == 4
    assert sorted(tree.given_back) == [0, 1, 2, 3, 12, 20, 21]
    assert (tree.total_size, shape(tree)) == (0, [])
    assert tree.evict(5) == 0
    tree.check_invariants([], [])


def test_all_slots_of_an_eviction_are_given_back_at_once() -> None:
    calls: list[list[int]] = []
    cache = RadixCache(2, free=lambda slots: calls.append(slots.tolist()))
    for i in range(5):
        cache.insert(RadixKey([i, i]), [2 * i, 2 * i + 1])
    cache.evict(0)
    assert calls == []
    cache.evict(5)
    assert calls == [[0, 1, 2, 3, 4, 5]]
    cache.reset()
    assert sorted(calls[1]) == [6, 7, 8, 9]
    assert len(calls) == 2


def test_slots_that_left_may_come_back() -> None:
    tree = Tree(2)
    tree.put([1, 2], 3)
    tree.evict(2)
    assert tree.put([5, 6], 3) == 0
    tree.check_invariants([6, 7])


def test_a_tree_needs_nobody_who_takes_slots_back() -> None:
    cache = RadixCache()
    cache.insert(RadixKey([1, 2]), [0, 1])
    assert cache.evict(1) == 2
    cache.insert(RadixKey([1, 2]), [0, 1])
    cache.reset()
    assert cache.total_size == 0


def test_the_part_behind_a_match_keeps_its_old_time() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4], 0)
    tree.put([5, 6], 10)
    tree.find([1, 2])
    assert (tree.evict(1), tree.given_back) == (2, [2, 3])


def test_who_was_used_last_goes_last() -> None:
    tree = Tree()
    for token in range(5):
        tree.put([token], token)
    tree.find([0])
    tree.put([2], 99)
    for _ in range(5):
        tree.evict(1)
    assert tree.given_back == [1, 3, 4, 0, 2]


def test_the_order_is_right_after_the_heap_was_tidied() -> None:
    """Used newest first, so that old entries stand everywhere in the heap, and leave gaps."""
    tree = Tree(strategy=lambda node: -node.last_access_time)
    dice = np.random.default_rng(0)
    for token in range(300):
        tree.put([token], token)
    last_use = {token: token for token in range(300)}
    for now in range(300, 2_000):
        token = int(dice.integers(300))
        tree.find([token])
        last_use[token] = now
        if len(tree.evictable_leaves._heap) == 300:  # it has just been tidied
            break
    tree.evict(300)
    assert tree.given_back == sorted(last_use, key=last_use.__getitem__, reverse=True)


def test_equal_leaves_go_in_the_order_in_which_they_came() -> None:
    tree = Tree(strategy=lambda node: 0)
    for token in (4, 2, 9):
        tree.put([token], token)
    tree.evict(3)
    assert tree.given_back == [4, 2, 9]


def test_the_part_behind_a_cut_is_judged_anew() -> None:
    """A strategy may look at where a segment begins, and a cut moves that."""
    tree = Tree(strategy=lambda node: node.depth - len(node.value))
    tree.put([1, 2, 3, 4], 0)
    tree.put([5], 10)
    tree.put([6, 7, 8], 20)
    tree.find([6, 7])
    assert [value for value, ticket, node in tree.evictable_leaves._heap
            if node.value.tolist() == [22] and ticket == node._ticket] == [2]  # fmt: skip
    assert (tree.evict(5), tree.given_back) == (5, [0, 1, 2, 3, 10])


@pytest.mark.parametrize("hold", [False, True])
def test_a_cut_makes_no_held_part_evictable(hold: bool) -> None:
    tree = Tree()
    tree.put([1, 2, 3], 0)
    node = tree.find([1, 2, 3]).node
    if hold:
        tree.lock(node)
    tree.find([1])
    assert (node in list(tree.evictable_leaves)) is not hold
    assert tree.evict(1) == (0 if hold else 2)


def test_a_reset_is_whole_before_anybody_hears_of_it() -> None:
    """Whoever takes the slots may use them at once, or fail; the tree is in order already."""
    cache: RadixCache
    seen: list[int] = []

    def take(slots: np.ndarray) -> None:
        seen.append(cache.total_size)
        cache.insert(RadixKey([9]), [slots[0]])

    cache = RadixCache(free=take)
    cache.insert(RadixKey([1, 2]), [0, 1])
    cache.evict(1)
    cache.check_invariants([0, 1], [1])
    cache.reset()
    assert seen == [0, 0]
    cache.check_invariants([0], [])


# What a node knows


def test_hits_are_matches_through_a_node() -> None:
    tree = Tree()
    tree.put([1, 2, 3, 4], 0)
    assert [node.hit_count for node in tree.nodes()] == [0], "an insert is no hit"
    tree.find([1, 2, 3, 4])
    tree.find([1, 2], count_hit=False)
    tree.find([1, 2])
    tree.put([1, 2, 3], 10)
    counts = {tuple(n.key.token_ids.tolist()): n.hit_count for n in tree.nodes()}
    # [1, 2] was cut off after one hit, and had one more; [3] was cut off [3, 4].
    assert counts == {(1, 2): 2, (3,): 1, (4,): 1}


def test_what_is_dear_makes_all_above_it_dear() -> None:
    tree = Tree()
    tree.put([1, 2, 3], 0, priority=1)
    tree.put([1, 2, 3, 4], 10, priority=5)
    tree.put([1, 2, 6], 20, priority=3)
    tree.put([1, 2, 3], 30, priority=2)
    tree.put([1], 40, priority=-1)
    kept = {tuple(n.key.token_ids.tolist()): n.priority for n in tree.nodes()}
    assert kept == {(1,): 5, (2,): 5, (3,): 5, (4,): 5, (6,): 3}


def test_a_priority_below_zero_is_kept() -> None:
    tree = Tree(strategy=PriorityStrategy())
    tree.put([1], 0, priority=-3)
    tree.put([2], 1, priority=-5)
    tree.put([3], 2)
    tree.put([1], 10, priority=-4)
    assert tree.find([1]).node.priority == -3
    tree.evict(3)
    assert tree.given_back == [1, 0, 2]


def test_a_priority_reaches_a_leaf_that_waits_already() -> None:
    tree = Tree(strategy=PriorityStrategy())
    tree.put([1], 1, priority=1)
    tree.put([2], 2, priority=2)
    tree.put([1], 3, priority=3)
    tree.evict(2)
    assert tree.given_back == [2, 1]


def test_a_node_remembers_how_far_its_prefix_once_went() -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    tree.put([1, 2, 3, 4, 5], 10)
    node = tree.find([1, 2]).node
    tree.evict(3)
    assert (node.history_len, node.depth, shape(tree)) == (5, 2, [([1, 2], 2)])
    assert tree.find([1]).node.history_len == 5
    tree.put([9], 30)
    assert tree.find([9]).node.history_len == 1


def test_a_part_of_a_segment_is_as_old_as_the_whole() -> None:
    tree = Tree(strategy=FIFOStrategy())
    tree.put([1, 2, 3], 0)
    tree.put([9], 9)
    born = {node.creation_time for node in tree.nodes() if node.depth == 3}
    tree.put([1, 2, 5], 20)
    ages = {tuple(n.key.token_ids.tolist()): n.creation_time for n in tree.nodes()}
    assert {ages[1, 2], ages[(3,)]} == born
    assert ages[(3,)] < ages[(9,)] < ages[(5,)]
    tree.evict(1)
    assert tree.given_back == [2]


def test_time_goes_on_by_matches_and_inserts_alone() -> None:
    tree = Tree()
    tree.put([1], 0)
    tree.put([2], 1)
    first, second = tree.find([1]).node, tree.find([2]).node
    assert first.last_access_time + 1 == second.last_access_time == tree.root.last_access_time
    tree.unlock(tree.lock(first))
    tree.evict(0)
    assert first.last_access_time + 1 == second.last_access_time


# The proof can fail


def a_tree() -> Tree:
    """Two namespaces, a branch, a lock in the middle, and a leaf at which a lock ends."""
    tree = Tree(2)
    tree.put([1, 1, 2, 2, 3, 3], 0, priority=1)
    tree.put([1, 1, 4, 4], 10)
    tree.put([1, 1], 20, extra_key="x")
    tree.lock(tree.find([1, 1, 2, 2]).node)
    tree.lock(tree.find([1, 1], extra_key="x").node)
    return tree


def leaf_of(tree: Tree) -> TreeNode:
    return next(n for n in tree.nodes() if n.key.token_ids.tolist() == [3, 3])


def set_to(name: str, change: Any) -> Any:
    def corrupt(tree: Tree) -> None:
        node = leaf_of(tree)
        setattr(node, name, change(getattr(node, name)))

    return corrupt


def set_above(name: str, change: Any) -> Any:
    def corrupt(tree: Tree) -> None:
        node = leaf_of(tree).parent
        setattr(node, name, change(getattr(node, name)))

    return corrupt


def set_tree(name: str, change: Any) -> Any:
    return lambda tree: setattr(tree, name, change(getattr(tree, name)))


def up(value: int) -> int:
    return value + 1


def down(value: int) -> int:
    return value - 1


def move_to_another_namespace(tree: Tree) -> None:
    node = leaf_of(tree)
    assert node.parent is not None
    del node.parent.children[tree._name(node.key)]
    node.key = RadixKey(node.key.token_ids, "y")
    node.parent.children[tree._name(node.key)] = node


CORRUPTIONS = {
    "lock_ref too high": set_to("lock_ref", up),
    "lock_ref too low": set_above("lock_ref", down),
    "a forgotten lock": lambda tree: tree._locks.pop(),
    "a lock too many": lambda tree: tree._locks.add(type(next(iter(tree._locks)))(leaf_of(tree))),
    "a lock of a node elsewhere": lambda tree: tree._locks.add(
        type(next(iter(tree._locks)))(leaf_of(a_tree()))
    ),
    "depth": set_to("depth", up),
    "a parent's depth": set_above("depth", up),
    "history below depth": set_to("history_len", lambda _: 0),
    "history above the parent's": set_to("history_len", lambda value: value + 9),
    "used after its parent": set_to("last_access_time", lambda value: value + 99),
    "dearer than its parent": set_to("priority", lambda value: value + 9),
    "another segment": set_to("key", lambda key: RadixKey([7, 7], key.extra_key)),
    "another namespace": set_to("key", lambda key: RadixKey(key.token_ids, "y")),
    "another namespace, and filed so": move_to_another_namespace,
    "a segment of less than a page": set_to("key", lambda key: key[:1]),
    "fewer slots than tokens": set_to("value", lambda value: value[:1]),
    "no segment": set_to("value", lambda value: value[:0]),
    "other slots": set_to("value", lambda value: value + 60),
    "slots of another": set_to("value", lambda value: value - 2),
    "slots backwards": set_to("value", lambda value: value[::-1]),
    "a page with a foreign slot": set_to("value", lambda value: value + np.int32([0, 40])),
    "a page that begins too late": set_to("value", lambda value: value + np.int32(1)),
    "slots of another type": set_to("value", lambda value: value.astype(np.int64)),
    "an orphan": set_to("parent", lambda _: None),
    "somebody else's child": set_to("parent", lambda parent: parent.parent),
    "a child under a wrong name": lambda tree: leaf_of(tree).parent.children.update(
        {b"": leaf_of(tree).parent.children.popitem()[1]}
    ),
    "one child under two names": lambda tree: leaf_of(tree).parent.children.update(
        {b"": leaf_of(tree)}
    ),
    "a child that is lost": lambda tree: leaf_of(tree).parent.children.clear(),
    "no ticket": set_to("_ticket", lambda _: 0),
    "a ticket that was never given": set_to("_ticket", lambda value: value + 9),
    "a ticket for a locked node": lambda tree: tree.evictable_leaves.add(leaf_of(tree).parent),
    "a ticket for the root": lambda tree: tree.evictable_leaves.add(tree.root),
    "a ticket for a node elsewhere": lambda tree: tree.evictable_leaves.add(leaf_of(a_tree())),
    "leaves miscounted": lambda tree: setattr(tree.evictable_leaves, "_num_leaves", 9),
    "a lost place in the heap": lambda tree: tree.evictable_leaves._heap.clear(),
    "one place too many": lambda tree: tree.evictable_leaves._heap.extend(
        [entry for entry in tree.evictable_leaves._heap if entry[2] is leaf_of(tree)][-1:]
    ),
    "a node of no tree": set_to("_tree", lambda _: None),
    "an inner node of no tree": set_above("_tree", lambda _: object()),
    "evictable_size": set_tree("evictable_size", up),
    "protected_size": set_tree("protected_size", up),
    "both sizes": lambda tree: (set_tree("evictable_size", up)(tree),
                                set_tree("protected_size", down)(tree)),
    "a page unknown": lambda tree: tree._in_tree.__setitem__(2, False),
    "a page too many": lambda tree: tree._in_tree.__setitem__(50, True)
    if len(tree._in_tree) > 50 else set_tree("_in_tree", lambda a: np.append(a, True))(tree),
    "a root with tokens": lambda tree: setattr(tree.root, "value", np.zeros(2, dtype=np.int32)),
    "a root with a lock": lambda tree: setattr(tree.root, "lock_ref", 1),
    "a root of no tree": lambda tree: setattr(tree.root, "_tree", None),
    "a root with a depth": lambda tree: setattr(tree.root, "depth", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_proof_notices(name: str) -> None:
    tree = a_tree()
    tree.check_invariants()
    CORRUPTIONS[name](tree)
    with pytest.raises(InvariantError):
        tree.check_invariants()


@pytest.mark.parametrize(
    ("pool", "outside"),
    [([0, 1, 2], [2, 3]), ([0, 1, 2, 3, 4], [2, 3]), ([0, 1, 2, 3], [1, 2, 3]),
     ([0, 1, 2, 3], [2, 2, 3]), ([0, 1, 2, 3, 3], [2, 3])],
)  # fmt: skip
def test_the_proof_wants_each_slot_in_one_place(pool: list[int], outside: list[int]) -> None:
    tree = Tree()
    tree.put([1, 2], 0)
    tree.check_invariants([3, 2, 1, 0], [3, 2])
    with pytest.raises(InvariantError, match="pool"):
        tree.check_invariants(pool, outside)


# Cost, in steps and in memory


@pytest.mark.parametrize("leaves", [1_000, 20_000])
def test_an_eviction_costs_what_it_evicts(leaves: int) -> None:
    calls = 0

    def counting(node: TreeNode) -> int:
        nonlocal calls
        calls += 1
        return node.last_access_time

    cache = RadixCache(strategy=counting)
    for i in range(leaves):
        cache.insert(RadixKey([i // 10, i]), [2 * i, 2 * i + 1])
    calls = 0
    assert cache.evict(10) == 10
    assert calls <= 2, "only a parent that became a leaf is judged anew"
    heap = cache.evictable_leaves._heap
    calls = 0
    cache.unlock(cache.lock(cache.match_prefix(RadixKey([9, 95])).node))
    assert calls <= 2
    assert cache.evictable_leaves._heap is heap, "nothing was rebuilt"


def test_a_leaf_that_is_used_again_and_again_does_not_fill_the_heap() -> None:
    tree = Tree()
    for token in range(10):
        tree.put([token], token)
    key = RadixKey([3])
    for _ in range(10_000):
        tree.match_prefix(key)
        assert len(tree.evictable_leaves._heap) <= 2 * 10 + 64
    tree.evict(9)
    assert 3 not in tree.given_back
    tree.check_invariants()


def test_tidying_the_heap_is_paid_for_by_those_who_join() -> None:
    class Counted(list):  # type: ignore[type-arg]
        looks = 0

        def __iter__(self) -> Any:
            Counted.looks += len(self)
            return super().__iter__()

    tree = Tree()
    for token in range(500):
        tree.put([token], token)
    leaves, joins = tree.evictable_leaves, 5_000
    for i in range(joins):
        if not isinstance(leaves._heap, Counted):
            leaves._heap = Counted(leaves._heap)
        tree.find([i % 500])
    assert 0 < Counted.looks <= 4 * joins


def test_what_was_evicted_is_not_kept_alive() -> None:
    """Slots that lists cannot count: an array knows whether anybody still has it."""
    tree = Tree()
    tree.put([1, 2], 0)
    tree.put([3, 4], 10)
    found = tree.find([1, 2])
    gone = weakref.ref(found.node.value)
    del found
    tree.find([3, 4])
    tree.evict(1)
    gc.collect()
    assert gone() is None


def test_a_split_leaves_no_part_of_the_old_arrays_behind() -> None:
    tree = Tree()
    tree.put(range_list(1000), 0)
    tree.find(range_list(1))
    for node in tree.nodes():
        assert node.value.base is None, "a view would keep all 1,000 slots alive"


# All small worlds


@pytest.mark.parametrize(("depth", "locks", "states"), [(2, 3, 396), (3, 1, 1_440)])
def test_every_small_tree_is_right(depth: int, locks: int, states: int) -> None:
    """The numbers are those of trees, counted by `numbers_of_trees`, not by a search."""
    report = explore(TreeWorld(depth=depth, locks=locks))
    assert not report.fault, report
    assert report.states == states == numbers_of_trees(depth, locks)


def numbers_of_trees(depth: int, locks: int) -> int:
    """How many trees there are, with cuts and locks, if the names of two branches do not matter.

    A polynomial: its coefficient for x**k is the number of trees with k locks. A position has any
    number of locks, if a node ends there, and then no child, one, or an unordered pair; if none
    ends there, it has one child and no lock.
    """

    def times(a: list[int], b: list[int]) -> list[int]:
        return [sum(a[i] * b[k - i] for i in range(k + 1)) for k in range(locks + 1)]

    def pairs(a: list[int]) -> list[int]:
        twins = [0 if k % 2 else a[k // 2] for k in range(locks + 1)]
        return [(x + y) // 2 for x, y in zip(times(a, a), twins, strict=True)]

    def plus(*many: list[int]) -> list[int]:
        return [sum(column) for column in zip(*many, strict=True)]

    none, any_number = [1] + [0] * locks, [1] * (locks + 1)
    below = [0] * (locks + 1)
    for _ in range(depth):
        below = plus(below, times(any_number, plus(none, below, pairs(below))))
    return sum(times(any_number, plus(none, below, pairs(below))))


class ForgetsWhoHolds(RadixCache):
    """A split that leaves the readers with the lower part."""

    def _split(self, child: TreeNode, at: int) -> TreeNode:
        upper = super()._split(child, at)
        upper.lock_ref = 0
        return upper


class HoldsTheEndOnly(RadixCache):
    """A lock that protects its node, and not the path above."""

    def unlock(self, lock: Any) -> None:
        super().unlock(lock)
        if lock.node.parent is not None:
            self.evictable_leaves.discard(lock.node)


@pytest.mark.parametrize("broken", [ForgetsWhoHolds, HoldsTheEndOnly])
def test_a_broken_tree_is_found(broken: type[RadixCache]) -> None:
    assert explore(TreeWorld(broken, depth=2, locks=1)).fault
