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

__version__ = "0.1.0"

__all__ = [
    "AllBlocksCleared",
    "BadArgumentError",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheStats",
    "DoubleFreeError",
    "FanoutKVError",
    "FreeBlockQueue",
    "InvariantError",
    "KVCacheEvent",
    "PoolExhaustedError",
    "StaleIndexError",
]
