"""The name of a KV block: a hash of all that its keys and values depend on (chapter 02).

That is its own tokens, all tokens before them, and whatever else the model was given: an adapter,
images, embeddings. So the hash of a block covers its tokens, the hash of the block before it, and
its extra keys. Then equal hash means equal prefix, and a hit in `BlockPool` can be trusted.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fanoutkv.blocks import BadArgumentError


def token_array(token_ids: ArrayLike) -> NDArray[np.int64]:
    """Return token ids as int64[n]: a list or tuple, or an array or CPU tensor of any integer type.

    Raises:
        BadArgumentError: the sequence is not flat, or an element is no integer (a bool is none) or
            does not fit into 64 bits with its sign.
    """
    try:
        if isinstance(token_ids, list | tuple):
            # From a list, struct is several times faster than NumPy, and takes integers only.
            raw = struct.pack(f"<{len(token_ids)}q", *token_ids)
            ids = np.frombuffer(raw, dtype="<i8").astype(np.int64, copy=False)
            # But it takes True for 1: look again, where a bool can hide.
            if any(type(token_ids[i]) is bool for i in np.flatnonzero((ids == 0) | (ids == 1))):
                raise TypeError("True and False are no tokens")
            return ids
        array = np.asarray(token_ids)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(f"this is {array.dtype} of shape {array.shape}")
        if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
            raise TypeError(f"{array.max()} is too large")
        return array.astype(np.int64)
    except (TypeError, ValueError, RuntimeError, struct.error) as error:
        raise BadArgumentError(
            f"token ids are a flat list, array or CPU tensor of 64-bit integers: {error}"
        ) from error


def pack_blocks(ids: NDArray[np.int64], block_size: int) -> list[bytes]:
    """Return the bytes of each block: its number of tokens, then the tokens.

    The length of `ids`, int64[n], is a multiple of block_size.
    Every number takes 8 bytes, little-endian, on any machine and whatever its value, so the bytes
    of a block do not depend on its neighbors. All blocks are converted at once, then cut apart.
    """
    rows = np.empty((len(ids) // block_size, 1 + block_size), dtype="<i8")
    rows[:, 0] = block_size
    rows[:, 1:] = ids.reshape(-1, block_size)
    data, stride = rows.tobytes(), 8 * (1 + block_size)
    return [data[start : start + stride] for start in range(0, len(data), stride)]


def encode(value: object) -> bytes:
    """Return bytes that no other value has: its type, the length of its body, its body.

    The length, 8 bytes, says where a value ends, so ("a", "bc") and ("ab", "c") differ; the type
    keeps 1, True, "1" and b"1" apart.

    Raises:
        BadArgumentError: not None, bool, int, str or bytes, or a tuple of these, or of such tuples.
    """
    if value is None:
        kind, body = b"N", b""
    elif type(value) is bool:
        kind, body = b"?", bytes([value])
    elif type(value) is int:
        kind, body = b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    elif type(value) is str:
        kind, body = b"s", value.encode("utf-8", "surrogatepass")
    elif type(value) is bytes:
        kind, body = b"b", value
    elif type(value) is tuple:
        kind, body = b"(", b"".join(map(encode, value))
    else:
        raise BadArgumentError(
            f"{value!r} cannot be part of a block's identity: use None, bool, int, str, bytes, and "
            f"tuples of these, not {type(value).__name__}"
        )
    return kind + len(body).to_bytes(8, "little") + body


# Drawn when the process starts, so that nobody outside can know it; a forked child inherits it.
PROCESS_SEED = os.urandom(32)


def hash_algorithm(name: str, seed: bytes | None = None) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Return the root, which stands in for the parent of a first block, and the hash function.

    "sha256" has a fixed root: to know it helps nobody to build a collision, and all processes,
    machines and Python versions agree on every hash.

    "xxh3_128" is not cryptographic: who can compute its hashes can build a collision (see
    CVE-2025-25183) and be served from another tenant's cache. So its root and the function's own
    64-bit seed are secrets of the process. A secret root alone would not do: xxh3 mixes pieces of
    its input separately and adds them up, so two blocks made to collide behind one parent collide
    behind every parent. Among tenants who may attack each other, use "sha256".

    Args:
        name: "sha256" (32 bytes a hash) or "xxh3_128" (16 bytes; needs the package xxhash).
        seed: instead of none or `PROCESS_SEED`; processes that share it share all hashes.

    Raises:
        BadArgumentError: there is no such algorithm, or xxhash is not installed.

    vLLM 0.33: `vllm/v1/core/kv_cache_utils.py`, `init_none_hash`, a random root alone.
    """
    if name == "sha256":
        blank = hashlib.sha256()

        def digest(data: bytes) -> bytes:
            state = blank.copy()  # cheaper than a new one, which asks OpenSSL for the algorithm
            state.update(data)
            return state.digest()

        return digest(encode(("fanoutkv", name, seed))), digest
    if name != "xxh3_128":
        raise BadArgumentError(f"there is no algorithm {name!r}: use 'sha256' or 'xxh3_128'")
    try:
        from xxhash import xxh3_128_digest
    except ImportError as missing:
        raise BadArgumentError(
            "'xxh3_128' needs the package xxhash: install it, or use 'sha256'"
        ) from missing
    secret = encode(("fanoutkv", name, PROCESS_SEED if seed is None else seed))
    root = hashlib.sha256(secret).digest()
    number = int.from_bytes(root[16:24], "little")
    return root[:16], lambda data: xxh3_128_digest(data, number)


