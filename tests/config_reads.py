"""Which configuration keys the program reads, found in its source by the types of expressions.

An expression has a section's type if annotations say so: parameters, fields, what functions return,
and what is assigned or looked up from those (``limits = context.limits``). Reading an attribute of
it reads that key. What only the configuration's own modules read (to check it) does not count,
unless by a property or method of a section that others use (``config.trainer.staleness_bound``).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.config.base import Section
from tests.config_values import section_of

ROOT = Path(__file__).parents[1]
Read = tuple[str, str]
"""Name of a section's class, and of its field."""
Types = frozenset[str]
NOTHING: Types = frozenset()
_TELL = (
    "jax_agent_rl/deploy/plan/",
    "jax_agent_rl/deploy/doctor/",
    "jax_agent_rl/deploy/launch/",
    "jax_agent_rl/cli/config.py",
    "jax_agent_rl/observe/warnings.py",
)
"""What speaks of a configuration, and does not carry it out."""
_CARRY_OUT = ("default_agent",)
"""Functions beside the sections that do."""


def sections(model: type[Section] = Config) -> dict[str, type[Section]]:
    """Every section's class by name."""
    found = {model.__name__: model}
    for info in model.model_fields.values():
        if (inner := section_of(info)) is not None:
            found |= sections(inner)
    return found


class Reads:
    """Finds them; ``found`` holds the result."""

    def __init__(self) -> None:
        self.sections = sections()
        self.found: set[Read] = set()
        files = [*(ROOT / "jax_agent_rl").rglob("*.py"), *(ROOT / "gpu_backend").rglob("*.py")]
        files = [
            file
            for file in files
            if not any(str(file.relative_to(ROOT)).startswith(one) for one in _TELL)
        ]
        own, others = [], []
        for file in sorted(files):
            tree = ast.parse(file.read_text())
            if file.parent.name != "config":
                others.append(tree)
                continue
            own.append(tree)
            carried_out: list[ast.stmt] = []
            for part in tree.body:
                if isinstance(part, ast.FunctionDef) and part.name in _CARRY_OUT:
                    carried_out.append(part)
            others.append(ast.Module(carried_out, []))
        self._bases = {
            name: {base.__name__ for base in cls.__mro__} for name, cls in self.sections.items()
        }
        self._holders: defaultdict[str, set[str]] = defaultdict(
            set
        )  # of sections: attributes and functions
        for tree in others + own:
            self._learn(tree)
        self._members = {name: set(self._of_members(own, name)) for name in self.sections}
        for _ in range(2):  # what the first pass learns of attributes, the second uses
            for tree in others:
                self._visit_block(tree.body, {})

    def _learn(self, tree: ast.Module) -> None:
        """Attributes and functions whose annotations name a section."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        self._holders[part.target.id] |= self._named(part.annotation)
            elif (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and node.returns is not None
            ):
                self._holders[node.name] |= self._named(node.returns)

    def _of_members(self, own: list[ast.Module], name: str) -> Iterator[tuple[str, str]]:
        """(property or method, field) for what a section's own members read."""
        for tree in own:
            for cls in tree.body:
                if isinstance(cls, ast.ClassDef) and cls.name in self._bases[name]:
                    for part in cls.body:
                        if isinstance(part, ast.FunctionDef):
                            for node in ast.walk(part):
                                if isinstance(node, ast.Attribute) and isinstance(
                                    node.value, ast.Name
                                ):
                                    if node.value.id == "self":
                                        yield part.name, node.attr

    def _named(self, annotation: ast.expr | None) -> Types:
        """The sections an annotation allows (``AgentConfig | None``, ``"Config"``); a list of them
        is none.
        """
        if annotation is None:
            return NOTHING
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self._named(annotation.left) | self._named(annotation.right)
        name = getattr(annotation, "id", getattr(annotation, "attr", None))
        return frozenset(
            key
            for key, bases in self._bases.items()
            if name in bases and name not in ("Section", "BaseModel")
        )

    def _visit_block(self, body: list[ast.stmt], scope: dict[str, Types]) -> None:
        for statement in body:
            self._visit(statement, scope)

    def _visit(self, node: ast.AST, scope: dict[str, Types]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            inner = {**scope, **{one.arg: self._named(one.annotation) for one in every}}
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            for part in body:
                self._visit(part, inner)
            return
        if isinstance(node, ast.ClassDef):
            self._visit_block(node.body, dict(scope))
            return
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value, scope)
        if isinstance(node, (ast.Attribute, ast.Call)):
            self._types(node, scope)
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: dict[str, Types]) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._assign(one, part, scope)
        elif isinstance(target, ast.Name):
            scope[target.id] = self._types(value, scope)
        elif isinstance(target, ast.Attribute):
            self._holders[target.attr] |= self._types(value, scope)

    def _types(self, node: ast.expr, scope: dict[str, Types]) -> Types:
        """The sections an expression may be; notes what it reads."""
        match node:
            case ast.Name(id=name):
                return scope.get(name, NOTHING)
            case ast.Attribute(value=value, attr=name):
                return self._attribute(self._types(value, scope), name)
            case ast.Call(func=ast.Attribute(value=value, attr="model_copy")):
                return self._types(value, scope)
            case ast.Call(func=ast.Attribute(value=value, attr="model_dump")):
                self._whole(self._types(value, scope), node)
                return NOTHING
            case ast.Call(func=func):
                name = getattr(func, "id", getattr(func, "attr", ""))
                return (self._named(func) if isinstance(func, ast.Name) else NOTHING) | frozenset(
                    self._holders[name]
                )
            case ast.BoolOp(values=values):
                return frozenset().union(*(self._types(value, scope) for value in values))
            case ast.IfExp(body=body, orelse=orelse):
                return self._types(body, scope) | self._types(orelse, scope)
            case ast.Await(value=value) | ast.NamedExpr(value=value):
                return self._types(value, scope)
        return NOTHING

    def _attribute(self, owners: Types, name: str) -> Types:
        if not owners:
            return frozenset(self._holders[name])
        found: set[str] = set()
        for owner in owners:
            info = self.sections[owner].model_fields.get(name)
            for field in (
                [name]
                if info
                else [field for member, field in self._members[owner] if member == name]
            ):
                self.found.add((owner, field))
            if info and (inner := section_of(info)) is not None:
                found.add(inner.__name__)
        return frozenset(found)

    def _whole(self, owners: Types, call: ast.Call) -> None:
        """``EnvironmentPools(**config.environments.model_dump(exclude={"path"}))`` reads all but
        that; what is dumped as JSON is saved, not used.
        """
        if any(keyword.arg == "mode" for keyword in call.keywords):
            return
        left_out = {
            item.value
            for keyword in call.keywords
            if keyword.arg == "exclude" and isinstance(keyword.value, ast.Set)
            for item in keyword.value.elts
            if isinstance(item, ast.Constant)
        }
        for owner in owners:
            self.found |= {
                (owner, name) for name in self.sections[owner].model_fields if name not in left_out
            }
