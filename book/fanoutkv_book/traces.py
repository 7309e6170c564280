"""Request traces with prefix structure, and a workload of the same kind where they are missing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK = 512


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: seconds since the start, lengths in tokens, an id for each block."""

    seconds: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def tokens(self) -> NDArray[np.int64]:
        """Return token ids that are equal for two requests just where their hash ids are."""
        return np.repeat(np.array(self.hash_ids, dtype=np.int64), BLOCK)[: self.input_length]


def conversation(limit: int | None = None) -> tuple[str, list[Arrival]]:
    """Return where the requests come from, and the first `limit` of the conversation trace."""
    return _load("conversation", limit)


def synthetic(limit: int | None = None) -> tuple[str, list[Arrival]]:
    """Return where the requests come from, and the first `limit` of the synthetic trace."""
    return _load("synthetic", limit)


def _load(name: str, limit: int | None) -> tuple[str, list[Arrival]]:
    """Read a trace of the Mooncake release (Apache-2.0), or make requests up.

    The file is looked for in the folder that FANOUTKV_TRACES names, or in `../shared/traces` beside
    the repository. Where there is none, requests with similar lengths and sharing are made up, up
    to 4,000 of them.
    """
    beside = Path(__file__).resolve().parents[3] / "shared" / "traces"
    path = Path(os.environ.get("FANOUTKV_TRACES", beside)) / f"{name}_trace.jsonl"
    if not path.exists():
        made = made_up(min(limit or 4000, 4000), seed=len(name))
        return f"made up, since the {name} trace is not here", made
    with path.open() as lines:
        rows = [json.loads(line) for line in islice(lines, limit)]
    return f"the {name} trace", [
        Arrival(r["timestamp"] / 1000, r["input_length"], r["output_length"], tuple(r["hash_ids"]))
        for r in rows
    ]


def made_up(limit: int, seed: int) -> list[Arrival]:
    """Return conversations that come back with more to say, 3.4 requests a second in the mean.

    Two in five requests continue an earlier one of the last 300; all share their first block, as
    those of the trace do.
    """
    rng = np.random.default_rng(seed)
    arrivals: list[Arrival] = []
    seconds, fresh = 0.0, iter(range(1, 10**9))
    for _ in range(limit):
        seconds += float(rng.exponential(1 / 3.4))
        old: tuple[int, ...] = (0,)
        if arrivals and rng.random() < 0.4:
            old = arrivals[-1 - int(rng.integers(min(300, len(arrivals))))].hash_ids
        new = 1 + int(rng.lognormal(2.4, 0.9))
        ids = old + tuple(next(fresh) for _ in range(new))
        length = len(ids) * BLOCK - int(rng.integers(BLOCK))
        arrivals.append(Arrival(seconds, length, 1 + int(rng.exponential(342)), ids))
    return arrivals
