"""Draw the ledger from live objects: what a picture shows is what the object says at that moment.

Pictures are inline SVG. Text and lines take the color of the page they stand on, and fills are
translucent, so one picture is legible on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

from fanoutkv import BlockPool, RadixCache, RadixKey, TreeNode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILLS = {
    "free": "none",
    "cached, unread": "rgba(58,134,255,.30)",
    "private": "rgba(46,160,67,.35)",
    "shared, no name": "rgba(255,159,28,.40)",
    "published": "rgba(163,92,240,.35)",
    "null": "rgba(128,128,128,.30)",
}
RED = "#e5484d"
CELL, GAP, LEFT = 46, 10, 92


class Picture:
    """An SVG drawing that a notebook and the built page show inline."""

    def __init__(self, svg: str, label: str) -> None:
        """Keep the drawing and one sentence that says what it shows, for readers who listen."""
        self.svg, self.label = svg, label

    def _repr_html_(self) -> str:
        label = escape(self.label, quote=True)
        return (
            f'<div class="picture" role="group" tabindex="0" aria-label="{label}" '
            f'style="overflow-x:auto;margin:.6em 0">{self.svg}</div>'
        )

    def __repr__(self) -> str:
        return f"<Picture: {self.label}>"


def state_of(pool: BlockPool, block_id: int) -> str:
    """Name the state of a block; one of the keys of `FILLS`."""
    if block_id == pool.null_block:
        return "null"
    readers, named = int(pool.ref_cnt[block_id]), bool(pool._is_cached[block_id])
    if readers == 0:
        return "cached, unread" if named else "free"
    if named:
        return "published"
    return "private" if readers == 1 else "shared, no name"


def _text(x: float, y: float, words: object, size: int = 13, **style: object) -> str:
    style = {"text_anchor": "middle", "fill": "currentColor", "font_size": size} | style
    attributes = " ".join(f'{key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{escape(str(words))}</text>'


def _box(x: float, y: float, fill: str, dashed: bool = False, red: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    stroke, width = (RED, 2.5) if red else ("currentColor", 1)
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" rx="6" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{width}"{dash}/>'
    )


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> Picture:
    # It shrinks to the width of a page, but on a phone it rather scrolls than become illegible.
    size = f"max-width:100%;min-width:{min(width, 540):g}px;height:auto"
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" style="{size}" role="img" '
        f'aria-label="{escape(label, quote=True)}" font-family="system-ui, sans-serif">'
    )
    return Picture(f"{opening}{''.join(parts)}</svg>", label)


def short(key: bytes) -> str:
    """Shorten a hash for a picture: a key of a few letters as it is, a real hash in hex."""
    return key.decode() if len(key) <= 6 and key.isascii() else key.hex()[:5]


def draw_pool(
    pool: BlockPool,
    tables: Mapping[str, Sequence[int]] | None = None,
    *,
    wrong: Collection[int] = (),
    contents: Mapping[int, str] | None = None,
) -> Picture:
    """Draw block tables, blocks and the free queue, all as they are now.

    Args:
        pool: a pool of up to about 16 blocks.
        tables: the requests' block tables by name, drawn above, with a line to each block.
        wrong: blocks to outline in red.
        contents: a few letters to write into a block instead of its keys.
    """
    tables = tables or {}
    step = CELL + GAP
    top = 20 + 40 * len(tables) + (34 if tables else 0)
    x_of = [LEFT + i * step for i in range(pool.num_blocks)]
    parts = []
    for row, (name, table) in enumerate(tables.items()):
        y = 14 + 40 * row
        parts.append(_text(LEFT - 12, y + 18, name, text_anchor="end", font_weight="600"))
        for i, block in enumerate(map(int, table)):
            x, red = LEFT + i * step, block in wrong
            # A line leaves its cell downwards, passes the rows below in the gap beside their
            # cells, and bends to its block.
            center, last = x + CELL / 2, 14 + 40 * (len(tables) - 1) + 26
            gap = center if y + 26 == last else x - GAP / 2
            bend = f"C{center:g},{y + 36:g} {gap:g},{y + 30:g} {gap:g},{y + 40:g} L{gap:g},{last:g}"
            parts.append(
                f'<path d="M{center:g},{y + 26:g} {bend if gap != center else ""} '
                f"C{gap:g},{last + 24:g} {x_of[block] + CELL / 2:g},{last + 10:g} "
                f'{x_of[block] + CELL / 2:g},{top:g}" fill="none" '
                f'stroke="{RED if red else "currentColor"}" '
                f'stroke-opacity="{0.9 if red else 0.45}" stroke-width="{2 if red else 1.2}"/>'
            )
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="26" rx="4" '
                f'fill="rgba(128,128,128,.22)" stroke="currentColor" stroke-opacity=".5"/>'
            )
            parts.append(_text(x + CELL / 2, y + 18, block))
    parts.append(_text(LEFT - 12, top + 20, "blocks", text_anchor="end", font_weight="600"))
    parts.append(_text(LEFT - 12, top + 37, "readers", 11, text_anchor="end"))
    parts.append(_text(LEFT - 12, top + CELL + 16, "keys", 11, text_anchor="end"))
    for block, x in enumerate(x_of):
        state = state_of(pool, block)
        parts.append(_box(x, top, FILLS[state], state == "free", block in wrong))
        parts.append(_text(x + CELL / 2, top + 20, block, 14, font_weight="600"))
        readers = "null" if state == "null" else f"×{pool.ref_cnt[block]}"
        parts.append(_text(x + CELL / 2, top + 37, readers, 11))
        keys = [pool.block_hash[block], *pool._partial_keys.get(block, ())]
        named = " ".join(short(key) for key in keys if key is not None)
        parts.append(_text(x + CELL / 2, top + CELL + 16, (contents or {}).get(block, named), 11))
    bottom = top + CELL + 34
    queue = [*pool.free_queue.uncached_blocks().tolist(), *pool.free_queue.cached_blocks().tolist()]
    parts += _draw_queue(pool, queue, bottom, wrong)
    shown = dict.fromkeys(state_of(pool, block) for block in range(pool.num_blocks))
    parts += _legend([state for state in FILLS if state in shown and state != "null"], bottom + 62)
    label = f"{len(tables)} block tables, {pool.num_blocks} blocks, free queue {queue}"
    width = LEFT + step * max(pool.num_blocks, len(queue) + 1, *map(len, tables.values()), 7) + 4
    return _svg(width, bottom + 78, parts, label)


def _draw_queue(
    pool: BlockPool, queue: Sequence[int], y: float, wrong: Collection[int]
) -> list[str]:
    parts = [_text(LEFT - 12, y + 19, "free queue", text_anchor="end", font_weight="600")]
    if not queue:
        parts.append(_text(LEFT, y + 19, "empty", text_anchor="start"))
    for i, block in enumerate(queue):
        x = LEFT + i * (CELL + GAP)
        fill = FILLS[state_of(pool, block)]
        stroke, width = (RED, 2.5) if block in wrong else ("currentColor", 1)
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="28" rx="14" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{width}"/>'
        )
        parts.append(_text(x + CELL / 2, y + 19, block))
    if queue:
        parts.append(_text(LEFT + CELL / 2, y + 42, "reused first", 11))
    return parts


def _legend(
    states: Sequence[str], y: float, fills: Mapping[str, str] = FILLS, x: float = LEFT
) -> list[str]:
    parts = []
    for state in states:
        dash = ' stroke-dasharray="3 2"' if state == "free" else ""
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="12" height="12" rx="3" fill="{fills[state]}" '
            f'stroke="currentColor" stroke-width=".8"{dash}/>'
        )
        parts.append(_text(x + 17, y + 10, state, 11, text_anchor="start"))
        x += 32 + 6.6 * len(state)
    return parts


def draw_text_blocks(
    rows: Mapping[str, Sequence[str]], wrong: Mapping[str, int] | None = None
) -> Picture:
    """Draw what each request reads, a box a block; `wrong` marks one box of a row in red."""
    width_of = 8.0
    parts, widest = [], 0.0
    for row, (name, texts) in enumerate(rows.items()):
        y, x = 8 + 38 * row, float(LEFT + 20)
        parts.append(_text(x - 12, y + 20, name, text_anchor="end", font_weight="600"))
        for i, words in enumerate(texts):
            red = (wrong or {}).get(name) == i
            width = max(30.0, width_of * len(words) + 12)
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="30" rx="4" '
                f'fill="rgba(128,128,128,.16)" stroke="{RED if red else "currentColor"}" '
                f'stroke-width="{2.5 if red else 0.8}"/>'
            )
            parts.append(
                _text(
                    x + 6,
                    y + 20,
                    words,
                    13,
                    text_anchor="start",
                    font_family="ui-monospace, monospace",
                    textLength=f"{width - 12:g}",
                    lengthAdjust="spacingAndGlyphs",
                )
                if words.strip()
                else ""
            )
            x += width + 4
        widest = max(widest, x)
    return _svg(widest + 4, 8 + 38 * len(rows), parts, "what each request reads, block by block")


INK = "#0a0b0c"


def axes(width: float = 6.4, height: float = 3.2, **kwargs: Any) -> tuple[Figure, Any]:
    """Open a matplotlib figure whose ink `plotted` will turn into the color of the page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[str, Any] = dict.fromkeys(ink, INK)
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    style |= {"axes.facecolor": "none", "figure.facecolor": "none", "font.size": 10.5}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(**kwargs)


