"""What each eviction strategy is worth on the full request traces: one JSON line a row.

    python benchmarks/eviction.py

The traces are looked for in the folder that FANOUTKV_TRACES names, or in `../shared/traces` beside
the repository; without them nothing is run, and the run says so. A block has 512 tokens.

`hit_%` is blocks found ÷ blocks asked for. Of a request that is larger than the memory, nothing is
found. `missed_p95` and `missed_p99` are blocks that a request has to compute: the tail, which TLRU
is made for. `s` is the seconds of the run. The traces give no priorities, so both priority
strategies must equal LRU here; and so must LRU with many requests at a time, as those that run are
the most recently used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fanoutkv.blocks import BlockPool
from fanoutkv.eviction import (
    AgingPriorityStrategy,
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    Simulation,
    SLRUStrategy,
    TLRUStrategy,
    optimal_hits,
    simulate,
)
from fanoutkv.radix import Strategy

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000)
Requests = Sequence[list[int]]
STRATEGIES: list[Strategy] = [
    LRUStrategy(),
    MRUStrategy(),
    FIFOStrategy(),
    FILOStrategy(),
    LFUStrategy(),
    SLRUStrategy(),
    PriorityStrategy(),
    AgingPriorityStrategy(1000),
    # In blocks: 4,096 to 16,384 tokens are computed within the limit; the next turn adds 2,048.
    TLRUStrategy(8, 4),
    TLRUStrategy(16, 4),
    TLRUStrategy(32, 4),
]


def load(name: str) -> Requests:
    """Return the block ids of each request of a trace."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    path = Path(os.environ.get("FANOUTKV_TRACES", beside)) / f"{name}_trace.jsonl"
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def block_queue(requests: Requests, capacity: int) -> Simulation:
    """Replay requests one by one through the block pool of chapter 01, which evicts by its queue.

    A request frees its blocks from the last to the first, so that a prefix outlives its tails.
    """
    pool = BlockPool(capacity + 1)
    seen = Simulation()
    for blocks in requests:
        seen.queries += len(blocks)
        if len(blocks) > capacity:
            seen.missed.append(len(blocks))
            continue
        names = [block.to_bytes(8, "big") for block in blocks]
        found = pool.find_longest_cache_hit(names)
        pool.touch(found)
        new = pool.get_new_blocks(len(blocks) - len(found))
        pool.cache_full_blocks(new, names[len(found) :])
        pool.free_blocks(np.concatenate([found, new])[::-1])
        seen.hits += len(found)
        seen.missed.append(len(new))
    return seen


def optimal(requests: Requests, capacity: int) -> Simulation:
    """Return the hits that no strategy can surpass; who misses how much is left open."""
    return Simulation(sum(map(len, requests)), optimal_hits(requests, capacity))


def row(trace: str, capacity: int, what: str, run: Callable[[], Simulation]) -> None:
    """Run, and print the row of the table."""
    start = time.perf_counter()
    seen = run()
    seconds = time.perf_counter() - start
    line: dict[str, object] = {"trace": trace, "capacity": capacity, "strategy": what}
    line["hit_%"] = round(100 * seen.hit_rate, 2)
    if seen.missed:
        p95, p99 = np.percentile(seen.missed, [95, 99])
        line |= {"missed_p95": round(float(p95), 1), "missed_p99": round(float(p99), 1)}
    if seen.waits:
        line["waits"] = seen.waits
    print(json.dumps(line | {"s": round(seconds, 2)}), flush=True)


def main() -> None:
    """Print all rows of both traces."""
    for trace in ("conversation", "synthetic"):
        try:
            requests = load(trace)
        except OSError as missing:
            print(f"the {trace} trace is left out: {missing}", file=sys.stderr)
            continue
        for capacity in CAPACITIES:
            fixed = partial(row, trace, capacity)
            for strategy in STRATEGIES:
                known = type(strategy).__qualname__
                settings = ", ".join(str(value) for value in vars(strategy).values())
                name = f"{known.removesuffix('Strategy')}({settings})"
                fixed(name, partial(simulate, requests, capacity, strategy))
            for concurrency in (16, 64):
                run = partial(simulate, requests, capacity, concurrency=concurrency)
                fixed(f"LRU(), {concurrency} at a time", run)
            fixed("block queue", partial(block_queue, requests, capacity))
            fixed("optimal", partial(optimal, requests, capacity))


if __name__ == "__main__":
    main()
