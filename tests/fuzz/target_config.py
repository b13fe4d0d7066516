"""A configuration's file and `--set` overrides. What is accepted is dumped, and reads back as the same.

An input is the file's bytes; where it has a line of `#--set`, what follows, line by line, are overrides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from headrace.config.dump import dump_config
from headrace.config.load import read_config
from headrace.config.schema import all_keys
from headrace.errors import InputError

declared = (InputError,)
longest = 1 << 15
_SEPARATOR = b"\n#--set\n"
_REPOSITORY = Path(__file__).resolve().parents[2]
_LONGEST_MESSAGE = 4000

_ODD_VALUES = (
    "0", "1", "-1", "2.5", "true", '""', '"x"', '"bounded"', "nan", "inf", "-inf", "1e999", "9223372036854775808",
    "1" * 400, "1" * 5000, "0x" + "f" * 100, "[]", "[[]]", "{}", '{type = "jsonl"}', "1979-05-27", "07:32:00",
    "1979-05-27T07:32:00Z", '"\\u0000"', '"a\\u0000b"', "'''x'''", "[1, 2, 3]", '["a", 1]', "[" * 300 + "]" * 300,
    "1000000000", "1000000000000", "-0.0", "1e308", "5e-324", "{" * 30, "'", '"' + "x" * 3000 + '"',
)  # fmt: skip


def _paths() -> list[str]:
    """Dotted keys, where a variant's tag in brackets is left out."""
    paths = []
    for key in all_keys():
        parts = [part.split("[")[0] for part in key.path.split(".")]
        paths.append(".".join(parts))
    return sorted(set(paths))


_PATHS = _paths()
dictionary = (
    *(path.encode() for path in _PATHS[::3]),
    *(value.encode() for value in _ODD_VALUES),
    b"\n[", b"]\n", b" = ", b"\n[[", b"]]\n", b".", b'"""', b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\r", _SEPARATOR,
    b"\\ud800", b"\\U00110000",
)  # fmt: skip


def corpus() -> list[bytes]:
    files = [file.read_bytes() for file in sorted((_REPOSITORY / "examples").rglob("*.toml"))]
    least = b'model.path = "m"\ntasks = {type = "jsonl", path = "t"}\n'
    overrides = [f"{path}={value}".encode() for path in _PATHS for value in ("0", "1", "true", '"x"')]
    return [*files, least, b"", *(least + _SEPARATOR + one for one in overrides)]


@contextmanager
def session() -> Iterator[None]:
    global _file
    with tempfile.TemporaryDirectory() as folder:
        _file = Path(folder) / "run.toml"
        yield


_file = Path("run.toml")


def run(data: bytes) -> None:
    text, _, rest = data.partition(_SEPARATOR)
    # The system hands arguments over with what is not UTF-8 as lone surrogates; a NUL cannot be in one.
    overrides = [line.decode("utf-8", "surrogateescape") for line in rest.replace(b"\0", b"").split(b"\n") if line]
    _file.write_bytes(text)
    try:
        config = read_config(_file, overrides)
    except InputError as error:
        _check_text(str(error))
        raise
    _file.write_bytes(dump_config(config).encode("utf-8"))
    assert read_config(_file) == config, "a dumped configuration reads back as another"


def _check_text(text: str) -> None:
    assert len(text) <= _LONGEST_MESSAGE, f"a message of {len(text)} characters"


def mutate(data: bytes, random: Random) -> bytes:
    """One more key, in the file or as an override, with a value that is likely to be odd."""
    line = (
        f"{random.choice(_PATHS)}{random.choice(('', '', '', '.x', '.type'))}={random.choice(_ODD_VALUES)}".encode()
    )
    text, separator, rest = data.partition(_SEPARATOR)
    if random.random() < 0.5:
        return text + _SEPARATOR + line + b"\n" + rest
    lines = text.split(b"\n")
    lines.insert(random.randint(0, len(lines)), line)
    return b"\n".join(lines) + separator + rest


def generate(random: Random) -> bytes:
    """A file with what is required, and a few keys of values that are as the schema says, or nearly."""
    lines = ['model.path = "m"', 'tasks = {type = "jsonl", path = "t"}']
    for path in random.sample(_PATHS, random.randint(0, 12)):
        lines.append(f"{path} = {random.choice(_ODD_VALUES)}")
    split = random.randint(2, len(lines))
    file, overrides = lines[:split], lines[split:]
    random.shuffle(file)
    return "\n".join(file).encode() + _SEPARATOR + "\n".join(overrides).encode()
