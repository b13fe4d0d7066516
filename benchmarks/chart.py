"""Decode steps as a picture: each row's share of what the memory bandwidth allows, peers below their row."""

from __future__ import annotations

from html import escape
from typing import Any, NamedTuple

WIDTH, BAR, ROW, TOP = 760, 16, 26, 34
LEFT, RIGHT = 220, 100
OURS, THEIRS, INK = "#2f6f9f", "#b0733c", "#777"


class Bar(NamedTuple):
    label: str
    share: float
    """Of the limit."""
    tok_s: float
    ours: bool


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """Of the rows of `headrace bench engine`; a peer that gave no figure is left out."""
    found: list[Bar] = []
    for row in rows:
        if row["part"] != "decode":
            continue
        name = f"{row['shape'].upper()}, {row['point'].replace('x', ' × ')}"
        if any(bar.label == name for bar in found):
            continue
        found.append(Bar(name, row["limit_frac"], row["tok_s"], ours=True))
        for peer in rows:
            same = peer["part"] == "peers" and (peer["shape"], peer["point"]) == (row["shape"], row["point"])
            if same and "tok_s" in peer:
                share = row["limit_frac"] * peer["tok_s"] / row["tok_s"]
                found.append(Bar(peer["peer"], share, peer["tok_s"], ours=False))
    return found


def svg(rows: list[dict[str, Any]]) -> str:
    """The picture's text, in colours that can be read on white and on black."""
    shown, full = bars(rows), WIDTH - LEFT - RIGHT
    height = TOP + ROW * len(shown) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        f' font-size="12" fill="{INK}">',
        f'<text x="{LEFT}" y="16">share of the bandwidth limit (sequences × context), tokens a second</text>',
    ]
    for i, bar in enumerate(shown):
        top, text = TOP + ROW * i, TOP + ROW * i + BAR - 4
        colour, width = OURS if bar.ours else THEIRS, max(1.0, full * bar.share)
        lines += [
            f'<text x="{LEFT - 10}" y="{text}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{full}" height="{BAR}" rx="2" fill-opacity="0.25"/>',
            f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
            f'<text x="{LEFT + full + 8}" y="{text}">{bar.share:.0%} · {bar.tok_s:,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
