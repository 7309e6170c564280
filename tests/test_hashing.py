"""Identity: equal hash means equal prefix, and nothing that changes K/V is left out."""

from __future__ import annotations

import array
import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanoutkv import hashing
from fanoutkv.blocks import BadArgumentError
from fanoutkv.hashing import (
    BlockHasher,
    MultiModalFeature,
    block_extra_keys,
    encode,
    full_block_hashes,
    hash_algorithm,
    hash_block_tokens,
    last_partial_key,
    pack_blocks,
    request_block_hashes,
    token_array,
)

# --- The encoding: a decoder, written from its description, gives back every value -------------


def decode(data: bytes) -> tuple[Any, bytes]:
    """Return the first value in data, and what follows it."""
    kind, size = data[:1], int.from_bytes(data[1:9], "little")
    body, rest = data[9 : 9 + size], data[9 + size :]
    assert len(body) == size
    if kind == b"N":
        return None, rest
    if kind == b"?":
        return {b"\x00": False, b"\x01": True}[body], rest
    if kind == b"i":
        return int.from_bytes(body, "little", signed=True), rest
    if kind == b"s":
        return body.decode("utf-8", "surrogatepass"), rest
    if kind == b"b":
        return body, rest
    assert kind == b"("
    items = []
    while body:
        item, body = decode(body)
        items.append(item)
    return tuple(items), rest


