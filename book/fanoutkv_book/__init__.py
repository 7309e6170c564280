"""Helpers that the chapters import. Kept light: nothing but `method_of` is imported here."""

from fanoutkv_book.cells import method_of

__all__ = ["method_of"]
