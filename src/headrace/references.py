"""From a name in a configuration to the object it names: "package.module:Name" or "path/file.py:Name".

Modules are looked for where Python looks and then in the current directory; files relative to the current
directory. A file is loaded once per process and registered under a name that depends on its path alone, so
that objects of its classes can be pickled between processes that have resolved the same reference.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import BadReference, InputError, short


def resolve(reference: str) -> Any:
    """The object `reference` names. Imports its module; raises BadReference where there is none."""
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise BadReference('a reference is "module:Name" or "file.py:Name"', reference, "write both parts")
    module = _load_file(place) if place.endswith(".py") else _import_module(place)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadReference(
                f"{place} has a name {name!r}", reference, _nearest(part, _public_names(found), "it defines")
            )
        found = getattr(found, part)
    return found


def _load_file(place: str) -> ModuleType:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        remedy = f"looked for {file}"
        if file.parent.is_dir():
            remedy += (
                f"; {_nearest(file.name, sorted(other.name for other in file.parent.glob('*.py')), 'it holds')}"
            )
        raise BadReference("a reference's file exists", place, remedy)
    name = module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    _search_also(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BadReference("a reference's file is a Python module", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(place, error) from error
    return module


def module_name(file: Path) -> str:
    """The name a file's module is registered under: the same in every process."""
    digest = hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()
    return f"headrace_user_{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_{digest}"


def _import_module(place: str) -> ModuleType:
    _search_also(os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place != missing and not place.startswith(missing + "."):
            raise _broken(place, error) from error
        remedy = _nearest(missing, _siblings(missing), "there are")
        if Path(place + ".py").is_file():
            remedy = f'for the file in this directory write "{place}.py:Name"'
        raise BadReference(f"the module {place!r} can be found", missing, remedy) from error
    except (Exception, SystemExit) as error:
        raise _broken(place, error) from error


def _broken(place: str, error: BaseException) -> InputError:
    if isinstance(error, InputError):
        return error
    where = traceback.extract_tb(error.__traceback__)[-1:]
    spot = f" ({where[0].filename}, line {where[0].lineno})" if where and not isinstance(error, SyntaxError) else ""
    return BadReference(
        f"{place} can be imported", f"{type(error).__name__}: {error}{spot}", "correct it, or install what it needs"
    )


def told(error: BaseException) -> str:
    """An error of users' code in one line: its type, its text, and the line of theirs that raised it."""
    return f"{type(error).__name__}: {short(error)}{spot_of(error)}"


def spot_of(error: BaseException) -> str:
    """Where users' code raised it, " (file.py, line 3)": the innermost line that is no library's; "" if none is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _of_library(frame.filename)]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _of_library(file: str) -> bool:
    return file.startswith((_PACKAGE, "<frozen", _STANDARD)) or "site-packages" in file


_PACKAGE = str(Path(__file__).parent) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep


def made(found: Any, options: Mapping[str, Any], source: str, key: str) -> Any:
    """The instance of a user's class; BadReference where its constructor raises."""
    check_call(found, (), options, source, f"{key}.options")
    try:
        return found(**options)
    except InputError:
        raise
    except Exception as error:
        raise BadReference(
            f"{key}: {source} can be made from {key}.options",
            told(error),
            "correct its constructor, or its options",
        ) from error


def check_call(
    function: Any, arguments: tuple[str, ...], options: Mapping[str, Any], source: str, options_key: str
) -> None:
    """Raise BadReference where `function(*arguments, **options)` cannot be called, for its signature."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        parameters = [name for name in signature.parameters if name != "self"]
        takes = parameters[max(0, len(arguments) - ("self" in arguments)) :]
        remedy = f"write def {source.rpartition(':')[2].rpartition('.')[2]}({', '.join(arguments)})"
        if options.keys() - signature.parameters.keys():
            remedy = f"correct {options_key}; it takes {', '.join(takes) or 'none'}"
        elif not arguments:
            remedy = f"give {', '.join(name for name in takes if name not in options)} in {options_key}"
        called = ", ".join([*arguments, *(f"{name}={value!r}" for name, value in options.items())])
        raise BadReference(
            f"{source} can be called as ({short(called)})", f"{signature}: {error}", remedy
        ) from None


def _search_also(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _siblings(missing: str) -> list[str]:
    """Modules beside the missing one, with their full names."""
    parent, dot, _ = missing.rpartition(".")
    if not dot:
        return []
    package = importlib.import_module(parent)
    return [f"{parent}.{info.name}" for info in pkgutil.iter_modules(getattr(package, "__path__", []))]


def _public_names(owner: object) -> list[str]:
    home = getattr(owner, "__name__", None)
    own = [name for name, value in vars(owner).items() if getattr(value, "__module__", None) == home]
    return sorted(name for name in own or vars(owner) if not name.startswith("_"))


def _nearest(wanted: str, known: list[str], verb: str) -> str:
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"{verb} {', '.join(known[:12])}" if known else "check the spelling, or install the package"
