"""Evaluation of models: validation loss and samples."""

import sys

from dtt.base.function_package import FunctionPackage

sys.modules[__name__].__class__ = FunctionPackage
