"""The prefix tree beside SGLang's own, on the same work in the same run: one JSON line a case.

    python benchmarks/radix.py

The peer needs `pip` and torch (the extra `bench`); without them only our side is timed, and the
run says so. Tokens come to each side in the form that it keeps: int32 arrays to ours, `array("q")`
to SGLang's. SGLang's slots are never freed and never checked; ours come from a free list and are.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import peers
from numpy.typing import NDArray
from timing import compare, median_us

from fanoutkv.radix import RadixCache, RadixKey

PROMPT = random.Random(0).choices(range(50_000), k=8192)
READERS = 64
REQUESTS = 1000
NUM_TOKENS = 100_000  # of the replay: more, if nobody holds them, are evicted
ROOM_FOR_ALL = 2176 * REQUESTS


@dataclass
class Case:
    """What is timed; `setup` makes its argument off the clock, and `per` divides the time."""

    work: Callable[..., object]
    setup: Callable[[], object] | None = None
    repeats: int = 30
    per: int = 1


def branches() -> list[list[int]]:
    """Return 2000 prompts of 192 tokens on 50 prefixes, each with an end of its own."""
    rng = random.Random(2)
    starts = [128 * rng.randrange(50) for _ in range(2000)]
    return [PROMPT[start : start + 128] + rng.choices(range(50_000), k=64) for start in starts]


def draw_prefixes(rng: random.Random) -> list[list[int]]:
    """Return 50 prefixes of 2048 tokens."""
    return [[rng.randrange(50_000) for _ in range(2048)] for _ in range(50)]


def draw_requests(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Yield for each request the number of its prefix, and 128 tokens of its own."""
    for _ in range(REQUESTS):
        yield rng.randrange(50), [rng.randrange(50_000) for _ in range(128)]


def draw_prompts() -> Iterator[list[int]]:
    """Yield the tokens of all requests, drawn one by one; the same on both sides."""
    rng = random.Random(1)
    prefixes = draw_prefixes(rng)
    for number, own in draw_requests(rng):
        yield prefixes[number] + own


class Slots:
    """A free list for our tree, which refuses a slot that it has already."""

    def __init__(self, size: int) -> None:
        self.stack, self.top = np.arange(size, dtype=np.int32), size

    def free(self, slots: NDArray[np.int32]) -> None:
        self.stack[self.top : self.top + len(slots)] = slots
        self.top += len(slots)

    def insert(self, cache: RadixCache, key: RadixKey) -> None:
        """Insert a key with the next free slots; those that the tree does not take stay free."""
        size = len(key)
        known = cache.insert(key, self.stack[self.top - size : self.top])
        self.top -= size - known


