"""What commands print: tables for people, or one JSON object for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table


@contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """With --json, everything printed meanwhile goes to standard error: also by users' code and by processes
    started inside. `print_json`, called afterwards, has standard output to itself."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def print_json(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(answer, enc_hook=_plain).decode() + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def table_of(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """Rows of equal or different keys; columns in the order keys are met."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold cyan")
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float) for row in rows if column in row)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(number(row.get(column)) for column in columns))
    return table


def facts_of(facts: Sequence[tuple[str, str]], title: str | None = None) -> Table:
    """Two columns: a name, and what there is to say."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(name, text)
    return table


def number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def ledger_line(ledger: Mapping[str, Any]) -> str:
    """`admitted = trained + dropped + in flight`, with the numbers; what else the ledger says follows."""
    dropped = ledger.get("dropped") or {}
    total = sum(dropped.values()) if isinstance(dropped, Mapping) else int(dropped)
    text = (
        f"{ledger.get('admitted', 0):,} admitted = {ledger.get('trained', 0):,} trained + {total:,} dropped "
        f"+ {ledger.get('in_flight', 0):,} in flight"
    )
    if isinstance(dropped, Mapping) and dropped:
        text += f" (dropped: {', '.join(f'{reason} {count:,}' for reason, count in dropped.items())})"
    return text


def console() -> Console:
    return Console(highlight=False, soft_wrap=False, markup=False)