def plotted(figure: Figure, label: str) -> Picture:
    """Turn a figure of `axes` into an inline picture; `label` says in a sentence what it shows."""
    import matplotlib as mpl

    for axis in figure.axes:
        if legend := axis.get_legend():
            legend.set_frame_on(False)
            for words in [legend.get_title(), *legend.get_texts()]:
                words.set_color(INK)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fanoutkv"}), StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return Picture(
        svg.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1), label
    )


HUES = ("58,134,255", "163,92,240", "46,160,67", "255,159,28", "229,72,77", "20,184,166")


def draw_chains(rows: Mapping[str, tuple[Sequence[str], Sequence[bytes]]]) -> Picture:
    """Draw prompts cut into blocks, each with its hash; equal hashes have equal colors.

    Args:
        rows: by name, the text of each full block and the hash of each.
    """
    color: dict[bytes, str] = {}
    parts, widest = [], 0.0
    for row, (name, (texts, hashes)) in enumerate(rows.items()):
        y, x = 8 + 70 * row, float(LEFT)
        parts.append(_text(x - 12, y + 20, name, text_anchor="end", font_weight="600"))
        for i, (words, block_hash) in enumerate(zip(texts, hashes, strict=True)):
            hue = color.setdefault(block_hash, HUES[len(color) % len(HUES)])
            width = 8.0 * len(words) + 12
            if i:
                parts.append(
                    f'<path d="M{x - 14:g},{y + 43:g} h12 m-5,-4 l5,4 l-5,4" fill="none" '
                    f'stroke="currentColor"/>'
                )
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="52" rx="5" '
                f'fill="rgba({hue},.28)" stroke="currentColor" stroke-width=".8"/>'
            )
            font = {"text_anchor": "start", "font_family": "ui-monospace, monospace"}
            fit = {"textLength": f"{width - 12:g}", "lengthAdjust": "spacingAndGlyphs"}
            parts.append(_text(x + 6, y + 20, words, 13, **font, **fit))
            parts.append(_text(x + 6, y + 42, short(block_hash), 11, **font))
            x += width + 16
        widest = max(widest, x)
    return _svg(widest, 8 + 70 * len(rows), parts, "prompts cut into blocks, and the hash of each")


