"""Packages that are called as the function of their name: `dtt.train(...)`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class FunctionPackage(ModuleType):
    """A package whose name is also that of a function of `dtt.library`.

    Importing anything of `dtt.train` makes the package an attribute of `dtt`, which then hides the
    function: the second call would fail, with "module object is not callable".
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of this name."""
        library = importlib.import_module("dtt.library")
        return getattr(library, self.__name__.rpartition(".")[2])(*args, **kwargs)
