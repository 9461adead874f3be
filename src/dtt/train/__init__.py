"""The training loop and the objects that it calls."""

import sys

from dtt.base.function_package import FunctionPackage

sys.modules[__name__].__class__ = FunctionPackage
