"""What can be fuzzed: each name leads to a module beside this file.

A target's module has

    corpus() -> list[bytes]     inputs that are in order, and some that nearly are
    declared                    the exception types that an input may raise
    run(data: bytes)            hands one input to the code that is tested

and, where the defaults do not do:

    generate(random) -> bytes       an input made from scratch, by the rules of the format
    mutate(data, random) -> bytes   a change that keeps what a blind one would break: lengths, checksums
    dictionary                      byte strings that mean something in the format
    session()                       a context manager around all inputs of a process: a server, a folder
    longest                         most bytes of an input
    limit_s                         longest an input may take, in seconds
    memory_mib                      most memory above the input's size
    watched                         module prefixes whose lines count as coverage
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random

TARGETS = {
    "decoder": "target_decoder",
    "config": "target_config",
    "folder_weights": "target_folder_weights",
    "folder_tokenizer": "target_folder_tokenizer",
    "chat_template": "target_chat_template",
    "http": "target_http",
    "rendezvous": "target_rendezvous",
    "planted": "target_planted",
}


@dataclass(frozen=True)
class Target:
    corpus: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    declared: tuple[type[BaseException], ...]
    generate: Callable[[Random], bytes] | None = None
    mutate: Callable[[bytes, Random], bytes] | None = None
    dictionary: tuple[bytes, ...] = ()
    session: Callable[[], AbstractContextManager[object]] = nullcontext
    longest: int = 1 << 16
    limit_s: float = 2.0
    memory_mib: float = 64.0
    watched: tuple[str, ...] = ("headrace",)


def load(name: str) -> Target:
    module = importlib.import_module(TARGETS[name])
    return Target(**{field: getattr(module, field) for field in Target.__annotations__ if hasattr(module, field)})
