"""Read, run and store a notebook so that every machine stores the same bytes."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import nbformat
from definitions import WeaveError

CELL_TIMEOUT = 1800  # seconds that one cell may run


def read_notebook(path: Path) -> Any:
    """A notebook as nbformat has it: dictionaries with attributes."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def is_code(cell: Any) -> bool:
    """A code cell with something to run."""
    return bool(cell.cell_type == "code" and cell.source.strip())


def write(path: Path, notebook: Any) -> bool:
    """Store a notebook in its one normal form; True when the file changed."""
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)  # cell ids came with 4.5
    taken = {cell.get("id") for cell in notebook.cells}
    for index, cell in enumerate(notebook.cells):
        if not cell.get("id"):
            cell["id"] = new_id(f"cell-{index + 1}", taken)
    text = nbformat.writes(notebook, indent=1)  # type: ignore[no-untyped-call]
    text = text.rstrip("\n") + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8", newline="\n")
    return True


def new_id(wish: str, taken: set[Any]) -> str:
    """A cell id like `wish` that no other cell has; it goes into `taken`."""
    wish = re.sub(r"[^A-Za-z0-9_-]", "-", wish)[:60]
    numbered = (f"{wish}-{number}" for number in range(2, len(taken) + 3))
    result = next(word for word in [wish, *numbered] if word not in taken)
    taken.add(result)
    return result


def run(root: Path, path: Path) -> None:
    """Execute a notebook in a fresh kernel and store it, unless a cell fails."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = read_notebook(path)
    shown = path.relative_to(root).as_posix()
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(root / "book")}},
    )
    started = time.monotonic()
    count = 0
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            cell.outputs, cell.execution_count = [], None
            if not is_code(cell):
                continue
            count += 1
            try:
                client.execute_cell(cell, index, execution_count=count)
            except CellExecutionError as error:
                trace = ANSI.sub("", error.traceback).strip()
                raise WeaveError(
                    f"{shown}, cell {index + 1} failed with {error.ename}: {error.evalue}\n"
                    f"{trace}\n{shown}: nothing was stored"
                ) from None
            except (CellTimeoutError, DeadKernelError) as error:
                raise WeaveError(f"{shown}, cell {index + 1}: {error}; nothing stored") from None
    normalize(notebook, root)
    what = "stored" if write(path, notebook) else "nothing changed"
    print(f"{shown}: {count} cells ran in {time.monotonic() - started:.1f} s, {what}")


ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


def scrub(text: str, root: Path) -> str:
    """Take colors, places on this machine and memory addresses out of an error's text."""
    text = ANSI.sub("", text)
    text = re.sub(r"[~/][^\s'\"()]*/(?=(?:site|dist)-packages/)", "", text)
    text = re.sub(r"[~/][^\s'\"()]*/lib/(?=python3\.\d+/)", "", text)
    text = re.sub(r"[~/][^\s'\"()]*/ipykernel_\d+/\d+\.py", "<cell>", text)
    places = [str(root)]
    if root.is_relative_to(Path.home()):
        places.append("~/" + root.relative_to(Path.home()).as_posix())
    for place in places:
        text = text.replace(place.rstrip("/") + "/", "")
    return re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x…", text)


def normalize(notebook: Any, root: Path) -> None:
    """Leave only what another machine would store too."""
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    }
    notebook.metadata["language_info"] = {"name": "python"}
    for noise in ("widgets", "signature", "orig_nbformat"):
        notebook.metadata.pop(noise, None)
    for cell in notebook.cells:
        for noise in ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted"):
            cell.metadata.pop(noise, None)
        merged: list[Any] = []
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.evalue = scrub(output.evalue, root)
                output.traceback = [scrub(line, root) for line in output.traceback]
            elif output.output_type == "stream":
                if output.name == "stderr":
                    output.text = scrub(output.text, root)
                last = merged[-1] if merged else None
                if last and last.output_type == "stream" and last.name == output.name:
                    last.text += output.text
                    continue
            merged.append(output)
        if cell.cell_type == "code":
            cell.outputs = merged
