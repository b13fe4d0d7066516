"""What a compiled chat template calls: operators, methods, filters and tests, each of which counts its work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from headrace.chat_template.generator import CountingGenerator, Generation
from headrace.chat_template.sizes import ELEMENT, SCALARS, copied, deep_size, shallow_size

MAX_STEPS = 2_000_000
"""Steps of one rendering, beside those that the messages' own size gives."""
STEPS_PER_INPUT = 64
"""Further steps for each step that it takes to look at the messages once."""
_MAX_BITS = 4096
_MAX_WIDTH = 4096
_MAX_TEXT_ARGUMENT = 256


class TooMuchWork(Exception):
    """A template's rendering has used up its steps."""


class Refusal(TemplateError):
    """What a template itself raises, by `raise_exception`."""


_FILTERS_LEFT_OUT = ("forceescape", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
"""For HTML, or of more than linear time."""
_SCAN_NOTHING = frozenset(("attr", "count", "d", "default", "first", "items", "last", "length", "safe"))
_SCAN_ELEMENTS = frozenset(
    ("batch", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice")
)
_BRIEF_TESTS = frozenset(
    (
        "boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter", "float", "integer",
        "iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined",
    )
)  # fmt: skip
_ANY_NUMBER = frozenset(
    ("d", "default", "int", "float", "map", "reject", "rejectattr", "select", "selectattr", "sum", "truncate")
)
_ANY_TEXT = frozenset(
    ("batch", "d", "default", "float", "format", "int", "join", "map", "reject", "rejectattr", "replace", "select",
     "selectattr", "truncate")
)  # fmt: skip
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (
        str,
        frozenset(
            (
                "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha",
                "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
                "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix",
                "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
                "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
            )
        ),
    ),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
    (float, frozenset(("is_integer",))),
    (LoopContext, frozenset(("changed", "cycle"))),
    (Cycler, frozenset(("next", "reset"))),
)  # fmt: skip
_NAMES_OF_DICT = frozenset(dir(dict))
_PADDING = ("center", "ljust", "rjust", "zfill")
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")


class CountingEnvironment(ImmutableSandboxedEnvironment):
    """Counts down `steps`. Used by one thread at a time."""

    code_generator_class = CountingGenerator
    intercepted_binops: ClassVar[frozenset[str]] = frozenset(("*", "**", "%"))  # type: ignore[misc]

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            # What is the same each time would be computed, uncounted, while the template is compiled.
            optimized=False,
        )
        self.steps = 0
        self._known: dict[int, int] = {}
        self.globals = {
            "cycler": Cycler,
            "dict": _Dict(self),
            "joiner": Joiner,
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "range": safe_range,
            "strftime_now": _now,
        }
        self.filters["tojson"] = self._to_json
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        self.filters = {name: self._counting_filter(name, filter_) for name, filter_ in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {
            name: test if name in _BRIEF_TESTS else self._counting_test(test) for name, test in tests.items()
        }

    # ── Counting ─────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Plain copies of what the template is given. What was counted before is forgotten."""
        known: dict[int, int] = {}
        self._known = known
        plain, size = {}, 0
        for key, value in given.items():
            plain[key], more = copied(value, known)
            size += more
        self.steps = MAX_STEPS + STEPS_PER_INPUT * size
        return plain

    def stop(self) -> NoReturn:
        raise TooMuchWork

    def count(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            self.stop()

    @property
    def one_step(self) -> bool:
        self.count(ELEMENT)
        return True

    def made(self, value: Any) -> Any:
        """The value, a new one; what it refers to was there already."""
        if type(value) is str:
            self.steps -= ELEMENT + len(value)
        elif type(value) not in SCALARS:
            self.steps -= shallow_size(value)
        if self.steps < 0:
            self.stop()
        return value

    def scanned(self, value: Any) -> Any:
        """The value, all of which is about to be looked at."""
        if type(value) is str:
            self.steps -= ELEMENT + len(value)
        elif type(value) not in SCALARS:
            self.steps -= deep_size(value, self._known, self.steps)
        if self.steps < 0:
            self.stop()
        return value

    def searched(self, value: Any) -> Any:
        """The value, in which something is about to be looked for."""
        return value if type(value) is dict else self.scanned(value)

    def text(self, value: Any) -> str:
        """What is written of a value."""
        return str(self.scanned(value))

    def joined(self, values: tuple[Any, ...]) -> str:
        return "".join(map(self.text, values))

    # ── Operators ────────────────────────────────────────────────────────────────────────────────────────────

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _NAMES_OF_DICT:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is tuple:
            self.scanned(argument)
        elif type(obj) is dict or type(argument) is int:
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str):
                self._count_percent(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise OverflowError(f"integers have at most {_MAX_BITS} bits")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    self.count(shallow_size(many) * max(0, times))
        return self.binop_table[operator](left, right)

    def added(self, first: Any, *summands: Any) -> Any:
        """The sum, one after the other; texts and lists are counted before."""
        for one in summands:
            if type(first) is str and type(one) is str:
                self.steps -= ELEMENT + len(first) + len(one)
            else:
                self.steps -= shallow_size(first) + shallow_size(one)
            if self.steps < 0:
                self.stop()
            first = first + one
        return first

    def _count_percent(self, text: str, values: Any) -> None:
        self.count(len(text))
        size, specifiers = deep_size(values, self._known, self.steps), 0
        for match in _PERCENT.finditer(text):
            specifiers += 1
            for width in match.groups():
                if width == "*" or len(width or "") > 4:
                    raise ValueError("the widths of a format have at most four digits")
                self.count(int(width or 0))
        self.count(specifiers * size)

    # ── Calls ────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.count(ELEMENT * (2 + len(args) + len(kwargs)))
        if type(function) is Macro:
            return self.made(context.call(function, *args, **kwargs))
        owner = getattr(function, "__self__", None)
        if owner is None or owner is self:
            return self.made(super().call(context, function, *args, **kwargs))
        name = function.__name__
        if not (isinstance(owner, _Dict) and name == "fromkeys") and not any(
            isinstance(owner, kind) and name in names for kind, names in _METHODS
        ):
            raise SecurityError(f"{type(owner).__name__}.{name} is not there for chat templates")
        # Jinja's own, for functions that ask for them.
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return self.made(function(*self._counted_arguments(owner, name, args), **kwargs))

    def _counted_arguments(self, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, once what the method does with them is counted."""
        if isinstance(owner, str):
            if name == "join" and args:
                items = list(args[0])
                args = (items, *args[1:])
                self.count(len(owner) * len(items))
            elif name == "replace":
                self._count_replace(owner, *args[:2])
            elif name in _PADDING and args and isinstance(args[0], int) and args[0] > _MAX_WIDTH:
                raise ValueError(f"text is padded to at most {_MAX_WIDTH} characters")
        if not isinstance(owner, dict):
            self.scanned(owner)
        for argument in args:
            self.scanned(argument)
        return args

    def _count_replace(self, text: str, old: Any = "", new: Any = "") -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.count(len(text))
            self.count(text.count(old) * len(new))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text: Any = value.__self__
        if not isinstance(text, str):
            return None
        if value.__name__ == "format_map" or type(text) is not str:
            raise SecurityError(f"{type(text).__name__}.{value.__name__} is not there for chat templates")
        formatter = _Formatter(self)
        return lambda *args, **kwargs: formatter.vformat(text, args, kwargs)

    # ── Filters and tests ────────────────────────────────────────────────────────────────────────────────────

    def _counting_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            value = args[place]
            if name in _SCAN_ELEMENTS:
                self.made(value)
            elif name not in _SCAN_NOTHING:
                if isinstance(value, Iterator) and name != "tojson":
                    value = list(value)
                    args = (*args[:place], value, *args[place + 1 :])
                self.scanned(value)
            if kwargs or len(args) > place + 1:
                self.count(ELEMENT * (len(args) + len(kwargs)))
                self._check_arguments(name, value, args[place + 1 :], kwargs)
            return self.made(function(*args, **kwargs))

        return counting

    def _check_arguments(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises, or counts what the filter will do with them."""
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, int) and abs(argument) > _MAX_WIDTH and name not in _ANY_NUMBER:
                raise ValueError(f"numbers of the filter {name} are at most {_MAX_WIDTH}")
            if isinstance(argument, str) and len(argument) > _MAX_TEXT_ARGUMENT and name not in _ANY_TEXT:
                raise ValueError(f"texts of the filter {name} have at most {_MAX_TEXT_ARGUMENT} characters")
        attribute = kwargs.get("attribute")
        if isinstance(attribute, str) and len(attribute) > _MAX_TEXT_ARGUMENT:
            raise ValueError(f"an attribute's name has at most {_MAX_TEXT_ARGUMENT} characters")
        given = [*args, *kwargs.values()]
        if name == "replace":
            texts = [kwargs.get("s", value), *(str(one) for one in given if not isinstance(one, int))]
            self._count_replace(str(texts[0]), *texts[1:3])
        elif name == "join":
            separator = max((len(one) for one in given if isinstance(one, str)), default=0)
            self.count(separator * (len(value) if isinstance(value, Sized) else 1))
        elif name == "format":
            self._count_percent(str(value), given)
        elif name == "indent":
            width = max((len(one) if isinstance(one, str) else int(one) for one in given), default=0)
            self.count((1 + str(value).count("\n")) * width)
        elif name in ("batch", "slice"):
            self.count(ELEMENT * max((one for one in given if isinstance(one, int)), default=0))
        elif name == "sum" and any(not isinstance(one, int | float | str) for one in given):
            raise TypeError("the filter sum adds numbers")

    def _counting_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            for value in args[place:]:
                self.searched(value)
            return function(*args, **kwargs)

        return counting

    def _to_json(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if separators is not None and any(len(one) > ELEMENT for one in separators):
            raise ValueError(f"separators of JSON have at most {ELEMENT} characters")
        elements = deep_size(x, self._known, self.steps) // ELEMENT
        width = 0 if indent is None else len(indent) if isinstance(indent, str) else indent
        if elements * (width * min(elements, _MAX_WIDTH) + 2 * ELEMENT) <= self.steps:
            return json.dumps(
                x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )
        # Indentation may make much of it: count piece by piece.
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return "".join(self.made(piece) for piece in encoder.iterencode(x))


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: CountingEnvironment):
        super().__init__(environment)
        self._counter = environment

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(self._counter.scanned(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if any(len(width) > 4 for width in re.findall(r"\d+", format_spec)):
            raise ValueError("the widths of a format have at most four digits")
        return self._counter.made(super().format_field(value, format_spec))


class _Dict:
    """What templates know as `dict`."""

    def __init__(self, environment: CountingEnvironment):
        self._counter = environment

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        for argument in args:
            self._counter.scanned(argument)
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Without names that begin with an underscore, and without a text: it may refer to itself many times over."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"names in a namespace do not begin with an underscore, as {name!r} does")


def _refuse(message: Any) -> None:
    raise Refusal(str(message))


def _now(form: str) -> str:
    if len(form) > _MAX_TEXT_ARGUMENT:
        raise ValueError(f"a format of times has at most {_MAX_TEXT_ARGUMENT} characters")
    return datetime.now().strftime(form)
