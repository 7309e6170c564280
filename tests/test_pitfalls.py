"""Each pitfall's bug stands once, in its chapter. Here it is run, and something must catch it.

A chapter tags the cell that defines a broken variant with `pitfall-NN`; the cell is executed on
top of the package, and the search of `fanoutkv_book.explore` must tell a story that ends in a
broken law.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanoutkv
from fanoutkv_book.explore import Report, explore
from fanoutkv_book.worlds import LedgerWorld

BOOK = Path(__file__).parent.parent / "book"


def run_cell(tag: str) -> dict[str, Any]:
    """Execute the one cell of the book with this tag; return what it defines."""
    found = []
    for notebook in sorted(BOOK.glob("*.ipynb")):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        found += [cell for cell in cells if tag in cell.get("metadata", {}).get("tags", [])]
    (cell,) = found
    namespace = {name: getattr(fanoutkv, name) for name in fanoutkv.__all__} | {"np": np}
    before = set(namespace)
    exec("".join(cell["source"]), namespace)
    return {name: namespace[name] for name in set(namespace) - before if name[0] != "_"}


def search(pitfall: int) -> Report:
    """Explore a small world whose pool is the broken one of the chapter."""
    (broken,) = run_cell(f"pitfall-{pitfall:02}").values()
    assert issubclass(broken, fanoutkv.BlockPool)
    # The states of the search are pickled, and pickle looks a class up by its module.
    broken.__module__ = __name__
    globals()[broken.__name__] = broken
    return explore(LedgerWorld(broken, requests=2, blocks=3))


def test_pitfall_01_counting_before_leaving_the_queue() -> None:
    report = search(1)
    assert "hits" in report.story[-1]
    assert "queued" in report.fault


def test_pitfall_02_one_end_for_all() -> None:
    assert "nameless" in search(2).fault


def test_pitfall_03_the_count_on_the_request() -> None:
    assert "number of tables" in search(3).fault


def test_pitfall_04_writable_by_the_count_alone() -> None:
    assert "writable" in search(4).fault


def test_pitfall_05_one_launch_a_pair() -> None:
    """It copies rightly, and its launches grow with the pairs: that is the whole fault."""
    (one_by_one,) = run_cell("pitfall-05").values()
    memory = np.arange(40).reshape(20, 2)
    pairs = np.array([[1, 11], [2, 12], [3, 13]])
    expected = memory.copy()
    expected[pairs[:, 1]] = expected[pairs[:, 0]]
    assert [one_by_one(memory, pairs[:k]) for k in range(4)] == [0, 1, 2, 3]
    assert (memory == expected).all()


def test_pitfall_06_dropping_only_the_first_key() -> None:
    report = search(6)
    assert any("partial key" in step for step in report.story)
    assert "keys and blocks" in report.fault


def test_pitfall_07_a_check_at_allocation_time() -> None:
    assert "queued" in search(7).fault


def test_pitfall_08_external_eviction_frees_the_memory() -> None:
    report = search(8)
    assert "evicted" in report.story[-1]


def test_pitfall_12_a_field_that_is_left_out() -> None:
    (broken,) = run_cell("pitfall-12").values()
    (_, one), (_, other) = run_cell("names-meet")["names_meet"](broken)
    assert one != other, "two adapters have one name"


def test_pitfall_13_hashing_the_tokens_alone() -> None:
    (broken,) = run_cell("pitfall-13").values()
    (one, _), (other, _) = run_cell("names-meet")["names_meet"](broken)
    assert one != other, "two prefixes have one name"


def test_pitfall_14_a_full_hit_leaves_nothing_to_compute() -> None:
    (broken,) = run_cell("pitfall-14").values()
    manager = broken(20, 4)
    first, second = (fanoutkv.Request(name, range(8)) for name in "12")
    manager.allocate_slots(first, 8)
    _, hit = manager.get_computed_blocks(second)
    assert hit == second.num_tokens
    with pytest.raises(fanoutkv.BadArgumentError, match="1 or more tokens"):
        manager.allocate_slots(second, second.num_tokens - hit, num_new_computed_tokens=hit)


TEXTS = ([1, 2], [1, 2, 3, 4], [1, 2, 5], [6])


def planted(cache_class: type[fanoutkv.RadixCache]) -> tuple[fanoutkv.RadixCache, list[int]]:
    """Return a tree of four prompts, three with a common beginning, and where its slots go."""
    free: list[int] = []
    cache = cache_class(free=lambda slots: free.extend(slots.tolist()))
    for i, text in enumerate(TEXTS):
        cache.insert(fanoutkv.RadixKey(text), range(10 * i, 10 * i + len(text)))
    return cache, free


def test_pitfall_09_evicting_an_inner_node() -> None:
    (broken,) = run_cell("pitfall-09").values()
    for cache_class, orphans in ((fanoutkv.RadixCache, 0), (broken, 3)):
        cache, free = planted(cache_class)
        cache.evict(1)
        reachable = sum(len(node.value) for node in cache.nodes())
        assert 6 - len(free) - reachable == orphans
    with pytest.raises(fanoutkv.InvariantError):
        cache.check_invariants()


def test_pitfall_10_locking_the_node_alone() -> None:
    (broken,) = run_cell("pitfall-10").values()
    for cache_class, dangling in ((fanoutkv.RadixCache, False), (broken, True)):
        cache, free = planted(cache_class)
        rows = {}
        for text in TEXTS[1:]:
            node = cache.lock(cache.match_prefix(fanoutkv.RadixKey(text)).node).node
            rows[tuple(text)] = cache.path_indices(node).tolist()
        cache.evict(1)  # all leaves are read, and so is everything above them
        assert any(set(row) & set(free) for row in rows.values()) == dangling


def test_pitfall_11_admission_by_free_memory_alone() -> None:
    (room,) = run_cell("pitfall-11").values()
    cache, free = planted(fanoutkv.RadixCache)
    assert room(cache, len(free)) < 3, "it lets nobody in, now and for ever"
    assert cache.evict(3) >= 3, "although there is room"


def test_pitfall_20_indices_that_are_read_after_an_allocation() -> None:
    (reads_late,) = run_cell("pitfall-20").values()
    cache, free = planted(fanoutkv.RadixCache)
    key = fanoutkv.RadixKey(TEXTS[1])
    promise = cache.match_prefix(key)
    slots = reads_late(cache, key, lambda: cache.evict(5))
    assert set(slots.tolist()) & set(free), "the slots are somebody else's by now"
    with pytest.raises(fanoutkv.StaleIndexError):
        _ = promise.indices


def test_pitfall_21_an_unlock_that_does_not_replay_the_lock() -> None:
    (broken,) = run_cell("pitfall-21").values()
    for cache_class, stuck in ((fanoutkv.RadixCache, 0), (broken, 1)):
        cache, _ = planted(cache_class)
        lock = cache.lock(cache.match_prefix(fanoutkv.RadixKey(TEXTS[1])).node)
        cache.match_prefix(fanoutkv.RadixKey([1]))  # a split above the locked node
        cache.unlock(lock)
        assert cache.protected_size == stuck
    with pytest.raises(fanoutkv.InvariantError, match="lock_ref"):
        cache.check_invariants()


def test_what_is_right_passes() -> None:
    assert not explore(LedgerWorld(requests=2, blocks=3)).fault
    assert run_cell("names-meet")["names_meet"](fanoutkv.hash_block_tokens) is None


@pytest.mark.parametrize("notebook", sorted(BOOK.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_tagged_pitfall_has_a_test(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tags = {tag for cell in cells for tag in cell.get("metadata", {}).get("tags", [])}
    for tag in sorted(tags):
        if tag.startswith("pitfall-"):
            prefix = f"test_pitfall_{tag.removeprefix('pitfall-')}_"
            assert any(name.startswith(prefix) for name in globals()), f"{tag} has no test"
