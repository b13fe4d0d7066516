"""Stages 1 to 3 of a publication in an engine's process, on a thread of their own beside generation.

The same thread tells the checksums of what is served.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from headrace.engine.messages import Announce, AskFingerprint, Ok, TellFingerprint, Transfer, Verify
from headrace.errors import HeadraceError, SyncError
from headrace.ipc import error_to_record
from headrace.sync.base import Manifest

if TYPE_CHECKING:
    from headrace.engine.native.core import NativeEngine
    from headrace.sync import Receiver


class StandbyThread:
    """What is announced, what has arrived, what is verified. A swap takes what is verified."""

    def __init__(self, engine: NativeEngine, receiver: Receiver, answer: Callable[[Any], None]):
        self._engine = engine
        self._receiver = receiver
        self._answer = answer
        self._manifest: Manifest | None = None
        self._buffers: Mapping[str, Any] = {}
        """Where what was announced goes, until it is swapped in or forgotten."""
        self._verified = False
        self._served: dict[str | None, Manifest] = {}
        """What was swapped in last, by adapter; None: of the model itself."""
        self._in_stage = threading.Lock()
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="headrace-sync", daemon=True).start()

    def take(self, record: Any) -> bool:
        if isinstance(record, Announce | Transfer | Verify | AskFingerprint):
            self._work.put(record)
            return True
        return False

    def require_verified(self, number: int) -> Manifest:
        """What was announced as this version, all of it in standby."""
        manifest = self._manifest
        if manifest is None or not self._verified or manifest.version.number != number:
            has = None if manifest is None or not self._verified else manifest.version.number
            raise SyncError(
                "swap", self._engine.name, f"version {number} is not verified in standby (it has {has})"
            )
        return manifest

    @property
    def adapter(self) -> str | None:
        """Of what was announced; None: it is the model itself."""
        manifest = self._manifest
        return None if manifest is None or manifest.adapter is None else manifest.adapter.name

    @contextmanager
    def at_rest(self, what: str) -> Iterator[None]:
        """No stage begins within, so nobody writes to the standby buffers. Refused while one is under way."""
        if not self._in_stage.acquire(blocking=False):
            raise SyncError(what, self._engine.name, "a version is being announced, transferred or verified")
        try:
            yield
        finally:
            self._in_stage.release()

    def swapped(self) -> None:
        """What was verified is served now."""
        assert self._manifest is not None
        self._served[self.adapter] = self._manifest
        self.forget()

    def let_go(self) -> None:
        """Forget, and hold no buffer any more: the engine gives their memory back."""
        self.forget()
        self._receiver.forget()

    def forget(self) -> None:
        self._manifest, self._buffers, self._verified = None, {}, False

    def _run(self) -> None:
        with _own_stream(self._engine):
            while True:
                record = self._work.get()
                try:
                    with self._in_stage:
                        answer = (
                            self._fingerprint(record) if isinstance(record, AskFingerprint) else self._stage(record)
                        )
                    self._answer(answer)
                except Exception as error:
                    self._answer(error_to_record(record.call, error))
                else:
                    if isinstance(record, Transfer):
                        self._look()

    def _stage(self, record: Any) -> Ok:
        engine, receiver = self._engine, self._receiver
        if isinstance(record, Announce):
            self.forget()
            adapter = record.manifest.adapter
            buffers = engine.standby if adapter is None else engine.adapter_standby(adapter)
            receiver.check(record.manifest, buffers, has=engine.version)
            self._manifest, self._buffers = record.manifest, buffers
            return Ok(call=record.call)
        number = record.seal.number if isinstance(record, Verify) else record.number
        manifest = self._manifest
        if manifest is None or manifest.version.number != number:
            stage = type(record).__name__.lower()
            raise SyncError(stage, engine.name, f"version {number} was not announced")
        self._verified = False
        if isinstance(record, Transfer):
            receiver.receive(manifest, self._buffers, has=engine.version, refresh=engine.refresh_standby)
        else:
            receiver.verify(manifest, record.seal, self._buffers)
            self._verified = True
        return Ok(call=record.call)

    def _look(self) -> None:
        """While the controller hears that a version has arrived, and sends its seal. What fails here fails again
        when it is to be verified, and is answered then."""
        with self._in_stage, suppress(SyncError, RuntimeError):
            if self._manifest is not None:
                self._receiver.look(self._manifest, self._buffers)

    def _fingerprint(self, record: AskFingerprint) -> TellFingerprint:
        manifest = self._served.get(record.adapter)
        if manifest is None:
            what = "the model" if record.adapter is None else f"adapter {record.adapter!r}"
            rule = f"a fingerprint is of a version that was swapped in ({self._engine.name}, {what})"
            raise HeadraceError(rule, "none", "publish one first")
        seal = self._receiver.fingerprint(manifest, self._engine.live(record.adapter))
        return TellFingerprint(call=record.call, seal=seal)


def _own_stream(engine: NativeEngine) -> Any:
    """What arrives is copied beside the passes, not between them."""
    import torch

    if engine.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(engine.device))