class Ours:
    """Our tree, with the few moves that all cases are made of."""

    def __init__(self, page: int) -> None:
        self.page = page

    def pack(self, tokens: Iterable[int]) -> NDArray[np.int32]:
        """Return tokens in the form in which they are kept."""
        return np.fromiter(tokens, dtype=np.int32)

    def make_key(self, packed: NDArray[np.int32]) -> RadixKey:
        return RadixKey(packed)

    def grown(
        self, keys: Iterable[RadixKey], size: int = NUM_TOKENS + 2**15
    ) -> tuple[RadixCache, Slots]:
        """Return a tree that knows some keys, and its free list."""
        slots = Slots(size)
        cache = RadixCache(self.page, free=slots.free)
        for key in keys:
            slots.insert(cache, key)
        return cache, slots

    def join(self, number: int, own: NDArray[np.int32]) -> RadixKey:
        return RadixKey(np.concatenate([self.prefixes[number], own]))

    def replay(self, keys: Iterable[RadixKey], limit: int = NUM_TOKENS) -> list[int]:
        """Match, lock, insert, unlock, and evict where the tree is full; return what was found."""
        cache, slots = self.grown([], limit + 2**15)
        lengths = []
        for key in keys:
            hit = cache.match_prefix(key)
            lock = cache.lock(hit.node)
            slots.insert(cache, key)
            cache.unlock(lock)
            if cache.evictable_size > limit:
                cache.evict(20_000)
            lengths.append(hit.length)
        return lengths

    def cases(self) -> dict[str, Case]:
        """Return each case by its name."""
        packed = self.pack(PROMPT)
        key = self.make_key(packed)
        ends = [self.pack(PROMPT[:end]) for end in range(128, 8193, 128)]
        one, _ = self.grown([self.make_key(ends[-1])])
        deep, _ = self.grown(map(self.make_key, ends))
        leaf = deep.match_prefix(key).node
        bushy = [self.make_key(self.pack(tokens)) for tokens in branches()]

        def lock_fan_out() -> None:
            locks = [deep.lock(leaf) for _ in range(READERS)]
            for lock in locks:
                deep.unlock(lock)

        return self.named(
            lambda: one.match_prefix(RadixKey(packed)),
            lambda: one.match_prefix(key),
            lambda: deep.match_prefix(RadixKey(packed)),
            lambda: deep.match_prefix(key),
            lock_fan_out,
            lambda: self.grown(bushy, 2000 * 192)[0],
            lambda cache: cache.evict(64_000),
        )

    def requests(self) -> Iterator[Any]:
        """Yield the requests of the replay, made of what `cases` has drawn."""
        return (self.join(number, own) for number, own in self.owns)

    def named(
        self,
        match_one: Callable[[], object],
        match_one_key: Callable[[], object],
        match_deep: Callable[[], object],
        match_deep_key: Callable[[], object],
        lock: Callable[[], object],
        bushy: Callable[[], object],
        evict: Callable[[Any], object],
    ) -> dict[str, Case]:
        """Name the cases, which are the same on both sides, and add the replays."""
        rng = random.Random(1)
        self.prefixes = [self.pack(tokens) for tokens in draw_prefixes(rng)]
        self.owns = [(number, self.pack(own)) for number, own in draw_requests(rng)]
        made = list(self.requests())
        replay = "replay, a request of 2048 shared + 128 new tokens: "

        def drawn() -> object:
            return self.replay(self.make_key(self.pack(tokens)) for tokens in draw_prompts())

        slow = partial(Case, repeats=3, per=REQUESTS)
        cases = {
            "match 8192 tokens in 1 node, key made on the clock": Case(match_one),
            "match 8192 tokens in 1 node, key made before": Case(match_one_key),
            "match 8192 tokens over 64 nodes, key made on the clock": Case(match_deep),
            "match 8192 tokens over 64 nodes, key made before": Case(match_deep_key),
            f"lock+unlock: {READERS} requests on a path of 64 nodes": Case(lock, repeats=9),
            "evict 1000 of 2000 leaves": Case(evict, bushy, repeats=3),
            replay + "tokens drawn on the clock": slow(drawn),
            replay + "joined on the clock": slow(lambda: self.replay(self.requests())),
            replay + "made before": slow(lambda: self.replay(made)),
        }
        return {f"{name}, page {self.page}": case for name, case in cases.items()}

    def cycle(self, leaves: int) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """Return how to make 10 new keys, and how to insert them and evict 10 old ones."""
        numbers = count()
        cache, slots = self.grown(short_keys(self, numbers, leaves), 8 * leaves + 80)

        def swap(keys: list[RadixKey]) -> None:
            for key in keys:
                slots.insert(cache, key)
            cache.evict(80)

        return lambda: list(short_keys(self, numbers, 10)), swap

    def matcher(self, *keys: RadixKey) -> Callable[[RadixKey], object]:
        """Return `match_prefix` of a tree that knows these keys."""
        return self.grown(keys, sum(map(len, keys)))[0].match_prefix

    def evicter(self, keys: Iterable[RadixKey], size: int) -> tuple[Any, Callable[[int], object]]:
        """Return how to match in a tree that knows these keys, and how to evict from it."""
        cache, _ = self.grown(keys, size)
        return cache.match_prefix, cache.evict


