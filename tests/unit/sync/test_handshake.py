from __future__ import annotations

import hashlib
import hmac
import struct

import pytest

from headrace.sync.transport.handshake import (
    ANSWER_BYTES,
    CALL_BYTES,
    GREETING_BYTES,
    WORD,
    Answer,
    CallerSide,
    Claim,
    HandshakeError,
    ListenerSide,
    make_secret,
)

SECRET = make_secret()
CLAIM = Claim(2**64 - 1, 3, 1)


@pytest.mark.parametrize("answer", Answer)
@pytest.mark.parametrize("size", [1, 33, 4096])
def test_two_with_the_secret_believe_each_other(answer: Answer, size: int) -> None:
    listener, caller = ListenerSide(SECRET), CallerSide(SECRET, CLAIM)
    call = caller.call(listener.greeting)
    heard = [listener.receive(call[at : at + size]) for at in range(0, len(call), size)]
    assert heard == [*[None] * (len(heard) - 1), CLAIM]
    assert caller.conclude(listener.answer(answer)) is answer
    assert (len(listener.greeting), len(call), len(listener.answer(answer))) == (43, 80, 33)
    assert (GREETING_BYTES, CALL_BYTES, ANSWER_BYTES) == (43, 80, 33)


def test_the_proofs_are_hmacs_over_both_nonces_and_the_claim() -> None:
    listener, caller = ListenerSide(SECRET), CallerSide(SECRET, CLAIM)
    call = caller.call(listener.greeting)
    nonce, said = listener.greeting[len(WORD) :], call[:48]
    assert said[32:] == struct.pack("<QII", *CLAIM)
    assert call[48:] == hmac.new(SECRET.encode(), b"caller" + nonce + said, hashlib.sha256).digest()
    listener.receive(call)
    expected = hmac.new(SECRET.encode(), b"listener" + nonce + said + b"w", hashlib.sha256).digest()
    assert listener.answer(Answer.WELCOME) == b"w" + expected


def test_a_secret_is_32_bytes_and_new_each_time() -> None:
    assert len(bytes.fromhex(make_secret())) == 32
    assert len({make_secret() for _ in range(100)}) == 100


@pytest.mark.parametrize("at", range(CALL_BYTES))
def test_a_call_with_one_wrong_bit_is_refused(at: int) -> None:
    listener = ListenerSide(SECRET)
    call = bytearray(CallerSide(SECRET, CLAIM).call(listener.greeting))
    call[at] ^= 1
    with pytest.raises(HandshakeError, match="not of this run's secret"):
        listener.receive(bytes(call))


@pytest.mark.parametrize("at", range(ANSWER_BYTES))
def test_an_answer_with_one_wrong_bit_is_not_believed(at: int) -> None:
    listener, caller = ListenerSide(SECRET), CallerSide(SECRET, CLAIM)
    listener.receive(caller.call(listener.greeting))
    answer = bytearray(listener.answer(Answer.WELCOME))
    answer[at] ^= 1
    with pytest.raises(HandshakeError, match="does not have this run's secret"):
        caller.conclude(bytes(answer))


def test_a_call_of_another_connection_is_refused() -> None:
    first, second = ListenerSide(SECRET), ListenerSide(SECRET)
    call = CallerSide(SECRET, CLAIM).call(first.greeting)
    assert first.receive(call) == CLAIM
    with pytest.raises(HandshakeError):
        second.receive(call)


def test_what_one_side_says_is_no_proof_when_it_is_sent_back() -> None:
    listener, caller = ListenerSide(SECRET), CallerSide(SECRET, CLAIM)
    call = caller.call(listener.greeting)
    with pytest.raises(HandshakeError):
        caller.conclude(b"w" + call[48:])
    assert listener.receive(call) == CLAIM
    with pytest.raises(HandshakeError):
        ListenerSide(SECRET).receive(call[:48] + listener.answer(Answer.WELCOME)[1:])


def test_more_than_a_call_is_refused_at_once_and_not_kept() -> None:
    listener = ListenerSide(SECRET)
    assert listener.receive(b"x" * 79) is None
    with pytest.raises(HandshakeError, match="more than 80 bytes"):
        listener.receive(b"xx")


@pytest.mark.parametrize(
    "greeting", [b"", b"HTTP/1.1 400 Bad Request", b"x" * 43, WORD + bytes(31), WORD + bytes(33)]
)
def test_a_greeting_of_something_else_is_not_answered(greeting: bytes) -> None:
    with pytest.raises(HandshakeError, match="does not speak as"):
        CallerSide(SECRET, CLAIM).call(greeting)
