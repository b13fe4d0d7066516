"""Proofs that an HTTP request and its answer are of processes with the run's secret. The secret never travels.

    request   HMAC(secret, "request" · nonce · method · path · range)       the nonce is the client's, and new
    answer    HMAC(secret, "answer" · nonce · path · status · content range)

A request that was seen on the way is of no use for another stream or another range. The server takes no nonce twice
for a stream.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from headrace.sync.transport.http_head import Request

_NONCE_BYTES = 16


class Credentials:
    """What either end needs of the secret."""

    def __init__(self, secret: str):
        self._key = secret.encode()

    def of_request(self, method: str, path: str, wanted: str | None) -> tuple[bytes, str]:
        """(the nonce, the value of `Authorization`)."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        proof = self._proof("request", nonce, method, path, wanted or "")
        return nonce, f"Headrace {nonce.hex()}:{proof.hex()}"

    def fits(self, request: Request) -> bool:
        """Whether whoever made the request has the secret."""
        proof = self._proof("request", request.nonce, request.method, request.path, request.range or "")
        return hmac.compare_digest(request.proof, proof)

    def of_answer(self, nonce: bytes, path: str, status: int, came: str) -> str:
        """The value of `Headrace-Proof`. `came` is that of `Content-Range`."""
        return self._proof("answer", nonce, path, str(int(status)), came).hex()

    def answers(self, nonce: bytes, path: str, status: int, given: str, came: str) -> bool:
        """Whether whoever answered the request with this nonce has the secret."""
        expected = self.of_answer(nonce, path, status, came)
        return hmac.compare_digest(given.encode("latin-1", "replace"), expected.encode())

    def _proof(self, *parts: str | bytes) -> bytes:
        """No part has a line break in it, but for the nonce, whose length is fixed."""
        said = b"\n".join(part if isinstance(part, bytes) else part.encode("latin-1", "replace") for part in parts)
        return hmac.digest(self._key, said, hashlib.sha256)
