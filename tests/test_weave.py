"""The weave: every check has a small repository with one fault, and the real one has none."""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

BOOK = Path(__file__).resolve().parents[1] / "book"
sys.path.insert(0, str(BOOK))

import notebooks  # noqa: E402
import weave  # noqa: E402

COUNTER = '''
"""A docstring that no cell shows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# How far a counter counts,
# and no further.
LIMIT: int = 3
STEP = 1

__all__ = ["Counter"]


@functools.lru_cache(maxsize=None)
def double(x: int) -> int:
    """Twice x."""
    return 2 * x


@dataclass(slots=True)
class Pair:
    """Two numbers."""

    left: int
    right: int = 2

    # The sum has
    # two lines of comment.
    def total(self) -> int:
        return self.left + self.right


class Counter:
    """Counts up to LIMIT."""

    unit = "blocks"  # a class attribute

    class Inner:
        """A nested class."""

        def hello(self) -> str:
            return "hello"

    def __init__(self) -> None:
        self.value = 0

    # --- reading ---

    # The property.
    @property
    def doubled(self) -> int:
        return double(self.value)

    @staticmethod
    def label() -> str:
        """Text with a multi-line string.

        Its own docstring is outdented.
        """
        return """first
    second
"""

    @classmethod
    def started(cls, value: int) -> Counter:
        counter = cls()
        counter.value = value
        return counter

    @functools.cached_property
    def cached(self) -> int:
        return self.value

    def bump(self) -> int:
        if self.value + STEP > LIMIT:
            raise ValueError("no further")
        self.value += STEP
        return self.value
        # a comment that ends the body

    def __len__(self) -> int:
        return self.value
'''.lstrip()

NAMES: list[Any] = [
    "counter",
    ["counter.LIMIT", "counter.STEP"],
    "counter.double",
    "counter.Pair",
    "counter.Pair.total",
    "counter.Counter",
    "counter.Counter.Inner",
    "counter.Counter.doubled",
    "counter.Counter.label",
    "counter.Counter.started",
    "counter.Counter.cached",
    "counter.Counter.bump",
]


