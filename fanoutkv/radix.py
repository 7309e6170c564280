"""Prefixes in a tree, and locks that hold a whole path (chapter 05).

`RadixCache` knows which prefixes have their K/V in memory, and in which slots. A reader locks the
path from its node to the root; what is left without a lock is evicted from the leaves inwards.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fanoutkv.blocks import (
    BadArgumentError,
    FanoutKVError,
    InvariantError,
    StaleIndexError,
    is_whole,
)
from fanoutkv.hashing import token_array


class ForeignLockError(FanoutKVError):
    """A lock is not the caller's to end: used up, of another tree, or somebody else's."""


class RadixKey:
    """Tokens, and the namespace in which they mean something.

    Args:
        token_ids: [n], a list or array of integers that fit into 32 bits.
        extra_key: all else that changes K/V (adapter, salt): any hashable value, best a tuple of
            (tag, value) pairs. Equal tokens under different extra keys never share a node. (To
            Python 1, True and 1.0 are equal; texts are safer.)

    Raises:
        BadArgumentError: something that is no flat sequence of such integers, or an extra key
            that cannot be hashed.

    The tokens are kept as bytes, 4 each: then one memcmp compares a whole segment.

    SGLang 0.5.23: `sglang/srt/mem_cache/radix_cache.py`, `RadixKey`.
    """

    __slots__ = ("data", "extra_key")

    def __init__(self, token_ids: ArrayLike, extra_key: Hashable = None) -> None:
        """Copy the tokens, once."""
        self.data = _token_bytes(token_ids)
        self.extra_key = extra_key
        try:
            hash(extra_key)
        except TypeError as error:
            raise BadArgumentError(f"an extra key is hashable, as a tuple is: {error}") from error
        if extra_key != extra_key:  # NaN: it would never be found again
            raise BadArgumentError(f"an extra key is equal to itself, not {extra_key!r}")

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.data) // 4

    def __getitem__(self, tokens: slice) -> RadixKey:
        """Return a part of the key, as a copy; `tokens` is a slice without a step."""
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            raise BadArgumentError(f"a part of a key is a slice without a step, not {tokens!r}")
        start, stop, _ = tokens.indices(len(self))
        part = RadixKey.__new__(RadixKey)
        part.data, part.extra_key = self.data[4 * start : 4 * stop], self.extra_key
        return part

    def __repr__(self) -> str:
        """Show the first tokens."""
        shown = ", ".join(map(str, self.token_ids[:8].tolist())) + ", …" * (len(self) > 8)
        namespace = "" if self.extra_key is None else f", extra_key={self.extra_key!r}"
        return f"RadixKey([{shown}]{namespace})"

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The tokens, int32[n]; a view that cannot be written to."""
        return np.frombuffer(self.data, dtype=np.int32)

    def match(self, other: RadixKey, start: int = 0) -> int:
        """Return how many tokens this key and `other[start:]` have in common before they differ.

        The cost grows with the answer, not with the keys, and nothing is copied.

        Raises:
            BadArgumentError: the keys have different extra keys, so no token means the same.
        """
        if self.extra_key != other.extra_key:
            raise BadArgumentError(
                f"keys of different namespaces, {self.extra_key!r} and {other.extra_key!r}, have "
                "nothing in common that could be counted"
            )
        mine, theirs = self.token_ids, other.token_ids[start:]
        end, begin, size = min(len(mine), len(theirs)), 0, 64
        while begin < end:  # in windows that double, so that an early difference is cheap
            stop = min(begin + size, end)
            differs = mine[begin:stop] != theirs[begin:stop]
            first = int(differs.argmax())
            if differs[first]:
                return begin + first
            begin, size = stop, 2 * size
        return end


def _token_bytes(token_ids: ArrayLike) -> bytes:
    """Return tokens as bytes, 4 each; an int32 array is copied as it is."""
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.int32 and token_ids.ndim == 1:
        return token_ids.tobytes()
    wide = token_array(token_ids)
    narrow = wide.astype(np.int32)
    if not np.array_equal(wide, narrow):
        wrong = wide[wide != narrow][0]
        raise BadArgumentError(f"tokens of a key fit into 32 bits with their sign, not {wrong}")
    return narrow.tobytes()