def hash_block_tokens(
    parent: bytes | None,
    token_ids: ArrayLike,
    extra_keys: tuple[Any, ...] | None = None,
    *,
    algorithm: str = "sha256",
    seed: bytes | None = None,
) -> bytes:
    """Return the name of one block: the hash of its parent, count, tokens and extra keys in a row.

    A parent has a fixed length, the count says where the tokens end, and extra keys are what
    follows, if anything does: so no two calls with different arguments hash the same bytes.

    The parent of the first block is None; see `token_array`, `block_extra_keys` and
    `hash_algorithm` for the rest.

    Raises:
        BadArgumentError: an argument is not what it should be, or there are no tokens.

    vLLM 0.33: `vllm/v1/core/kv_cache_utils.py`, `hash_block_tokens`, over a pickled tuple.
    """
    root, digest = hash_algorithm(algorithm, seed)
    ids = token_array(token_ids)
    if parent is None:
        parent = root
    if type(parent) is not bytes or len(parent) != len(root):
        raise BadArgumentError(f"a parent is {len(root)} bytes of {algorithm}, not {parent!r}")
    if not isinstance(extra_keys, tuple | None):
        raise BadArgumentError(f"extra keys are a tuple or None, not {extra_keys!r}")
    if not len(ids):
        raise BadArgumentError("a block without tokens has no K/V, so it needs no name")
    [packed] = pack_blocks(ids, len(ids))
    return digest(parent + packed + (b"" if extra_keys is None else encode(extra_keys)))


@dataclass(frozen=True)
class MultiModalFeature:
    """An image, or the like, that fills tokens `offset` to `offset + length - 1` of a prompt.

    The identifier names the content, for instance by a hash of the pixels.

    vLLM 0.33: `vllm/v1/core/kv_cache_utils.py`, `_gen_mm_extra_hash_keys`, reads the same three.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        """Refuse a feature without a name, without tokens, or with tokens before the first."""
        types = type(self.identifier), type(self.offset), type(self.length)
        if types != (str, int, int) or self.offset < 0 or self.length < 1:
            raise BadArgumentError(
                f"a feature is named by a str, and fills 1 or more tokens from 0 on, not {self}"
            )


def block_extra_keys(
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    mm_features: Sequence[MultiModalFeature] = (),
    prompt_embeds: ArrayLike | None = None,
) -> tuple[tuple[Any, ...] | None, dict[int, tuple[Any, ...]]]:
    """Return the extra keys of most blocks of a request, and those of the others by block index.

    The extra keys of a block are fields, each of which begins with its tag; without any, None.

    Args:
        block_size: tokens a block.
        lora_name: the adapter, in every block; one name must always mean the same weights.
        cache_salt: the tenant's secret, in the first block; the chain carries it on.
        mm_features: in each block that they touch, with their offset from its start.
        prompt_embeds: [tokens, width] from the first token on, by the SHA-256 of each block's rows;
            NumPy cannot read bfloat16 tensors, so pass `tensor.view(torch.int16)`.

    Raises:
        BadArgumentError: the embeddings are no matrix of numbers.

    vLLM 0.33: `vllm/v1/core/kv_cache_utils.py`, `generate_block_hash_extra_keys`; it adds the
    adapter's path, and leaves out the length of a feature and the type of embeddings.
    """
    usual = () if lora_name is None else (("lora", lora_name),)
    fields: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for feature in sorted(mm_features, key=lambda f: (f.offset, f.length, f.identifier)):
        last = (feature.offset + feature.length - 1) // block_size
        for block in range(feature.offset // block_size, last + 1):
            offset = feature.offset - block * block_size
            fields[block].append(("mm", feature.identifier, offset, feature.length))
    if cache_salt is not None:
        fields[0].append(("cache_salt", cache_salt))
    if prompt_embeds is not None:
        for block, digest in enumerate(_embedding_digests(prompt_embeds, block_size)):
            fields[block].append(("prompt_embeds", *digest))
    return usual or None, {block: (*usual, *more) for block, more in fields.items()}


def _embedding_digests(
    prompt_embeds: ArrayLike, block_size: int
) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return the type, shape and SHA-256 of the rows that fall into each block."""
    try:
        rows = np.asarray(prompt_embeds)
        if rows.ndim != 2 or rows.dtype.kind not in "fiuV" or rows.dtype.hasobject:
            raise TypeError(f"this is {rows.dtype} of shape {rows.shape}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadArgumentError(
            f"prompt embeddings are a matrix of numbers, [tokens, width]: {error}"
        ) from error
    parts = [rows[start : start + block_size] for start in range(0, len(rows), block_size)]
    return [(str(p.dtype), p.shape, hashlib.sha256(p.tobytes()).digest()) for p in parts]