class Repository:
    """A package and a book in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "fanoutkv").mkdir()
        (root / "fanoutkv" / "__init__.py").write_text('__version__ = "1"\n')
        (root / "book").mkdir()
        self.chapters: list[str] = []

    def module(self, name: str, source: str) -> None:
        path = self.root / "fanoutkv" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)

    def chapter(self, stem: str, cells: list[Any], listed: bool = True) -> Path:
        """A notebook with a cell for each name (a str or list); a tuple is (source, tags)."""
        notebook = nbformat.v4.new_notebook()
        for number, names in enumerate(cells, 1):
            if isinstance(names, tuple):
                cell = nbformat.v4.new_code_cell(names[0], metadata={"tags": list(names[1:])})
            else:
                cell = nbformat.v4.new_code_cell("", metadata={"fanoutkv": names})
            cell["id"] = f"c{number}"
            cell.execution_count = number
            notebook.cells.append(cell)
        path = self.root / "book" / f"{stem}.ipynb"
        nbformat.write(notebook, path)
        if listed:
            self.chapters.append(stem)
        toc = ["format: jb-book", "root: book/intro", "parts:", "- chapters:"]
        toc += [f"  - file: book/{chapter}" for chapter in self.chapters]
        (self.root / "_toc.yml").write_text("\n".join(toc) + "\n")
        return path

    def weave(self) -> int:
        return weave.main([], self.root)

    def faults(self) -> str:
        return "\n".join(weave.check(self.root))

    def woven_faults(self) -> str:
        """The faults that remain after weaving and after numbering the cells as a run would."""
        self.weave()
        for path in (self.root / "book").glob("*.ipynb"):
            notebook = json.loads(path.read_text())
            code = [c for c in notebook["cells"] if c["cell_type"] == "code" and c["source"]]
            for number, cell in enumerate(code, 1):
                cell["execution_count"] = number
            path.write_text(json.dumps(notebook))
        return self.faults()


def sources(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.fixture
def woven(repo: Repository) -> Repository:
    """A book in order: COUNTER in chapter 01."""
    repo.module("counter", COUNTER)
    repo.chapter("01_counter", NAMES)
    repo.weave()
    assert repo.faults() == ""
    return repo


def one_module(repo: Repository, source: str, names: list[Any]) -> list[str]:
    """The woven cells of a module `m`."""
    repo.module("m", textwrap.dedent(source).lstrip())
    path = repo.chapter("01_m", names)
    repo.weave()
    return sources(path)


# --- what the cells show --------------------------------------------------------------------------


def test_header_is_imports_without_the_docstring(woven: Repository) -> None:
    header = sources(woven.root / "book" / "01_counter.ipynb")[0]
    assert header == (
        "from __future__ import annotations\n\nimport functools\n"
        "from dataclasses import dataclass\nfrom typing import TYPE_CHECKING\n\n"
        "if TYPE_CHECKING:\n    from collections.abc import Iterator"
    )


def test_constants_keep_their_comments_and_neighbours_their_distance(woven: Repository) -> None:
    cell = sources(woven.root / "book" / "01_counter.ipynb")[1]
    assert cell == "# How far a counter counts,\n# and no further.\nLIMIT: int = 3\nSTEP = 1"


def test_list_of_names_has_two_blank_lines_between(repo: Repository) -> None:
    cells = one_module(
        repo, "def f():\n    pass\n\ndef g():\n    pass\n\nX = 1\n", [["m.f", "m.g", "m.X"]]
    )
    assert cells == ["def f():\n    pass\n\n\ndef g():\n    pass\n\n\nX = 1"]


def test_decorated_function_and_dataclass(woven: Repository) -> None:
    cells = sources(woven.root / "book" / "01_counter.ipynb")
    assert cells[2].startswith("@functools.lru_cache(maxsize=None)\ndef double(x: int)")
    assert cells[3] == (
        '@dataclass(slots=True)\nclass Pair:\n    """Two numbers."""\n\n'
        "    left: int\n    right: int = 2"
    )
    assert cells[4] == (
        "# The sum has\n# two lines of comment.\n@method_of(Pair)\n"
        "def total(self) -> int:\n    return self.left + self.right"
    )


def test_class_cell_has_exactly_what_no_other_cell_shows(woven: Repository) -> None:
    cell = sources(woven.root / "book" / "01_counter.ipynb")[5]
    assert cell == (
        'class Counter:\n    """Counts up to LIMIT."""\n\n'
        '    unit = "blocks"  # a class attribute\n\n'
        "    def __init__(self) -> None:\n        self.value = 0\n\n"
        "    def __len__(self) -> int:\n        return self.value"
    )


def test_nested_class_in_a_cell_of_its_own(woven: Repository) -> None:
    cell = sources(woven.root / "book" / "01_counter.ipynb")[6]
    assert cell.startswith(
        '@method_of(Counter)\nclass Inner:\n    """A nested class."""\n\n    def'
    )


def test_members_of_a_nested_class(repo: Repository) -> None:
    source = """
        class A:
            class B:
                def f(self):
                    return 1
        """
    cells = one_module(repo, source, ["m.A", "m.A.B.f"])
    assert cells == [
        "class A:\n    class B:\n        pass",
        "@method_of(A.B)\ndef f(self):\n    return 1",
    ]


def test_class_without_a_rest_says_pass(repo: Repository) -> None:
    cells = one_module(repo, "class A:\n    def f(self):\n        pass\n", ["m.A", "m.A.f"])
    assert cells[0] == "class A:\n    pass"


def test_comments_between_methods_belong_to_the_next(woven: Repository) -> None:
    cells = sources(woven.root / "book" / "01_counter.ipynb")
    assert cells[7].startswith(
        "# --- reading ---\n\n# The property.\n@method_of(Counter)\n@property\ndef doubled"
    )
    assert cells[11].endswith("    # a comment that ends the body")


def test_outdent_leaves_the_inside_of_strings_alone(woven: Repository) -> None:
    cell = sources(woven.root / "book" / "01_counter.ipynb")[8]
    assert '    """Text with a multi-line string.\n\n    Its own docstring is outdented.\n' in cell
    assert cell.endswith('    return """first\n    second\n"""')


