"""Keep the chapters and the package in step.

The package in `fanoutkv/` is the place to edit code; the chapters in `book/` show it. A code cell
says in its metadata which definitions it shows, and weaving fills it from the module::

    {"fanoutkv": "blocks"}                      the module's imports: always its first cell
    {"fanoutkv": "blocks.NULL_BLOCK"}           a constant or a type alias
    {"fanoutkv": "blocks.BlockPool"}            the class, without what other cells show
    {"fanoutkv": "blocks.BlockPool.touch"}      one method, under @method_of(BlockPool)
    {"fanoutkv": ["blocks.one", "blocks.two"]}  several, one after another

Commands::

    python book/weave.py                fill every woven cell
    python book/weave.py --check        write nothing; exit 1 with a sentence for each fault
    python book/weave.py run 01         run chapter 01 in a fresh kernel and store its outputs
    python book/weave.py add 01 blocks.BlockPool.trim [--after blocks.BlockPool.touch]

How a cell's text is cut from a module stands in `definitions.py`, how a notebook is run and stored
in `notebooks.py`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import yaml
from definitions import KEY, Module, WeaveError, defined_name
from notebooks import is_code, new_id, read_notebook, run, write

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class WovenCell:
    """A code cell that shows definitions, all of one module."""

    notebook: Path
    index: int  # 0-based, among all cells of the notebook
    names: list[str]
    module: Module
    cell: Any
    where: str  # "book/01_reference_counts.ipynb, cell 7"


@dataclass
class Book:
    """The repository as weaving sees it. `faults` holds what stands in the way of reading it."""

    root: Path
    modules: dict[str, Module]
    notebooks: dict[Path, Any]
    chapters: list[str]  # in reading order, from _toc.yml: "book/01_reference_counts"
    cells: list[WovenCell]
    faults: list[str]

    @classmethod
    def read(cls, root: Path) -> Book:
        """Read modules, table of contents and notebooks; faults are collected, not raised."""
        book = cls(root, {}, {}, read_toc(root / "_toc.yml"), [], [])
        for path in sorted((root / KEY).rglob("*.py")):
            if path.name == "__init__.py":
                continue
            try:
                module = Module.read(root, path)
            except WeaveError as error:
                book.faults.append(str(error))
            else:
                book.modules[module.name] = module
        for path in sorted((root / "book").glob("*.ipynb")):
            try:
                notebook = read_notebook(path)
            except Exception as error:
                book.faults.append(f"{book.shown(path)}: not a notebook: {error}")
                continue
            book.notebooks[path] = notebook
            for index, cell in enumerate(notebook.cells):
                if KEY in cell.metadata:
                    book._add_cell(path, index, cell)
        order = {book.root / f"{name}.ipynb": place for place, name in enumerate(book.chapters)}
        book.cells.sort(key=lambda woven: (order.get(woven.notebook, len(order)), woven.index))
        return book

    def _add_cell(self, path: Path, index: int, cell: Any) -> None:
        where = f"{self.shown(path)}, cell {index + 1}"
        value = cell.metadata[KEY]
        names = [value] if isinstance(value, str) else value
        if (
            cell.cell_type != "code"
            or not isinstance(names, list)
            or not names
            or not all(isinstance(name, str) for name in names)
        ):
            self.faults.append(
                f'{where}: the metadata "{KEY}" is for a code cell, and holds a name or a list of'
                f" names; it holds {value!r}"
            )
            return
        modules = [self.module_of(name) for name in names]
        first = modules[0]
        for name, module in zip(names, modules, strict=True):
            if module is None or name not in module.definitions:
                place = module.path if module else f"any module of {KEY}/"
                self.faults.append(f"{where}: `{name}` does not exist in {place}")
                first = None
            elif module is not modules[0] and first is not None:
                self.faults.append(f"{where}: one cell shows one module, not {', '.join(names)}")
                first = None
        if first is not None:
            self.cells.append(WovenCell(path, index, names, first, cell, where))

    def shown(self, path: Path) -> str:
        """A path as the reader knows it, from the root of the repository."""
        return path.relative_to(self.root).as_posix()

    def module_of(self, name: str) -> Module | None:
        """The module with the longest name that `name` begins with."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            if ".".join(parts[:length]) in self.modules:
                return self.modules[".".join(parts[:length])]
        return None

    def shown_names(self) -> set[str]:
        """All names that some cell shows."""
        return {name for woven in self.cells for name in woven.names}

    def stale_cells(self) -> Iterator[tuple[WovenCell, str]]:
        """The cells that differ from their module, each with the text that it should have."""
        alone = self.shown_names()
        for woven in self.cells:
            text = woven.module.join(woven.names, alone)
            if woven.cell.source != text:
                yield woven, text


