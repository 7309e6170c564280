"""Time two implementations of the same work against each other, in one run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable


def median_us(work: Callable[[], object], repeats: int = 30) -> float:
    """Return the median time of a call in microseconds, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def compare(
    case: str, ours: Callable[[], object], peer: Callable[[], object] | None, rounds: int = 5
) -> None:
    """Print one JSON line: both medians and peer ÷ ours, the sides taking turns.

    Taking turns, and the median ratio of the rounds, keep a noisy machine from favouring a side.
    """
    pairs = [(median_us(ours), median_us(peer) if peer else float("nan")) for _ in range(rounds)]
    line: dict[str, object] = {"case": case}
    line["ours_us"] = round(statistics.median(pair[0] for pair in pairs), 1)
    if peer:
        line["peer_us"] = round(statistics.median(pair[1] for pair in pairs), 1)
        line["peer/ours"] = round(statistics.median(b / a for a, b in pairs), 2)
    print(json.dumps(line, ensure_ascii=False), flush=True)