def test_setter_and_overloads_stay_in_the_class_cell(repo: Repository) -> None:
    source = """
        class A:
            @property
            def f(self):
                return 1

            @f.setter
            def f(self, value):
                pass
        """
    assert one_module(repo, source, ["m.A"])[0] == textwrap.dedent(source).strip()
    assert repo.woven_faults() == ""
    repo.chapters.clear()
    repo.chapter("01_m", ["m.A", "m.A.f"])
    assert "`m.A.f` cannot have a cell of its own, because it is defined more than" in (
        repo.woven_faults()
    )


def load_module(repo: Repository) -> ModuleType:
    path = repo.root / "fanoutkv" / "counter.py"
    spec = importlib.util.spec_from_file_location("woven_counter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["woven_counter"] = module
    spec.loader.exec_module(module)
    return module


def test_woven_cells_build_what_the_module_builds(woven: Repository) -> None:
    namespace: dict[str, Any] = {"__name__": "woven_counter"}
    exec("from fanoutkv_book import method_of", namespace)
    module = load_module(woven)
    for source in sources(woven.root / "book" / "01_counter.ipynb"):
        exec(source, namespace)
    for space in (namespace, vars(module)):
        assert space["Pair"](1).total() == 3
        counter = space["Counter"].started(1)
        assert (counter.bump(), counter.doubled, len(counter), counter.cached) == (2, 4, 2, 2)
        assert counter.label() == "first\n    second\n"
        assert counter.Inner().hello() == "hello"
        assert type(counter).bump.__qualname__ == "Counter.bump"
        counter.bump()
        with pytest.raises(ValueError, match="no further"):
            counter.bump()
    assert set(vars(namespace["Counter"])) == set(vars(module.Counter))
    assert namespace["bump"] is namespace["Counter"].bump  # the name also lives alone


def test_method_of_serves_abstract_classes_and_says_what_it_wants() -> None:
    import abc

    from fanoutkv_book import method_of

    class Shape(abc.ABC):  # noqa: B024
        pass

    @method_of(Shape)
    @abc.abstractmethod
    def area(self: Shape) -> float:
        raise NotImplementedError

    with pytest.raises(TypeError, match="abstract"):
        Shape()  # type: ignore[abstract]
    with pytest.raises(TypeError, match=r"@method_of\(BlockPool\)"):
        method_of(area)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no name"):
        method_of(Shape)(3)


# --- the faults -----------------------------------------------------------------------------------


def test_drifted_cell(woven: Repository) -> None:
    path = woven.root / "book" / "01_counter.ipynb"
    path.write_text(path.read_text().replace("return 2 * x", "return x + x"))
    assert "cell 3: differs from fanoutkv/counter.py (counter.double)" in woven.faults()
    assert weave.main(["--check"], woven.root) == 1
    woven.weave()
    assert woven.faults() == ""


def test_unknown_name(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repo.module("m", "X = 1\n")
    repo.chapter("01_m", ["m.X", "m.Y", "n.Z"])
    assert "cell 2: `m.Y` does not exist in fanoutkv/m.py" in repo.faults()
    assert "cell 3: `n.Z` does not exist in any module of fanoutkv/" in repo.faults()
    assert repo.weave() == 1
    assert "`m.Y` does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("value", [[], 3, ["m.X", 1], {"a": 1}])
def test_malformed_metadata(repo: Repository, value: Any) -> None:
    repo.module("m", "X = 1\n")
    repo.chapter("01_m", ["m.X", value])
    assert "holds a name or a list of names" in repo.faults()


def test_shown_twice(repo: Repository) -> None:
    repo.module("m", "X = 1\nY = 2\n")
    repo.chapter("01_m", ["m.X", ["m.X", "m.Y"]])
    assert "`m.X` is shown 2 times: book/01_m.ipynb, cell 1; book/01_m.ipynb, cell 2" in (
        repo.woven_faults()
    )


@pytest.mark.parametrize("name", ["counter", "counter.STEP", "counter.double", "counter.Pair"])
def test_shown_nowhere(repo: Repository, name: str) -> None:
    repo.module("counter", COUNTER)
    kept = [[n] if isinstance(n, str) else list(n) for n in NAMES]
    repo.chapter("01_counter", [left for ns in kept if (left := [n for n in ns if n != name])])
    assert f"`{name}` (" in repo.woven_faults()
    assert "shown in no cell" in repo.faults()


def test_member_without_a_cell_stands_in_the_class_cell(repo: Repository) -> None:
    repo.module("counter", COUNTER)
    repo.chapter("01_counter", NAMES[:-1])
    assert repo.woven_faults() == ""


def test_module_in_no_chapter_kernels_included(repo: Repository) -> None:
    repo.module("m", "X = 1\n")
    repo.module("n", "X = 1\n")
    repo.module("kernels/k", "X = 1\n")
    repo.chapter("01_m", ["m.X"])
    assert (
        repo.woven_faults()
        == "fanoutkv/kernels/k.py is in no chapter\nfanoutkv/n.py is in no chapter"
    )
    repo.chapter("02_n", ["n.X", "kernels.k.X"])
    assert repo.woven_faults() == ""


@pytest.mark.parametrize(
    "names", [["m.X", "m"], ["m", "m.A.f", "m.A", "m.X"], ["m", "m.X", "m.A", "m.A.f"]]
)
def test_wrong_order(repo: Repository, names: list[str]) -> None:
    repo.module("m", "import os\n\nclass A:\n    def f(self):\n        pass\n\nX = 1\n")
    repo.chapter("01_m", names)
    assert "but after it here" in repo.woven_faults()


def test_module_spread_over_chapters(repo: Repository) -> None:
    repo.module("m", "X = 1\nY = 2\n")
    repo.chapter("01_m", ["m.X"])
    repo.chapter("02_m", ["m.Y"])
    assert "fanoutkv/m.py is spread over book/01_m.ipynb, book/02_m.ipynb" in repo.woven_faults()


def test_chapter_without_a_place(repo: Repository) -> None:
    repo.module("m", "X = 1\n")
    repo.chapter("01_m", ["m.X"], listed=False)
    assert "book/01_m.ipynb is not in _toc.yml" in repo.woven_faults()


@pytest.mark.parametrize(
    "line",
    [
        "from fanoutkv.later import X",
        "from fanoutkv import later",
        "import fanoutkv.later",
        "if TYPE_CHECKING:\n    from fanoutkv.later import X",
        "def f():\n    from fanoutkv.later import X",
    ],
)
def test_forward_import(repo: Repository, line: str) -> None:
    repo.module("early", f"from typing import TYPE_CHECKING\n{line}\n")
    repo.module("later", "X = 1\n")
    early = ["early", "early.f"] if "def" in line else ["early"]
    repo.chapter("01_early", early)
    repo.chapter("02_later", ["later.X"])
    assert "imports fanoutkv/later.py, which the book builds only later" in repo.woven_faults()
    repo.chapters.reverse()
    repo.chapter("02_later", ["later.X"], listed=False)
    assert repo.woven_faults() == ""


def test_forward_import_within_one_chapter(repo: Repository) -> None:
    repo.module("early", "import fanoutkv.kernels.k\n")
    repo.module("kernels/k", "X = 1\n")
    path = repo.chapter("01_both", ["early", "kernels.k.X"])
    assert "imports fanoutkv/kernels/k.py, which the book builds only later" in repo.woven_faults()
    path.unlink()
    repo.chapter("01_both", ["kernels.k.X", "early"], listed=False)
    assert repo.woven_faults() == ""


def test_relative_import(repo: Repository) -> None:
    one_module(repo, "from .other import X\n", ["m"])
    assert "m.py:1: a relative import does not work in a notebook" in repo.faults()


def test_import_of_a_name_that_the_package_only_passes_on(repo: Repository) -> None:
    one_module(repo, "from fanoutkv import BlockPool, __version__\n", ["m"])
    assert repo.faults() == (
        "fanoutkv/m.py:1: `fanoutkv.BlockPool` is not defined there: import it from its own module"
    )


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("def f(self): return super().f()", "it calls `super()` without arguments"),
        ("def f(self): return __class__", "it uses `__class__`"),
        ("def f(self): return self.__x", "Python renames `__x`"),
        ("def f(self, __x): return 1", "Python renames `__x`"),
        ("def len(self): return 1", "it would hide another `len`"),
        ("def os(self): return 1", "it would hide another `os`"),
        ("def X(self): return 1", "it would hide another `X`"),
        ("def __post_init__(self): pass", "Python looks for `__post_init__`"),
    ],
)
def test_method_that_needs_its_class_body(repo: Repository, method: str, reason: str) -> None:
    name = method.removeprefix("def ").partition("(")[0]
    source = f"import os\n\nX = 1\n\n\nclass A:\n    {method}\n"
    one_module(repo, source, ["m", "m.X", "m.A", f"m.A.{name}"])
    assert f"cannot have a cell of its own, because {reason}" in repo.faults().replace(
        "in the notebook ", ""
    )
    repo.chapters.clear()
    repo.chapter("01_m", ["m", "m.X", "m.A"])
    assert repo.woven_faults() == ""
    assert weave.main(["add", "01", f"m.A.{name}"], repo.root) == 1


