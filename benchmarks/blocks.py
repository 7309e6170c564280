"""The block pool beside vLLM's own, on the same work in the same run: one JSON line a case.

    python benchmarks/blocks.py

The peer needs `pip`, and the packages that vLLM's files import (the extra `bench`);
without them only our side is timed, and the run says so.
"""

from __future__ import annotations

import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any

import peers
from timing import compare, median_us

from fanoutkv import BlockPool

BLOCKS = 100_001
PREFIX = 512
READERS = 64
Case = Callable[[], object]


def fresh_keys(numbers: Iterator[int]) -> list[bytes]:
    """Return hashes that nobody has used, made beforehand so that making them is not timed."""
    return [next(numbers).to_bytes(32, "big") for _ in range(PREFIX)]


def fan_out(pool: Any, tables: list[Any], backwards: list[Any]) -> None:
    """Let many requests hit the same blocks, and leave; the calls are the same for both pools."""
    for table in tables:
        pool.touch(table)
    for table in backwards:
        pool.free_blocks(table)


def our_cases() -> dict[str, Case]:
    """Return each case as a function, all on one pool of ours."""
    pool = BlockPool(BLOCKS)
    shared = pool.get_new_blocks(PREFIX)
    orders = [random.Random(i).sample(shared.tolist(), PREFIX) for i in range(READERS)]
    tables = [shared[[i - shared[0] for i in order]] for order in orders]
    keys = fresh_keys(count(1))
    pool.cache_full_blocks(shared, keys)

    same = [shared] * READERS, [shared[::-1]] * READERS

    def lookup() -> None:
        for key in keys:
            pool.get_cached_block(key)

    def revive() -> None:
        idle.touch(idle_shared)
        idle.free_blocks(idle_shared[::-1])

    idle = BlockPool(BLOCKS)
    idle_shared = idle.get_new_blocks(PREFIX)
    idle.cache_full_blocks(idle_shared, keys)
    idle.free_blocks(idle_shared[::-1])
    full, numbers = BlockPool(BLOCKS), count(1)

    def cycle() -> None:
        blocks = full.get_new_blocks(PREFIX)
        full.cache_full_blocks(blocks, next(stock))
        full.free_blocks(blocks[::-1])

    stock = iter([fresh_keys(numbers) for _ in range(600)])
    for _ in range(BLOCKS // PREFIX + 1):
        cycle()
    return {
        f"touch+free: {READERS} requests x {PREFIX} shared blocks": partial(fan_out, pool, *same),
        f"touch+free: the same, {READERS} lists of different order": partial(
            fan_out, pool, tables, tables
        ),
        f"look-up of {PREFIX} cached blocks, a key at a time": lookup,
        f"touch+free: {PREFIX} blocks out of the free queue": revive,
        f"allocate+publish+free {PREFIX} blocks, each evicting one": cycle,
    }


def vllm_cases(utils: ModuleType, block_pool: ModuleType) -> list[Case]:
    """Return the same cases, in the same order, on vLLM's pools."""

    def key(number: int) -> bytes:
        made: bytes = utils.make_block_hash_with_group_id(number.to_bytes(32, "big"), 0)
        return made

    pool = block_pool.BlockPool(BLOCKS, True, 16)
    shared = pool.get_new_blocks(PREFIX)
    tables = [random.Random(i).sample(shared, PREFIX) for i in range(READERS)]
    hashes = [i.to_bytes(32, "big") for i in range(1, PREFIX + 1)]
    for i, block in enumerate(shared):
        pool._insert_block_hash(key(i + 1), block, 16)

    same = [shared] * READERS, [shared[::-1]] * READERS

    def lookup() -> None:
        for block_hash in hashes:
            pool.get_cached_block(block_hash, [0])

    idle = block_pool.BlockPool(BLOCKS, True, 16)
    idle_shared = idle.get_new_blocks(PREFIX)
    for i, block in enumerate(idle_shared):
        idle._insert_block_hash(key(i + 1), block, 16)
    idle.free_blocks(reversed(idle_shared))

    def revive() -> None:
        idle.touch(idle_shared)
        idle.free_blocks(reversed(idle_shared))

    full, numbers = block_pool.BlockPool(BLOCKS, True, 16), count(1)

    def cycle() -> None:
        blocks = full.get_new_blocks(PREFIX)
        for block, block_hash in zip(blocks, next(stock), strict=True):
            full._insert_block_hash(block_hash, block, 16)
        full.free_blocks(reversed(blocks))

    stock = iter([[key(next(numbers)) for _ in range(PREFIX)] for _ in range(600)])
    for _ in range(BLOCKS // PREFIX + 1):
        cycle()
    orders = [partial(fan_out, pool, *same), partial(fan_out, pool, tables, tables)]
    return [*orders, lookup, revive, cycle]


def growth() -> None:
    """Print what a pool costs to create, and the same work in pools of very different size."""
    tracemalloc.start()
    start = time.perf_counter()
    million = BlockPool(1_000_000)
    seconds = time.perf_counter() - start
    megabytes = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    line = {"case": "create a pool of 1,000,000 blocks", "s": round(seconds, 3)}
    print(json.dumps(line | {"peak_MB": round(megabytes, 1)}))
    for pool in (BlockPool(2_000), million):
        keys = fresh_keys(count(1))

        def work(pool: BlockPool = pool, keys: list[bytes] = keys) -> None:
            blocks = pool.get_new_blocks(PREFIX)
            pool.cache_full_blocks(blocks, keys)
            pool.free_blocks(blocks[::-1])
            pool.touch(blocks)
            pool.evict_blocks(blocks)
            pool.free_blocks(blocks)

        case = f"all operations on {PREFIX} blocks, pool of {pool.num_blocks:,}"
        print(json.dumps({"case": case, "ours_us": round(median_us(work), 1)}))


def main() -> None:
    """Print every case."""
    theirs: list[Case | None] = [None] * 5
    try:
        _, utils, block_pool = peers.vllm()
        theirs = [*vllm_cases(utils, block_pool)]
    except Exception as missing:  # whatever keeps the peer from loading, our side still counts
        print(f"vLLM's side is left out: {missing!r}", file=sys.stderr)
    for (case, ours), peer in zip(our_cases().items(), theirs, strict=True):
        compare(case, ours, peer)
    growth()


if __name__ == "__main__":
    main()
