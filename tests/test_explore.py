"""The search through all states: it visits everything once, and it can fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fanoutkv import BlockPool
from fanoutkv_book.explore import Move, explore
from fanoutkv_book.worlds import LedgerWorld


class Counter:
    """A world of one number, 0 to 9, which may go up by 1 or by 3; `bad` breaks its law."""

    def __init__(self, bad: int = -1) -> None:
        self.value, self.bad = 0, bad

    def moves(self) -> Iterator[Move]:
        for step in (1, 3):
            if self.value + step <= 9:
                yield f"+{step}", lambda w, step=step: w.add(step)

    def add(self, step: int) -> None:
        self.value += step

    def check(self) -> None:
        assert self.value != self.bad, f"{self.value} is bad"

    def canonical(self) -> int:
        return self.value


class Refuses(Counter):
    def add(self, step: int) -> None:
        if self.value == 4:
            raise ValueError("no further")
        super().add(step)


def test_every_state_is_visited_once() -> None:
    report = explore(Counter())
    assert (report.states, report.transitions) == (10, 9 + 7)
    assert "all laws hold" in str(report)


def test_the_shortest_story_is_told() -> None:
    report = explore(Counter(bad=7))
    assert sorted(report.story) == ["+1", "+3", "+3"]
    assert "7 is bad" in str(report)


def test_a_first_state_may_be_wrong() -> None:
    assert explore(Counter(bad=0)).fault


def test_a_move_that_raises_is_a_fault() -> None:
    report = explore(Refuses())
    assert "no further" in report.fault
    assert len(report.story) == 3


def test_the_small_ledger_is_searched_whole_and_alike() -> None:
    one, other = (explore(LedgerWorld(requests=2, blocks=3)) for _ in range(2))
    assert not one.fault
    assert (one.states, one.transitions) == (other.states, other.transitions)


@pytest.mark.parametrize(
    ("requests", "blocks", "longest"), [(1, 1, 1), (1, 2, 2), (2, 2, 3), (3, 3, 2)]
)
def test_ledgers_of_other_sizes_keep_their_laws(requests: int, blocks: int, longest: int) -> None:
    assert not explore(LedgerWorld(requests=requests, blocks=blocks, longest=longest)).fault


class Forgets(BlockPool):
    """A free that forgets the queue when it frees more than one block: a rarer bug."""

    def _join_queue(self, idle):  # type: ignore[no-untyped-def]
        super()._join_queue(idle if len(idle) == 1 else idle[:1])


def test_a_bug_that_needs_two_blocks_is_found() -> None:
    report = explore(LedgerWorld(Forgets, requests=1, blocks=2))
    assert report.story == ["request 1 takes a new block"] * 2 + ["request 1 leaves"]
