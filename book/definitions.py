"""What a module defines, and how a code cell of a chapter shows each piece of it.

Positions come from `ast`, and the text is sliced from the source: what the reader sees is what the
package runs, to the byte. A comment belongs to the definition below it.
"""

from __future__ import annotations

import ast
import builtins
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

KEY = "fanoutkv"  # the metadata key of a woven cell, and the name of the package

# Python looks at these while it makes the class, so a method put on it afterwards comes too late.
TOO_LATE = {"__post_init__", "__init_subclass__", "__set_name__", "__eq__", "__slots__"}
# A notebook is a module, and these names mean something on a module.
MEANS_SOMETHING_ON_A_MODULE = {"__getattr__", "__dir__"}


class WeaveError(Exception):
    """Something that the user has to mend; its text says what and where."""


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
