"""From a user's class or function to a reference by which worker processes find it again: the way back from
`references.resolve`.

    of a module     "package.module:Name"
    of a script     "path/script.py:Name"
    of a notebook's cell, or of a prompt
                    "RUN/interactive/Name_DIGEST.py:Name": a file with its source and with what that needs of other
                    cells (imports, functions, classes, values), for workers to import like any other

The file is made of sources alone, and its name of its content: the same code has the same name in every session.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import re
import symtable
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from headrace.errors import ConfigError, quoted

FOLDER = "interactive"
"""Where such files are, in the run's folder."""
MAX_VALUE_CHARS = 64 << 10
"""Of a value that is written into such a file."""

_HEAD = "# Written by headrace.train for its worker processes: code of a notebook's cells or of a prompt.\n"
_REMEDY = 'put the code into a file, and pass what that file defines or its reference, "file.py:Name"'


@dataclass
class Definitions:
    """References to users' code, for one run, and the files that some of them need."""

    folder: Path
    """The run's."""
    files: dict[Path, str] = field(default_factory=dict)
    """Paths and contents: to be written once the run's folder is there."""

    def reference(self, thing: Any) -> str:
        if isinstance(thing, str):
            return thing
        name = getattr(thing, "__qualname__", None)
        if name is None or "<" in name or not isinstance(getattr(thing, "__module__", None), str):
            raise ConfigError(
                "an environment or scorer is a class or function that worker processes can import",
                repr(thing),
                "define it at the top level of a module, and pass it rather than an instance",
            )
        if thing.__module__ != "__main__":
            return f"{thing.__module__}:{name}"
        file = _file_of(thing)
        script = getattr(sys.modules["__main__"], "__file__", None)
        if file is not None and script is not None and file == Path(script).absolute():
            return f"{file}:{name}"
        cells = _cells()
        root = name.partition(".")[0]
        if (found := _definition(root, cells)) is not None:
            return self._interactive(name, found, cells)
        if file is not None:
            return f"{file}:{name}"
        raise ConfigError(
            f"the source of {name} can be found: worker processes are to import it",
            quoted(thing),
            _REMEDY,
        )

    def _interactive(self, name: str, definition: str, cells: list[ast.Module]) -> str:
        root = name.partition(".")[0]
        text = _HEAD + _Gathered(root, cells).text(definition)
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        path = self.folder / FOLDER / f"{root}_{digest}.py"
        self.files[path] = text
        return f"{path}:{name}"


# ── Finding sources ──────────────────────────────────────────────────────────────────────────────────────


def _file_of(thing: Any) -> Path | None:
    """The file that its code says it is from, where there is one."""
    functions = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
    for function in map(inspect.unwrap, functions):
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None and function.__module__ == "__main__":
            file = Path(code.co_filename).absolute()
            return file if file.is_file() else None
    script = getattr(sys.modules["__main__"], "__file__", None)
    return Path(script).absolute() if script is not None and Path(script).is_file() else None


def _cells() -> list[ast.Module]:
    """What was executed in this session, the latest last: IPython's own record, or else what a prompt keeps for
    tracebacks."""
    record = vars(sys.modules["__main__"]).get("In")
    if isinstance(record, list):
        texts = [text for text in record if isinstance(text, str)]
    else:
        entries = [entry for name, entry in linecache.cache.items() if len(entry) > 2 and not Path(name).is_file()]
        texts = ["".join(entry[2]) for entry in entries]
    found = []
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue  # a cell that could not be executed either
        tree.source = text  # type: ignore[attr-defined]
        found.append(tree)
    return found


def _statements(cells: list[ast.Module]) -> Iterator[tuple[ast.stmt, str]]:
    """Top-level statements with the cells they are in, the latest first."""
    for cell in reversed(cells):
        for statement in reversed(cell.body):
            yield statement, cell.source  # type: ignore[attr-defined]


def _definition(name: str, cells: list[ast.Module]) -> str | None:
    """The source of the latest class or function of this name, with its decorators."""
    for statement, source in _statements(cells):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name:
            return _source(statement, source)
    return None


def _source(statement: ast.stmt, source: str) -> str:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    # As ast counts lines: a form feed within one is none of their ends.
    return "\n".join(re.split(r"\r\n|\r|\n", source)[first - 1 : statement.end_lineno]) + "\n"


# ── What a definition needs ──────────────────────────────────────────────────────────────────────────────


