"""Heads of HTTP requests, read strictly: what is not one of ours is refused, and nothing is kept of it.

    GET /streams/<name> HTTP/1.1
    Authorization: Headrace <32 hexadecimal digits>:<64 of them>
    Range: bytes=<first>-<last>

Other header fields are allowed and not looked at. No sockets here: whoever has bytes calls `receive`.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import NamedTuple

HEAD_BYTES = 4096
"""Longest head of a request; ours have about 300."""
_FIRST_LINE = re.compile(rb"(GET|HEAD) (/[!-~]{0,255}) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}):[ \t]*([\x20-\x7e\x80-\xff]*)")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")
_AUTHORIZATION = re.compile(r"Headrace ([0-9a-f]{32}):([0-9a-f]{64})")


class BadRequestError(Exception):
    """These bytes are no request of ours."""

    def __init__(self, why: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST):
        super().__init__(why)
        self.status = status


class Request(NamedTuple):
    method: str
    path: str
    range: str | None
    nonce: bytes
    """Empty without an authorization of ours."""
    proof: bytes
    last: bool
    """The connection is to be closed after the answer."""


class HeadReader:
    """Collects one request's head."""

    def __init__(self) -> None:
        self._got = b""

    def receive(self, data: bytes) -> Request | None:
        """The request once its head is whole; None while bytes are missing. Raises BadRequestError."""
        self._got += data[: HEAD_BYTES + 1]
        head, end, rest = self._got.partition(b"\r\n\r\n")
        if len(head) + len(end) > HEAD_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise BadRequestError(f"a head of more than {HEAD_BYTES} bytes", status)
        if not end:
            return None
        if rest:
            raise BadRequestError("bytes came behind a head; requests have no bodies, and each awaits its answer")
        return _parsed(head)


def range_of(text: str | None, nbytes: int) -> tuple[int, int]:
    """(first, last), as asked for of so many bytes; (-1, -1) where it makes no sense."""
    if text is None:
        return 0, nbytes - 1
    if (found := _RANGE.fullmatch(text)) is None:
        return -1, -1
    return int(found[1]), min(int(found[2] or nbytes), nbytes - 1)


def _parsed(head: bytes) -> Request:
    first, *lines = head.split(b"\r\n")
    begun = _FIRST_LINE.fullmatch(first)
    if begun is None:
        raise BadRequestError("the first line is no request for a stream")
    fields: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise BadRequestError("a line of the head is no header field")
        name = field[1].decode("ascii").lower()
        if name in fields:
            raise BadRequestError("a header field came twice")
        fields[name] = field[2].decode("latin-1").strip(" \t")
    if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
        raise BadRequestError("requests have no bodies")
    proof = _AUTHORIZATION.fullmatch(fields.get("authorization", ""))
    return Request(
        method=begun[1].decode("ascii"),
        path=begun[2].decode("ascii"),
        range=fields.get("range"),
        nonce=bytes.fromhex(proof[1]) if proof else b"",
        proof=bytes.fromhex(proof[2]) if proof else b"",
        last=begun[3] == b"0" or fields.get("connection", "").lower() == "close",
    )
