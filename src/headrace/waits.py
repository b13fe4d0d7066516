"""Why engines and trainer are idle: who waits for whom, added up by cause as the controller sees it.

The components measure by their own clocks how long they idle (usage.py). What they wait for, only the controller
knows: where episodes are, and what the trainer is asked to do. `Waits` is told of both. It reads its clock when a
cause may have changed, as when the last episode leaves an environment, not at every message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from headrace.usage import Usage

Doing = Literal["training", "batch", "publication", "evaluation", "turns", "controller"]
"""What the training loop is at: the trainer works, it waits for a batch, for versions to reach engines, for an
evaluation, for engines to sleep or wake, or the controller has the word."""

TRAINER_CAUSES = ("generation", "environment", "scoring", "publication", "evaluation", "turns", "controller")
ENGINE_CAUSES = ("training", "environment", "scoring", "publication", "evaluation", "turns", "end", "controller")
"""`training` is the staleness bound at work: nothing is admitted before the trainer has made its step."""


class Around(NamedTuple):
    """What buffer, engines and trainer add to a sight; fields as there."""

    engines: int = 1
    without_request: int = 0
    only_scoring: bool = False
    publishing: bool = False
    all_begun: bool = False


class Sight(NamedTuple):
    """What the controller sees at one moment."""

    doing: Doing
    generating: int = 0
    """Episodes that an environment has, some of which wait for engines."""
    scoring: int = 0
    """Episodes that a scorer has."""
    full: bool = False
    """So many episodes are generated that no more would be begun for the engines' sake."""
    asleep: bool = False
    """Engines give their memory to the trainer, or have given it."""
    engines: int = 1
    without_request: int = 0
    """Engines that have nothing to do."""
    only_scoring: bool = False
    """The batch is complete as soon as groups are scored whose episodes have all been generated."""
    publishing: bool = False
    """Engines have not got the trainer's version yet."""
    all_begun: bool = False
    """Every group that the run will train on has been admitted."""

    @property
    def idle_engines(self) -> int:
        return self.engines if self.asleep else self.without_request


def trainer_waits_for(sight: Sight) -> str | None:
    """One of TRAINER_CAUSES, or None while it works."""
    if sight.doing == "training":
        return None
    if sight.doing != "batch":
        return sight.doing
    if sight.only_scoring:
        return "scoring"
    if sight.idle_engines < sight.engines:
        return "generation"
    return _unfinished(sight)


def engines_wait_for(sight: Sight) -> str:
    """One of ENGINE_CAUSES: why an engine that has no request has none, or sleeps."""
    if sight.asleep and sight.doing != "batch":
        return sight.doing
    if sight.all_begun and not sight.generating:
        return "end"
    if sight.full or (sight.doing == "batch" and sight.generating):
        return "environment"
    return _unfinished(sight) if sight.doing == "batch" else sight.doing


def _unfinished(sight: Sight) -> str:
    """Where the groups are that the trainer waits for, when no engine works on them."""
    if sight.generating:
        return "environment"
    if sight.scoring:
        return "scoring"
    return "publication" if sight.publishing else "controller"


class Waited(NamedTuple):
    """Seconds so far."""

    trainer: dict[str, float]
    engines: dict[str, float]
    """Added up over the engines."""
    together_s: float
    """The trainer worked while episodes were generated or scored."""

    def since(self, earlier: Waited) -> Waited:
        return Waited(
            trainer={cause: spent - earlier.trainer[cause] for cause, spent in self.trainer.items()},
            engines={cause: spent - earlier.engines[cause] for cause, spent in self.engines.items()},
            together_s=self.together_s - earlier.together_s,
        )