class _Gathered:
    """Follows names from a definition to all that it needs, and puts that in an order in which it can be executed:
    whatever a source names comes before it."""

    def __init__(self, root: str, cells: list[ast.Module]):
        self._root = root
        self._cells = cells
        self._globals: Mapping[str, Any] = vars(sys.modules["__main__"])
        self._imports: dict[str, None] = {}
        if any(isinstance(one, ast.ImportFrom) and one.module == "__future__" for one, _ in _statements(cells)):
            # It holds for all cells that come after it.
            self._imports["from __future__ import annotations"] = None
        self._parts: list[str] = []
        self._seen = {root}

    def text(self, definition: str) -> str:
        self._add(definition)
        imports = sorted(self._imports, key=lambda line: (not line.startswith("from __future__"), line))
        return "\n".join([*imports, *([""] if imports else []), *self._parts])

    def _add(self, source: str) -> None:
        for name in _global_names(source):
            if name not in self._seen and name in self._globals:
                self._seen.add(name)
                self._add_name(name, self._globals[name])
        self._parts.append(source)

    def _add_name(self, name: str, value: Any) -> None:
        if (lines := self._import_lines(name, value)) is not None:
            self._imports.update(dict.fromkeys(lines))
        elif (source := self._own_source(name, value)) is not None:
            self._add(source)
        elif (literal := _literal(value)) is not None:
            self._parts.append(f"{name} = {literal}\n")
        elif isinstance(value, re.Pattern):
            self._imports["import re as _re"] = None
            self._parts.append(f"{name} = _re.compile({value.pattern!r}, {value.flags})\n")
        elif (source := self._assignment(name)) is not None:
            self._add(source)
        elif not hasattr(builtins, name) or any(name in _bound(one) for one, _ in _statements(self._cells)):
            # IPython has an `open` of its own; a worker has Python's.
            self._refuse(name, value)

    def _refuse(self, name: str, value: Any) -> NoReturn:
        raise ConfigError(
            f"{self._root} runs in worker processes, where {name}, which it uses, cannot be made again: no cell "
            "defines it by one statement",
            quoted(value),
            f"make {name} within {self._root}, or {_REMEDY}",
        )

    def _import_lines(self, name: str, value: Any) -> list[str] | None:
        """Import statements that give this name this value."""
        found = []
        for statement, _ in _statements(self._cells):
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for alias in statement.names:
                if (line := _import_line(statement, alias, name, value)) is not None:
                    found.append(line)
        if found:
            return sorted(set(found))
        if isinstance(value, types.ModuleType) and value.__name__ != "__main__":
            return [f"import {value.__name__} as {name}"]
        module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if not isinstance(module, str) or module == "__main__" or not str(own).isidentifier():
            return None
        same = getattr(sys.modules.get(module), own, None) is value
        return [f"from {module} import {own} as {name}"] if same else None

    def _own_source(self, name: str, value: Any) -> str | None:
        """The source of a class or function that a cell defines."""
        own = getattr(value, "__qualname__", None)
        if getattr(value, "__module__", None) != "__main__" or not isinstance(own, str):
            return None
        source = _definition(own, self._cells)
        if source is None or own == name:
            return source
        if own in self._seen:
            return f"{name} = {own}\n"
        self._seen.add(own)
        return f"{source}\n\n{name} = {own}\n"

    def _assignment(self, name: str) -> str | None:
        """The statement that has given the name its value, if one alone did in the latest cell that names it."""
        for cell in reversed(self._cells):
            binding = [one for one in cell.body if name in _bound(one)]
            if not binding:
                continue
            one = binding[0]
            alone = isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name)
            if len(binding) == 1 and (alone or isinstance(one, ast.AnnAssign)):
                return _source(one, cell.source)  # type: ignore[attr-defined]
            return None
        return None


def _import_line(statement: ast.Import | ast.ImportFrom, alias: ast.alias, name: str, value: Any) -> str | None:
    """The part of an import statement that gives `name` this value, if it still does."""
    bound = alias.asname or alias.name.partition(".")[0]
    if bound != name:
        return None
    renamed = f" as {alias.asname}" if alias.asname else ""
    if isinstance(statement, ast.Import):
        module = sys.modules.get(alias.name if alias.asname else bound)
        return f"import {alias.name}{renamed}" if module is value else None
    if statement.level or statement.module is None:
        return None
    home = sys.modules.get(statement.module)
    found = getattr(home, alias.name, None)
    return f"from {statement.module} import {alias.name}{renamed}" if found is value else None


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement may give a value."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }


def _global_names(source: str) -> list[str]:
    """Names that a source takes from outside, in whatever scope, in their order."""
    found: set[str] = set()

    def walk(table: symtable.SymbolTable) -> None:
        outermost = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (outermost or symbol.is_global()):
                found.add(symbol.get_name())
        for child in table.get_children():
            walk(child)

    walk(symtable.symtable(source, "<cell>", "exec"))
    return sorted(found)


def _literal(value: Any) -> str | None:
    """The value as Python writes it, where reading that gives the value again."""
    try:
        text = _written(value)
        same = text is not None and len(text) <= MAX_VALUE_CHARS and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return text if same else None


def _written(value: Any) -> str | None:
    """In one form in every session: a set has another order in each."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    if type(value) is dict:
        keys, values = _all_written(value), _all_written(value.values())
        if keys is None or values is None:
            return None
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(keys, values, strict=True)) + "}"
    if type(value) not in (list, tuple, set) or (items := _all_written(value)) is None:
        return None
    if type(value) is set:
        return f"{{{', '.join(sorted(items))}}}" if items else "set()"
    if type(value) is list:
        return f"[{', '.join(items)}]"
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _all_written(values: Iterable[Any]) -> list[str] | None:
    found = [_written(value) for value in values]
    return None if None in found else [text for text in found if text is not None]