def with_types(value: Any) -> Any:
    """Return the value with its type beside it at every level, so that 1 and True differ."""
    inner = tuple(map(with_types, value)) if isinstance(value, tuple) else value
    return type(value).__name__, inner


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2)
    | st.text(st.characters(codec=None), max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(VALUES, st.binary(max_size=4))
def test_a_value_and_where_it_ends_can_be_read_back(value: Any, tail: bytes) -> None:
    decoded, rest = decode(encode(value) + tail)
    assert with_types(decoded) == with_types(value)
    assert rest == tail


@given(VALUES, VALUES)
def test_equal_bytes_mean_equal_values(a: Any, b: Any) -> None:
    assert (encode(a) == encode(b)) == (with_types(a) == with_types(b))


def test_classic_confusions_are_kept_apart() -> None:
    values: list[Any] = [None, False, True, 0, 1, -1, 255, -256, 2**63, 2**64, -(2**63), "", "1"]
    values += [
        "None",
        "é",
        "e\u0301",
        "\ud800",
        "?",
        b"",
        b"1",
        b"\x01",
        (),
        (None,),
        ((),),
        ((), ()),
    ]
    values += [(1,), (True,), ("1",), ((1,),), ("a", "bc"), ("ab", "c"), ("abc",)]
    values += [("a", ("b", "c")), (("a", "b"), "c"), encode("a"), encode(1)]
    assert len({encode(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "value",
    [1.5, [1], {1}, {"a": 1}, np.int64(1), np.str_("a"), bytearray(b"a"), object(), (1, [2])],
)
def test_what_has_no_encoding_is_refused(value: Any) -> None:
    with pytest.raises(BadArgumentError, match="cannot be part of a block's identity"):
        encode(value)


# --- Token ids ---------------------------------------------------------------------------------

TOKENS = [3, 0, 1, 127, 7, 100, 2, 126, 1, 0]
DTYPES = ["i1", "u1", "<i2", ">i2", "u2", "<i4", ">i4", "u4", "<i8", ">i8", "u8"]


def same_tokens() -> dict[str, Any]:
    """Return the same tokens in every form."""
    wide = np.zeros((len(TOKENS), 2), dtype=np.int32)
    wide[:, 0] = TOKENS
    frozen = np.array(TOKENS)
    frozen.flags.writeable = False
    forms: dict[str, Any] = {
        "tuple": tuple(TOKENS),
        "list of NumPy integers": list(np.array(TOKENS, dtype=np.int16)),
        "array.array": array.array("l", TOKENS),
        "strided": wide[:, 0],
        "read-only": frozen,
    }
    return forms | {dtype: np.array(TOKENS, dtype=dtype) for dtype in DTYPES}


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
@pytest.mark.parametrize("form", same_tokens())
def test_every_form_of_the_tokens_hashes_alike(form: str, algorithm: str) -> None:
    tokens = same_tokens()[form]
    want = request_block_hashes(TOKENS, 3, algorithm=algorithm)
    assert request_block_hashes(tokens, 3, algorithm=algorithm) == want
    assert hash_block_tokens(None, tokens[:3], algorithm=algorithm) == want[0]


def test_torch_tensors_of_every_integer_dtype_hash_alike() -> None:
    torch = pytest.importorskip("torch")
    want = request_block_hashes(TOKENS, 3)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        tensor = torch.tensor(TOKENS, dtype=torch.int64).to(getattr(torch, name))
        assert request_block_hashes(tensor, 3) == want
    for name in ("bool", "float32", "bfloat16"):
        with pytest.raises(BadArgumentError):
            request_block_hashes(torch.ones(3, dtype=getattr(torch, name)), 3)
    with pytest.raises(BadArgumentError):
        request_block_hashes(torch.ones((1, 3), dtype=torch.int64), 3)


def test_the_whole_signed_64_bit_range_is_kept() -> None:
    edges = [-(2**63), -(2**32), -1, 0, 2**31, 2**32, 2**63 - 1]
    assert token_array(edges).tolist() == token_array(np.array(edges)).tolist() == edges
    assert token_array(np.array([2**63 - 1], dtype=np.uint64)).tolist() == [2**63 - 1]
    assert len({hash_block_tokens(None, [t]) for t in edges}) == len(edges)
    assert hash_block_tokens(None, [1, 2, 2**40])[:4] != hash_block_tokens(None, [1, 2, 0])[:4]
    # The width of a block does not depend on what comes later.
    assert request_block_hashes([1, 2, 2**40, 4], 2)[0] == request_block_hashes([1, 2], 2)[0]


BAD_TOKENS: dict[str, Any] = {
    "floats": [1.0, 2.0],
    "one float": [1, 2.0],
    "bools": [True, False],
    "one bool among ones": [1] * 5 + [True] + [0] * 5,
    "one bool among zeros": [0] * 5 + [False] + [1] * 5,
    "a NumPy bool in a list": [1, np.True_],
    "strings": ["1", "2"],
    "a string": "12",
    "bytes": b"12345678",
    "None": None,
    "None in a list": [1, None],
    "a number": 5,
    "a set": {1, 2},
    "a generator": (i for i in range(3)),
    "nested": [[1, 2], [3, 4]],
    "two-dimensional": np.zeros((2, 2), dtype=np.int32),
    "too large": [1, 2**63],
    "too small": [-(2**63) - 1],
    "uint64 beyond int64": np.array([1, 2**63], dtype=np.uint64),
    "float array": np.ones(3),
    "no elements, of floats": np.ones(0),
    "bool array": np.ones(3, dtype=bool),
    "object array": np.array([1, 2], dtype=object),
    "ragged": np.array([[1], [1, 2]], dtype=object),
}


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_what_is_no_token_is_refused_and_nothing_changes(tokens: Any) -> None:
    hasher = BlockHasher(2)
    hasher.extend([1, 2, 3])
    before = list(hasher.hashes)
    with pytest.raises(BadArgumentError, match="token ids are a flat list"):
        hasher.extend(tokens)
    with pytest.raises(BadArgumentError):
        hash_block_tokens(None, tokens)
    assert (hasher.hashes, hasher.num_tokens) == (before, 3)
    hasher.extend([4])
    assert hasher.hashes == request_block_hashes([1, 2, 3, 4], 2)


# --- One block: the bytes that are hashed, spelled out by hand ---------------------------------


def le(number: int) -> bytes:
    return struct.pack("<q", number)


def tagged(kind: bytes, body: bytes) -> bytes:
    return kind + le(len(body)) + body


SHA_ROOT = hashlib.sha256(
    tagged(b"(", tagged(b"s", b"fanoutkv") + tagged(b"s", b"sha256") + tagged(b"N", b""))
).digest()


def test_a_chain_by_hand() -> None:
    first = hashlib.sha256(SHA_ROOT + le(3) + le(10) + le(-11) + le(2**40)).digest()
    second = hashlib.sha256(first + le(3) + le(1) + le(2) + le(3)).digest()
    assert request_block_hashes([10, -11, 2**40, 1, 2, 3, 4], 3) == [first, second]
    assert hash_block_tokens(None, [10, -11, 2**40]) == first
    assert hash_block_tokens(first, (1, 2, 3)) == second


def test_extra_keys_by_hand() -> None:
    embeds = np.arange(6, dtype=np.float32).reshape(3, 2)
    hashes = request_block_hashes(
        [1, 2, 3, 4],
        2,
        lora_name="ad",
        cache_salt="salt",
        mm_features=[MultiModalFeature("cat", 1, 2)],
        prompt_embeds=embeds,
    )

    def feature(offset: bytes) -> bytes:
        body = (
            tagged(b"s", b"mm") + tagged(b"s", b"cat") + tagged(b"i", offset) + tagged(b"i", b"\2")
        )
        return tagged(b"(", body)

    def rows(count: bytes, floats: list[float]) -> bytes:
        digest = hashlib.sha256(struct.pack(f"<{len(floats)}f", *floats)).digest()
        shape = tagged(b"(", tagged(b"i", count) + tagged(b"i", b"\2"))
        body = tagged(b"s", b"prompt_embeds") + tagged(b"s", b"float32") + shape
        return tagged(b"(", body + tagged(b"b", digest))

    lora = tagged(b"(", tagged(b"s", b"lora") + tagged(b"s", b"ad"))
    salt = tagged(b"(", tagged(b"s", b"cache_salt") + tagged(b"s", b"salt"))
    extra = tagged(b"(", lora + feature(b"\x01") + salt + rows(b"\2", [0, 1, 2, 3]))
    first = hashlib.sha256(SHA_ROOT + le(2) + le(1) + le(2) + extra).digest()
    extra = tagged(b"(", lora + feature(b"\xff") + rows(b"\1", [4, 5]))
    second = hashlib.sha256(first + le(2) + le(3) + le(4) + extra).digest()
    assert hashes == [first, second]


def test_xxh3_by_hand() -> None:
    xxhash = pytest.importorskip("xxhash")
    names = tagged(b"s", b"fanoutkv") + tagged(b"s", b"xxh3_128")
    key = hashlib.sha256(tagged(b"(", names + tagged(b"b", b"secret"))).digest()
    data = key[:16] + le(2) + le(5) + le(6)
    want = xxhash.xxh3_128_digest(data, seed=struct.unpack("<Q", key[16:24])[0])
    assert hash_block_tokens(None, [5, 6], algorithm="xxh3_128", seed=b"secret") == want


@given(
    st.none() | st.binary(min_size=32, max_size=32),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    st.none() | st.lists(VALUES, max_size=3).map(tuple),
)
def test_all_arguments_can_be_read_back_from_the_hashed_bytes(
    parent: bytes | None, tokens: list[int], extra: tuple[Any, ...] | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "hash_algorithm", lambda name, seed: (b"r" * 32, lambda data: data))
        data = hash_block_tokens(parent, tokens, extra)
    assert data[:32] == (parent or b"r" * 32)
    end = 40 + 8 * struct.unpack("<q", data[32:40])[0]
    assert list(struct.unpack(f"<{(end - 40) // 8}q", data[40:end])) == tokens
    found, rest = decode(data[end:]) if data[end:] else (None, b"")
    assert (with_types(found), rest) == (with_types(extra), b"")


def test_no_extra_keys_and_empty_ones_differ() -> None:
    assert hash_block_tokens(None, [1]) != hash_block_tokens(None, [1], ())
    # Tokens that look like extra keys do not pass for them.
    fake = struct.unpack("<2q", (encode(("a",)) + bytes(16))[:16])
    assert hash_block_tokens(None, [1, *fake]) != hash_block_tokens(None, [1], ("a",))


BAD_ARGUMENTS: list[dict[str, Any]] = [
    {"parent": b""},
    {"parent": b"short"},
    {"parent": "x" * 32},
    {"parent": bytearray(32)},
    {"parent": bytes(32), "algorithm": "xxh3_128"},
    {"parent": bytes(16)},
    {"token_ids": []},
    {"extra_keys": "ab"},
    {"extra_keys": [("lora", "a")]},
    {"extra_keys": (1.5,)},
    {"algorithm": "md5"},
    {"seed": 1.5},
]


@pytest.mark.parametrize("bad", BAD_ARGUMENTS, ids=str)
def test_bad_arguments_of_a_block(bad: dict[str, Any]) -> None:
    with pytest.raises(BadArgumentError):
        hash_block_tokens(**({"parent": None, "token_ids": [1, 2]} | bad))


# --- Chains: equal hash just when the prefix and what came with it are equal -------------------


@dataclass
class Case:
    """A request in a small world."""

    tokens: list[int]
    block_size: int
    lora_name: str | None
    cache_salt: str | None
    mm_features: list[MultiModalFeature]
    prompt_embeds: np.ndarray[Any, Any] | None

    @property
    def extra(self) -> dict[str, Any]:
        names = ("lora_name", "cache_salt", "mm_features", "prompt_embeds")
        return {name: getattr(self, name) for name in names}

    def identity(self, end: int) -> Any:
        """Return all that the K/V of the first `end` tokens depend on, as plain values."""
        embeds = self.prompt_embeds
        rows = None
        if embeds is not None and len(embeds):
            rows = str(embeds.dtype), embeds[:end].shape, embeds[:end].tobytes()
        features = sorted(
            (f.offset, f.length, f.identifier) for f in self.mm_features if f.offset < end
        )
        extra = self.lora_name, self.cache_salt, features, rows
        return self.block_size, self.tokens[:end], extra


NAMES = st.sampled_from([None, None, "", "a", "ab"])
FEATURES = st.builds(
    MultiModalFeature, st.sampled_from(["a", "b"]), st.integers(0, 5), st.integers(1, 4)
)
EMBEDS = st.tuples(st.integers(0, 4), st.sampled_from(["int8", "uint8"]), st.integers(0, 1)).map(
    lambda t: np.full((t[0], 1), t[2], dtype=t[1])
)
CASES = st.builds(
    Case,
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.integers(1, 3),
    NAMES,
    NAMES,
    st.lists(FEATURES, max_size=2),
    st.none() | EMBEDS,
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """Return two requests that differ in one respect, or in all."""
    one, other = draw(CASES), draw(CASES)
    name = draw(st.sampled_from([*vars(one), "all"]))
    return one, other if name == "all" else Case(**(vars(one) | {name: getattr(other, name)}))


@given(pairs(), st.sampled_from(["sha256", "xxh3_128"]))
def test_equal_hash_is_equal_prefix_and_equal_extra_keys(
    pair: tuple[Case, Case], algorithm: str
) -> None:
    named = []
    for case in pair:
        hashes = request_block_hashes(
            case.tokens, case.block_size, algorithm=algorithm, **case.extra
        )
        assert len(hashes) == len(case.tokens) // case.block_size
        named += [(h, case.identity((i + 1) * case.block_size)) for i, h in enumerate(hashes)]
    for a, identity in named:
        for b, other in named:
            assert (a == b) == (identity == other)


@given(CASES, st.lists(st.integers(0, 6), max_size=4))
def test_any_split_gives_the_same_hashes(case: Case, cuts: list[int]) -> None:
    whole = BlockHasher(case.block_size, **case.extra)
    assert whole.extend(case.tokens) == whole.hashes
    pieces, new = BlockHasher(case.block_size, **case.extra), []
    edges = [0, *sorted(cuts), len(case.tokens)]
    for start, end in pairwise(edges):
        new += pieces.extend(case.tokens[start:end])
        assert pieces.num_tokens == min(max(start, end), len(case.tokens))
    assert new == pieces.hashes == whole.hashes
    parent = None
    for i, block_hash in enumerate(whole.hashes):
        tokens = case.tokens[i * case.block_size : (i + 1) * case.block_size]
        parent = hash_block_tokens(parent, tokens, whole.extra_keys(i))
        assert parent == block_hash


def test_the_hasher_keeps_no_memory_of_its_caller() -> None:
    tokens, embeds = np.array([1, 2, 3]), np.ones((4, 1))
    hasher = BlockHasher(2, prompt_embeds=embeds)
    hasher.extend(tokens)
    tokens[:], embeds[:] = 9, 9
    hasher.extend([4])
    assert hasher.hashes == request_block_hashes([1, 2, 3, 4], 2, prompt_embeds=np.ones((4, 1)))


def test_a_block_in_the_wrong_context_is_another_block() -> None:
    assert request_block_hashes([1, 2, 7, 7], 2)[1] != request_block_hashes([3, 4, 7, 7], 2)[1]


# --- Extra keys --------------------------------------------------------------------------------


def test_a_salt_is_in_the_first_block_and_parts_all() -> None:
    tokens = range(20)
    salted = BlockHasher(4, cache_salt="tenant")
    salted.extend(list(tokens))
    assert [salted.extra_keys(i) for i in range(3)] == [(("cache_salt", "tenant"),), None, None]
    others = [request_block_hashes(list(tokens), 4, cache_salt=s) for s in (None, "", "other")]
    assert len({h for hashes in [salted.hashes, *others] for h in hashes}) == 4 * 5


def test_an_adapter_is_in_every_block_and_tags_keep_it_from_a_salt() -> None:
    adapter = BlockHasher(2, lora_name="x")
    adapter.extend([1, 2, 3, 4])
    assert [adapter.extra_keys(i) for i in (0, 1, 99)] == [(("lora", "x"),)] * 3
    salt = request_block_hashes([1, 2, 3, 4], 2, cache_salt="x")
    assert not {*adapter.hashes} & {*salt, *request_block_hashes([1, 2, 3, 4], 2)}
    both = request_block_hashes([1, 2], 2, lora_name="a", cache_salt="bc")
    assert both != request_block_hashes([1, 2], 2, lora_name="ab", cache_salt="c")


@given(st.lists(FEATURES, max_size=3), st.integers(1, 4))
def test_a_feature_is_in_just_the_blocks_that_it_touches(
    features: list[MultiModalFeature], block_size: int
) -> None:
    usual, others = block_extra_keys(block_size, mm_features=features)
    assert usual is None
    for block in range(12):
        want = [
            ("mm", f.identifier, f.offset - block * block_size, f.length)
            for f in features
            if any(t // block_size == block for t in range(f.offset, f.offset + f.length))
        ]
        assert sorted(others.get(block, ())) == sorted(want)
    assert block_extra_keys(block_size, mm_features=features[::-1]) == (usual, others)


def test_embeddings_are_in_the_blocks_that_their_rows_fall_into() -> None:
    rows = np.arange(10, dtype=np.float16).reshape(5, 2)
    usual, others = block_extra_keys(2, prompt_embeds=rows)
    digests = [hashlib.sha256(rows[i : i + 2].tobytes()).digest() for i in (0, 2, 4)]
    shapes = [(2, 2), (2, 2), (1, 2)]
    want = [(("prompt_embeds", "float16", *p),) for p in zip(shapes, digests, strict=True)]
    assert (usual, others) == (None, dict(enumerate(want)))
    assert block_extra_keys(2, prompt_embeds=np.asfortranarray(rows)) == (usual, others)
    assert block_extra_keys(2, prompt_embeds=rows.view(np.int16)) != (usual, others)
    tokens = [0] * 6
    changed = rows.copy()
    changed[2, 1] += 1
    a, b = (request_block_hashes(tokens, 2, prompt_embeds=r) for r in (rows, changed))
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, False, False]


def test_embeddings_of_bfloat16_are_passed_as_integers() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.ones((2, 2), dtype=torch.bfloat16)
    with pytest.raises(BadArgumentError, match="matrix of numbers"):
        BlockHasher(2, prompt_embeds=rows)
    assert BlockHasher(2, prompt_embeds=rows.view(torch.int16)).extend([0, 0])


BAD_EXTRAS: list[dict[str, Any]] = [
    {"prompt_embeds": np.ones(3)},
    {"prompt_embeds": np.ones((1, 2, 3))},
    {"prompt_embeds": np.array([["a"]])},
    {"prompt_embeds": np.array([[None]])},
    {"prompt_embeds": np.array([[(None,)]], dtype=[("x", object)])},
    {"prompt_embeds": [[1.0], [1.0, 2.0]]},
    {"lora_name": 1.5},
    {"cache_salt": ["a"]},
    {"algorithm": "md5"},
    {"block_size": 0},
    {"block_size": -1},
    {"block_size": 2.0},
]


@pytest.mark.parametrize("bad", BAD_EXTRAS, ids=str)
def test_bad_arguments_of_a_hasher(bad: dict[str, Any]) -> None:
    with pytest.raises(BadArgumentError):
        BlockHasher(**({"block_size": 2} | bad))


@pytest.mark.parametrize(
    "bad", [("a", -1, 1), ("a", 0, 0), (None, 0, 1), ("a", 0.0, 1), ("a", 0, np.int64(1))], ids=str
)
def test_bad_features(bad: Any) -> None:
    with pytest.raises(BadArgumentError, match="a feature is named"):
        MultiModalFeature(*bad)


def test_a_request_is_hashed_with_all_that_it_carries() -> None:
    extra: dict[str, Any] = {
        "lora_name": "a",
        "cache_salt": "s",
        "mm_features": (MultiModalFeature("i", 0, 3),),
        "prompt_embeds": None,
    }
    request = SimpleNamespace(all_token_ids=[1, 2, 3, 4], **extra)
    assert request_block_hashes(request, 2) == request_block_hashes([1, 2, 3, 4], 2, **extra)
    with pytest.raises(TypeError, match="multiple values"):
        request_block_hashes(request, 2, lora_name="b")
    del request.lora_name
    with pytest.raises(AttributeError, match="lora_name"):
        request_block_hashes(request, 2)


# --- Algorithms, roots and processes -----------------------------------------------------------

PROGRAM = """
import json, sys
from fanoutkv.hashing import request_block_hashes
seed = bytes.fromhex(sys.argv[2]) or None
hashes = request_block_hashes(range(64), 16, algorithm=sys.argv[1], seed=seed, lora_name="a")
print(json.dumps([[h.hex() for h in hashes], sorted({"torch", "xxhash"} & {*sys.modules})]))
"""


def in_process(algorithm: str, seed: bytes, hash_seed: str) -> tuple[list[str], list[str]]:
    """Return the hashes that another process computes, and what heavy modules it imported."""
    command = [sys.executable, "-c", PROGRAM, algorithm, seed.hex()]
    environment = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    hashes, modules = json.loads(done.stdout)
    return hashes, modules


def test_sha256_agrees_between_processes_and_needs_no_other_package() -> None:
    want = [h.hex() for h in request_block_hashes(range(64), 16, lora_name="a")]
    for hash_seed in ("0", "1", "random"):
        assert in_process("sha256", b"", hash_seed) == (want, [])


def test_xxh3_differs_between_processes_unless_they_share_a_seed() -> None:
    pytest.importorskip("xxhash")
    alone = [in_process("xxh3_128", b"", "0") for _ in range(2)]
    assert alone[0][0] != alone[1][0]
    want = request_block_hashes(range(64), 16, algorithm="xxh3_128", seed=b"s", lora_name="a")
    for hash_seed in ("0", "random"):
        assert in_process("xxh3_128", b"s", hash_seed)[0] == [h.hex() for h in want]


def test_algorithms_and_seeds_have_roots_of_their_own() -> None:
    roots = [hash_algorithm("sha256", seed)[0] for seed in (None, b"", b"a")]
    roots += [hash_algorithm("xxh3_128", seed)[0] for seed in (None, b"", b"a")]
    assert len(set(roots)) == 6
    assert [len(root) for root in roots] == [32] * 3 + [16] * 3
    assert len(hash_block_tokens(None, [1], algorithm="xxh3_128")) == 16
    assert hash_block_tokens(None, [1], seed=b"a") != hash_block_tokens(None, [1])


def test_a_missing_xxhash_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(BadArgumentError, match="needs the package xxhash"):
        BlockHasher(2, algorithm="xxh3_128")
    assert BlockHasher(2).extend([1, 2])


def test_a_secret_root_alone_does_not_stop_a_collision() -> None:
    """Build two blocks that collide behind every parent, unless the function too is seeded.

    XXH3 multiplies 16 bytes of input, as two numbers, after it has combined them with two published
    constants; the product is 0 if either number equals its constant, whatever the other one is.
    The sum of the two numbers is used as well, so the second block is made to have the same.
    """
    xxhash = pytest.importorskip("xxhash")
    left, right = 0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82
    other = (left + 777 - right + 2**63) % 2**64 - 2**63
    blocks = [list(range(100, 116)) for _ in range(2)]
    blocks[0][1:3], blocks[1][1:3] = [left, 777], [other, right]
    [a], [b] = (pack_blocks(token_array(tokens), 16) for tokens in blocks)
    assert a != b
    for parent in (bytes(16), os.urandom(16), os.urandom(16)):
        assert xxhash.xxh3_128_digest(parent + a) == xxhash.xxh3_128_digest(parent + b)
        for algorithm, pad in (("xxh3_128", b""), ("sha256", bytes(16))):
            one, two = (hash_block_tokens(parent + pad, t, algorithm=algorithm) for t in blocks)
            assert one != two


# --- Finer boundaries inside a block -----------------------------------------------------------


@given(st.lists(st.integers(0, 1), max_size=20), st.integers(1, 3), st.integers(1, 4))
def test_hashes_at_finer_boundaries(tokens: list[int], fine: int, scale: int) -> None:
    block_size = fine * scale
    hashes = request_block_hashes(tokens, fine, cache_salt="s")
    full = full_block_hashes(hashes, fine, block_size)
    assert len(full) == len(tokens) // block_size
    for i, key in enumerate(full):
        prefix = tokens[: (i + 1) * block_size]
        assert key == request_block_hashes(prefix, fine, cache_salt="s")[-1]
    covered = len(tokens) // fine * fine
    partial = last_partial_key(hashes, fine, block_size)
    if covered % block_size == 0:
        assert partial is None
    else:
        assert partial == (covered // block_size, covered % block_size, hashes[-1])


def test_the_partial_key_is_found_by_a_longer_request() -> None:
    partial = last_partial_key(request_block_hashes(range(26), 4), 4, 16)
    longer = request_block_hashes([*range(24), 99, 99, 99, 99], 4)
    assert partial == (1, 8, longer[24 // 4 - 1])


@pytest.mark.parametrize(("fine", "block_size"), [(3, 16), (0, 16), (-4, 16), (32, 16), (4, 0)])
def test_boundaries_that_do_not_meet_are_refused(fine: int, block_size: int) -> None:
    for function in (full_block_hashes, last_partial_key):
        with pytest.raises(BadArgumentError, match="multiple of hash_block_size"):
            function([], fine, block_size)
