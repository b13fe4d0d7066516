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

MAX_QUOTED = 200


def _quotable(value: object) -> object:
    """The value where it can be quoted whole, otherwise the beginning of what it would be quoted as."""
    if isinstance(value, str):
        return _clipped(value)
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxlist, brief.maxtuple, brief.maxdict, brief.maxset = 4, 8, 8, 8, 8
    brief.maxstring = brief.maxlong = brief.maxother = MAX_QUOTED
    text = brief.repr(value)
    return value if len(text) <= MAX_QUOTED and "..." not in text else _clipped(text)


def _clipped(text: str, most: int = MAX_QUOTED) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


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
            text += f" (got {self.value!r})"
        if self.remedy:
            text += f"; {self.remedy}"
        return text


class InputError(HeadraceError):
    """Bad input or configuration: the command line answers with exit code 2."""

    exit_code = 2


class ConfigError(InputError):
    pass


class ModelFolderError(InputError):
    """Quotes at most `MAX_QUOTED` characters of a stranger's value, however large or deep that is."""

    def __init__(self, rule: str, value: object = None, remedy: str | None = None):
        said = [None if text is None else _clipped(text, 2 * MAX_QUOTED) for text in (rule, remedy)]
        super().__init__(said[0] or "", _quotable(value), said[1])


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
