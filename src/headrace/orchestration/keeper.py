"""The keeper of one child: a small process between the controller and the child, so that nothing is left behind.

    controller ══ control socket ══ keeper ── fork, exec ──▶ child ──▶ whatever the child starts
                                      ▲                        │
             logs/NAME.log ◀── capped ┴── pipe: what is printed┘

It starts the child in a session of its own, copies what the child prints into the log, and says the child's
process id and exit status. When the child has ended, or the controller has, it kills every process that descends
from the child, waits until none is left, and ends. On Linux it is their subreaper: a descendant that loses its
parent becomes the keeper's own child, in whatever session it hides, and so is found. Elsewhere the child's process
group is killed.

`processes.py` runs this file by its path, with `python -I -S`: it imports nothing of Headrace, and starts in a few
hundredths of a second. It runs in the environment that is meant for the child. On the control socket it reads an
order (see `order`), and writes the lines "pid N", "ended STATUS" and "cleared"; one byte more, or the end of the
socket, tells it to end everything now.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence

LOG_HEAD_BYTES = 4 << 20
"""A log keeps as many bytes of its beginning."""
LOG_TAIL_BYTES = 6 << 20
"""And as many of its end, up to twice as many: a log that reaches head + 2 × tail is shortened to head + tail."""
MARK = "HEADRACE_MARK"
"""In the environment of a child and its descendants: a text of that child's own, by which they can be found."""

_CLEAR_S = 30.0
"""Longest that the keeper tries to end what cannot be killed, a process stuck in a driver say."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NOTE, _DIGITS = b"\n[headrace ", 15
_PIPE_BYTES = 1 << 18
_LINUX = sys.platform == "linux" and os.path.exists("/proc/self/stat")
"""Without its /proc, Linux has not what descendants are found by."""
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP")


# ── The order ────────────────────────────────────────────────────────────────────────────────────────────


def order(command: Sequence[str], *, log: str, niceness: int, fds: Iterable[int]) -> bytes:
    """What the controller sends first: its length, then the fields."""
    fields = [log, str(niceness), ",".join(map(str, fds)), *command]
    data = b"\0".join(os.fsencode(field) for field in fields)
    return len(data).to_bytes(8, "little") + data


def _read_order(control: int) -> list[str]:
    size = int.from_bytes(_read_exactly(control, 8), "little")
    return [os.fsdecode(field) for field in _read_exactly(control, size).split(b"\0")]


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data


# ── The log ──────────────────────────────────────────────────────────────────────────────────────────────


class Log:
    """A file of bounded size: the beginning and the end of what is printed, and a line about what is left out."""

    def __init__(self, path: str, head: int = LOG_HEAD_BYTES, tail: int = LOG_TAIL_BYTES):
        self._head, self._tail = head, tail
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        """A disk that is full or gone costs the text, not the child."""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            size = os.fstat(self._fd).st_size
            if size > self._head + 2 * self._tail:
                self._shorten(size)
        except OSError:
            pass

    def _shorten(self, size: int) -> None:
        before = os.pread(self._fd, len(_note(0)), self._head)
        number = before[len(_NOTE) : len(_NOTE) + _DIGITS].strip()
        if before.startswith(_NOTE) and number.isdigit():
            missing = size - self._tail - self._head - len(before) + int(number)
        else:
            missing = size - self._tail - self._head
        end = os.pread(self._fd, self._tail, size - self._tail)
        os.ftruncate(self._fd, self._head)
        rest = _note(missing) + end
        while rest:
            rest = rest[os.write(self._fd, rest) :]


def _note(missing: int) -> bytes:
    """Always as long, and its number at the same place: it is read again when the log is shortened again."""
    return _NOTE + b"%*d bytes are left out here: a log keeps its beginning and its end]\n" % (_DIGITS, missing)


# ── Processes ────────────────────────────────────────────────────────────────────────────────────────────


def descendants(root: int) -> set[int]:
    """All processes below `root`, by the parents that /proc names; those that have ended already are left out."""
    children: dict[int, list[int]] = {}
    ended = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            try:
                text = os.read(fd, 1024)
            finally:
                os.close(fd)
        except OSError:
            continue
        # The second field is the program's name in brackets, which may hold anything.
        state, parent = text[text.rindex(b")") + 2 :].split(None, 2)[:2]
        children.setdefault(int(parent), []).append(int(name))
        if state in (b"Z", b"X"):
            ended.add(int(name))
    found: set[int] = set()
    reached = [root]
    while reached:
        fresh = [pid for pid in children.get(reached.pop(), ()) if pid not in found]
        found.update(fresh)
        reached += fresh
    return found - ended


def end_marked(mark: str) -> None:
    """Kill the processes that have this mark in their environment: for the case that their keeper was killed."""
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc") if _LINUX else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                found = wanted in file.read().split(b"\0")
        except OSError:
            continue
        if found:
            send_signal(int(name), signal.SIGKILL)


def send_signal(pid: int, number: int, *, group: bool = False) -> None:
    """To a process that may have ended, or that may not be signalled."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except OSError:
        pass


