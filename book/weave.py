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

A comment belongs to the definition below it. Positions come from `ast` and the text is sliced from
the source, so that what the reader sees is what the package runs, to the byte.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import re
import sys
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import yaml

ROOT = Path(__file__).resolve().parents[1]
KEY = "fanoutkv"  # the metadata key of a woven cell, and the name of the package
CELL_TIMEOUT = 1800  # seconds that one cell may run

# Python looks at these while it makes the class, so a method put on it afterwards comes too late.
TOO_LATE = {"__post_init__", "__init_subclass__", "__set_name__", "__eq__", "__slots__"}
# A notebook is a module, and these names mean something on a module.
MEANS_SOMETHING_ON_A_MODULE = {"__getattr__", "__dir__"}


class WeaveError(Exception):
    """Something that the user has to mend; its text says what and where."""


# --- the modules --------------------------------------------------------------------------------


@dataclass
class Definition:
    """One nameable piece of a module.

    `spans` are 0-based, half-open line ranges, blank lines and comments above included. There is
    more than one where a name is defined more than once (a property with a setter, overloads).
    """

    name: str  # "blocks.BlockPool.touch"; the header is "blocks"
    nodes: list[ast.stmt]
    spans: list[tuple[int, int]]
    parent: Definition | None = None


@dataclass
class Module:
    """A module of the package, cut into definitions (in the order of the source)."""

    name: str  # "kernels.paged_attention"
    path: str  # "fanoutkv/kernels/paged_attention.py"
    lines: list[str]
    tree: ast.Module
    definitions: dict[str, Definition] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, root: Path, path: Path) -> Module:
        """Cut the module at `path`; WeaveError where it is not valid Python."""
        shown = path.relative_to(root).as_posix()
        source = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(root / KEY).with_suffix("").parts)
        try:
            module = cls(name, shown, source.split("\n"), ast.parse(source))
        except SyntaxError as error:
            raise WeaveError(f"{shown}:{error.lineno}: not valid Python: {error.msg}") from None
        module._cut(module.tree.body, None)
        return module

    def _cut(self, body: list[ast.stmt], parent: Definition | None) -> None:
        """Fill `definitions` from the statements of the module or, within `parent`, of a class."""
        previous_end = 0
        if parent:  # the first statement's own comments start below the line "class …:"
            previous_end = first_line(body[0])
            while self._is_filler(previous_end - 1):
                previous_end -= 1
        last: Definition | None = None
        for node in body:
            span = (previous_end, self._end(node))
            previous_end = span[1]
            name = defined_name(node, in_class=parent is not None)
            if name is not None:
                last = self._add(
                    f"{parent.name if parent else self.name}.{name}", node, span, parent
                )
                if isinstance(node, ast.ClassDef):
                    self._cut(node.body, last)
            elif parent or is_all(node) or (is_string(node) and node is body[0]):
                last = None  # stays in the class cell, or is left out
            elif is_string(node) and last:
                last.spans[-1] = (last.spans[-1][0], span[1])  # a docstring under a constant
            elif is_import(node) or not set(self.definitions) - {self.name}:
                self._add(self.name, node, span, None)
                last = None
            else:
                self.faults.append(
                    f"{self.path}:{node.lineno}: only imports, constants, functions and classes can"
                    " stand in a chapter; move this above the first definition, or into a function"
                )

    def _add(
        self, name: str, node: ast.stmt, span: tuple[int, int], parent: Definition | None
    ) -> Definition:
        known = self.definitions.get(name)
        if known is None:
            known = self.definitions[name] = Definition(name, [], [], parent)
            if name == self.name:  # the header leads, wherever its first import stands
                self.definitions = {name: known, **self.definitions}
        known.nodes.append(node)
        known.spans.append(span)
        return known

    def _is_filler(self, line: int) -> bool:
        text = self.lines[line].strip()
        return not text or text.startswith("#")

    def _end(self, node: ast.stmt) -> int:
        """The line after a statement and after the comments that end its indented block."""
        assert node.end_lineno is not None
        end = scan = node.end_lineno
        while scan < len(self.lines) and self._is_filler(scan):
            line = self.lines[scan]
            scan += 1
            if line.strip() and len(line) - len(line.lstrip()) > node.col_offset:
                end = scan
        return end

    def text(self, name: str, alone: set[str]) -> str:
        """The source of a cell that shows `name`, where `alone` have cells of their own."""
        definition = self.definitions[name]
        removed: set[int] = set()
        instead: dict[int, str] = {}
        for other in self.definitions.values():
            if other is not definition and other.name in alone and within(other, definition):
                removed.update(line for span in other.spans for line in range(*span))
        for other in self.definitions.values():
            if within(other, definition) and isinstance(other.nodes[0], ast.ClassDef):
                body = other.nodes[0].body
                bare = all(statement.lineno - 1 in removed for statement in body)
                if bare and other.nodes[0].lineno - 1 not in removed:
                    instead[body[0].lineno - 1] = " " * body[0].col_offset + "pass"
        lines = []
        for node, span in zip(definition.nodes, definition.spans, strict=True):
            for line in range(*span):
                if definition.parent and line == first_line(node):
                    owner = definition.parent.name.removeprefix(f"{self.name}.")
                    lines.append(" " * node.col_offset + f"@method_of({owner})")
                if line not in removed:
                    lines.append(self.lines[line])
                elif line in instead:
                    lines.append(instead[line])
        return outdent("\n".join(lines), definition.nodes[0].col_offset).strip("\n")

    def join(self, names: list[str], alone: set[str]) -> str:
        """The source of a cell with several names, two blank lines between.

        Between constants that are neighbors in the module stands what the module has there.
        """
        cell = ""
        for before, name in zip(["", *names], names, strict=False):
            gap = 2
            if before and all(is_assignment(self.definitions[n].nodes[0]) for n in (before, name)):
                start, _ = self.definitions[name].spans[0]
                if self.definitions[before].spans[-1][1] == start:
                    gap = next(i for i in range(len(self.lines)) if self.lines[start + i].strip())
            cell += ("\n" * (gap + 1) if before else "") + self.text(name, alone)
        return cell

    def why_not_alone(self, definition: Definition) -> str | None:
        """Why a member cannot have a cell of its own; None where it can."""
        name = definition.name.rpartition(".")[2]
        node = definition.nodes[0]
        if len(definition.nodes) > 1:
            return "it is defined more than once (a property with a setter, or overloads)"
        if name in TOO_LATE:
            return f"Python looks for `{name}` while it makes the class"
        top = {other.name[len(self.name) + 1 :] for other in self.definitions.values()}
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for statement in ast.walk(self.tree)
            if isinstance(statement, (ast.Import, ast.ImportFrom))
            for alias in statement.names
        }
        if name in top | imported | MEANS_SOMETHING_ON_A_MODULE or (
            hasattr(builtins, name) and not name.startswith("__")
        ):
            return f"in the notebook it would hide another `{name}`"
        if isinstance(node, ast.ClassDef):
            return None
        for part in walk_function(node):
            if isinstance(part, ast.Call) and ast.unparse(part) == "super()":
                return "it calls `super()` without arguments, which works in a class body only"
            for word in identifiers(part):
                if word == "__class__" and isinstance(part, ast.Name):
                    return "it uses `__class__`, which works in a class body only"
                if word.startswith("__") and not word.endswith("__"):
                    return f"Python renames `{word}` in a class body only"
        return None


