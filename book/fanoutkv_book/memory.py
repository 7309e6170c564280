"""A memory whose contents can be read: where a GPU keeps K/V, it keeps the token, one byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TextMemory:
    """`num_blocks` blocks of `block_size` one-byte tokens."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        """Start with blank memory."""
        self.block_size = block_size
        self.blocks = np.full((num_blocks, block_size), ord(" "), dtype=np.uint8)

    def write(self, table: Sequence[int], text: str, position: int = 0) -> None:
        """Write text through a block table, from a position of the sequence on."""
        for i, token in enumerate(text.encode(), position):
            self.blocks[table[i // self.block_size], i % self.block_size] = token

    def read(self, table: Sequence[int]) -> str:
        """Read all blocks of a table, in its order."""
        return bytes(self.blocks[np.asarray(table, dtype=np.intp)].ravel()).decode()
