"""Changes to the syntax trees of chat templates."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes


def instrument(tree: nodes.Template) -> None:
    """Insert the hooks that count steps into the tree of a template."""
    for output in tree.find_all(nodes.Output):
        output.nodes = [_read(node, "read_all") for node in output.nodes]
    for assignment in tree.find_all(nodes.Assign):
        assignment.node = _read(assignment.node, "read")
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice):
            item.node = _read(item.node, "read")
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        # With a constant, it takes a step, unless a text is searched for it.
        if not any(isinstance(side, nodes.Const) for side in sides):
            comparison.expr = _read(comparison.expr, "read_all")
        for operand in comparison.ops:
            if operand.op in ("in", "notin") or comparison.expr is not sides[0]:
                operand.expr = _read(operand.expr, "read_all")
    for loop in tree.find_all(nodes.For):
        turn = nodes.Filter(nodes.Const(None), "dtt turn", [], [], None, None)
        loop.body = [nodes.Output([turn]), *loop.body]


def _read(node: Any, name: str) -> Any:
    """Return an expression with the hook that counts the steps of its value."""
    if isinstance(node, nodes.TemplateData | nodes.Const):
        return node
    return nodes.Filter(node, f"dtt {name}", [], [], None, None).set_lineno(node.lineno)
