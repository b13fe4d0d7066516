"""`headrace show`: read a run's episodes in the terminal."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Group
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from headrace.cli.output import console, print_json
from headrace.errors import HeadraceError, RunFolderError
from headrace.records import Episode, Turn, text_before
from headrace.telemetry.episodes import Decode, StoredEpisode, read_episodes
from headrace.telemetry.folder import RunFolder

if TYPE_CHECKING:
    from headrace.tokenizer import Tokenizer

ORDERS: dict[str, Callable[[StoredEpisode], float]] = {
    "best": lambda stored: stored.episode.reward or 0.0,
    "worst": lambda stored: -(stored.episode.reward or 0.0),
    "slowest": lambda stored: stored.episode.finished - stored.episode.started,
    "stalest": lambda stored: stored.lag,
}
"""By name, what is largest for the episode to show first."""
MAX_CONTEXT, MAX_COMPLETION = 1_500, 4_000
"""Characters of one turn's new context and of its completion; `--full` shows all."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}
"""A terminal would obey them."""
VERSION_STYLES = ("green", "yellow", "magenta", "cyan", "red", "blue")


def command(
    folder: Path, order: str | None, group: str | None, step: int | None, count: int, *, full: bool, json: bool
) -> None:
    run = RunFolder(folder).require()
    chosen = select(read_episodes(run, step), order, group, count)
    if not chosen:
        raise RunFolderError("this run has recorded such episodes", str(run.path), _what_there_is(run, group, step))
    tokenizer = _tokenizer(run)
    if json:
        episodes = [summary(one, tokenizer, full=full) for one in chosen]
        print_json({"run": str(run.path), "order": order or "latest", "episodes": episodes})
        return
    out = console()
    for stored in chosen:
        out.print(picture(stored, tokenizer, full=full))


def select(
    episodes: Iterable[StoredEpisode], order: str | None, group: str | None, count: int
) -> list[StoredEpisode]:
    """At most `count` of them, holding no more than that in memory."""
    wanted = (one for one in episodes if group is None or one.group == group)
    if order is None:
        return list(deque(wanted, maxlen=count))
    return heapq.nlargest(count, wanted, key=ORDERS[order])


def summary(stored: StoredEpisode, tokenizer: Tokenizer | None = None, *, full: bool = True) -> dict[str, Any]:
    """`contexts` and `completions` are by turn, None where there is no tokenizer to read them with."""
    episode = stored.episode
    contexts: list[str | None] = []
    completions: list[str | None] = []
    for place, turn in enumerate(episode.turns):
        said = _said(tokenizer, new_context(episode, place).tokens)
        wrote = None if tokenizer is None else tokenizer.decode(turn.tokens.tolist())
        contexts.append(said if said is None or full else shortened(Text(said), MAX_CONTEXT).plain)
        completions.append(wrote if wrote is None or full else shortened(Text(wrote), MAX_COMPLETION).plain)
    return {
        "id": episode.id,
        "group": stored.group,
        "step": stored.step,
        "task": episode.task.id,
        "prompt": episode.task.prompt,
        "answer": episode.task.answer,
        "text": stored.text,
        "reward": episode.reward,
        "advantage": stored.advantage,
        "trained_version": stored.trained_version,
        "teacher": stored.teacher,
        "versions": [episode.version_min, episode.version_max],
        "lag": stored.lag,
        "stop": [turn.stop for turn in episode.turns],
        "stop_string": [turn.stop_string for turn in episode.turns],
        "tokens": episode.num_tokens,
        "turns": len(episode.turns),
        "seconds": episode.finished - episode.started,
        "metrics": episode.metrics,
        "contexts": contexts,
        "completions": completions,
    }


class NewContext(NamedTuple):
    """What a turn was given that none before it in the episode had."""

    tokens: list[int]
    after: int | None
    """The turn that it goes on from, or from a part of."""
    of: int
    """Tokens of the whole context."""


def new_context(episode: Episode, place: int) -> NewContext:
    """The environment's part: from where the turn leaves the sequence of one before it, which it may only quote."""
    whole = episode.full_context(place)
    begins, after = 0, None
    for earlier in range(place):
        before = episode.full_context(earlier)
        sequence = np.concatenate([before, episode.turns[earlier].tokens])[: len(whole)]
        differs = np.flatnonzero(sequence != whole[: len(sequence)])
        common = int(differs[0]) if len(differs) else len(sequence)
        # Prompts that merely begin alike are no continuation.
        if common >= max(begins, len(before)):
            begins, after = common, earlier
    return NewContext(whole[begins:].tolist(), after, len(whole))


