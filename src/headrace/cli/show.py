"""`headrace show`: read a run's episodes in the terminal."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from headrace.cli.output import console, print_json
from headrace.errors import HeadraceError, RunFolderError
from headrace.records import Turn, text_before
from headrace.telemetry.episodes import Decode, StoredEpisode, read_episodes
from headrace.telemetry.folder import RunFolder

ORDERS: dict[str, Callable[[StoredEpisode], float]] = {
    "best": lambda stored: stored.episode.reward or 0.0,
    "worst": lambda stored: -(stored.episode.reward or 0.0),
    "slowest": lambda stored: stored.episode.finished - stored.episode.started,
    "stalest": lambda stored: stored.lag,
}
"""By name, what is largest for the episode to show first."""
VERSION_STYLES = ("green", "yellow", "magenta", "cyan", "red", "blue")


def command(
    folder: Path, order: str | None, group: str | None, step: int | None, count: int, *, json: bool
) -> None:
    run = RunFolder(folder).require()
    chosen = select(read_episodes(run, step), order, group, count)
    if not chosen:
        raise RunFolderError("this run has recorded such episodes", str(run.path), _what_there_is(run, group, step))
    if json:
        print_json({"run": str(run.path), "order": order or "latest", "episodes": [summary(one) for one in chosen]})
        return
    decode = _decoder(run)
    out = console()
    for stored in chosen:
        out.print(picture(stored, decode))


def select(
    episodes: Iterable[StoredEpisode], order: str | None, group: str | None, count: int
) -> list[StoredEpisode]:
    """At most `count` of them, holding no more than that in memory."""
    wanted = (one for one in episodes if group is None or one.group == group)
    if order is None:
        return list(deque(wanted, maxlen=count))
    return heapq.nlargest(count, wanted, key=ORDERS[order])


def summary(stored: StoredEpisode) -> dict[str, Any]:
    episode = stored.episode
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
    }


def picture(stored: StoredEpisode, decode: Decode | None) -> Panel:
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
    parts: list[Any] = [head, Rule(style="dim"), Text(_prompt(episode.task.prompt), style="dim")]
    for place, turn in enumerate(episode.turns):
        parts += [Rule(style="dim"), _completion(stored, place, turn, versions, decode)]
    if episode.task.answer is not None:
        parts += [Rule(style="dim"), Text(f"answer: {episode.task.answer}", style="dim")]
    return Panel(Group(*parts), title=Text(episode.id), subtitle=Text(f"group {stored.group}"), border_style=colour)


def _completion(stored: StoredEpisode, place: int, turn: Turn, versions: list[int], decode: Decode | None) -> Text:
    """The turn's text; where several versions wrote it, each one's share in its own colour."""
    if decode is None:
        return Text(stored.text or "(no tokenizer)") if place == 0 else Text("")
    text, shown, tokens = Text(), "", turn.tokens.tolist()
    length = len(text_before(decode(tokens), turn.stop_string))
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and turn.versions[end] == turn.versions[end - 1]:
            continue
        # A character can span tokens: what a share adds is what the text up to its end has more.
        whole = decode(tokens[:end])[:length]
        text.append(whole[len(shown) :], style=_style(int(turn.versions[end - 1]), versions))
        shown = whole
    return text


def _style(version: int, versions: list[int]) -> str:
    return VERSION_STYLES[versions.index(version) % len(VERSION_STYLES)] if len(versions) > 1 else ""


def _prompt(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)


def _decoder(run: RunFolder) -> Decode | None:
    """The model's own tokenizer, to colour tokens with; None where the model is no longer there."""
    from headrace.config.load import read_config
    from headrace.tokenizer import Tokenizer

    try:
        return Tokenizer(read_config(run.config).model.path).decode
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