class TreeNode:
    """A segment of tokens that the prefixes below it have in common, and their slots.

    Attributes:
        key, value: the tokens of the segment, and a slot index for each, int32.
        parent, children: the neighbors; a child is found by the first page of its tokens.
        depth: tokens from the root to the end of this segment.
        lock_ref: readers that hold this node or one below it.
        last_access_time, creation_time: ticks of the tree's own clock.
        hit_count: matches that came to this node or through it.
        priority: the highest that anybody gave to a prefix through this node.
        history_len: the largest depth that ever was below this node; see `TLRUStrategy`.

    SGLang 0.5.23: `sglang/srt/mem_cache/radix_cache.py`, `TreeNode`.
    """

    __slots__ = (
        "_ticket",
        "_tree",
        "children",
        "creation_time",
        "depth",
        "history_len",
        "hit_count",
        "key",
        "last_access_time",
        "lock_ref",
        "parent",
        "priority",
        "value",
    )

    def __init__(self, key: RadixKey, value: NDArray[np.int32], parent: TreeNode | None) -> None:
        """Make a node that nobody has used yet; to put it under its parent is the tree's part."""
        self.key, self.value, self.parent = key, value, parent
        self.children: dict[Hashable, TreeNode] = {}
        self.depth: int = len(key) + (parent.depth if parent is not None else 0)
        self.lock_ref = self.hit_count = self.priority = 0
        self.last_access_time = self.creation_time = 0
        self.history_len = self.depth
        self._ticket = 0  # its place among the evictable leaves; 0 if it is none
        self._tree: object = None  # the generation of the tree that it stands in; None if evicted

    def inherit(self, lower: TreeNode) -> None:
        """Take over what is known of a node whose upper part this one is to be."""
        self.lock_ref, self.hit_count, self._tree = lower.lock_ref, lower.hit_count, lower._tree
        self.last_access_time, self.creation_time = lower.last_access_time, lower.creation_time
        self.priority, self.history_len = lower.priority, lower.history_len

    def __repr__(self) -> str:
        """Show what the tree knows of the node."""
        return f"TreeNode({self.key!r}, depth={self.depth}, lock_ref={self.lock_ref})"


Strategy = Callable[[TreeNode], Any]


class LRUStrategy:
    """Least recently used first."""

    def __call__(self, node: TreeNode) -> int:
        """Return the time of the last use."""
        return node.last_access_time


class EvictableLeaves:
    """The leaves that nobody holds, in the order in which a strategy wants them to go.

    A heap with tickets: a leaf joins with a new ticket, and to leave is to lose it. An entry whose
    ticket is not its leaf's any more is passed over later. So a leaf that is used, locked or grown
    costs one entry, and nothing is ever sorted anew.
    """

    def __init__(self, strategy: Strategy) -> None:
        """Start without leaves; the lowest priority that `strategy` gives to a node goes first."""
        self._strategy = strategy
        self._heap: list[tuple[Any, int, TreeNode]] = []
        self._last_ticket = self._num_leaves = 0

    def __len__(self) -> int:
        """Return the number of leaves."""
        return self._num_leaves

    def __iter__(self) -> Iterator[TreeNode]:
        """Yield the leaves, in no order."""
        return (node for _, ticket, node in self._heap if ticket == node._ticket)

    def add(self, node: TreeNode) -> None:
        """Let a leaf join; one that is there already gets the place that it deserves now."""
        value = self._strategy(node)
        self._num_leaves += not node._ticket
        node._ticket = self._last_ticket = self._last_ticket + 1
        heapq.heappush(self._heap, (value, node._ticket, node))
        if len(self._heap) > 2 * self._num_leaves + 64:  # the rest are old tickets
            self._heap = [entry for entry in self._heap if entry[1] == entry[2]._ticket]
            heapq.heapify(self._heap)

    def discard(self, node: TreeNode) -> None:
        """Let a node leave, if it is here."""
        self._num_leaves -= bool(node._ticket)
        node._ticket = 0

    def pop(self) -> TreeNode | None:
        """Take the leaf that is to go first, or return None if there is none."""
        while self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            if ticket == node._ticket:
                self._num_leaves -= 1
                node._ticket = 0
                return node
        return None


