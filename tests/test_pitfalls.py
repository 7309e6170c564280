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
