"""Visit every state that a small world can reach, and stop at the first broken law.

`explore` is a breadth-first search over the production class itself, so what it returns is a proof
for worlds of that size, and what it finds is the shortest story that leads to the fault.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

Move = tuple[str, Callable[[Any], None]]


class World(Protocol):
    """What `explore` needs of a small world."""

    def moves(self) -> Iterator[Move]:
        """Yield every step that is possible now: its name, and a function that makes it."""

    def check(self) -> None:
        """Raise if a law does not hold."""

    def canonical(self) -> Hashable:
        """Return the same value for two states that differ only in the names of things."""


@dataclass
class Report:
    """What a search has seen; `fault` is empty if every law held everywhere."""

    states: int = 0
    transitions: int = 0
    story: list[str] = field(default_factory=list)
    fault: str = ""

    def __str__(self) -> str:
        """Say in one line that all laws held, or tell the shortest story that breaks one."""
        if not self.fault:
            return f"{self.states:,} states, {self.transitions:,} transitions: all laws hold"
        steps = [f"  {number}. {step}" for number, step in enumerate(self.story, 1)]
        return "\n".join(["found after", *steps, f"  -> {self.fault}"])


def explore(world: World) -> Report:
    """Search from `world` through all moves; each distinct state is checked once.

    Args:
        world: the first state; it and all that follow are copied by pickle, never changed.

    Returns:
        the counts and, if a law was broken, the shortest way to break it. A move that raises is a
        fault too: a world offers only moves that must succeed.
    """
    report = Report()
    frontier: list[tuple[bytes, list[str]]] = [(pickle.dumps(world), [])]
    seen = {world.canonical()}
    report.fault = _fault_of(world.check)
    while frontier and not report.fault:
        reached = []
        for state, story in frontier:
            for name, move in pickle.loads(state).moves():
                after = pickle.loads(state)
                report.transitions += 1
                report.fault = _fault_of(lambda m=move, a=after: m(a))
                if not report.fault and (key := after.canonical()) not in seen:
                    seen.add(key)
                    reached.append((pickle.dumps(after), [*story, name]))
                    report.fault = _fault_of(after.check)
                if report.fault:
                    report.story = [*story, name]
                    report.states = len(seen)
                    return report
        frontier = reached
    report.states = len(seen)
    return report


def _fault_of(action: Callable[[], None]) -> str:
    try:
        action()
    except Exception as fault:  # any error at all is what the search looks for
        return f"{type(fault).__name__}: {fault}"
    return ""
