"""What one Python source file imports, and a digest of what it means rather than how it is written."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipelines.errors import UserError

_REFERENCE = re.compile(r"^((?:flows|tasks|pipelines)(?:\.\w+)+):\w+$")
_REGISTRY = "pipelines.registry"
_REGISTRY_FILE = "pipelines/registry.py"
_HARMLESS_IMPORTLIB = ("importlib.metadata",)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """One source file: its digest, the project modules, packages and data files it names."""

    digest: str
    imports: list[str] = field(default_factory=list)
    external: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def scan(path: Path, name: str, base: Path, project: tuple[str, ...]) -> Module:
    """Read a source file. `name` is its path below `base`, the directory that holds the `project` packages.

    A `problem` is set when the file imports in a way that the closure cannot follow.
    """
    try:
        syntax = ast.parse(path.read_bytes(), filename=name)
    except SyntaxError as error:
        raise UserError(f"{name}, line {error.lineno}: not valid Python ({error.msg}); mend it first.") from None
    package = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if not name.endswith("/__init__.py"):
        package = package.rpartition(".")[0]
    visitor = _Visitor(name, package, base, project)
    visitor.visit(syntax)
    return Module(
        digest=_digest(syntax),
        imports=sorted(visitor.internal),
        external=sorted(visitor.external),
        data=sorted(visitor.data),
        problem="" if name == _REGISTRY_FILE else visitor.problem,
    )


scan.format = [4]  # type: ignore[attr-defined]  # a new number makes every cached scan be done again


def _digest(syntax: ast.Module) -> str:
    for node in ast.walk(syntax):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if hasattr(node, "type_comment"):
            node.type_comment = None
    return hashlib.sha256(ast.dump(syntax).encode("utf-8")).hexdigest()


class _Visitor(ast.NodeVisitor):
    def __init__(self, name: str, package: str, base: Path, project: tuple[str, ...]) -> None:
        self.name, self.package, self.base, self.project = name, package, base, project
        self.internal: set[str] = set()
        self.external: set[str] = set()
        self.data: set[str] = set()
        self.problem = ""
        self.registry: dict[str, str] = {}  # local name -> "load", "data_file" or "module"

    def _refuse(self, node: ast.AST, what: str) -> None:
        self.problem = self.problem or (
            f"{self.name}, line {getattr(node, 'lineno', 0)}: {what}, which code.lock cannot follow. "
            'Use pipelines.registry.load("package.module:name") or data_file("path") with a literal text.'
        )

    def _module(self, node: ast.AST, dotted: str) -> None:
        top = dotted.split(".")[0]
        if top in self.project:
            self.internal.add(dotted)
        elif top in ("importlib", "runpy", "imp"):
            if not any(dotted == h or dotted.startswith(h + ".") for h in _HARMLESS_IMPORTLIB):
                self._refuse(node, f"imports {dotted}")
        elif top not in sys.stdlib_module_names:
            self.external.add(top)

    def visit_If(self, node: ast.If) -> None:
        """What only a type checker imports does not run."""
        test = node.test
        checking = isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
        checking = checking or (isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")
        for child in node.orelse if checking else [test, *node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._module(node, alias.name)
            if alias.name == _REGISTRY:
                self.registry[alias.asname or alias.name] = "module"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parts = self.package.split(".")
            parts = parts[: len(parts) - node.level + 1]
            module = ".".join([*parts, *([module] if module else [])])
        if module == "importlib":
            for alias in node.names:
                self._module(node, f"importlib.{alias.name}")
            return
        self._module(node, module)
        for alias in node.names:
            dotted = f"{module}.{alias.name}"
            if module.split(".")[0] in self.project and self._is_module(dotted):
                self.internal.add(dotted)
            if module == _REGISTRY:
                self.registry[alias.asname or alias.name] = alias.name
            if dotted == _REGISTRY:
                self.registry[alias.asname or alias.name] = "module"

    def _is_module(self, dotted: str) -> bool:
        path = self.base / dotted.replace(".", "/")
        return path.with_name(path.name + ".py").is_file() or (path / "__init__.py").is_file()

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and (match := _REFERENCE.match(node.value)):
            self.internal.add(match[1])

    def visit_Call(self, node: ast.Call) -> None:
        called = self._registry_function(node.func)
        argument = node.args[0] if node.args else None
        if isinstance(node.func, ast.Name) and node.func.id == "__import__":
            self._refuse(node, "calls __import__")
        if called == "load" and isinstance(argument, ast.JoinedStr | ast.BinOp):
            self._refuse(node, "puts a registry reference together at run time")
        if called == "data_file":
            literals = list(_literals(argument))
            if not literals:
                self._refuse(node, "names a data file by a value")
            self.data.update(f"pipelines/{literal}" for literal in literals)
        self.generic_visit(node)

    def _registry_function(self, function: ast.expr) -> str:
        if isinstance(function, ast.Name):
            return self.registry.get(function.id, "")
        if isinstance(function, ast.Attribute) and self.registry.get(ast.unparse(function.value)) == "module":
            return function.attr
        return ""


def _literals(argument: ast.expr | None) -> Iterator[str]:
    """The text of a literal argument, or of both branches of a conditional one."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value
    elif isinstance(argument, ast.IfExp):
        yield from _literals(argument.body)
        yield from _literals(argument.orelse)