def draw_layout(block_ids: Sequence[int], block_size: int, parts_of: Mapping[str, int]) -> Picture:
    """Draw a block table as a band of tokens, cut into blocks, with what each stretch is.

    Args:
        block_ids: the table.
        block_size: tokens a block.
        parts_of: by name, how many tokens each stretch has, from the first token on.
    """
    scale = min(16.0, 560 / max(1, len(block_ids) * block_size))
    parts, x = [], float(LEFT)
    for i, (name, tokens) in enumerate(parts_of.items()):
        width = tokens * scale
        parts.append(
            f'<rect x="{x:g}" y="34" width="{width:g}" height="30" fill="rgba({HUES[i]},.32)" '
            f'stroke="currentColor" stroke-width=".6"/>'
        )
        if tokens:
            parts.append(_text(x + width / 2, 26 - 14 * (i % 2), f"{name} {tokens}", 11))
        x += width
    for i, block in enumerate(block_ids):
        left = LEFT + i * block_size * scale
        parts.append(
            f'<rect x="{left:g}" y="70" width="{block_size * scale - 3:g}" height="26" rx="4" '
            f'fill="rgba(128,128,128,.2)" stroke="currentColor" stroke-opacity=".6"/>'
        )
        parts.append(_text(left + block_size * scale / 2 - 1.5, 88, block))
    parts.append(_text(LEFT - 12, 54, "tokens", text_anchor="end", font_weight="600"))
    parts.append(_text(LEFT - 12, 88, "blocks", text_anchor="end", font_weight="600"))
    label = ", ".join(f"{name} {tokens} tokens" for name, tokens in parts_of.items())
    return _svg(LEFT + len(block_ids) * block_size * scale + 30, 104, parts, label)