@dataclass(slots=True, eq=False)
class MatchResult:
    """The longest known prefix of a key: a promise, and it is kept only while its node is locked.

    Attributes:
        length: tokens that were found.
        node: where they end; the root if nothing was found.

    SGLang 0.5.23: `sglang/srt/mem_cache/base_prefix_cache.py`, `MatchResult`.
    """

    length: int
    node: TreeNode
    _cache: RadixCache
    _epoch: int

    @property
    def indices(self) -> NDArray[np.int32]:
        """The slots of the prefix, int32[length], read off the path now.

        Raises:
            StaleIndexError: nobody has locked the node, and `evict` was called since the match.
        """
        if not self.length:
            return np.zeros(0, dtype=np.int32)
        if self._epoch != self._cache._epoch and not self.node.lock_ref:
            raise StaleIndexError(
                f"memory was taken since these {self.length} tokens were matched, and nobody had "
                "locked them: match again, lock the node, then read"
            )
        return self._cache.path_indices(self.node)


@dataclass(frozen=True, slots=True, eq=False)
class TreeLock:
    """The receipt of a lock: whoever has it reads the path from the root to `node`.

    SGLang 0.5.23: `sglang/srt/mem_cache/base_prefix_cache.py`, `TreeLock`.
    """

    node: TreeNode


