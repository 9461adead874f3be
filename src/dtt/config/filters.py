"""Filters of a sweep: boolean expressions over its keys, such as `optim.lr * model.dim < 1`.

The syntax is a subset of Python: comparisons, `and`, `or`, `not`, `+ - * / // %`, lists and
constants. Calls, attribute access and indexing are not supported. Expressions are interpreted over
the syntax tree; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from dtt.base.errors import ConfigError

CONSTANTS = {"null": None, "true": True, "false": False}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Is: operator.eq,  # `is null` means `== null`
    ast.IsNot: operator.ne,
}


def keeps(text: str, values: Mapping[str, Any]) -> bool:
    """Return True if the filter holds for these values; ConfigError if it cannot be evaluated."""
    try:
        return bool(_value(ast.parse(text.strip(), mode="eval").body, values))
    except SyntaxError as error:
        why = error.msg
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        why = str(error)
    shown = ", ".join(f"{key} = {value!r}" for key, value in values.items())
    raise ConfigError(
        f"cannot parse the filter {text!r}",
        where=shown or None,
        why=why,
        next="write a comparison of keys of this sweep, such as optim.lr * model.dim < 1",
    )


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name() | ast.Attribute():
            return _named(node, values)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, values) for item in items]
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ARITHMETIC[type(op)](_number(left, values), _number(right, values))
        case ast.Compare(left=left, ops=ops, comparators=rest):
            sides = [_value(side, values) for side in (left, *rest)]
            pairs = zip(ops, sides, sides[1:], strict=False)
            return all(COMPARISONS[type(op)](one, other) for op, one, other in pairs)
        case _:
            raise ValueError(f"`{ast.unparse(node)}` is neither a comparison nor arithmetic")


def _named(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of a dotted key or of the constants null, true and false."""
    name = ast.unparse(node)
    if name in values:
        return values[name]
    if name in CONSTANTS:
        return CONSTANTS[name]
    raise ValueError(f"{name} is not a key of this sweep: {', '.join(values)}")


def _number(node: ast.expr, values: Mapping[str, Any]) -> int | float:
    value = _value(node, values)
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value