def read_toc(path: Path) -> list[str]:
    """The `file:` entries of a Jupyter Book table of contents, in reading order."""

    def files(node: Any) -> Iterator[str]:
        for item in node if isinstance(node, list) else [node]:
            if isinstance(item, dict):
                yield from (str(item[key]) for key in ("root", "file") if key in item)
                for key in ("parts", "chapters", "sections"):
                    yield from files(item.get(key) or [])

    if not path.exists():
        return []
    return [name.removesuffix(".ipynb") for name in files(yaml.safe_load(path.read_text("utf-8")))]


def check(root: Path = ROOT) -> list[str]:
    """All faults of the book, one sentence each; an empty list when book and package agree."""
    book = Book.read(root)
    faults = [*book.faults]
    for woven, _ in book.stale_cells():
        faults.append(
            f"{woven.where}: differs from {woven.module.path} ({', '.join(woven.names)}): edit the"
            " module, then `make weave`"
        )
    for module in book.modules.values():
        faults += module.faults
        faults += check_places(book, module)
        faults += check_imports(book, module)
    faults += check_members(book)
    faults += check_run(book)
    return faults


def check_places(book: Book, module: Module) -> Iterator[str]:
    """Each definition is in exactly one cell; a module's cells are in one chapter, in its order."""
    cells = [woven for woven in book.cells if woven.module is module]
    if not cells:
        if module.definitions:
            yield f"{module.path} is in no chapter"
        return
    places: dict[str, list[str]] = {}
    for woven in cells:
        for name in woven.names:
            places.setdefault(name, []).append(woven.where)
    for name, where in places.items():
        if len(where) > 1:
            yield f"`{name}` is shown {len(where)} times: {'; '.join(where)}"
    for name, definition in module.definitions.items():
        if definition.parent is None and name not in places:
            what = "its imports" if name == module.name else "the definition"
            yield f"{module.path}: `{name}` ({what}) is shown in no cell of the book"
    notebooks = list(dict.fromkeys(woven.notebook for woven in cells))
    if len(notebooks) > 1:
        yield f"{module.path} is spread over {', '.join(map(book.shown, notebooks))}"
    for notebook in notebooks:
        if book.shown(notebook).removesuffix(".ipynb") not in book.chapters:
            yield f"{book.shown(notebook)} is not in _toc.yml, so its place in the book is unknown"
    order = {name: place for place, name in enumerate(module.definitions)}
    shown = [(name, woven.where) for woven in cells for name in woven.names]
    for (before, _), (name, here) in pairwise(shown):
        if order[name] < order[before]:
            yield f"{here}: `{name}` stands before `{before}` in {module.path}, but after it here"


def check_members(book: Book) -> Iterator[str]:
    """What has a cell of its own must work outside the class body."""
    for woven in book.cells:
        for name in woven.names:
            definition = woven.module.definitions[name]
            reason = woven.module.why_not_alone(definition) if definition.parent else None
            if reason:
                yield (
                    f"{woven.where}: `{name}` cannot have a cell of its own, because {reason}:"
                    " take the name out of the metadata and it stays in the class cell"
                )


