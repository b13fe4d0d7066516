"""Everything Headrace raises, in one tree. Each error states the rule, the offending value and the remedy.

HeadraceError
├── InputError                 the user can fix it before anything runs (exit code 2)
│   ├── ConfigError            a configuration breaks a rule
│   ├── ModelFolderError       a model folder is missing, damaged or of an unknown architecture
│   ├── BadReference           "module:Name" or "file.py:Name" does not lead to an object
│   ├── RunFolderError         a run's folder is missing, incomplete or already in use
│   └── MissingExtra           an optional dependency is not installed
├── RecordError                a record breaks its own invariants
│   ├── TruncatedMessage       fewer bytes than the message announces
│   ├── CorruptMessage         not a Headrace message, or its checksum is wrong
│   └── NewerMessage           written by a newer encoding than this one
├── EpisodeFailure             costs one episode, never the run; its `reason` goes to the ledger
├── SyncError                  a publication failed at a stage; the engine kept its old version
│   └── Superseded             the version to be published has been replaced by a later one
├── ComponentDied              a process of the run ended when it should not have
├── DeadlineExceeded           a wait passed its deadline: who waited, for whom, how long
├── GaveUp                     nothing that the run samples can be trained on; it ended in order
└── LawBroken                  one of the laws does not hold; always a bug, never retried
"""

from __future__ import annotations

import reprlib

QUOTED_CHARS = 200
"""Most characters of a value, or of another error's text, that an error quotes."""


def short(text: object) -> str:
    """The text, cut where it is too long to quote."""
    whole = str(text)
    return whole if len(whole) <= QUOTED_CHARS else f"{whole[:QUOTED_CHARS]}… ({len(whole):,} characters)"


def quoted(value: object) -> str:
    """The value as Python writes it, cut where it is too long to quote."""
    if isinstance(value, str | bytes) and len(value) > QUOTED_CHARS:
        return f"{value[:QUOTED_CHARS]!r}… ({len(value):,} {'characters' if isinstance(value, str) else 'bytes'})"
    try:
        return short(repr(value))
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or lists too deep to be written.
        return f"a value of type {type(value).__name__} that is too large to be written"


def brief(value: object) -> object:
    """The value where it is short, otherwise the beginning of what it is written as. However large or deep it is,
    little memory is needed."""
    if isinstance(value, str):
        return short(value)
    form = reprlib.Repr()
    form.maxlevel, form.maxlist, form.maxtuple, form.maxdict, form.maxset = 4, 8, 8, 8, 8
    form.maxstring = form.maxlong = form.maxother = QUOTED_CHARS
    text = form.repr(value)
    return value if len(text) <= QUOTED_CHARS and "..." not in text else short(text)


class HeadraceError(Exception):
    """Base of the tree. `rule`, `value` and `remedy` survive pickling and travel between processes."""

    exit_code = 1

    def __init__(self, rule: str, value: object = None, remedy: str | None = None):
        super().__init__(rule, value, remedy)
        self.rule = rule
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        text = self.rule
        if self.value is not None:
            text += f" (got {quoted(self.value)})"
        if self.remedy:
            text += f"; {self.remedy}"
        return text


class InputError(HeadraceError):
    """Bad input or configuration: the command line answers with exit code 2."""

    exit_code = 2


class ConfigError(InputError):
    pass


class ModelFolderError(InputError):
    """A folder may be a stranger's: the error holds little of what it quotes."""

    def __init__(self, rule: str, value: object = None, remedy: str | None = None):
        super().__init__(short(rule), brief(value), None if remedy is None else short(remedy))


class BadReference(InputError):
    pass


class RunFolderError(InputError):
    pass


class MissingExtra(InputError):
    def __init__(self, package: str, extra: str):
        super().__init__(
            f"this needs the package {package!r}, which is not installed",
            remedy=f"install it with: pip install 'headrace[{extra}]'",
        )
        self.args = (package, extra)


class RecordError(HeadraceError):
    pass


class TruncatedMessage(RecordError):
    pass


class CorruptMessage(RecordError):
    pass


class NewerMessage(RecordError):
    pass


class EpisodeFailure(HeadraceError):
    """One episode cannot go on. `reason` is a short word that the ledger counts by."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.args = (reason, detail)
        self.reason = reason
        self.detail = detail


class SyncError(HeadraceError):
    """A publication failed. `stage` is announce, transfer, verify, swap or acknowledge."""

    def __init__(self, stage: str, who: str, why: str):
        super().__init__(
            f"weights were not published: stage {stage!r} failed at {who}: {why}",
            remedy="the engine keeps serving its previous version",
        )
        self.args = (stage, who, why)
        self.stage = stage
        self.who = who


class Superseded(SyncError):
    pass


class ComponentDied(HeadraceError):
    def __init__(self, who: str, how: str, look_at: str = ""):
        super().__init__(f"{who} ended unexpectedly: {how}", remedy=look_at or None)
        self.args = (who, how, look_at)
        self.who = who


class DeadlineExceeded(HeadraceError):
    def __init__(self, who: str, whom: str, seconds: float, look_at: str):
        super().__init__(f"{who} waited {seconds:.1f} s for {whom}, past its deadline", remedy=look_at)
        self.args = (who, whom, seconds, look_at)


class GaveUp(HeadraceError):
    pass


class LawBroken(HeadraceError):
    def __init__(self, law: str, where: str, what: str):
        super().__init__(f"law broken ({law}) at {where}: {what}", remedy="this is a bug in Headrace: report it")
        self.args = (law, where, what)
        self.law = law
        self.where = where
        self.what = what
