"""Changes to the syntax trees of chat templates, and facts that follow from the trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes

PROMPT = "add_generation_prompt"
FIXED = (
    nodes.If, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Compare,
    nodes.Operand, nodes.Test, nodes.Not, nodes.And, nodes.Or, nodes.Add,
)  # fmt: skip
"""Nodes whose output depends on nothing but the values of variables."""


def ends_with_prompt(tree: nodes.Template) -> bool:
    """Return True if the generation prompt is provably the end of a render, and constant.

    Then a render with the generation prompt is the render without it, followed by a text that
    depends on no message and no tool. This holds if the template reads `add_generation_prompt`
    once, in an `if` at its end whose body reads only variables that the template never sets.
    """
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return False
    names = [*tree.find_all(nodes.Name)]
    if not isinstance(last.test, nodes.Name) or [n.name for n in names].count(PROMPT) != 1:
        return False
    known = {name.name for name in names if name.ctx != "load"} | {"messages", "tools"}
    known |= {macro.name for macro in tree.find_all(nodes.Macro)}
    body = [node for one in last.body for node in (one, *one.find_all(nodes.Node))]
    return last.test.name == PROMPT and all(
        isinstance(node, FIXED) and not (isinstance(node, nodes.Name) and node.name in known)
        for node in body
    )


def instrument(tree: nodes.Template) -> None:
    """Insert the hooks that trace messages and count steps into the tree of a template."""
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
    direct = {id(node) for node in _direct(tree)}
    for loop in tree.find_all(nodes.For):
        names = [loop.target] if isinstance(loop.target, nodes.Name) else []
        names += [*loop.target.find_all(nodes.Name)]
        variables = [nodes.Name(name.name, "load") for name in names]
        _end_early(loop.body)
        at_once = nodes.Const(id(loop) in direct)
        loop.body = [_output("begin", [at_once, *variables]), *loop.body, _output("end")]


KEPT = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
"""Nodes that collect the output of their bodies as a string, or can."""


def _direct(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the nodes below `node` whose output goes directly to the output of the template.

    Then the template cannot read it, and its position is the size of the output so far.
    """
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.For) and child.recursive:
            continue
        yield child
        if not isinstance(child, KEPT):
            yield from _direct(child)


def _output(name: str, args: list[Any] | None = None) -> nodes.Output:
    """Return the output of a hook, which is empty."""
    first, *others = args or [nodes.Const(None)]
    return nodes.Output([nodes.Filter(first, f"dtt {name}", others, [], None, None)])


def _read(node: Any, name: str) -> Any:
    """Return an expression with the hook that counts the steps of its value."""
    if isinstance(node, nodes.TemplateData | nodes.Const):
        return node
    return nodes.Filter(node, f"dtt {name}", [], [], None, None).set_lineno(node.lineno)


def _end_early(body: list[nodes.Node]) -> None:
    """Insert the hook of the end before each `continue` and `break` of a loop body."""
    for i in reversed(range(len(body))):
        node = body[i]
        if isinstance(node, (nodes.Continue, nodes.Break)):
            body.insert(i, _output("end"))
        elif isinstance(node, nodes.If):
            _end_early(node.body)
            _end_early(node.else_)
            for branch in node.elif_:
                _end_early(branch.body)
        elif isinstance(node, (nodes.With, nodes.FilterBlock)):
            _end_early(node.body)