class BlockHasher:
    """The chained hashes of one request's full blocks, kept up as tokens are appended.

    Args:
        block_size: tokens a block.
        algorithm, seed: see `hash_algorithm`.
        lora_name, cache_salt, mm_features, prompt_embeds: see `block_extra_keys`.

    Attributes:
        hashes: one a full block, from the first token on. Read it; change it by `extend`.

    Raises:
        BadArgumentError: block_size is not 1 or more, or another argument is wrong.

    vLLM 0.33: `vllm/v1/core/kv_cache_utils.py`, `get_request_block_hasher`.
    """

    def __init__(
        self,
        block_size: int,
        *,
        algorithm: str = "sha256",
        seed: bytes | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        mm_features: Sequence[MultiModalFeature] = (),
        prompt_embeds: ArrayLike | None = None,
    ) -> None:
        """Start without tokens; what the extra keys are is known, and encoded, now."""
        if not isinstance(block_size, int) or block_size < 1:
            raise BadArgumentError(f"block_size is an int, 1 or more, not {block_size!r}")
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._parent, self._digest = hash_algorithm(algorithm, seed)
        self._usual, self._others = block_extra_keys(
            block_size,
            lora_name=lora_name,
            cache_salt=cache_salt,
            mm_features=mm_features,
            prompt_embeds=prompt_embeds,
        )
        self._usual_bytes = b"" if self._usual is None else encode(self._usual)
        self._other_bytes = {block: encode(keys) for block, keys in self._others.items()}
        self._rest = np.zeros(0, dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        """The tokens so far, with those of the block that is not yet full."""
        return len(self.hashes) * self.block_size + len(self._rest)

    def extra_keys(self, block: int) -> tuple[Any, ...] | None:
        """Return the extra keys that the hash of a block covers, None if there are none."""
        return self._others.get(block, self._usual)

    def extend(self, token_ids: ArrayLike) -> list[bytes]:
        """Append tokens and return the hashes of the blocks that became full.

        Raises:
            BadArgumentError: see `token_array`; nothing has changed.
        """
        ids = np.concatenate([self._rest, token_array(token_ids)])
        full = len(ids) // self.block_size * self.block_size
        packed = pack_blocks(ids[:full], self.block_size)
        if self._usual_bytes or self._other_bytes:
            extra = self._other_bytes.get
            numbered = enumerate(packed, len(self.hashes))
            packed = [data + extra(block, self._usual_bytes) for block, data in numbered]
        parent, new = self._parent, []
        for data in packed:
            parent = self._digest(parent + data)
            new.append(parent)
        self._parent, self._rest = parent, ids[full:].copy()  # a view would keep all ids alive
        self.hashes += new
        return new


def request_block_hashes(
    request: Any,
    block_size: int,
    *,
    algorithm: str = "sha256",
    seed: bytes | None = None,
    **extra: Any,
) -> list[bytes]:
    """Return the chained hashes of all full blocks of a request, or of token ids.

    A request has `all_token_ids`, and as attributes all that `block_extra_keys` takes: one that is
    missing is an error, not a default. With token ids, these are arguments.

    Raises:
        BadArgumentError: see `BlockHasher` and `token_array`.
    """
    token_ids, own = request, {}
    if hasattr(request, "all_token_ids"):
        token_ids = request.all_token_ids
        names = "lora_name", "cache_salt", "mm_features", "prompt_embeds"
        own = {name: getattr(request, name) for name in names}
    hasher = BlockHasher(block_size, algorithm=algorithm, seed=seed, **own, **extra)
    return hasher.extend(token_ids)


def full_block_hashes(
    hashes: Sequence[bytes], hash_block_size: int, block_size: int
) -> Sequence[bytes]:
    """Return the hashes of blocks of `block_size` from those at every `hash_block_size` tokens.

    Each hash covers all tokens before its end, so that of a block is the last one within it.

    Raises:
        BadArgumentError: block_size is no multiple of hash_block_size.

    vLLM 0.33: `vllm/v1/core/kv_cache_utils.py`, `BlockHashListWithBlockSize`.
    """
    if not 1 <= hash_block_size <= block_size or block_size % hash_block_size:
        raise BadArgumentError(
            f"hashes at every {hash_block_size} tokens do not end where blocks of {block_size} do: "
            "block_size must be a multiple of hash_block_size"
        )
    scale = block_size // hash_block_size
    return hashes[scale - 1 :: scale]


def last_partial_key(
    hashes: Sequence[bytes], hash_block_size: int, block_size: int
) -> tuple[int, int, bytes] | None:
    """Return block index, tokens and key of the last block, if hashes end within it, or None.

    The key names the prefix that ends after that many tokens of the block: it is what
    `BlockPool.cache_partial_block` takes.

    Raises:
        BadArgumentError: see `full_block_hashes`.

    vLLM 0.33: `vllm/v1/core/block_pool.py`, `BlockPool.cache_partial_block`.
    """
    block = len(full_block_hashes(hashes, hash_block_size, block_size))
    num_tokens = len(hashes) * hash_block_size - block * block_size
    return (block, num_tokens, hashes[-1]) if num_tokens else None
