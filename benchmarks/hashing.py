"""Chained block hashes beside vLLM's own, on the same tokens in the same run: one JSON line a case.

    python benchmarks/hashing.py

The peer needs `pip`, and the packages that vLLM's files import (the extra `bench`);
without them only our side is timed, and the run says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import peers
from numpy.typing import ArrayLike
from timing import compare, median_us

from fanoutkv.hashing import BlockHasher, MultiModalFeature, request_block_hashes

TOKENS = 8192
BLOCK_SIZE = 16
ALGORITHMS = {"sha256": "sha256", "xxh3_128": "xxhash"}


def vllm_chain(
    hashing: ModuleType, utils: ModuleType, name: str, token_ids: list[int]
) -> Callable[[], object]:
    """Return vLLM's chain over a list of tokens, the input that it has; no extra keys."""
    function = hashing.get_hash_fn_by_name(name)
    utils.init_none_hash(function)
    starts = range(0, len(token_ids), BLOCK_SIZE)

    def chain() -> None:
        parent = None
        for start in starts:
            tokens = token_ids[start : start + BLOCK_SIZE]
            parent = utils.hash_block_tokens(function, parent, tokens, None)

    return chain


def our_chain(algorithm: str, token_ids: ArrayLike, **extra: Any) -> Callable[[], object]:
    """Return our chain over a list or array of tokens, with or without extra keys."""
    return lambda: request_block_hashes(token_ids, BLOCK_SIZE, algorithm=algorithm, **extra)


def extras(token_ids: ArrayLike) -> None:
    """Print what extra keys add to a chain, and what it costs to append one token."""
    image = MultiModalFeature("a picture", 100, 1000)
    cases: dict[str, dict[str, Any]] = {
        "an adapter in every block": {"lora_name": "adapter"},
        "a salt in the first block": {"cache_salt": "secret"},
        "an image in 63 blocks": {"mm_features": [image]},
    }
    for (case, keys), algorithm in product(cases.items(), ALGORITHMS):
        chain = our_chain(algorithm, token_ids, **keys)
        compare(f"{algorithm}, {TOKENS} tokens from an int32 array, {case}", chain, None)
    hasher = BlockHasher(BLOCK_SIZE)
    hasher.extend(token_ids)
    decode = median_us(lambda: hasher.extend([7]), repeats=10_000)
    print(json.dumps({"case": "sha256, append one token", "ours_us": round(decode, 2)}))


def main() -> None:
    """Print every case."""
    array = np.random.default_rng(7).integers(0, 128_000, TOKENS, dtype=np.int32)
    tokens: list[int] = array.tolist()
    modules: list[ModuleType] = []
    try:
        modules = peers.vllm()[:2]
    except Exception as missing:  # whatever keeps the peer from loading, our side still counts
        print(f"vLLM's side is left out: {missing!r}", file=sys.stderr)
    kinds: dict[str, ArrayLike] = {"an int32 array": array, "a list": tokens}
    for (ours, theirs), (kind, token_ids) in product(ALGORITHMS.items(), kinds.items()):
        peer = vllm_chain(modules[0], modules[1], theirs, tokens) if modules else None
        compare(f"{ours}, {TOKENS} tokens from {kind}", our_chain(ours, token_ids), peer)
    extras(array)


if __name__ == "__main__":
    main()
