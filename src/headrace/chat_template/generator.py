"""The code that Jinja makes of a chat template, with counting between."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension
from jinja2.parser import Parser

from headrace.chat_template.sizes import ELEMENT

_BRIEF_BODY = 64
_BRIEF = (nodes.Const, nodes.Compare, nodes.Test, nodes.Not)
"""Expressions whose value is no larger than what is written."""


class CountingGenerator(CodeGenerator):
    """Jinja's own, with counting between."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._counted_outside: set[int] = set()
        self._sizes: dict[int, int] = {}

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        if id(nodes) not in self._counted_outside:
            steps = ELEMENT + sum(map(self._static_size, nodes))
            self.writeline(f"environment.steps -= {steps}")
            self.writeline("if environment.steps < 0: environment.stop()")
        super().blockvisit(nodes, frame)

    def _static_size(self, node: nodes.Node) -> int:
        """Steps of running a node once, without the bodies within it that count for themselves."""
        if isinstance(node, nodes.TemplateData):
            return 2 + len(node.data)
        if isinstance(node, nodes.Const):
            return 2 + (len(node.value) if isinstance(node.value, str) else 0)
        if id(node) in self._sizes:
            return self._sizes[id(node)]
        size = 2
        for name, field in node.iter_fields():
            of_its_own = name in ("body", "else_")
            if of_its_own and not isinstance(node, nodes.If):
                continue
            children = field if isinstance(field, list) else [field]
            inside = sum(self._static_size(child) for child in children if isinstance(child, nodes.Node))
            if of_its_own:
                if inside > _BRIEF_BODY:
                    continue
                self._counted_outside.add(id(field))
            size += inside
        self._sizes[id(node)] = size
        return size

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is not there for chat templates", node.lineno)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            # What a condition leaves out was looked at, too.
            node.test = nodes.And(nodes.EnvironmentAttribute("one_step"), node.test)
        super().visit_For(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        summands, first = [node.right], node.left
        while isinstance(first, nodes.Add):
            summands.append(first.right)
            first = first.left
        self.write("environment.added(")
        for one in (first, *reversed(summands)):
            self.visit(one, frame)
            self.write(", ")
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        expressions = [node.expr, *(operand.expr for operand in node.ops)]
        # Comparing with a literal takes no longer than the literal is.
        brief = len(expressions) == 2 and any(isinstance(one, _BRIEF) for one in expressions)
        self.write("(")
        self._visit_counted("scanned", node.expr, frame, brief)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            if operand.op in ("in", "notin"):
                self._visit_counted("searched", operand.expr, frame)
            else:
                self._visit_counted("scanned", operand.expr, frame, brief)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.made(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            self._visit_counted("scanned", pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def _visit_counted(self, function: str, node: nodes.Expr, frame: Frame, brief: bool = False) -> None:
        """What `function` of the environment counts and gives back. A literal's size is known already."""
        if brief or isinstance(node, _BRIEF):
            self.visit(node, frame)
            return
        self.write(f"environment.{function}(")
        self.visit(node, frame)
        self.write(")")


class Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for which nothing is done here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)