class _Child:
    def __init__(self, pid: int):
        self.pid = pid
        self.status: int | None = None

    def reap(self) -> bool:
        """Bury all that have ended. Whether this process still has children, adopted ones included."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False

    def end_family(self) -> None:
        """Kill the child and its descendants, those too that are forked meanwhile, and bury them."""
        now = time.monotonic()
        end, look_at, pause = now + _CLEAR_S, now, 0.001
        known: set[int] = set()
        if not _LINUX:
            # Those whose parent has ended already are nobody's here, and still of its group.
            send_signal(self.pid, signal.SIGKILL, group=True)
        while self.reap() and now < end:
            if not _LINUX:
                send_signal(self.pid, signal.SIGKILL, group=True)
            elif now >= look_at:
                found = descendants(os.getpid())
                for pid in found:
                    send_signal(pid, signal.SIGKILL)
                # Those that were told die on their own time. Only what was not known can have forked since.
                look_at = now if found - known else now + 0.2
                known = found
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            now = time.monotonic()


def _start(command: list[str], output: int) -> _Child:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return _Child(pid)
    try:
        os.setsid()
        for name in (*_IGNORED, "SIGPIPE", "SIGXFSZ", "SIGCHLD"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        if _LINUX:
            # It dies with its keeper, also when it is stopped.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(127)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} could not be started: {error}\n".encode())
    finally:
        os._exit(127)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _SessionWeights:
    """Linux may share the processors out among sessions first: niceness then counts within a session only, and each
    session has one of its own. Few may be set in a second, by all processes together."""

    def __init__(self, niceness: int, leaders: list[int]):
        self._niceness = niceness
        self._leaders = leaders if niceness and os.path.exists("/proc/self/autogroup") else []

    def set_next(self) -> bool:
        """Whether there are more to set, later."""
        while self._leaders:
            leader = self._leaders[-1]
            try:
                if os.getsid(leader) != leader:
                    return True
                with open(f"/proc/{leader}/autogroup", "w") as file:
                    file.write(str(self._niceness))
            except BlockingIOError:
                return True
            except OSError:
                pass
            self._leaders.pop()
        return False


# ── The keeper ───────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    control = int(sys.argv[1])
    os.set_inheritable(control, False)
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # Where users' code has stopped its keeper, the controller's end wakes it, and it clears up.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    wake, wakes = os.pipe()
    for fd in (wake, wakes):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    path, niceness, fds, *command = _read_order(control)
    log = Log(path)
    printed, output = os.pipe()
    os.nice(int(niceness))
    child = _start(command, output)
    for fd in (output, *map(int, filter(None, fds.split(",")))):
        # A copy of the child's socket would hide its end from the controller.
        os.close(fd)
    os.set_blocking(printed, False)
    if _LINUX:
        # A child that prints much waits less often. There is a limit on what one user may have so.
        import fcntl

        try:
            fcntl.fcntl(printed, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass
    _say(control, f"pid {child.pid}")
    weights = _SessionWeights(int(niceness), [os.getpid(), child.pid])
    _copy_until_the_end(child, log, weights, control=control, printed=printed, wake=wake)
    child.reap()
    _copy(printed, log)
    if child.status is not None:
        _say(control, f"ended {child.status}")
        child.end_family()
    else:
        child.end_family()
        _say(control, f"ended {-signal.SIGKILL if child.status is None else child.status}")
    _copy(printed, log)
    _say(control, "cleared")
    os._exit(0)


def _copy_until_the_end(
    child: _Child, log: Log, weights: _SessionWeights, *, control: int, printed: int, wake: int
) -> None:
    """Copy what is printed until the child or the controller has ended."""
    poller = select.poll()
    for fd in (control, printed, wake):
        poller.register(fd, select.POLLIN)
    while child.status is None:
        ready = {fd for fd, _ in poller.poll(100 if weights.set_next() else None)}
        if control in ready:
            return
        if wake in ready:
            os.read(wake, 4096)
            child.reap()
        if printed in ready and not _copy(printed, log, at_most=1):
            # All have closed it: nothing more will be printed.
            poller.unregister(printed)


def _copy(printed: int, log: Log, at_most: int = 64) -> bool:
    """Whether more may come. `at_most` so many reads: there may be those who print for ever."""
    for _ in range(at_most):
        try:
            data = os.read(printed, _PIPE_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        log.write(data)
    return True


def _say(control: int, line: str) -> None:
    try:
        os.write(control, line.encode() + b"\n")
    except OSError:
        # The controller has gone.
        pass


if __name__ == "__main__":
    main()