class Waits:
    """Told where episodes are and what the training loop is at. Used from one event loop."""

    def __init__(self, clock: Callable[[], float], *, most_generating: int):
        """No more than `most_generating` episodes are generated at once."""
        self.look_around: Callable[[], Around] = Around
        self.only_scoring: Callable[[], bool] = bool
        """One of its fields, which groups change."""
        self._clock = clock
        self._most_generating = most_generating
        self._doing: Doing = "controller"
        self._generating = 0
        self._scoring = 0
        self.groups_only_scored = 0
        """Groups whose episodes have all been generated and not all been scored."""
        self._asleep = False
        self._trainer = dict.fromkeys(TRAINER_CAUSES, 0.0)
        self._engines = dict.fromkeys(ENGINE_CAUSES, 0.0)
        self._together_s = 0.0
        self._since = clock()
        self._trainer_cause: str | None = "controller"
        self._engine_cause = "controller"
        self._idle = 0
        self._together = False
        self._was_only_scoring = False

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        """What the training loop is at, within."""
        before, self._doing = self._doing, what
        self.look()
        try:
            yield
        finally:
            self._doing = before
            self.look()

    def generates(self, change: int) -> None:
        """An environment has got an episode (1), or is done with one (-1)."""
        self._generating = count = self._generating + change
        if count == (change > 0) or count == self._most_generating - (change < 0):
            self.look()

    def scores(self, change: int) -> None:
        """A scorer has got an episode (1), or is done with one (-1)."""
        self._scoring = count = self._scoring + change
        if count == (change > 0):
            self.look()

    def group_generated(self) -> None:
        """The last of a group's episodes has been generated."""
        self.groups_only_scored += 1
        self.look_at_groups()

    def group_scored(self) -> None:
        """And scored. `look_at_groups` is called when the buffer has it, or it was dropped."""
        self.groups_only_scored -= 1

    def look_at_groups(self) -> None:
        """Of each group there is news; mostly it makes no difference to what is waited for."""
        if self._doing == "batch" and self.only_scoring() != self._was_only_scoring:
            self.look()

    def asleep(self, asleep: bool) -> None:
        """Whether the engines give their memory to the trainer, or have given it."""
        self._asleep = asleep
        self.look()

    def look(self) -> None:
        """Something may have changed: what has gone by counts for the causes until now."""
        now = self._clock()
        spent, self._since = now - self._since, now
        if self._trainer_cause is not None:
            self._trainer[self._trainer_cause] += spent
        self._engines[self._engine_cause] += spent * self._idle
        self._together_s += spent * self._together
        full = self._generating >= self._most_generating
        around = self.look_around()
        sight = Sight(self._doing, self._generating, self._scoring, full, self._asleep, *around)
        self._was_only_scoring = sight.only_scoring
        self._trainer_cause, self._engine_cause = trainer_waits_for(sight), engines_wait_for(sight)
        self._idle = sight.idle_engines
        self._together = self._doing == "training" and not self._asleep and self._generating + self._scoring > 0

    def waited(self) -> Waited:
        self.look()
        return Waited(dict(self._trainer), dict(self._engines), self._together_s)


def idle_shares(idle_s: float, wall_s: float, waited: Mapping[str, float]) -> dict[str, float]:
    """Idle time by cause as shares of wall time; they add up to the share that the component measured itself.

    What no cause explains is the controller's: messages on their way, and its own work between two calls.
    """
    if wall_s <= 0:
        return dict.fromkeys(waited, 0.0)
    # The two clocks are read at different moments: the causes may claim a little more than there was.
    claimed = sum(waited.values())
    scale = min(1.0, idle_s / claimed) if claimed > 0 else 0.0
    shares = {cause: spent * scale / wall_s for cause, spent in waited.items()}
    shares["controller"] += (idle_s - claimed * scale) / wall_s
    return shares


class TimeSpent(NamedTuple):
    """Where the time of engines, trainer and controller went, until a moment or between two."""

    at: float
    engines: Usage
    """Added up over the engines."""
    trainer: Usage
    waited: Waited
    controller_s: float
    """The controller's thread computed."""

    def since(self, earlier: TimeSpent) -> TimeSpent:
        return TimeSpent(
            at=self.at - earlier.at,
            engines=self.engines.since(earlier.engines),
            trainer=self.trainer.since(earlier.trainer),
            waited=self.waited.since(earlier.waited),
            controller_s=self.controller_s - earlier.controller_s,
        )

    @property
    def engines_idle(self) -> dict[str, float]:
        return idle_shares(self.engines.idle_s, self.engines.wall_s, self.waited.engines)

    @property
    def trainer_idle(self) -> dict[str, float]:
        return idle_shares(self.trainer.idle_s, self.trainer.wall_s, self.waited.trainer)

    @property
    def together_frac(self) -> float:
        """Share of the time in which trainer and generation worked side by side."""
        return self.waited.together_s / self.at if self.at > 0 else 0.0

    @property
    def controller_busy_frac(self) -> float:
        return self.controller_s / self.at if self.at > 0 else 0.0

    def idle_metrics(self) -> dict[str, float]:
        """As in metrics.jsonl: `trainer_idle_scoring_frac` and so on."""
        sides = {"trainer": self.trainer_idle, "engine": self.engines_idle}
        shares = {f"{who}_idle_{why}_frac": share for who, by in sides.items() for why, share in by.items()}
        return shares | {"together_frac": self.together_frac, "controller_busy_frac": self.controller_busy_frac}

    def summary(self) -> dict[str, Any]:
        """As in summary.json: seconds, and shares of them."""
        return {
            "seconds": self.at,
            "trainer_idle": self.trainer_idle,
            "engine_idle": self.engines_idle,
            "together": self.together_frac,
            "controller_busy": self.controller_busy_frac,
        }