class RadixCache:
    """The prefixes whose K/V are in memory, as a tree of segments.

    Args:
        page_size: tokens a page; prefixes are known in whole pages.
        free: called with the slots that leave the tree, int32[n].
        strategy: a function of a `TreeNode`; the leaf with the lowest value is evicted first.
            Its value may change only when the node is used, split, or becomes a leaf; values are
            compared with each other, and the function must not raise.

    Attributes:
        root: the node of the empty prefix; it has no slots and is never evicted.
        evictable_size, protected_size: tokens in nodes without a lock, and in locked ones.

    Raises:
        BadArgumentError: a page size below 1, or a strategy's class instead of an object.

    SGLang 0.5.23: `sglang/srt/mem_cache/radix_cache.py`, `RadixCache`.
    """

    def __init__(
        self,
        page_size: int = 1,
        *,
        free: Callable[[NDArray[np.int32]], None] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        """Start with the empty prefix alone."""
        if not is_whole(page_size) or page_size < 1:
            raise BadArgumentError(f"a page has 1 or more tokens, not {page_size!r}")
        if isinstance(strategy, type):
            raise BadArgumentError(f"a strategy is an object: {strategy.__name__}(), not its class")
        if not all(function is None or callable(function) for function in (free, strategy)):
            raise BadArgumentError(f"free and strategy are functions, not {free!r}, {strategy!r}")
        self.page_size = int(page_size)
        self._page_bytes = 4 * self.page_size
        self._free = free
        self._strategy = LRUStrategy() if strategy is None else strategy
        self._clock = self._epoch = 0
        self._plant()

    def _plant(self) -> None:
        """Begin a new, empty tree; nothing that belonged to an old one is good any more."""
        self.root = self._new_node(RadixKey([]), np.zeros(0, dtype=np.int32), None)
        self.root._tree = self._tree = object()
        self.evictable_size = self.protected_size = 0
        self._locks: set[TreeLock] = set()
        self.evictable_leaves = EvictableLeaves(self._strategy)
        self._in_tree = np.zeros(0, dtype=bool)  # a flag for each page

    @property
    def total_size(self) -> int:
        """Tokens in the tree."""
        return self.evictable_size + self.protected_size

    def nodes(self) -> Iterator[TreeNode]:
        """Yield every node but the root, parents first."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _new_node(
        self, key: RadixKey, value: NDArray[np.int32], parent: TreeNode | None
    ) -> TreeNode:
        """Make a node; a tree that knows more of its nodes makes others."""
        return TreeNode(key, value, parent)

    def _path(self, node: TreeNode) -> Iterator[TreeNode]:
        """Yield the nodes from here up to the root, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _name(self, key: RadixKey) -> Hashable:
        """Return what a node with this key is called among its siblings: by its first page."""
        page = key.data[: self._page_bytes]
        return page if key.extra_key is None else (key.extra_key, page)

    def match_prefix(self, key: RadixKey, *, count_hit: bool = True) -> MatchResult:
        """Find the longest known prefix of a key, in whole pages.

        The nodes on its path count as used now. If it ends inside a segment, the segment is split
        there; the part behind keeps its old time, since it was not used. A split moves no slot.

        Args:
            key: the tokens.
            count_hit: add one to the `hit_count` of each node on the path. Who looks up what it
                has itself inserted says False, or it would count as its own second reader.

        Raises:
            BadArgumentError: `key` is not a RadixKey.

        SGLang 0.5.23: `RadixCache.match_prefix`.
        """
        node, inside = self._walk(key)
        if inside < len(node.value):
            node = self._split(node, inside)
        self._clock += 1
        self._refresh(node, hits=int(count_hit))
        return MatchResult(node.depth, node, self, self._epoch)

    def _walk(self, key: RadixKey) -> tuple[TreeNode, int]:
        """Return the last node that agrees with a key, and how many of its tokens do."""
        if not isinstance(key, RadixKey):
            raise BadArgumentError(f"a prefix is looked up by RadixKey(tokens), not by {type(key)}")
        data, step, namespace = key.data, self._page_bytes, key.extra_key
        node, depth, end = self.root, 0, len(data) // step * self.page_size
        while depth < end:
            name: Hashable = data[4 * depth : 4 * depth + step]  # as in _name, but it is hot here
            child = node.children.get(name if namespace is None else (namespace, name))
            if child is None:
                break
            node = child
            if not data.startswith(child.key.data, 4 * depth):
                return node, child.key.match(key, depth) // self.page_size * self.page_size
            depth = child.depth
        return node, len(node.value)

    def _split(self, child: TreeNode, at: int) -> TreeNode:
        """Cut a node in two, and return the upper one, a new node.

        The old node becomes the lower part. So whoever holds it still holds the same prefix, and
        all its readers are readers of the new node, too.

        SGLang 0.5.23: `RadixCache._split_node`.
        """
        assert child.parent is not None  # only the root has none, and it has nothing to split
        upper = self._new_node(child.key[:at], child.value[:at].copy(), child.parent)
        upper.inherit(child)
        child.parent.children[self._name(child.key)] = upper
        child.key, child.value, child.parent = child.key[at:], child.value[at:].copy(), upper
        upper.children[self._name(child.key)] = child
        self._offer(child)  # a strategy may look at its length
        return upper

    def insert(self, key: RadixKey, value: ArrayLike, *, priority: int = 0) -> int:
        """Make a prefix known, in whole pages; the tree becomes the owner of the new slots.

        Args:
            key: the tokens.
            value: [len(key)], the slot of each token. A page is `page_size` slots in a row, the
                first of them a multiple of page_size.
            priority: how much the prefix is worth to `PriorityStrategy`; a node keeps the highest.

        Returns:
            how many tokens were known before. For these the tree has slots of its own: those that
            the caller computed are duplicates, and still the caller's to free. So is the last
            page, if it is not full.

        Raises:
            BadArgumentError: `value` is not one slot a token; new slots are no pages, negative,
                named twice, or in the tree already; the priority is no integer.

        SGLang 0.5.23: `RadixCache.insert`.
        """
        node, inside = self._walk(key)
        if not is_whole(priority):
            raise BadArgumentError(f"a priority is an integer, not {priority!r}")
        known = node.depth - len(node.value) + inside
        end = len(key) // self.page_size * self.page_size
        slots = self._take(value, len(key), known, end)
        node = self._extend(node, inside, key[known:end], slots, priority)
        self._refresh(node, hits=0)
        return known

    def _extend(
        self, node: TreeNode, inside: int, key: RadixKey, slots: NDArray[np.int32], priority: int
    ) -> TreeNode:
        """Let the way that ends `inside` tokens into a node go on with a key; return its end."""
        if inside < len(node.value):
            node = self._split(node, inside)
        self._clock += 1
        if len(slots):
            node = self._grow(node, key, slots, priority)
        node.priority = max(node.priority, priority)
        return node

    def _take(self, value: ArrayLike, length: int, start: int, end: int) -> NDArray[np.int32]:
        """Become the owner of the slots `value[start:end]`, and return them; or refuse."""
        try:
            slots = np.asarray(value)
        except ValueError as error:
            raise BadArgumentError(f"slots are a flat array: {error}") from error
        if slots.shape != (length,) or (length and slots.dtype.kind not in "iu"):
            raise BadArgumentError(
                f"a key of {length} tokens needs a flat array of {length} slot indices, not "
                f"{slots.dtype} of shape {slots.shape}"
            )
        if start == end:
            return np.zeros(0, dtype=np.int32)
        slots, page = slots[start:end], self.page_size
        pages = slots[::page].astype(np.intp) // page  # NumPy indexes fastest by this type
        in_a_row = page * pages[:, None] + np.arange(page)
        if page > 1 and np.count_nonzero(slots.reshape(-1, page) != in_a_row):
            raise BadArgumentError(f"a page is {page} slots in a row, from a multiple of that")
        ordered = np.sort(pages)
        last = ordered.item(-1)
        if ordered.item(0) < 0 or last >= 2**31 // page:
            raise BadArgumentError("a slot index is 0 or more, and fits into 32 bits")
        twice = np.count_nonzero(ordered[1:] == ordered[:-1])
        if last >= len(self._in_tree) and not twice:
            flags = np.zeros(max(last + 1, 2 * len(self._in_tree)), dtype=bool)
            flags[: len(self._in_tree)] = self._in_tree  # the rest is not written: it costs nothing
            self._in_tree = flags
        if twice or np.count_nonzero(self._in_tree[pages]):
            raise BadArgumentError(
                "a page has one owner and one place: some of these slots are in the tree already, "
                "or named twice"
            )
        self._in_tree[pages] = True
        return slots.astype(np.int32)

    def _grow(
        self, parent: TreeNode, key: RadixKey, slots: NDArray[np.int32], priority: int
    ) -> TreeNode:
        """Put a new leaf under a node, and return it."""
        leaf = self._new_node(key, slots, parent)
        leaf._tree, leaf.priority = self._tree, priority
        leaf.creation_time = self._clock
        parent.children[self._name(key)] = leaf
        self.evictable_leaves.discard(parent)
        self.evictable_size += len(slots)
        return leaf

    def _refresh(self, node: TreeNode, hits: int) -> None:
        """Count the path as used now; what a node is worth, those above it are worth as well."""
        now, priority, history_len = self._clock, node.priority, node.history_len
        above: TreeNode | None = node
        while above is not None:
            above.last_access_time = now
            above.hit_count += hits
            if above.priority < priority:
                above.priority = priority
            if above.history_len < history_len:
                above.history_len = history_len
            above = above.parent
        self._offer(node)

    def _offer(self, node: TreeNode) -> None:
        """Let a node join the evictable leaves, if it is one: no child, no lock, not the root.

        SGLang 0.5.23: `RadixCache._update_leaf_status`.
        """
        if not node.children and not node.lock_ref and node is not self.root:
            self.evictable_leaves.add(node)

    def _check(self, node: TreeNode) -> None:
        """Refuse a node that is not in this tree."""
        if not isinstance(node, TreeNode):
            raise BadArgumentError(f"this wants the node of a match, not {node!r}")
        if node._tree is not self._tree:
            raise StaleIndexError(
                "this node is not in the tree: it was evicted, or it is of another tree or of the "
                "time before a reset; match again"
            )

    def path_indices(self, node: TreeNode) -> NDArray[np.int32]:
        """Return the slots of the prefix that ends with a node, int32[node.depth].

        Valid until memory is taken again, unless the path is locked.

        Raises:
            StaleIndexError: the node is not in this tree any more.

        SGLang 0.5.23: `RadixCache.path_device_indices`.
        """
        self._check(node)
        values = [above.value for above in self._path(node)]
        return np.concatenate([*values[::-1], self.root.value])

    def lock(self, node: TreeNode) -> TreeLock:
        """Become a reader of the prefix that ends with a node: all its path is protected.

        Returns:
            the receipt, which alone can end it.

        Raises:
            StaleIndexError: the node is not in this tree any more.

        SGLang 0.5.23: `RadixCache.inc_lock_ref`.
        """
        self._check(node)
        self.evictable_leaves.discard(node)
        lock, gained = TreeLock(node), 0
        self._locks.add(lock)
        while node.parent is not None:
            if not node.lock_ref:
                gained += len(node.value)
            node.lock_ref += 1
            node = node.parent
        self.protected_size += gained
        self.evictable_size -= gained
        return lock

    def unlock(self, lock: TreeLock) -> None:
        """End a lock: what it raised is lowered, however often its path was split meanwhile.

        Raises:
            ForeignLockError: this lock was ended before, or another tree gave it.

        SGLang 0.5.23: `RadixCache.dec_lock_ref`.
        """
        if not isinstance(lock, TreeLock) or lock not in self._locks:
            raise ForeignLockError(
                f"{lock!r} is no lock that is held here: a lock is ended once, by what `lock` "
                "returned, and by the tree that gave it"
            )
        self._locks.remove(lock)
        node, lost = lock.node, 0
        while node.parent is not None:
            node.lock_ref -= 1
            if not node.lock_ref:
                lost += len(node.value)
            node = node.parent
        self.protected_size -= lost
        self.evictable_size += lost
        self._offer(lock.node)

    def evict(self, num_tokens: int) -> int:
        """Make room: let leaves go, the strategy's first choice first, and hand on their slots.

        Call it before every allocation, with the number of slots that are missing, be it 0: from
        then on nothing that was matched and not locked is a promise any more.

        Returns:
            tokens evicted: more than asked, since nodes go whole, or less, if no more can go.

        Raises:
            BadArgumentError: a negative number.

        SGLang 0.5.23: `RadixCache.evict`.
        """
        if not is_whole(num_tokens) or num_tokens < 0:
            raise BadArgumentError(f"0 or more tokens can be evicted, not {num_tokens!r}")
        self._epoch += 1
        gone: list[NDArray[np.int32]] = []
        num_evicted = 0
        while num_evicted < num_tokens and (leaf := self.evictable_leaves.pop()) is not None:
            gone.append(leaf.value)
            num_evicted += len(leaf.value)
            self._remove(leaf)
        self.evictable_size -= num_evicted
        if gone:
            self._give_back(np.concatenate(gone))
        return num_evicted

    def _remove(self, leaf: TreeNode) -> None:
        """Take a leaf off the tree; its parent may have become one."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._name(leaf.key)]
        leaf.parent = leaf._tree = None
        if not parent.children:
            self._offer(parent)

    def _give_back(self, slots: NDArray[np.int32]) -> None:
        """Stop owning slots, and hand them on."""
        self._in_tree[slots[:: self.page_size].astype(np.intp) // self.page_size] = False
        if self._free is not None:
            self._free(slots)

    def reset(self) -> None:
        """Forget every prefix, and hand on all slots.

        Raises:
            ForeignLockError: somebody holds a lock.
        """
        if self._locks:
            raise ForeignLockError(
                f"{len(self._locks)} locks are held, and their readers would lose what they read: "
                "unlock first"
            )
        slots = np.concatenate([self.root.value, *(node.value for node in self.nodes())])
        self._epoch += 1
        self._plant()
        if self._free is not None and len(slots):
            self._free(slots)

    def check_invariants(self, pool: ArrayLike | None = None, outside: ArrayLike = ()) -> None:
        """Prove the laws of the tree, in O(its nodes, tokens and locked paths).

        Args:
            pool: all slots that there are, if the caller knows them: then each must be in the tree
                or outside, and in one place only.
            outside: the slots of the allocator's free list and of the requests themselves.

        Raises:
            InvariantError: the first law that is broken, and by which node.
        """
        nodes, root, page = list(self.nodes()), self.root, self.page_size
        readers = Counter(node for lock in self._locks for node in self._path(lock.node))
        leaves = Counter(self.evictable_leaves)
        laws: dict[str, Callable[[TreeNode, TreeNode], bool]] = {
            "a child knows its parent, and stands there under its own name": lambda node, parent: (
                parent.children.get(self._name(node.key)) is node
            ),
            "a segment has whole pages, one or more, and a slot for each token": lambda node, _: (
                len(node.key) == len(node.value) > 0 == len(node.value) % page
                and node.value.dtype == np.int32
            ),
            "depths add up": lambda node, parent: node.depth == parent.depth + len(node.value),
            "a namespace ends only at the root": lambda node, parent: (
                parent is root or node.key.extra_key == parent.key.extra_key
            ),
            "lock_ref is the number of locks here and below": lambda node, _: (
                node.lock_ref == readers[node]
            ),
            "whoever is used or dear makes all above it so": lambda node, parent: (
                node.last_access_time <= parent.last_access_time
                and node.priority <= parent.priority
                and node.depth <= node.history_len <= parent.history_len
            ),
            "a node is evictable just when it is a leaf without a lock": lambda node, _: (
                leaves[node] == (not node.children and not node.lock_ref)
            ),
            "a node in the tree knows that it is": lambda node, _: node._tree is self._tree,
        }
        for law, holds in laws.items():
            for node in nodes:
                if node.parent is None or not holds(node, node.parent):
                    raise InvariantError(f"{law}: not so for {node}")
        self._check_sums(nodes, leaves, pool, outside)

    def _check_sums(
        self,
        nodes: list[TreeNode],
        leaves: Counter[TreeNode],
        pool: ArrayLike | None,
        outside: ArrayLike,
    ) -> None:
        """Count sizes, leaves, pages and slots again; raises `InvariantError`."""
        protected = sum(len(node.value) for node in nodes if node.lock_ref)
        slots = np.concatenate([self.root.value, *(node.value for node in nodes)])
        pages = np.sort(slots[:: self.page_size]) // self.page_size
        rows = slots.reshape(-1, self.page_size)
        root, known = self.root, {self.root, *nodes}
        laws = {
            "the root is in the tree, has no lock, and never leaves": (
                root._tree is self._tree and not root.lock_ref and not root._ticket
            ),
            "whoever has a lock reads a node of this tree": all(
                lock.node in known for lock in self._locks
            ),
            "a page is slots in a row, from a multiple of its size": bool(
                (rows == np.arange(self.page_size) + rows[:, :1]).all()
                and not (rows[:, 0] % self.page_size).any()
            ),
            "the protected size is that of the locked nodes": self.protected_size == protected,
            "the evictable size is that of the others": self.total_size == len(slots),
            "the evictable leaves are counted, and in the tree": (
                len(self.evictable_leaves) == leaves.total() <= len(nodes)
            ),
            "no page is in two places": len(np.unique(pages)) == len(pages),
            "the tree knows which pages are its own": np.array_equal(
                np.flatnonzero(self._in_tree), pages
            ),
        }
        if pool is not None:
            places = np.sort(np.concatenate([slots, np.asarray(outside, dtype=np.int64)]))
            laws["tree and outside are the pool, each slot once"] = np.array_equal(
                places, np.sort(np.asarray(pool))
            )
        for law, holds in laws.items():
            if not holds:
                raise InvariantError(f"{law}: not so")
