"""Build a class one cell at a time."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

Member = TypeVar("Member")


def method_of(cls: type[Any]) -> Callable[[Member], Member]:
    """Put the decorated member on `cls`, under the member's own name.

    A chapter shows a class with its fields first, and then adds one method a cell::

        @method_of(BlockPool)
        def touch(self, block_ids): ...

    The member may be a function, a property, a staticmethod, a classmethod, a
    functools.cached_property or a nested class. It is returned as it is, so that its name also
    lives alone in the notebook. Objects that exist already get the new method too; but running
    the class cell again makes a new, bare class, and the method cells must then run again.

    Raises:
        TypeError: `cls` is not a class, or the member has no name.
    """
    if not isinstance(cls, type):
        raise TypeError(f"method_of takes a class, as in @method_of(BlockPool); it got {cls!r}")

    def put(member: Member) -> Member:
        inner: Any = member  # the function within
        if isinstance(member, property):
            inner = member.fget
        elif isinstance(member, (staticmethod, classmethod)):
            inner = member.__func__
        elif isinstance(member, functools.cached_property):
            inner = member.func
        name = getattr(inner, "__name__", None)
        if not isinstance(name, str):
            raise TypeError(f"method_of({cls.__name__}) got {member!r}, which has no name")
        with contextlib.suppress(AttributeError, TypeError):  # a built-in keeps its own
            inner.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, member)
        # What Python does by itself for a member that stands in the class body:
        set_name = getattr(type(member), "__set_name__", None)
        if set_name is not None:
            set_name(member, cls, name)
        abc.update_abstractmethods(cls)
        return member

    return put
