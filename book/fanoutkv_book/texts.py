"""Real text for prompts: the book reads itself."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from fanoutkv import blocks


def own_text(notebook: str) -> str:
    """Return the prose of a chapter that lies in the current folder.

    Where only the notebook was opened, as on Colab, its file has another name or none: then the
    source text of the package is returned, which is long enough for every example.
    """
    path = Path(notebook)
    if not path.exists():
        return inspect.getsource(blocks)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return "\n\n".join(prose)
