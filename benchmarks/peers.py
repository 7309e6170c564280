"""Load the bookkeeping modules of vLLM or SGLang, without their GPU parts, to time them.

A peer is a wheel of several hundred megabytes that wants a GPU; a few of its Python files are all
that is needed. They are unpacked once into a cache folder. Whatever else of the peer they import is
replaced by a stand-in, so only the bookkeeping runs. Nothing of a peer is part of this project.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

CACHE = Path.home() / ".cache" / "fanoutkv" / "peers"


class _Finder:
    """Serve a peer's chosen modules from files and every other one of its modules as a mock."""

    def __init__(self, folder: Path, wanted: list[str]) -> None:
        self.folder, self.wanted, self.package = folder, wanted, wanted[0].split(".")[0]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self.wanted:
            return spec_from_file_location(name, self.folder / f"{name.replace('.', '/')}.py")
        if name.split(".")[0] == self.package:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        vars(module)["__getattr__"] = lambda name: _mock(spec.name, name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has nothing to run."""


def _mock(module: str, name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=f"{module}.{name}")


def load(project: str, version: str, wanted: list[str]) -> list[ModuleType]:
    """Return the wanted modules of a peer, in order; raises what pip or the import raises."""
    folder = CACHE / f"{project}-{version}"
    files = [f"{name.replace('.', '/')}.py" for name in wanted]
    if not all((folder / file).exists() for file in files):
        with tempfile.TemporaryDirectory() as wheels:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--only-binary=:all:", "--dest", wheels, f"{project}=={version}"]
            subprocess.run(pip, check=True)
            with zipfile.ZipFile(next(Path(wheels).glob("*.whl"))) as wheel:
                wheel.extractall(folder, files)
    sys.meta_path.insert(0, _Finder(folder, wanted))  # type: ignore[arg-type]
    return [importlib.import_module(name) for name in wanted]


def vllm() -> list[ModuleType]:
    """Return vLLM 0.33.0's hashing, kv_cache_utils and block_pool modules."""
    core = "vllm.v1.core."
    wanted = ["vllm.utils.hashing", core + "kv_cache_utils", core + "block_pool"]
    return load("vllm", "0.33.0", wanted)


def sglang() -> list[ModuleType]:
    """Return SGLang 0.5.23's base_prefix_cache and radix_cache modules; they need torch."""
    folder = "sglang.srt.mem_cache."
    # Real, too, is what a tree runs on its way: its parameters, strategies, events and helpers.
    helpers = ["evict_policy", "utils", "cache_init_params", "events"]
    wanted = [folder + name for name in (*helpers, "base_prefix_cache", "radix_cache")]
    return load("sglang", "0.5.23", wanted)[-2:]
