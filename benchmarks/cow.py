"""Copy on write: what a step costs, and how much memory sharing saves. One JSON line a case.

    python benchmarks/cow.py

No peer is timed: vLLM 0.33 forks no tables any more, and SGLang's beams need its GPU tensors.

The memory saving is the paper's (arXiv 2309.06180, section 6.3): blocks saved by sharing ÷ blocks
without sharing. Both are summed over all decode steps of all requests, so `saving_%` is a mean in
which each block counts for each step that it is held; `at_end_%` looks at the last step of each
request only. Lengths are log-normal with the published means; a prompt is cut at 1,024 tokens, and
prompt with output at 2,048. The same requests serve every width, and all samples of a request are
equally long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray
from timing import compare

from fanoutkv import BlockPool, BlockTable, prepare_write, select_beams

TABLES = 64
BLOCKS = 512
BLOCK_SIZE = 16
MAX_TOKENS = 2048
WIDTHS = (2, 4, 6)
MEANS = {"Alpaca": (19.31, 58.45), "ShareGPT": (161.31, 337.99)}
PUBLISHED = {
    ("parallel", "Alpaca"): "6.1-9.8",
    ("parallel", "ShareGPT"): "16.2-30.5",
    ("beam", "Alpaca"): "37.6-55.2",
    ("beam", "ShareGPT"): "44.3-66.3",
}
Parents = Callable[[], list[int]]


def times() -> None:
    """Print what forks and steps cost for 64 tables of 512 blocks."""
    tokens = BLOCKS * BLOCK_SIZE - BLOCK_SIZE // 2  # the tail is half full
    pool = BlockPool(200_000)
    leader = BlockTable(pool, BLOCK_SIZE)
    prepare_write([leader], tokens)

    def fork() -> list[BlockTable]:
        return [leader.fork() for _ in range(TABLES)]

    def free(tables: list[BlockTable]) -> None:
        for table in tables:
            table.free()

    def diverge() -> None:
        tables = fork()
        prepare_write(tables)
        free(tables)

    alone = fork()
    prepare_write(alone)
    beams = fork()
    rng = np.random.default_rng(0)

    def select() -> None:
        beams[:] = select_beams(beams, rng.integers(0, TABLES, TABLES).tolist())

    shape = f"{TABLES} tables x {BLOCKS} blocks"
    compare(f"fork and free {shape}", lambda: free(fork()), None)
    compare(f"fork, prepare_write ({TABLES} copies) and free {shape}", diverge, None)
    compare(f"prepare_write of one token, nothing to copy, {TABLES} tables", step(alone), None)
    compare(f"select_beams of {shape}, random parents", select, None)


def step(tables: list[BlockTable]) -> Callable[[], object]:
    """Return a decode step: one token more for each table."""
    return lambda: prepare_write(tables)


def lengths(rng: np.random.Generator, data: str, requests: int, sigma: float) -> NDArray[np.int64]:
    """Draw int64[requests, 2], prompt and output lengths with the published means before the cut.

    Args:
        rng: the source of randomness.
        data: a key of MEANS.
        requests: how many.
        sigma: the standard deviation of the logarithm; 0 gives the mean to everybody.
    """
    location = np.log(MEANS[data]) - sigma**2 / 2
    drawn = np.rint(rng.lognormal(location, sigma, (requests, 2))).astype(np.int64)
    drawn[:, 0] = np.clip(drawn[:, 0], 1, MAX_TOKENS // 2)
    drawn[:, 1] = np.clip(drawn[:, 1], 1, MAX_TOKENS - drawn[:, 0])
    return drawn


def random_parents(rng: np.random.Generator, k: int) -> Parents:
    """Every survivor continues anybody: no candidate is ever better than another."""
    return lambda: [int(parent) for parent in rng.integers(0, k, k)]


def faithful_parents(rng: np.random.Generator, k: int, stays: float) -> Parents:
    """A candidate continues itself with probability `stays`, and else anybody."""

    def draw() -> list[int]:
        moves = rng.random(k) >= stays
        anybody = rng.integers(0, k, k)
        return [int(anybody[i]) if moves[i] else i for i in range(k)]

    return draw


def scored_parents(rng: np.random.Generator, k: int, concentration: float) -> Parents:
    """Beam search itself: the k best continuations by summed log-probability.

    The model's next-token distribution is drawn anew for each beam and step, Dirichlet over 64
    tokens. A small concentration means a sure model: nearly all the weight on one token.
    """
    scores = np.zeros(k)
    share = np.full(64, concentration / 64)

    def draw() -> list[int]:
        nonlocal scores
        likelihood = np.log(rng.dirichlet(share, k) + 1e-9)
        total = (scores[:, None] + likelihood).ravel()
        best = np.argsort(-total)[:k]
        scores = total[best] - total[best[0]]
        return [int(parent) for parent in best // len(share)]

    return draw


def decode(n: int, prompt: int, output: int, parents: Parents | None) -> NDArray[np.int64]:
    """Decode one request; return int64[output, 2], blocks held and blocks without sharing."""
    pool = BlockPool(n * (MAX_TOKENS // BLOCK_SIZE + 2) + 1)
    tables = [BlockTable(pool, BLOCK_SIZE)]
    prepare_write(tables, prompt)
    tables += [tables[0].fork() for _ in range(n - 1)]
    held = []
    for _ in range(output):
        prepare_write(tables)
        used = pool.num_blocks - 1 - pool.num_free_blocks
        held.append((used, sum(len(table.block_ids) for table in tables)))
        if parents:
            tables = select_beams(tables, parents())
    return np.array(held)


def saving(
    mode: str, data: str, model: str, sigma: float, requests: int, maker: Callable[..., Parents]
) -> None:
    """Print the saving for each width, beside the published range over widths 2 to 6."""
    drawn = lengths(np.random.default_rng(0), data, requests, sigma).tolist()
    line: dict[str, object] = {"case": f"{mode}, {data}, sigma {sigma}{model}"}
    results = []
    for n in WIDTHS:
        rng, beam = np.random.default_rng(n), mode == "beam"
        runs = [decode(n, p, o, maker(rng, n) if beam else None) for p, o in drawn]
        sums = [np.concatenate(runs).sum(axis=0), sum(run[-1] for run in runs)]
        results.append([round(100 * (1 - used / alone), 1) for used, alone in sums])
    line["n_or_k"] = list(WIDTHS)
    line["saving_%"] = [every for every, _ in results]
    line["at_end_%"] = [end for _, end in results]
    line["published_%"] = PUBLISHED[mode, data]
    print(json.dumps(line), flush=True)


def savings() -> None:
    """Print parallel sampling and beam search, under each assumption about what is not known."""
    for data, sigma in product(MEANS, (0.0, 0.6, 1.0)):
        saving("parallel", data, "", sigma, 150, random_parents)
    models: dict[str, Callable[..., Parents]] = {"random parents": random_parents}
    for stays in (0.9, 0.98):
        models[f"itself with probability {stays}"] = lambda r, k, s=stays: faithful_parents(r, k, s)
    for c in (0.1, 0.3, 1.0):
        models[f"best by score, concentration {c}"] = lambda r, k, c=c: scored_parents(r, k, c)
    for data, (model, maker) in product(MEANS, models.items()):
        saving("beam", data, f", {model}", 1.0, 40, maker)


def main() -> None:
    """Print every case."""
    times()
    savings()


if __name__ == "__main__":
    main()