def shortened(text: Text, most: int) -> Text:
    """With its middle left out, and how much that is, where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    head = 2 * most // 3
    tail = most - head
    note = Text(f" [… {len(text) - most:,} characters left out, --full shows them …] ", style="italic dim")
    return Text.assemble(text[:head], note, text[len(text) - tail :])


def picture(stored: StoredEpisode, tokenizer: Tokenizer | None, *, full: bool = False) -> Panel:
    episode = stored.episode
    reward = episode.reward
    colour = (
        "white"
        if reward is None
        else "green"
        if stored.advantage > 0
        else "red"
        if stored.advantage < 0
        else "white"
    )
    head = Text()
    head.append(f"reward {'–' if reward is None else format(reward, '.3g')}", style=f"bold {colour}")
    head.append(f"   advantage {stored.advantage:+.3f}", style=colour)
    head.append(
        f"   {episode.num_tokens} tokens, {', '.join(turn.stop for turn in episode.turns)}"
        f"   {episode.finished - episode.started:.2f} s\n"
    )
    head.append(f"trained at version {stored.trained_version} (step {stored.step}), lag {stored.lag}, ")
    if stored.teacher is not None:
        head.append(f"teacher version {stored.teacher}, ")
    head.append("produced by ")
    versions = sorted({int(version) for turn in episode.turns for version in turn.versions})
    for place, version in enumerate(versions):
        head.append(", " if place else "versions " if len(versions) > 1 else "version ")
        head.append(str(version), style=_style(version, versions) or "bold")
    if episode.metrics:
        said = ", ".join(f"{name} {value:.6g}" for name, value in sorted(episode.metrics.items()))
        head.append(f"\nmetrics: {_plain(said)}")
    parts: list[Any] = [head]
    decode = None if tokenizer is None else tokenizer.decode
    for place, turn in enumerate(episode.turns):
        context = new_context(episode, place)
        given = _said(tokenizer, context.tokens)
        if given is None:
            given = _prompt(episode.task.prompt) if place == 0 else f"({len(context.tokens):,} tokens)"
        wrote = _completion(stored, place, turn, versions, decode)
        if not full:
            wrote = shortened(wrote, MAX_COMPLETION)
        parts.append(_turn_rule(episode, place, context))
        if given:
            text = Text(_plain(given), style="dim")
            parts += [text if full else shortened(text, MAX_CONTEXT), Rule(style="dim")]
        parts.append(wrote if wrote.plain else Text("(no text but special tokens)", style="dim italic"))
    if episode.task.answer is not None:
        parts += [Rule(style="dim"), Text(f"answer: {_plain(episode.task.answer)}", style="dim")]
    return Panel(Group(*parts), title=Text(episode.id), subtitle=Text(f"group {stored.group}"), border_style=colour)


def _turn_rule(episode: Episode, place: int, context: NewContext) -> Rule:
    """Nothing to say of an episode's only turn."""
    if len(episode.turns) == 1:
        return Rule(style="dim")
    turn = episode.turns[place]
    who = "" if turn.policy == "policy" else f" of {turn.policy}"
    title = f"turn {place + 1}{who}"
    if context.after is not None:
        title += f", after turn {context.after + 1}"
    if place:
        title += f", {len(context.tokens):,} new {'token' if len(context.tokens) == 1 else 'tokens'} of context"
    return Rule(Text(title, style="dim"), style="dim", align="left")


def _said(tokenizer: Tokenizer | None, tokens: list[int]) -> str | None:
    """With special tokens: they show whose words are whose."""
    return None if tokenizer is None else tokenizer.decode(tokens, keep_special=True)


def _plain(text: str) -> str:
    return text.translate(CONTROLS)


def _completion(stored: StoredEpisode, place: int, turn: Turn, versions: list[int], decode: Decode | None) -> Text:
    """The turn's text; where several versions wrote it, each one's share in its own colour."""
    if decode is None:
        return Text(_plain(stored.text or "(no tokenizer)")) if place == 0 else Text("")
    text, shown, tokens = Text(), "", turn.tokens.tolist()
    length = len(text_before(decode(tokens), turn.stop_string))
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and turn.versions[end] == turn.versions[end - 1]:
            continue
        # A character can span tokens: what a share adds is what the text up to its end has more.
        whole = decode(tokens[:end])[:length]
        text.append(_plain(whole[len(shown) :]), style=_style(int(turn.versions[end - 1]), versions))
        shown = whole
    return text


def _style(version: int, versions: list[int]) -> str:
    return VERSION_STYLES[versions.index(version) % len(VERSION_STYLES)] if len(versions) > 1 else ""


def _prompt(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)


def _tokenizer(run: RunFolder) -> Tokenizer | None:
    """The model's own, to read tokens with; None where the model is no longer there."""
    from headrace.config.load import read_config
    from headrace.tokenizer import Tokenizer

    try:
        return Tokenizer(read_config(run.config).model.path)
    except HeadraceError:
        return None


def _what_there_is(run: RunFolder, group: str | None, step: int | None) -> str:
    files = run.step_files()
    if not files:
        return "it trained no step, or recording.episodes was 0"
    recorded = f"steps {files[0][0]} to {files[-1][0]} are recorded"
    if group is not None:
        ids = list(dict.fromkeys(one.group for one in read_episodes(run, files[-1][0])))[:5]
        return f"{recorded}; groups look like {', '.join(ids)}"
    return recorded