class SGLang(Ours):
    """SGLang's tree, with the same moves; the calls are those of its own scheduler."""

    def __init__(self, page: int, base: ModuleType, radix: ModuleType) -> None:
        import torch

        super().__init__(page)
        self.base, self.radix, self.torch = base, radix, torch
        self.slots: Any = torch.arange(2176)

    def pack(self, tokens: Iterable[int]) -> Any:
        return array("q", tokens)

    def make_key(self, packed: Any) -> Any:
        return self.radix.RadixKey(packed)

    def new_cache(self) -> Any:
        """Return an empty tree whose pool and metrics cost nothing."""
        cache = self.radix.RadixCache.create_simulated(page_size=self.page)
        pool = type("Pool", (), {"free_segment": staticmethod(lambda *_, **__: None)})
        cache.token_to_kv_pool_allocator = pool()
        cache.update_eviction_metrics = lambda *_, **__: None
        return cache

    def grown(self, keys: Iterable[Any], size: int = 0) -> Any:
        cache = self.new_cache()
        for key in keys:
            slots = self.torch.arange(len(key))
            cache.insert(self.base.InsertParams(key=key, value=slots))
        return cache, None

    def join(self, number: int, own: Any) -> Any:
        return self.make_key(self.prefixes[number] + own)

    def requests(self) -> Iterator[Any]:
        """Yield the arguments of both calls: its API wants them wrapped."""
        return map(self.wrap, super().requests())

    def wrap(self, key: Any) -> Any:
        match = self.base.MatchPrefixParams(key=key)
        return match, self.base.InsertParams(key=key, value=self.slots)

    def replay(self, keys: Iterable[Any], limit: int = NUM_TOKENS) -> list[int]:
        cache, evict = self.new_cache(), self.base.EvictParams(num_tokens=20_000)
        lengths = []
        for request in keys:
            match, insert = request if type(request) is tuple else self.wrap(request)
            hit = cache.match_prefix(match)
            cache.inc_lock_ref(hit.last_device_node)
            cache.insert(insert)
            cache.dec_lock_ref(hit.last_device_node)
            if cache.evictable_size() > limit:
                cache.evict(evict)
            lengths.append(hit.device_prefix_len)
        return lengths

    def cases(self) -> dict[str, Case]:
        packed, params = self.pack(PROMPT), self.base.MatchPrefixParams
        key = self.make_key(packed)
        made, room = params(key=key), self.base.EvictParams(num_tokens=64_000)
        ends = [self.pack(PROMPT[:end]) for end in range(128, 8193, 128)]
        one, _ = self.grown([self.make_key(ends[-1])])
        deep, _ = self.grown(map(self.make_key, ends))
        leaf = deep.match_prefix(made).last_device_node
        bushy = [self.make_key(self.pack(tokens)) for tokens in branches()]

        def lock_fan_out() -> None:
            for _ in range(READERS):
                deep.inc_lock_ref(leaf)
            for _ in range(READERS):
                deep.dec_lock_ref(leaf)

        return self.named(
            lambda: one.match_prefix(params(key=self.radix.RadixKey(packed))),
            lambda: one.match_prefix(made),
            lambda: deep.match_prefix(params(key=self.radix.RadixKey(packed))),
            lambda: deep.match_prefix(made),
            lock_fan_out,
            lambda: self.grown(bushy)[0],
            lambda cache: cache.evict(room),
        )

    def cycle(self, leaves: int) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        numbers = count()
        cache, _ = self.grown(short_keys(self, numbers, leaves))
        room, slots = self.base.EvictParams(num_tokens=80), self.torch.arange(8)

        def insert_params() -> list[Any]:
            keys = short_keys(self, numbers, 10)
            return [self.base.InsertParams(key=key, value=slots) for key in keys]

        def swap(params: list[Any]) -> None:
            for insert in params:
                cache.insert(insert)
            cache.evict(room)

        return insert_params, swap

    def matcher(self, *keys: Any) -> Callable[[Any], object]:
        cache, _ = self.grown(keys)
        return lambda key: cache.match_prefix(self.base.MatchPrefixParams(key=key))

    def evicter(self, keys: Iterable[Any], size: int) -> tuple[Any, Callable[[int], object]]:
        cache, _ = self.grown(keys)
        params, room = self.base.MatchPrefixParams, self.base.EvictParams
        return (
            lambda key: cache.match_prefix(params(key=key)),
            lambda size: cache.evict(room(num_tokens=size)),
        )


def short_keys(side: Ours, numbers: Iterator[int], how_many: int) -> Iterator[Any]:
    """Yield keys of 8 tokens that nobody has used."""
    for _ in range(how_many):
        start = 8 * next(numbers)
        yield side.make_key(side.pack(range(start, start + 8)))


def side_by_side(ours: Ours, peer: SGLang | None) -> None:
    """Print all cases of a page size, and in how many requests of the replay both find the same.

    Without eviction it must be in all. With it they part: what lies behind a split counts as used
    in SGLang's tree, and not in ours, so now and then another leaf goes first.
    """
    theirs = peer.cases() if peer else {}
    for name, case in ours.cases().items():
        other = theirs.get(name)
        compare(
            name,
            case.work,
            other.work if other else None,
            repeats=case.repeats,
            setups=(case.setup, other.setup if other else None),
            per=case.per,
        )
    if peer:
        for limit in (NUM_TOKENS, ROOM_FOR_ALL):
            pairs = [side.replay(side.requests(), limit) for side in (ours, peer)]
            line: dict[str, object] = {"case": f"found in the replay, page {ours.page}"}
            line |= {"evictable_limit": limit, "requests": REQUESTS}
            line["equal"] = sum(a == b for a, b in zip(*pairs, strict=True))
            line |= {"ours_tokens": sum(pairs[0]), "peer_tokens": sum(pairs[1])}
            assert limit == NUM_TOKENS or pairs[0] == pairs[1], line
            print(json.dumps(line))


