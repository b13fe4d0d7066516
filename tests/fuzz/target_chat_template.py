"""Chat templates, as texts and by the grammar. They end soon, with a text or a ModelFolderError."""

from __future__ import annotations

from random import Random

from folder_inputs import check_message

from headrace.chat_template import ChatTemplate, environment
from headrace.errors import ModelFolderError

declared = (ModelFolderError,)
longest = 1 << 13
# One step in a hundred, to try more inputs.
environment.MAX_STEPS //= 100
environment.STEPS_PER_INPUT //= 16
watched = ("headrace.chat_template.environment", "headrace.chat_template.sizes")
_TALK = [
    {"role": "system", "content": "Be brief. ✓"},
    {"role": "user", "content": "  <b>2 + 2</b>?\n\n", "parts": [{"type": "text", "text": "x"}, None, 1.5]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4"},
]
_NAMES = (
    "messages",
    "message",
    "loop",
    "x",
    "y",
    "ns",
    "ns.x",
    "messages[0]",
    "message.content",
    "undefined",
    "m",
    "self",
)
_VALUES = (
    "'ab'",
    "''",
    "0",
    "1",
    "7",
    "99",
    "99999",
    "10**9",
    "1.5",
    "-1",
    "none",
    "true",
    "[]",
    "[1, 2]",
    "{}",
    "(1, 2)",
    "'%9999d'",
    "'%s%s'",
    "'%(a)s'",
    "'{0:9999}'",
    "'{0}{0}'",
    "{'a': 1}",
    "range(99999)",
    "'\\n'",
    "'😀'",
    "messages",
    "dict(a=1)",
    "namespace(a=1)",
    "cycler(1, 2)",
    "joiner(',')",
    "range(9)",
)
_FILTERS = (
    "abs",
    "attr('role')",
    "batch(3)",
    "batch(4096, 'x')",
    "capitalize",
    "center(4096)",
    "default('x')",
    "dictsort",
    "escape",
    "first",
    "float",
    "format('x')",
    "groupby('role')",
    "indent(4096)",
    "indent('xx', true)",
    "int",
    "items",
    "int(base=16)",
    "join",
    "join('x')",
    "join(attribute='role')",
    "last",
    "length",
    "list",
    "lower",
    "map('upper')",
    "map(attribute='role')",
    "max",
    "min",
    "reject",
    "rejectattr('role')",
    "replace('', 'xx')",
    "replace('a', x)",
    "reverse",
    "round(3)",
    "round(4000)",
    "safe",
    "select('string')",
    "select('in', x)",
    "slice(9)",
    "sort",
    "string",
    "selectattr('role', 'equalto', 'user')",
    "sort(attribute='role')",
    "sum",
    "sum(start=[])",
    "sum(attribute='x')",
    "title",
    "tojson",
    "tojson(indent=4)",
    "tojson(indent=4096)",
    "trim",
    "truncate(9)",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "filesizeformat",
    "map('join', 'x')",
    "map('replace', '', 'xx')",
    "map('list')",
)
_METHODS = (
    "split()",
    "split('a')",
    "strip()",
    "replace('', 'xx')",
    "replace('a', x)",
    "join(x)",
    "join(messages)",
    "items()",
    "center(4096)",
    "zfill(9999)",
    "format(x)",
    "format(x, y=1)",
    "count('a')",
    "startswith('a')",
    "get('role')",
    "keys()",
    "values()",
    "copy()",
    "append(1)",
    "encode()",
    "index(1)",
    "upper()",
    "to_bytes(9, 'big')",
    "role",
    "next()",
    "cycle(1, 2)",
    "changed(x)",
    "fromkeys(x)",
    "__class__",
    "splitlines()",
    "rsplit('a', 1)",
    "length",
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or", "is")
_TESTS = ("defined", "none", "string", "in x", "sameas x", "divisibleby 3", "eq 'a'", "iterable", "mapping", "odd")
dictionary = tuple(
    text.encode()
    for text in (
        *_NAMES,
        *_VALUES,
        *(f"|{one}" for one in _FILTERS),
        *(f".{one}" for one in _METHODS),
        *_OPERATORS,
        "{{ ",
        " }}",
        "{% ",
        " %}",
        "{%- ",
        "-%}",
        "{# ",
        " #}",
        "{% for x in x recursive %}",
        "{{ loop(x) }}",
        "{% endfor %}",
        "{% if ",
        "{% else %}",
        "{% endif %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set x = [x, x] %}",
        "{% break %}",
        "{% macro m(x, y=x) %}",
        "{% endmacro %}",
        "{{ m(x) }}",
        "{% call m(x) %}",
        "{{ caller() }}",
        "{% endcall %}",
        "{% filter upper %}",
        "{% endfilter %}",
        "{% set x %}",
        "{% endset %}",
        "{% block b %}",
        "{{ self.b() }}",
        "{% endblock %}",
        "{% generation %}",
        "{% endgeneration %}",
        "{% raw %}",
        "{% endraw %}",
        "{% with x = 1 %}",
        "{% autoescape true %}",
        "{% include 'x' %}",
        "{% extends 'x' %}",
        "{% import 'x' as y %}",
        "{% continue %}",
    )
)


def corpus() -> list[bytes]:
    texts = [
        "{% for message in messages %}<|{{ message.role }}|>{{ message['content'] | trim }}\n{% endfor %}",
        "{%- set ns = namespace(x='ab') -%}{%- for x in range(40) -%}{%- set ns.x = ns.x + ns.x -%}{%- endfor -%}",
        "{% macro m(x) %}{% if x %}{{ m(x - 1) }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(30) }}",
        "{% for x in range(99999) %}{% for y in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{{ messages | tojson(indent=2) }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{{ 'x' * 999999 }}{{ 2 ** 4000 }}{{ '%999d' % 1 }}{{ '{:999}'.format(1) }}{{ messages[::-1] }}",
        "{% if messages[0].role != 'user' %}{{ raise_exception('no: ' + messages[0].role) }}{% endif %}",
        "{% for x in messages recursive %}{{ loop.index }}{{ loop(x.parts or []) }}{% endfor %}",
        "{{ strftime_now('%Y') }}",
    ]
    return [text.encode() for text in texts]


def run(data: bytes) -> None:
    try:
        source = data.decode("utf-8")
    except UnicodeDecodeError:
        source = data.decode("latin-1")
    template = ChatTemplate(source, "chat_template.jinja")
    try:
        template.render(_TALK, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
    except ModelFolderError as error:
        check_message(str(error))
        raise


def mutate(data: bytes, random: Random) -> bytes:
    """With another statement or expression somewhere between."""
    text = data.decode("utf-8", "replace")
    ends = [
        place for place in range(len(text) + 1) if text[:place].endswith(("%}", "}}")) or place in (0, len(text))
    ]
    start, end = sorted((random.choice(ends), random.choice(ends)))
    inside = text[start:end] if random.random() < 0.5 else ""
    return (text[:start] + _statement(random, 0, inside) + (text[end:] if inside else text[start:])).encode()


def generate(random: Random) -> bytes:
    setup = "{% set ns = namespace(x='ab', y=[1]) %}{% set x = " + random.choice(_VALUES) + " %}"
    return (setup + "".join(_statement(random, 0) for _ in range(random.randint(1, 5)))).encode()


def _statement(random: Random, depth: int, inside: str = "") -> str:
    if depth > 3:
        return "{{ " + _expression(random, 0) + " }}"
    if not inside and random.random() < 0.8:
        inside = "".join(_statement(random, depth + 1) for _ in range(random.randint(0, 2)))
    value = _expression(random, 0)
    return random.choice(
        (
            "{{ " + value + " }}" + inside,
            "{% for x in " + value + " %}" + inside + "{% endfor %}",
            "{% for x in range(99999) %}" + inside + "{% endfor %}",
            "{% for x in messages if " + value + " %}" + inside + "{% endfor %}",
            "{% if " + value + " %}" + inside + "{% else %}" + inside + "{% endif %}",
            "{% set x = " + value + " %}" + inside,
            "{% set ns.x = " + value + " %}" + inside,
            "{% set x %}" + inside + "{% endset %}",
            "{% macro m(x, y=" + value + ") %}" + inside + "{{ caller }}{% endmacro %}{{ m(" + value + ") }}",
            "{% call m(" + value + ") %}" + inside + "{% endcall %}",
            "{% filter " + random.choice(_FILTERS) + " %}" + inside + "{% endfilter %}",
            "{% generation %}" + inside + "{% endgeneration %}",
        )
    )


def _expression(random: Random, depth: int) -> str:
    kind = random.random() if depth < 4 else 0.0
    if kind < 0.3:
        return random.choice((*_NAMES, *_VALUES))
    one = _expression(random, depth + 1)
    if kind < 0.5:
        return f"{one} | {random.choice(_FILTERS)}"
    if kind < 0.65:
        return f"({one}).{random.choice(_METHODS)}"
    if kind < 0.72:
        return f"({one})[{random.choice((':', '1:', '::-1', '0', ':-1', 'x'))}]"
    if kind < 0.78:
        return random.choice(
            (f"[{one}, x, x]", f"{{x: {one}}}", f"({one}, x)", f"m({one})", f"({one} if x else y)")
        )
    if kind < 0.84:
        return f"({one}) is {random.choice(_TESTS)}"
    return f"({one}) {random.choice(_OPERATORS)} ({_expression(random, depth + 1)})"
