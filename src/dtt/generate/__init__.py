"""Generation and conversation with a model."""

import sys

from dtt.base.function_package import FunctionPackage

sys.modules[__name__].__class__ = FunctionPackage