def growth(ours: Ours, peer: SGLang | None) -> None:
    """Print the same work in trees, nodes and keys of very different size."""
    sides = [ours, peer] if peer else [ours]
    for leaves in (1_000, 10_000, 100_000):
        setups, works = zip(*(side.cycle(leaves) for side in sides), strict=True)
        compare(
            f"insert 10 leaves and evict 10, tree of {leaves:,} leaves",
            works[0],
            works[1] if peer else None,
            repeats=5,
            setups=(setups[0], setups[-1]),
        )
        del setups, works
    for size in (64, 512, 4_096, 32_768, 65_536):
        line: dict[str, object] = {"case": f"match {size:,} tokens in 1 node, key made before"}
        for name, side in zip(("ours", "peer"), sides, strict=False):
            # Two keys: one that is the tree's own memory would be compared in the caches.
            known, key = (side.make_key(side.pack(range(size))) for _ in range(2))
            match = side.matcher(known)
            us = median_us(lambda match=match, key=key: match(key), 101)
            line |= {f"{name}_us": round(us, 2), f"{name}_ns_a_token": round(1000 * us / size, 3)}
        print(json.dumps(line))
    for name, side in zip(("ours", "peer"), sides, strict=False):
        page, million = side.page, range(1_000_000)
        match = side.matcher(side.make_key(side.pack(million)))
        short = side.make_key(side.pack(million[:page]))
        long = side.make_key(side.pack([*million[:page], *range(2_000_000, 3_000_000 - page)]))
        start = time.perf_counter()
        match(short)  # cuts the node of 1,000,000 tokens in two
        line = {"case": f"match 1 page ({page} tokens) of 1,000,000", "side": name}
        line["first_with_split_us"] = round(1e6 * (time.perf_counter() - start), 1)
        line["key_of_1_page_us"] = round(median_us(lambda m=match, k=short: m(k)), 2)
        line["key_of_1,000,000_us"] = round(median_us(lambda m=match, k=long: m(k)), 2)
        print(json.dumps(line))


def resident_bytes() -> int:
    """Return the memory of this process; only Linux says it so."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forest(side: Ours, nodes: int) -> Iterator[Any]:
    """Yield keys of 32 tokens: one node in a thousand is a prefix, all others are leaves below."""
    for number in range(nodes - nodes // 1000):
        prefix = 10**7 + 16 * (number % (nodes // 1000))
        yield side.make_key(side.pack([*range(prefix, prefix + 16), number, *range(15)]))


def many_nodes(name: str, nodes: int) -> None:
    """Print what a tree costs in seconds and bytes; in a process of its own, where RSS is it all.

    A node has 16 tokens and their slots; these are in the bytes. torch does not report to
    tracemalloc, so both sides are measured by RSS.
    """
    side = Ours(16) if name == "ours" else SGLang(16, *peers.sglang())
    last = list(forest(side, 1000))[:100]
    side.evicter(last, 100 * 32)  # whatever is loaded late is loaded now
    gc.collect()
    on_linux = Path("/proc/self/statm").exists()
    before, start = resident_bytes() if on_linux else 0, time.perf_counter()
    match, evict = side.evicter(forest(side, nodes), 16 * nodes + 32)
    line: dict[str, object] = {"case": f"a tree of {nodes:,} nodes, page 16", "side": name}
    line["build_s"] = round(time.perf_counter() - start, 2)
    if on_linux:
        taken = resident_bytes() - before
        if name == "ours":
            taken -= 4 * (16 * nodes + 32)  # the free list is not the tree's
        line["RSS_bytes_a_node"] = round(taken / nodes)
    keys = [key for key, _ in zip(forest(side, nodes), range(200), strict=False)]
    line["match_us"] = round(median_us(lambda: [match(key) for key in keys], 5) / 200, 1)
    line["evict_1000_us"] = round(median_us(lambda: evict(16_000), 5))
    print(json.dumps(line), flush=True)


def main() -> None:
    """Print every case."""
    modules = None
    try:
        modules = peers.sglang()
    except Exception as missing:  # whatever keeps the peer from loading, our side still counts
        print(f"SGLang's side is left out: {missing!r}", file=sys.stderr)
    for page in (1, 16):
        ours, peer = Ours(page), SGLang(page, *modules) if modules else None
        side_by_side(ours, peer)
    growth(Ours(1), SGLang(1, *modules) if modules else None)
    trees = [("ours", 100_000), ("peer", 100_000), ("ours", 1_000_000)]
    for name, nodes in trees:
        if name == "ours" or modules:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, spawn) as fresh:
                fresh.submit(many_nodes, name, nodes).result()


if __name__ == "__main__":
    main()
