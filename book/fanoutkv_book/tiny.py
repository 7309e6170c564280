"""A transformer small enough to read: two layers, one byte a token, random weights.

Its words mean nothing, but its arithmetic is real: K/V depend on the tokens before, on the
position and on the adapter, and a wrong K/V changes what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
KV = list[tuple[Array, Array]]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class TinyModel:
    """Two attention layers of 4 heads, width 32, and adapters made on demand from their names."""

    def __init__(self, seed: int = 0, *, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        """Draw the weights."""
        rng = np.random.default_rng(seed)
        self.width, self.heads = width, heads
        self.embedding = rng.normal(size=(256, width))
        self.layers = [1.7 * rng.normal(size=(4, width, width)) / width**0.5 for _ in range(layers)]
        self.output = rng.normal(size=(width, len(LETTERS)))

    def adapter(self, name: str | None) -> Array:
        """Return what an adapter adds to every weight: a matrix of rank 2, or zero."""
        if name is None:
            return np.zeros((self.width, self.width))
        rng = np.random.default_rng(list(name.encode()))
        down, up = rng.normal(size=(self.width, 2)), rng.normal(size=(2, self.width))
        added: Array = down @ up / self.width**0.5
        return added

    def read(self, text: str, past: KV | None = None, lora: str | None = None) -> tuple[str, KV]:
        """Read text after `past`; return the next letter, and the K/V of past and text together.

        K and V are [tokens, width], one pair a layer.
        """
        start = len(past[0][0]) if past else 0
        angles = (start + np.arange(len(text)))[:, None] / 50.0 ** np.linspace(0, 1, self.width)
        x, kv = self.embedding[list(text.encode())] + np.sin(angles), []
        for layer, weights in enumerate(self.layers):
            q, k, v, o = weights + self.adapter(lora)
            keys, values = x @ k, x @ v
            if past:
                keys = np.concatenate([past[layer][0], keys])
                values = np.concatenate([past[layer][1], values])
            kv.append((keys, values))
            x = _normalized(x + self._attend(x @ q, keys, values) @ o)
        return LETTERS[int(np.argmax(x[-1] @ self.output))], kv

    def _attend(self, queries: Array, keys: Array, values: Array) -> Array:
        new, total = len(queries), len(keys)
        parts = (queries, keys, values)
        q, k, v = (part.reshape(len(part), self.heads, -1).swapaxes(0, 1) for part in parts)
        scores = q @ k.swapaxes(1, 2) / k.shape[-1] ** 0.5
        future = np.arange(total) > np.arange(total - new, total)[:, None]
        scores = np.where(future, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed: Array = (weights @ v).swapaxes(0, 1).reshape(new, -1)
        return mixed

    def answer(self, text: str, past: KV | None = None, *, lora: str | None = None) -> str:
        """Return the 8 letters that follow `past` and `text`, the likeliest one each time."""
        letters = ""
        for _ in range(8):
            letter, past = self.read(text, past, lora)
            letters, text = letters + letter, letter
        return letters


def _normalized(x: Array) -> Array:
    scaled: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True))
    return scaled


def cut(kv: KV, tokens: slice) -> KV:
    """Return the K/V of some tokens, as if they lay in a block of their own."""
    return [(keys[tokens], values[tokens]) for keys, values in kv]


def joined(parts: Sequence[KV]) -> KV:
    """Return the K/V of blocks that stand one after another in a block table."""
    layers = zip(*parts, strict=True)
    return [
        (np.concatenate([k for k, _ in kv]), np.concatenate([v for _, v in kv])) for kv in layers
    ]