def test_explicit_super_and_classes_inside_a_method_are_fine(repo: Repository) -> None:
    source = """
        class A:
            def f(self):
                class B(A):
                    def f(self):
                        return super().f()
                return super(A, self).__repr__(), B
        """
    one_module(repo, source, ["m.A", "m.A.f"])
    assert repo.woven_faults() == ""


def test_loose_statement(repo: Repository) -> None:
    one_module(repo, "try:\n    import os\nexcept ImportError:\n    pass\n\nX = {}\nX[1] = 2\n", [])
    repo.chapters.clear()
    repo.chapter("01_m", ["m", "m.X"])
    assert "m.py:7: only imports, constants, functions and classes" in repo.woven_faults()


def test_invalid_module_and_notebook(repo: Repository) -> None:
    repo.module("m", "def f(:\n")
    repo.chapter("01_m", []).write_text("{")
    assert "fanoutkv/m.py:1: not valid Python" in repo.faults()
    assert "book/01_m.ipynb: not a notebook" in repo.faults()


@pytest.mark.parametrize("counts", [(None, None), (1, None), (2, 1), (1, 3), (2, 3)])
def test_not_run_top_to_bottom(woven: Repository, counts: tuple[int | None, ...]) -> None:
    path = woven.chapter("02_other", [("1",), ("2",)])
    assert woven.faults() == ""
    notebook = nbformat.read(path, as_version=4)
    for cell, count in zip(notebook.cells, counts, strict=True):
        cell.execution_count = count
    nbformat.write(notebook, path)
    assert "book/02_other.ipynb was not run top to bottom" in woven.faults()


