"""The ledger of a KV cache whose prefixes are shared: one module a chapter of the book."""

from fanoutkv.blocks import (
    AllBlocksCleared,
    BadArgumentError,
    BlockPool,
    BlockRemoved,
    BlockStored,
    CacheStats,
    DoubleFreeError,
    FanoutKVError,
    FreeBlockQueue,
    InvariantError,
    KVCacheEvent,
    PoolExhaustedError,
    StaleIndexError,
)
from fanoutkv.cow import (
    BlockTable,
    alias,
    collect_orphans,
    move_group,
    prepare_write,
    reparent,
    select_beams,
)
from fanoutkv.hashing import BlockHasher, MultiModalFeature, hash_block_tokens, request_block_hashes
from fanoutkv.manager import KVCacheManager, PrefixCacheStats, Request

__version__ = "0.1.0"

__all__ = [
    "AllBlocksCleared",
    "BadArgumentError",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTable",
    "CacheStats",
    "DoubleFreeError",
    "FanoutKVError",
    "FreeBlockQueue",
    "InvariantError",
    "KVCacheEvent",
    "KVCacheManager",
    "MultiModalFeature",
    "PoolExhaustedError",
    "PrefixCacheStats",
    "Request",
    "StaleIndexError",
    "alias",
    "collect_orphans",
    "hash_block_tokens",
    "move_group",
    "prepare_write",
    "reparent",
    "request_block_hashes",
    "select_beams",
]
