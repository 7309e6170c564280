"""Block tables that share, and copy when they must write (chapter 03).

A block table says which block holds which tokens of a sequence. Forking a sequence shares all its
blocks. Before tokens are written, `prepare_write` decides for a whole step who owns what, takes
the blocks that are needed, and returns the copies that must run first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fanoutkv.blocks import BadArgumentError, BlockPool, PoolExhaustedError


class BlockTable:
    """The blocks of one sequence, in order, and how many tokens they hold.

    Args:
        pool: the ledger that the blocks come from.
        block_size: tokens a block; 1 or more.

    Attributes:
        num_tokens: tokens that have a place in the table.

    Raises:
        BadArgumentError: block_size is below 1.

    vLLM 0.33 keeps the same rows in `vllm/v1/worker/block_table.py`, `BlockTable`.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Start without tokens and without blocks."""
        if block_size < 1:
            raise BadArgumentError(f"a block holds at least 1 token, not {block_size}")
        self.pool = pool
        self.block_size = block_size
        self.num_tokens = 0
        self._row = np.zeros(8, dtype=np.int32)
        self._num_blocks = 0

    @property
    def block_ids(self) -> NDArray[np.int32]:
        """The blocks, int32[n], as an attention kernel reads them; a view, not a copy."""
        return self._row[: self._num_blocks]

    def append(self, block_ids: ArrayLike) -> None:
        """Add blocks that the caller has taken or touched for this table; amortized O(1) each.

        Raises:
            BadArgumentError: an id is no integer, or there is no such block; nothing has changed.
        """
        new = np.asarray(block_ids)
        if new.size and (
            new.dtype.kind not in "iu" or new.min() < 0 or new.max() >= self.pool.num_blocks
        ):
            raise BadArgumentError(f"{new.tolist()} are not all blocks of this pool")
        end = self._num_blocks + len(new)
        if end > len(self._row):
            self._row = np.resize(self._row, max(end, 2 * len(self._row)))
        self._row[self._num_blocks : end] = new
        self._num_blocks = end

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """The places in memory, int64[stop - start], of tokens start to stop - 1.

        Raises:
            BadArgumentError: the table does not hold these tokens.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise BadArgumentError(
                f"tokens {start} to {stop} are not in a table of {self.num_tokens} tokens"
            )
        positions = np.arange(start, stop)
        blocks = self.block_ids[positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def fork(self) -> BlockTable:
        """Return a second table for the same tokens, which shares their blocks; nothing is copied.

        It takes no memory, so it cannot fail. PagedAttention, section 5.2, calls it `fork`, too.
        """
        child = BlockTable(self.pool, self.block_size)
        # Blocks in reserve stay with this table: two that share them would write the same slots.
        used = self.block_ids[: -(-self.num_tokens // self.block_size)]
        self.pool.touch(used[used != self.pool.null_block])
        child.append(used)
        child.num_tokens = self.num_tokens
        return child

    def free(self) -> None:
        """Give all blocks back, the tail first. A table that is empty already stays as it is."""
        held = self.block_ids[self.block_ids != self.pool.null_block]
        self.pool.free_blocks(held[::-1])
        self._num_blocks = self.num_tokens = 0


def prepare_write(tables: Sequence[BlockTable], num_new_tokens: int = 1) -> NDArray[np.int32]:
    """Make room for the next tokens of every table, each in blocks that it alone may write.

    A tail block that is not full, and that somebody else reads or that has a name, is replaced by
    a new block; whoever comes last to a block without a name writes in place. The new tokens count
    as held by the tables when this returns.

    Args:
        tables: distinct tables on one pool.
        num_new_tokens: for each table; 0 or more.

    Returns:
        int32[k, 2], pairs (src, dst) of blocks to copy, whole, before anything is written.

    Raises:
        PoolExhaustedError: the pool cannot serve all of them; then nothing has changed.
        BadArgumentError: no table, tables on several pools, one table twice, or a number below 0.

    PagedAttention, section 4.4. vLLM 0.33 copies in a few cases only, for layers with state
    (`vllm/v1/core/single_type_kv_cache_manager.py`, `SingleTypeKVCacheManager._apply_cow`).
    """
    pool = _pool_of(tables)
    if num_new_tokens < 0:
        raise BadArgumentError(f"a step appends 0 or more tokens, not {num_new_tokens}")
    leaving: Counter[int] = Counter()
    replaced = [
        places_to_replace(table, table.num_tokens, table.num_tokens + num_new_tokens, leaving)
        for table in tables
    ]
    # A table may have blocks in reserve already, for tokens that were only guessed.
    grown = [
        max(0, -(-(table.num_tokens + num_new_tokens) // table.block_size) - len(table.block_ids))
        for table in tables
    ]
    needed = sum(map(len, replaced)) + sum(grown)
    if needed > pool.num_free_blocks:
        raise PoolExhaustedError(
            f"this step needs {needed} blocks, {needed - sum(grown)} of them for copies, and "
            f"{pool.num_free_blocks} are free: preempt a group, then try again"
        )
    new = iter(pool.get_new_blocks(needed).tolist())
    copies, given_up = [], []
    for table, places, count in zip(tables, replaced, grown, strict=True):
        for place in places:
            source, table.block_ids[place] = int(table.block_ids[place]), next(new)
            given_up.append(source)
            if place * table.block_size < table.num_tokens:
                copies.append((source, int(table.block_ids[place])))
        table.append([next(new) for _ in range(count)])
        table.num_tokens += num_new_tokens
    # Only now: a source that lost its last reader must not be handed out in this same step.
    for source in given_up:
        pool.free_blocks([source])
    return np.array(copies, dtype=np.int32).reshape(-1, 2)


def places_to_replace(
    table: BlockTable, start: int, stop: int, leaving: Counter[int] | None = None
) -> list[int]:
    """Return the places in a table whose block may not be written, for tokens start to stop - 1.

    Nearly always that is the tail or nothing. It is more after tokens were taken back in a table
    whose blocks are shared.

    Args:
        table: the blocks that are there; those that must be added do not count.
        start: the first token that will be written.
        stop: the token after the last one.
        leaving: how many readers each block has lost in this step already; it is kept up.

    Raises:
        BadArgumentError: a token would go where the table has the null block.
    """
    leaving = Counter() if leaving is None else leaving
    last = -(-stop // table.block_size) if stop > start else 0
    places = []
    for place in range(start // table.block_size, min(last, len(table.block_ids))):
        block = int(table.block_ids[place])
        if block == table.pool.null_block:
            raise BadArgumentError(
                f"token {start} lies behind the window: its block was given back"
            )
        alone = table.pool.ref_cnt[block] - leaving[block] == 1
        if not alone or table.pool._is_cached[block]:
            places.append(place)
            leaving[block] += 1
    return places


def _pool_of(tables: Sequence[BlockTable]) -> BlockPool:
    """Return the one pool of distinct tables, or raise `BadArgumentError`."""
    if not tables or any(table.pool is not tables[0].pool for table in tables):
        raise BadArgumentError("one or more tables are needed, all of them on one pool")
    if len(set(map(id, tables))) < len(tables):
        raise BadArgumentError("a table stands in the list twice")
    return tables[0].pool


def select_beams(tables: Sequence[BlockTable], parents: Sequence[int]) -> list[BlockTable]:
    """Return the tables of the next step of a beam search, and free those of this one.

    Args:
        tables: the candidates of this step.
        parents: for each survivor the index of the candidate that it continues; one may be
            continued several times, or not at all.

    Raises:
        BadArgumentError: there is no such candidate; nothing has changed.

    PagedAttention, section 4.4 and figure 9.
    """
    if not all(0 <= parent < len(tables) for parent in parents):
        raise BadArgumentError(
            f"parents {list(parents)} are not all among {len(tables)} candidates"
        )
    # First everybody who stays gets a reader, then those who go lose theirs: in the other order a
    # block could be free for a moment although a survivor needs it.
    survivors = [tables[parent].fork() for parent in parents]
    for table in tables:
        table.free()
    return survivors


def alias(req_to_token: NDArray[np.int32], rows: ArrayLike, leader: int, prompt_len: int) -> None:
    """Let the rows of a group name the leader's slots for the prompt. No K/V moves.

    Args:
        req_to_token: int32[requests, max_len], the slot of each token of each request.
        rows: the members' rows.
        leader: the row that computed the prompt, and that owns its slots.
        prompt_len: tokens of the prompt.

    Raises:
        BadArgumentError: there is no such row or column; nothing has changed.

    SGLang 0.5.23: `sglang/srt/beam_search/fork.py`, `alias_members_prompt_kv`.
    """
    _check_rows(req_to_token, [leader, *np.asarray(rows).tolist()], 0, prompt_len)
    req_to_token[np.asarray(rows), :prompt_len] = req_to_token[leader, :prompt_len]


def reparent(
    req_to_token: NDArray[np.int32],
    rows: ArrayLike,
    parents: ArrayLike,
    prompt_len: int,
    seq_len: int,
) -> NDArray[np.int32]:
    """Let each row continue its parent, by renaming slots; return the slots that nobody names now.

    Args:
        req_to_token: int32[requests, max_len].
        rows: the members' rows.
        parents: for each member, the position in `rows` of the member that it continues.
        prompt_len: tokens of the prompt, which all members share.
        seq_len: tokens so far; the slots between the two belong to the group.

    Returns:
        int32[n], the orphans: free them once.

    Raises:
        BadArgumentError: there is no such row, column or member, or not one parent a member;
            nothing has changed.

    SGLang 0.5.23: `sglang/srt/beam_search/fork.py`, `remap_kv_mapping`.
    """
    _check_rows(req_to_token, np.asarray(rows).tolist(), prompt_len, seq_len)
    chosen, width = np.asarray(parents).tolist(), len(np.asarray(rows))
    if len(chosen) != width or not set(chosen) <= set(range(width)):
        raise BadArgumentError(f"parents {chosen} do not name one of {width} members for each")
    members = np.asarray(rows)
    before = req_to_token[members, prompt_len:seq_len]
    after = before[np.asarray(parents)]
    req_to_token[members, prompt_len:seq_len] = after
    return collect_orphans(before, after)


def _check_rows(req_to_token: NDArray[np.int32], rows: list[int], start: int, stop: int) -> None:
    """Raise `BadArgumentError` unless these rows exist and have columns start to stop - 1."""
    height, width = req_to_token.shape
    if not set(rows) <= set(range(height)) or not 0 <= start <= stop <= width:
        raise BadArgumentError(
            f"rows {rows}, columns {start} to {stop} are not all in a table of {height} x {width}"
        )


def collect_orphans(before: NDArray[np.int32], after: NDArray[np.int32]) -> NDArray[np.int32]:
    """The slots that were named before and are not named after, each once, ascending.

    SGLang 0.5.23: `sglang/srt/beam_search/fork.py`, `collect_orphan_slots`.
    """
    orphans: NDArray[np.int32] = np.setdiff1d(before, after)
    return orphans


def move_group(tables: Sequence[BlockTable], target: BlockPool) -> NDArray[np.int32]:
    """Move a group of tables to another pool, for instance from the GPU's to the host's, or back.

    A block that several of the tables share is moved once and stays shared. Names stay with the
    old pool, where the blocks can still be found until they are reused.

    Args:
        tables: the whole group, on one pool; the unit in which requests are preempted.
        target: the pool to move to.

    Returns:
        int32[k, 2], pairs (block in the old pool, block in the target) to copy before either pool
        hands out another block: the old ones are free already.

    Raises:
        PoolExhaustedError: the target cannot take all of them; then nothing has changed.
        BadArgumentError: no table, tables on several pools, or one table twice.

    PagedAttention, section 4.5: sequence groups, all or nothing.
    """
    source = _pool_of(tables)
    blocks = np.unique(np.concatenate([table.block_ids for table in tables]))
    blocks = blocks[blocks != source.null_block]
    renamed = np.zeros(source.num_blocks, dtype=np.int32)
    renamed[blocks] = target.get_new_blocks(len(blocks))
    has_reader = np.zeros(source.num_blocks, dtype=np.bool_)
    for table in tables:
        held = table.block_ids[table.block_ids != source.null_block]
        target.touch(renamed[held[has_reader[held]]])
        has_reader[held] = True
        source.free_blocks(held[::-1])
        table.block_ids[:] = renamed[table.block_ids]
        table.pool = target
    return np.stack([blocks, renamed[blocks]], axis=1)