# --- weaving --------------------------------------------------------------------------------------


def test_second_weave_does_nothing(woven: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    path = woven.root / "book" / "01_counter.ipynb"
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    capsys.readouterr()
    assert woven.weave() == 0
    assert capsys.readouterr().out == "weave: nothing to do\n"
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_weave_keeps_outputs_and_says_what_to_run(
    repo: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repo.module("m", "X = 1\nY = 2\n")
    path = repo.chapter("01_m", ["m.X", "m.Y", ("print(X)",)])
    repo.weave()
    notebook = nbformat.read(path, as_version=4)
    for number in (0, 2):
        notebook.cells[number].outputs = [nbformat.v4.new_output("stream", text="1\n")]
    nbformat.write(notebook, path)
    capsys.readouterr()
    repo.module("m", "X = 5\nY = 2\n")
    repo.weave()
    assert capsys.readouterr().out == (
        "book/01_m.ipynb: 1 cell changed (m.X): run it again with `make run NB=01`\n"
    )
    after = nbformat.read(path, as_version=4)
    notebook.cells[0].source = "X = 5"
    assert after.cells == notebook.cells


def test_check_writes_nothing(repo: Repository) -> None:
    repo.module("m", "X = 1\n")
    path = repo.chapter("01_m", ["m.X"])
    before = path.read_bytes()
    assert weave.main(["--check"], repo.root) == 1
    assert path.read_bytes() == before


def test_add_inserts_after_the_definition_before(woven: Repository) -> None:
    source = COUNTER.replace(
        "    def __len__", "    def reset(self) -> None:\n        self.value = 0\n\n    def __len__"
    )
    woven.module("counter", source)
    assert weave.main(["add", "01", "counter.Counter.reset"], woven.root) == 0
    cells = sources(woven.root / "book" / "01_counter.ipynb")
    assert cells[12] == ("@method_of(Counter)\ndef reset(self) -> None:\n    self.value = 0")
    assert woven.woven_faults() == ""
    assert weave.main(["add", "01", "counter.Counter.reset"], woven.root) == 1  # is there already
    assert weave.main(["add", "01", "counter.nothing"], woven.root) == 1
    assert weave.main(["add", "09", "counter.Counter.__len__"], woven.root) == 1


def test_add_after_a_named_cell(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repo.module("m", "import os\nX = 1\nY = 2\n")
    path = repo.chapter("01_m", [("print(0)",)])
    assert weave.main(["add", "01", "m.X"], repo.root) == 0
    assert weave.main(["add", "01", "m.Y", "--after", "m.X"], repo.root) == 0
    assert weave.main(["add", "01", "m"], repo.root) == 0
    assert sources(path) == ["print(0)", "import os", "X = 1", "Y = 2"]
    assert [cell.id for cell in nbformat.read(path, as_version=4).cells][1:] == ["m", "m-X", "m-Y"]
    assert weave.main(["add", "01", "m.Y", "--after", "m.Q"], repo.root) == 1
    assert "has a cell already" in capsys.readouterr().err


# --- running --------------------------------------------------------------------------------------


def test_run_normalizes_and_repeats_to_the_byte(repo: Repository) -> None:
    path = repo.chapter(
        "01_m",
        [
            ("import os, sys\nprint('a')\nprint('b', flush=True)\nprint('c')\nos.getcwd()[-4:]",),
            ("import json\njson.loads('{')", "raises-exception"),
            ("2 + 2",),
        ],
    )
    notebook = json.loads(path.read_text())
    notebook["metadata"]["language_info"] = {"name": "python", "version": "3.99", "x": {}}
    notebook["cells"][0]["metadata"]["execution"] = {"iopub.status.busy": "now"}
    notebook["cells"][2]["execution_count"] = 17
    path.write_text(json.dumps(notebook))
    assert weave.main(["run", "01"], repo.root) == 0
    first = path.read_bytes()
    assert weave.main(["run", "book/01_m.ipynb"], repo.root) == 0
    assert path.read_bytes() == first
    assert repo.faults() == ""
    stored = json.loads(first)
    assert stored["metadata"] == {
        "kernelspec": {
            "display_name": "Python 3 (ipykernel)",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    cells = stored["cells"]
    assert [cell["id"] for cell in cells] == ["c1", "c2", "c3"]
    assert cells[0]["metadata"] == {"tags": []}
    assert cells[0]["outputs"][0]["text"] == ["a\n", "b\n", "c\n"]
    assert cells[0]["outputs"][1]["data"] == {"text/plain": ["'book'"]}
    trace = "\n".join(cells[1]["outputs"][0]["traceback"])
    assert "JSONDecodeError" in trace
    assert "\x1b" not in trace
    assert "File python3." in trace
    assert sys.prefix not in trace
    assert first.startswith(b'{\n "cells"')
    assert first.endswith(b"}\n")


def test_failing_cell_stores_nothing(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    path = repo.chapter("01_m", [("x = 1",), ("x / 0",), ("print(x)",)])
    before = path.read_bytes()
    assert weave.main(["run", "01_m.ipynb"], repo.root) == 1
    assert path.read_bytes() == before
    error = capsys.readouterr().err
    assert "book/01_m.ipynb, cell 2 failed with ZeroDivisionError: division by zero" in error
    assert "nothing was stored" in error


def test_run_of_an_unknown_notebook(repo: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repo.chapter("01_m", [])
    assert weave.main(["run", "7"], repo.root) == 1
    assert capsys.readouterr().err == ("weave: no notebook is called 7; there are: 01_m.ipynb\n")


def test_scrub_takes_out_colors_and_places() -> None:
    root = Path("/some/where/repo")
    text = (
        "\x1b[31mFile /some/where/repo/fanoutkv/blocks.py:3\x1b[39m\n"
        "File ~/.venv/lib/python3.11/site-packages/numpy/core.py:1\n"
        "File /usr/lib/python3.11/json/decoder.py:2\n"
        "<object at 0x7f0011223344> /tmp/ipykernel_12/345.py:1"
    )
    assert notebooks.scrub(text, root) == (
        "File fanoutkv/blocks.py:3\n"
        "File site-packages/numpy/core.py:1\n"
        "File python3.11/json/decoder.py:2\n"
        "<object at 0x…> <cell>:1"
    )


# --- the real book --------------------------------------------------------------------------------


def test_the_book_and_the_package_agree() -> None:
    assert weave.check() == []