def check_imports(book: Book, module: Module) -> Iterator[str]:
    """A module imports only what the reader has already met."""
    first: dict[str, int] = {}
    for place, woven in enumerate(book.cells):
        first.setdefault(woven.module.name, place)
    for node in ast.walk(module.tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        here = f"{module.path}:{node.lineno}"
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif node.level:
            yield f"{here}: a relative import does not work in a notebook: write `from {KEY}.…`"
            continue
        else:
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in wanted:
            if name == KEY or not name.startswith(f"{KEY}."):
                continue
            short = name.removeprefix(f"{KEY}.")
            target = book.module_of(short)
            if target is None:
                if not in_package(book.root / KEY, short):
                    yield f"{here}: `{name}` is not defined there: import it from its own module"
            elif target is module:
                yield f"{here}: the module imports itself"
            elif module.name in first and first.get(target.name, len(first)) > first[module.name]:
                yield f"{here}: imports {target.path}, which the book builds only later"


def in_package(package: Path, name: str) -> bool:
    """Whether `name` is a subpackage, or is defined by the `__init__.py` of a package."""
    *folders, last = name.split(".")
    home = package.joinpath(*folders)
    if (home / last / "__init__.py").exists():
        return True
    init = home / "__init__.py"
    if not init.exists():
        return False
    return any(
        defined_name(node, in_class=False) == last
        for node in ast.parse(init.read_text("utf-8")).body
    )


def check_run(book: Book) -> Iterator[str]:
    """Every stored notebook was run top to bottom, in one go."""
    for path, notebook in book.notebooks.items():
        counts = [cell.execution_count for cell in notebook.cells if is_code(cell)]
        if counts != list(range(1, len(counts) + 1)):
            yield (
                f"{book.shown(path)} was not run top to bottom (its execution counts are not 1 to"
                f" {len(counts)}): `make run NB={label(path)}`"
            )


def label(path: Path) -> str:
    """What `make run NB=` takes: the chapter's number or, without one, its name."""
    number, _, _ = path.stem.partition("_")
    return number if number.isdigit() else path.stem


def weave(root: Path = ROOT) -> int:
    """Fill the woven cells; the outputs stay until the notebook is run again."""
    book = Book.read(root)
    changed: dict[Path, list[WovenCell]] = {}
    for woven, text in list(book.stale_cells()):
        woven.cell.source = text
        changed.setdefault(woven.notebook, []).append(woven)
    for path, cells in changed.items():
        write(path, book.notebooks[path])
        names = [name for woven in cells for name in woven.names]
        listed = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
        print(
            f"{book.shown(path)}: {count} changed ({listed}):"
            f" run it again with `make run NB={label(path)}`"
        )
    for fault in book.faults:
        print(f"weave: {fault}", file=sys.stderr)
    if not changed and not book.faults:
        print("weave: nothing to do")
    return 1 if book.faults else 0


def find(root: Path, wish: str) -> Path:
    """The notebook that `wish` means: a path, a file name, or a leading number."""
    known = sorted((root / "book").glob("*.ipynb"))
    for path in known:
        if wish in (label(path), label(path).lstrip("0"), path.stem, path.name):
            return path
        if path.resolve() in (Path(wish).resolve(), (root / wish).resolve()):
            return path
    names = ", ".join(path.name for path in known) or "none"
    raise WeaveError(f"no notebook is called {wish}; there are: {names}")


def add(root: Path, chapter: str, names: list[str], after: str | None) -> None:
    """Insert a woven cell, by default below the cell of the definition that comes before it."""
    book = Book.read(root)
    path = find(root, chapter)
    module = book.module_of(names[0])
    for name in names:
        if module is None or name not in module.definitions:
            raise WeaveError(f"`{name}` does not exist in {module.path if module else KEY + '/'}")
        if name in book.shown_names():
            raise WeaveError(f"`{name}` has a cell already")
        definition = module.definitions[name]
        reason = module.why_not_alone(definition) if definition.parent else None
        if reason:
            raise WeaveError(f"`{name}` stays in the class cell, because {reason}")
    assert module is not None
    cells = [woven for woven in book.cells if woven.module is module]
    elsewhere = [woven.where for woven in cells if woven.notebook != path]
    if elsewhere:
        raise WeaveError(f"{module.path} stands in another chapter ({elsewhere[0]})")
    order = list(module.definitions)
    if after is None:
        before = [w for w in cells if order.index(w.names[-1]) < order.index(names[0])]
    else:
        before = [w for w in cells if after in w.names]
        if not before:
            raise WeaveError(f"`{after}` has no cell in {book.shown(path)}")
    notebook = book.notebooks[path]
    # Without a piece before it: above the module's other cells, or else at the end.
    place = cells[0].index if cells else len(notebook.cells)
    index = before[-1].index + 1 if before else place
    metadata = {KEY: names[0] if len(names) == 1 else names}
    cell = nbformat.v4.new_code_cell(metadata=metadata)  # type: ignore[no-untyped-call]
    cell["id"] = new_id("-".join(names), {old.get("id") for old in notebook.cells})
    notebook.cells.insert(index, cell)
    write(path, notebook)
    print(f"{book.shown(path)}: cell {index + 1} shows {', '.join(names)}")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="weave.py", description="Chapters and package in step.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on any fault")
    commands = parser.add_subparsers(dest="command")
    running = commands.add_parser("run", help="run notebooks and store their outputs")
    running.add_argument("notebooks", nargs="+", metavar="NB", help="path, file name or number")
    adding = commands.add_parser("add", help="insert a cell that shows definitions")
    adding.add_argument("notebook", metavar="NB", help="the chapter, such as 01")
    adding.add_argument("names", nargs="+", metavar="NAME", help="such as blocks.BlockPool.touch")
    adding.add_argument("--after", metavar="NAME", help="put it below the cell that shows NAME")
    options = parser.parse_args(arguments)
    try:
        if options.command == "run":
            for path in [find(root, wish) for wish in options.notebooks]:
                run(root, path)
        elif options.command == "add":
            add(root, options.notebook, options.names, options.after)
            return weave(root)
        elif options.check:
            faults = check(root)
            for fault in faults:
                print(f"weave: {fault}", file=sys.stderr)
            if not faults:
                print("weave: book and package agree")
            return 1 if faults else 0
        else:
            return weave(root)
    except WeaveError as error:
        print(f"weave: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
