"""How weights travel. A channel joins an outlet with its inlets; each transport's two ends share a file."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.sync.transport.handshake import make_secret

if TYPE_CHECKING:
    from headrace.sync.base import Inlet, Outlet


def open_channel(
    transport: str, *, folder: str | None = None, host: str = "127.0.0.1", port: int = 0, **options: Any
) -> dict[str, Any]:
    """What both ends are given.

    Within one process it holds the shelf itself. Otherwise it is plain data; `descriptor`, where there is one, is
    a file descriptor that all processes must inherit under the same number and that the caller closes.

    `folder` is for "files": where the versions are, under the same path for all processes. `host` is for "http" and
    "collective", the address under which engines reach the trainer's machine; `port` for "http", 0 being any that
    is free. `options` are the collective outlet's.

    A channel with which a socket is opened holds a secret, made for this channel alone, that both ends prove to
    each other. It is for the processes at its ends and nobody else: not for a file, a log, an argument of a program
    or its environment.
    """
    if transport == "in_process":
        from headrace.sync.transport.in_process import Shelf

        return {"transport": transport, "shelf": Shelf()}
    if transport == "files":
        if not folder:
            remedy = "give one that the trainer and all engines reach under the same path"
            raise ConfigError('the transport "files" needs a folder', folder, remedy)
        return {"transport": transport, "folder": os.path.abspath(folder), "run": secrets.token_hex(4)}
    if transport in ("http", "collective") and host in ("", "0.0.0.0", "::"):
        rule = (
            f'the transport "{transport}" serves at one address, under which engines reach the trainer\'s machine'
        )
        raise ConfigError(rule, host, "give that address")
    if transport == "http":
        return {"transport": transport, "host": host, "port": port, "secret": make_secret()}
    from headrace.sync.transport.shared_memory import create_segment

    channel = {"transport": transport, "descriptor": create_segment()}
    if transport == "collective":
        return {**channel, "host": host, "secret": make_secret(), **options}
    return channel


def open_outlet(channel: dict[str, Any]) -> Outlet:
    """The trainer's end."""
    transport = channel["transport"]
    if transport == "in_process":
        from headrace.sync.transport.in_process import InProcessOutlet

        return InProcessOutlet(channel["shelf"])
    if transport == "files":
        from headrace.sync.transport.files import FilesOutlet

        return FilesOutlet(channel["folder"], channel["run"])
    if transport == "http":
        from headrace.sync.transport.http import HttpOutlet

        return HttpOutlet(channel["host"], channel["port"], channel["secret"])
    if transport == "collective":
        from headrace.sync.transport.collective import CollectiveOutlet

        return CollectiveOutlet(**{name: value for name, value in channel.items() if name != "transport"})
    if transport == "cuda_ipc":
        from headrace.sync.transport.cuda_ipc import CudaIpcOutlet

        return CudaIpcOutlet(channel["descriptor"])
    from headrace.sync.transport.shared_memory import SharedMemoryOutlet

    return SharedMemoryOutlet(channel["descriptor"])


def open_inlet(channel: dict[str, Any], name: str) -> Inlet:
    """The end of the engine of this name."""
    transport = channel["transport"]
    if transport == "in_process":
        from headrace.sync.transport.in_process import InProcessInlet

        return InProcessInlet(channel["shelf"])
    if transport == "files":
        from headrace.sync.transport.files import FilesInlet

        return FilesInlet()
    if transport == "http":
        from headrace.sync.transport.http import HttpInlet

        return HttpInlet(channel["secret"])
    if transport == "collective":
        from headrace.sync.transport.collective import CollectiveInlet

        return CollectiveInlet(name, channel["secret"], descriptor=channel["descriptor"])
    if transport == "cuda_ipc":
        from headrace.sync.transport.cuda_ipc import CudaIpcInlet

        return CudaIpcInlet(channel["descriptor"])
    from headrace.sync.transport.shared_memory import SharedMemoryInlet

    return SharedMemoryInlet(channel["descriptor"])
