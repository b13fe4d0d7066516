"""What a call of the command line gives back."""

from typing import NamedTuple


class Answer(NamedTuple):
    code: int
    out: str
    err: str
