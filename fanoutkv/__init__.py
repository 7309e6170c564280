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
from fanoutkv.hashing import BlockHasher, MultiModalFeature, hash_block_tokens, request_block_hashes

__version__ = "0.1.0"

__all__ = [
    "AllBlocksCleared",
    "BadArgumentError",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheStats",
    "DoubleFreeError",
    "FanoutKVError",
    "FreeBlockQueue",
    "InvariantError",
    "KVCacheEvent",
    "MultiModalFeature",
    "PoolExhaustedError",
    "StaleIndexError",
    "hash_block_tokens",
    "request_block_hashes",
]
