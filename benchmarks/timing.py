"""Time two implementations of the same work against each other, in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

Setup = Callable[[], Any]


def median_us(work: Callable[..., object], repeats: int = 30, setup: Setup | None = None) -> float:
    """Return the median time of a call in microseconds, after one call that is not counted.

    Work that uses something up has a `setup`: it is called before each call of `work`, off the
    clock, and what it returns is the argument.
    """
    times = []
    for _ in range(repeats + 1):
        made = (setup(),) if setup else ()
        start = time.perf_counter()
        work(*made)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e6


def compare(
    case: str,
    ours: Callable[..., object],
    peer: Callable[..., object] | None,
    rounds: int = 5,
    *,
    repeats: int = 30,
    setups: tuple[Setup | None, Setup | None] = (None, None),
    per: int = 1,
) -> None:
    """Print one JSON line: both medians, divided by `per`, and peer ÷ ours, the sides taking turns.

    Taking turns, and the median ratio of the rounds, keep a noisy machine from favouring a side.
    """
    pairs = []
    for _ in range(rounds):
        mine = median_us(ours, repeats, setups[0]) / per
        pairs.append((mine, median_us(peer, repeats, setups[1]) / per if peer else float("nan")))
    line: dict[str, object] = {"case": case}
    line["ours_us"] = round(statistics.median(pair[0] for pair in pairs), 1)
    if peer:
        line["peer_us"] = round(statistics.median(pair[1] for pair in pairs), 1)
        line["peer/ours"] = round(statistics.median(b / a for a, b in pairs), 2)
    print(json.dumps(line, ensure_ascii=False), flush=True)