def first_line(node: ast.stmt) -> int:
    """The 0-based line on which a statement, its decorators included, begins."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def defined_name(node: ast.stmt, in_class: bool) -> str | None:
    """The name under which a statement may be shown (fields stay with their class)."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    if in_class or is_all(node) or not is_assignment(node):
        return None
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target  # type: ignore[attr-defined]
    if isinstance(target, ast.Tuple):
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else None


def is_assignment(node: ast.stmt) -> bool:
    """A plain or annotated assignment."""
    return isinstance(node, (ast.Assign, ast.AnnAssign))


def is_all(node: ast.stmt) -> bool:
    """The list `__all__`, which no chapter needs to show."""
    return is_assignment(node) and ast.unparse(node).startswith("__all__")


def is_string(node: ast.stmt) -> bool:
    """A docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_import(node: ast.stmt) -> bool:
    """An import, or the imports that only a type checker sees."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, (ast.Import, ast.ImportFrom))


def within(inner: Definition | None, outer: Definition) -> bool:
    """Whether `inner` is `outer`, or stands somewhere in it."""
    while inner is not None and inner is not outer:
        inner = inner.parent
    return inner is outer


def walk_function(node: ast.AST) -> Iterator[ast.AST]:
    """All parts of a function, but not those of classes inside it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef):
            yield from walk_function(child)


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that stand in one node itself."""
    for attribute in ("id", "attr", "arg", "name"):
        word = getattr(node, attribute, None)
        if isinstance(word, str):
            yield word


def outdent(text: str, columns: int) -> str:
    """Take `columns` spaces from each line, but not from the inside of a string that is a value."""
    if not columns:
        return text
    kept: set[int] = set()
    starts: list[int] = []
    before = ""  # what stands before a docstring: the start of a line
    for token in tokenize.generate_tokens(io.StringIO("if 1:\n" + text + "\n").readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            starts.append(token.start[0])
        elif kind == "FSTRING_END" or (kind == "STRING" and before not in ("NEWLINE", "INDENT")):
            start = starts.pop() if kind == "FSTRING_END" else token.start[0]
            kept.update(range(start - 1, token.end[0] - 1))
        if kind not in ("NL", "COMMENT", "DEDENT"):
            before = kind
    return "\n".join(
        line if number in kept else line[min(columns, len(line) - len(line.lstrip(" "))) :]
        for number, line in enumerate(text.split("\n"))
    )


# --- the book -----------------------------------------------------------------------------------


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


def read_notebook(path: Path) -> Any:
    """A notebook as nbformat has it: dictionaries with attributes."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


# --- the checks ---------------------------------------------------------------------------------


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


def is_code(cell: Any) -> bool:
    """A code cell with something to run."""
    return bool(cell.cell_type == "code" and cell.source.strip())


# --- writing ------------------------------------------------------------------------------------


def label(path: Path) -> str:
    """What `make run NB=` takes: the chapter's number or, without one, its name."""
    number, _, _ = path.stem.partition("_")
    return number if number.isdigit() else path.stem


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


# --- the command line ---------------------------------------------------------------------------


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
