"""What finds those forgeries that records alone do not find: a replay, a digest, or nothing at all."""

from __future__ import annotations

EXPECTED: dict[str, str] = {}
