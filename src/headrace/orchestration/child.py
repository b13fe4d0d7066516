"""Where every child process of a local run begins: `python -m headrace.orchestration.child NAME ENTRY FD`.

ENTRY is "module:function"; the function gets the socket and its options, which arrive as the first message.
"""

from __future__ import annotations

import importlib
import logging
import signal
import socket
import sys

from headrace import records
from headrace.errors import InputError
from headrace.ipc import Begin, error_to_record


def main() -> None:
    name, entry, fd = sys.argv[1:4]
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("headrace").setLevel(logging.INFO)
    # Ctrl-C is for the controller, which ends its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(fd))
    options = _first_message(sock).options
    module, function = entry.split(":")
    try:
        getattr(importlib.import_module(module), function)(sock, {**options, "name": name})
    except InputError as error:
        # What the controller cannot see, such as a weight that is NaN or a scorer that cannot be made, is told it.
        sock.sendall(records.encode(error_to_record(0, error)))
        raise


def _first_message(sock: socket.socket) -> Begin:
    """Not a byte more: what follows is for the entry, whose module defines its kinds."""
    prelude = _read(sock, records.PRELUDE_BYTES)
    begin: Begin = records.decode(prelude + _read(sock, records.body_length(prelude)))
    return begin


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            sys.exit("the controller has gone")
        data += part
    return data


if __name__ == "__main__":
    main()
