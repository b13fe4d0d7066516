"""TOML from strangers: what `tomllib` reads, within limits that keep its time and memory small."""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_BYTES = 128 << 10
"""A configuration of this size has thousands of keys; the time to read one grows with its size."""
MAX_KEY_PARTS = 16
"""The memory that a dotted key takes grows with the square of its parts: 130,000 of them take 60 GB."""

_QUOTED = re.compile(
    r'''#[^\n]*+|"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?|"(?:[^"\\\n]|\\.)*+"?'''
    r"""|'''(?:[^']|'(?!''))*+(?:''')?|'[^'\n]*+'?""",
    re.DOTALL,
)
"""Comments and texts, which may have as many dots as they like. One that does not end is a text to the end of its
line, or of all, so that no place is looked at twice."""
# No part is looked for within a word, or the search would take a time that grows with the square of its length.
_PART = r"(?<![\w-])[\w-]++"
_LONG_KEY = re.compile(rf"{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_KEY_PARTS}}}")


def _placeholder(quoted: re.Match[str]) -> str:
    """One word for a quoted text, which may be a part of a key; the lines are as many as before."""
    return ("" if quoted[0].startswith("#") else "x") + "\n" * quoted[0].count("\n")


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError, with the rule, for what is no TOML or beyond the limits."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has at most {MAX_BYTES:,} characters, here {len(text):,}")
    plain = _QUOTED.sub(_placeholder, text)
    if long_key := _LONG_KEY.search(plain):
        line = plain.count("\n", 0, long_key.start()) + 1
        raise ValueError(f"a key has at most {MAX_KEY_PARTS} parts (at line {line})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its arrays and tables are nested too deep") from None