_THIN = 'stroke="currentColor" stroke-width="1"'
NODE_FILLS = {
    "locked": "rgba(163,92,240,.35)",
    "evictable leaf": "rgba(58,134,255,.30)",
    "inner, not locked": "rgba(128,128,128,.18)",
}


def spelled(key: RadixKey) -> str:
    """Write tokens that are letters as text, and others as numbers."""
    tokens = key.token_ids.tolist()
    if all(32 <= token < 127 for token in tokens):
        return "".join(map(chr, tokens)).replace(" ", "␣")
    return " ".join(map(str, tokens))


def slots_of(node: TreeNode) -> str:
    """Write the slots of a node, runs of neighbors as a range."""
    runs: list[list[int]] = []
    for slot in node.value.tolist():
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)


def draw_tree(
    cache: RadixCache,
    readers: Mapping[str, TreeNode] | None = None,
    *,
    wrong: Collection[TreeNode] = (),
    below: Callable[[TreeNode], str] = slots_of,
    legend: str = "under a node: its slots, and how many locks hold it",
) -> Picture:
    """Draw a tree from its root on the left to its leaves on the right, as it is now.

    Args:
        cache: a tree of up to about a dozen nodes.
        readers: by name, the node at which a reader's prefix ends; written beside it.
        wrong: nodes to outline in red.
        below: what to write under a node; its slots by default.
        legend: what that means.
    """
    parts: list[str] = [_text(16, 45, "root", 11)]
    row, widest, shown = 0, 0.0, set()
    leaves = set(cache.evictable_leaves)

    def place(node: TreeNode, x: float, y: float) -> None:
        nonlocal row, widest
        for child in node.children.values():
            top = 24 + 78 * row
            names = ", ".join(name for name, end in (readers or {}).items() if end is child)
            note = below(child) + (f"  ×{child.lock_ref}" if child.lock_ref else "")
            width = max(44.0, 8.2 * len(spelled(child.key)) + 14, 6.6 * len(note) + 4)
            state = "locked" if child.lock_ref else "inner, not locked"
            state = "evictable leaf" if child in leaves else state
            shown.add(state)
            left, center, mid = x + 26, x + 26 + width / 2, top + 17
            stroke = f'stroke="{RED}" stroke-width="2.5"' if child in wrong else _THIN
            parts.append(
                f'<path d="M{x:g},{y:g} C{x + 14:g},{y:g} {x:g},{mid:g} {left:g},{mid:g}" '
                f'fill="none" stroke="currentColor" stroke-opacity=".6"/>'
                f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="34" rx="6" '
                f'fill="{NODE_FILLS[state]}" {stroke}/>'
            )
            mono = {"font_family": "ui-monospace, monospace"}
            parts.append(_text(center, top + 22, spelled(child.key), 13, **mono))
            parts.append(_text(center, top + 48, note, 11))
            if names:
                parts.append(_text(center, top - 5, f"{names} ▾", 12, font_weight="600"))
            widest = max(widest, left + width + 14)
            if child.children:
                place(child, left + width, mid)
            else:
                row += 1

    place(cache.root, 32, 41)
    bottom = 26 + 78 * max(1, row)
    parts += _legend([state for state in NODE_FILLS if state in shown], bottom, NODE_FILLS, 32.0)
    parts.append(_text(32, bottom + 28, legend, 11, text_anchor="start"))
    nodes = [f"{spelled(n.key)} ({below(n)}, lock_ref {n.lock_ref})" for n in cache.nodes()]
    label = f"a tree of {len(nodes)} nodes: {'; '.join(nodes)}"
    return _svg(max(widest, 430), bottom + 36, parts, label)
