"""Two processes prove to each other that they have a run's secret, before either trusts a connection.

    listener (the trainer)                               caller (an engine)
    WORD · nonce L                            ──▶
                              ◀──   nonce C · claim · HMAC(secret, "caller" · L · C · claim)
    answer · HMAC(secret, "listener" · L · C · claim · answer)   ──▶

The secret itself never travels, and nonces are fresh for every connection, so what was seen on the way is of no use
for another one. Messages have fixed lengths: nobody can announce a longer one. No sockets here: whoever has bytes
calls `receive`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from enum import Enum
from typing import NamedTuple

WORD = b"headrace/1 "
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CLAIM = struct.Struct("<QII")
GREETING_BYTES = len(WORD) + _NONCE_BYTES
CALL_BYTES = _NONCE_BYTES + _CLAIM.size + _PROOF_BYTES
ANSWER_BYTES = 1 + _PROOF_BYTES


class Claim(NamedTuple):
    """The place in a group that a caller comes for. Each number is not negative."""

    group: int
    """Below 2 ** 64."""
    rank: int
    lane: int
    """Both below 2 ** 32."""


class Answer(Enum):
    WELCOME = b"w"
    TAKEN = b"t"
    """Somebody with the secret is in that place."""
    GONE = b"g"
    """There is no such place, or not any more."""


class HandshakeError(Exception):
    """The other end has not shown that it has the secret."""


def make_secret() -> str:
    """32 random bytes in hexadecimal digits."""
    return secrets.token_bytes(32).hex()


class ListenerSide:
    """One connection's handshake, as the listener sees it."""

    def __init__(self, secret: str):
        self._key = secret.encode()
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._got = b""
        self.greeting = WORD + self._nonce
        """What the listener sends first."""

    def receive(self, data: bytes) -> Claim | None:
        """The caller's claim once it is whole and proved; None while bytes are missing. Raises HandshakeError."""
        if len(self._got) + len(data) > CALL_BYTES:
            raise HandshakeError(f"more than {CALL_BYTES} bytes came before an answer")
        self._got += data
        if len(self._got) < CALL_BYTES:
            return None
        said, proof = self._got[:-_PROOF_BYTES], self._got[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._key, b"caller", self._nonce, said)):
            raise HandshakeError("the proof is not of this run's secret")
        return Claim(*_CLAIM.unpack(said[_NONCE_BYTES:]))

    def answer(self, answer: Answer) -> bytes:
        """What to send to a caller whose claim was proved."""
        said = self._got[:-_PROOF_BYTES]
        return answer.value + _proof(self._key, b"listener", self._nonce, said + answer.value)


class CallerSide:
    """One connection's handshake, as the caller sees it."""

    def __init__(self, secret: str, claim: Claim):
        self._key = secret.encode()
        self._said = secrets.token_bytes(_NONCE_BYTES) + _CLAIM.pack(*claim)
        self._nonce = b""

    def call(self, greeting: bytes) -> bytes:
        """What to send in reply to the listener's first GREETING_BYTES. Raises HandshakeError."""
        if len(greeting) != GREETING_BYTES or not greeting.startswith(WORD):
            raise HandshakeError("what listens there does not speak as a Headrace trainer does")
        self._nonce = greeting[len(WORD) :]
        return self._said + _proof(self._key, b"caller", self._nonce, self._said)

    def conclude(self, reply: bytes) -> Answer:
        """What the listener's last ANSWER_BYTES say. Raises HandshakeError."""
        answer, proof = reply[:1], reply[1:]
        if not hmac.compare_digest(proof, _proof(self._key, b"listener", self._nonce, self._said + answer)):
            raise HandshakeError("what listens there does not have this run's secret")
        try:
            return Answer(answer)
        except ValueError:
            raise HandshakeError(f"{answer!r} is no answer") from None


def _proof(key: bytes, role: bytes, nonce: bytes, said: bytes) -> bytes:
    """All parts but the last have one length for each role, so no two inputs look alike."""
    return hmac.digest(key, role + nonce + said, hashlib.sha256)
