"""A child under its keeper: what it leaves behind, what it prints, and a keeper that is itself in trouble."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import ComponentDied
from headrace.ipc import Peer
from headrace.orchestration import processes
from headrace.orchestration.keeper import MARK, Log

CHILDREN = """
import os, signal, sys, time

def idle(sock, options):
    time.sleep(3600)

def _daemon():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    time.sleep(3600)

def forks(sock, options):
    for index in range(options["count"]):
        pid = os.fork()
        if pid == 0:
            _daemon() if index % 2 else time.sleep(3600)
        elif index % 2:
            os.waitpid(pid, 0)
    print("forked", flush=True)
    if "status" in options:
        os._exit(options["status"])
    time.sleep(3600)

def stops_its_keeper(sock, options):
    os.kill(os.getppid(), signal.SIGSTOP)
    print("forked", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

def kills_its_keeper(sock, options):
    if os.fork() == 0:
        os.setsid()
        time.sleep(3600)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)

def prints(sock, options):
    for index in range(options["lines"]):
        os.write(1, b"%09d\\n" % index)
    os.write(2, b"last words\\n")
    os._exit(3)

def tells(sock, options):
    print(sorted(os.environ), os.nice(0), flush=True)
    time.sleep(3600)
"""


def family(mark: str) -> list[psutil.Process]:
    """All processes of this child, its keeper among them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        await asyncio.sleep(0.02)


def with_child(
    folder: Path,
    monkeypatch: Any,
    entry: str,
    scenario: Callable[[Peer, str, Callable[[], str]], Awaitable[None]],
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """`scenario` gets the child, its mark, and its log's content."""
    (folder / "kept_children.py").write_text(CHILDREN)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    log = folder / "kept.log"

    async def main() -> None:
        peer = await processes.spawn("kept", f"kept_children:{entry}", options or {}, logs=folder, **settings)
        mark = peer.process._mark  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(60):
                await scenario(peer, mark, log.read_text)
        finally:
            await peer.kill()
        await until(lambda: family(mark) == [], 5.0)

    asyncio.run(main())


def test_all_that_a_child_has_forked_ends_when_it_is_killed(tmp_path, monkeypatch):
    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        await until(lambda: "forked" in log())
        assert len(family(mark)) == 2 + 20
        assert len({os.getsid(process.pid) for process in family(mark)}) == 2 + 10
        await peer.kill()
        assert (peer.process.poll(), family(mark)) == (-signal.SIGKILL, [])

    with_child(tmp_path, monkeypatch, "forks", scenario, {"count": 20})


def test_a_crash_is_noticed_at_once_though_forks_hold_the_socket(tmp_path, monkeypatch):
    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        await until(lambda: "forked" in log())
        begun = time.monotonic()
        died = await asyncio.wait_for(peer.died, 4.0)
        assert time.monotonic() - begun < 3.0
        assert str(died).startswith("kept ended unexpectedly: exit status 7; its last words in ")
        await until(lambda: family(mark) == [], 5.0)

    with_child(tmp_path, monkeypatch, "forks", scenario, {"count": 20, "status": 7})


KEEPER_ELSEWHERE = """
import runpy, sys
sys.platform = "darwin"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("options", [{"status": 7}, {}])
def test_where_the_system_is_not_linux_a_childs_group_ends_with_it(tmp_path, monkeypatch, options):
    """Those that its children adopted away are found by their group; a session of one's own hides there."""
    runner = tmp_path / "keeper_elsewhere.py"
    runner.write_text(KEEPER_ELSEWHERE)
    start = processes.subprocess.Popen

    def elsewhere(command: list[str], **settings: Any) -> Any:
        return start([*command[:3], str(runner), *command[3:]], **settings)

    monkeypatch.setattr(processes.subprocess, "Popen", elsewhere)

    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        await until(lambda: "forked" in log())
        if "status" in options:
            await asyncio.wait_for(peer.died, 20.0)
        else:
            assert len(family(mark)) == 2 + 1
            await peer.kill()
        await until(lambda: family(mark) == [], 5.0)

    with_child(tmp_path, monkeypatch, "forks", scenario, {"count": 1, **options})


def test_a_child_that_is_stopped_and_has_stopped_its_keeper_is_killed_with_it(tmp_path, monkeypatch):
    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        await until(lambda: [p.status() for p in family(mark)] == [psutil.STATUS_STOPPED] * 2)
        await peer.kill()
        assert (peer.process.poll(), family(mark)) == (-signal.SIGKILL, [])

    with_child(tmp_path, monkeypatch, "stops_its_keeper", scenario)


def test_a_child_whose_keeper_is_killed_ends_and_what_it_has_started_too(tmp_path, monkeypatch):
    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        died = await peer.died
        assert "killed by signal 9" in str(died)
        await until(lambda: family(mark) == [], 5.0)

    with_child(tmp_path, monkeypatch, "kills_its_keeper", scenario)


def test_a_child_whose_end_of_the_control_is_lost_is_cleared_by_its_keeper(tmp_path, monkeypatch):
    """As when the controller is killed: nobody tells the keeper anything."""

    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        await until(lambda: "forked" in log())
        os.kill(peer.process.pid, signal.SIGSTOP)
        peer.process._control.shutdown(2)  # type: ignore[attr-defined]
        await until(lambda: family(mark) == [], 5.0)

    with_child(tmp_path, monkeypatch, "forks", scenario, {"count": 4})


def test_a_log_keeps_its_beginning_and_its_end_and_says_how_much_is_left_out(tmp_path, monkeypatch):
    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        died = await peer.died
        assert str(died).endswith(f"exit status 3; its last words in {tmp_path}/kept.log: last words")

    with_child(tmp_path, monkeypatch, "prints", scenario, {"lines": 4_000_000})
    file = tmp_path / "kept.log"
    assert file.stat().st_size <= 17 << 20
    first, _, rest = file.read_text().partition("\n[headrace ")
    number, _, last = rest.partition(" bytes are left out here: a log keeps its beginning and its end]\n")
    assert first.startswith("000000000\n000000001\n")
    assert last.endswith("003999998\n003999999\nlast words\n")
    assert len(first) + int(number) + len(last) == 40_000_000 + len("last words\n")


def test_a_log_that_is_gone_on_with_still_knows_what_was_left_out_before(tmp_path):
    path = tmp_path / "some.log"
    for part in range(30):
        log = Log(str(path), head=1000, tail=2000)
        for line in range(100):
            log.write(b"%03d %05d\n" % (part, line))
    text = path.read_text()
    first, _, rest = text.partition("\n[headrace ")
    number, _, last = rest.partition(" bytes are left out here: a log keeps its beginning and its end]\n")
    assert len(first) == 1000
    assert 2000 <= len(last) <= 4100
    assert len(first) + int(number) + len(last) == 30 * 100 * 10
    assert last.endswith("029 00099\n")


def test_a_child_gets_the_variables_and_the_priority_that_it_is_given(tmp_path, monkeypatch):
    async def scenario(peer: Peer, mark: str, log: Callable[[], str]) -> None:
        await until(lambda: "]" in log())
        ours = ["HEADRACE_CHILD", "HEADRACE_MARK", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PATH", "PYTHONPATH"]
        assert log().split("]")[0] == str(sorted([*ours, "LC_CTYPE"])).split("]")[0]
        assert log().split("]")[1] == f" {os.nice(0) + 5}\n"
        autogroup = Path(f"/proc/{peer.process.pid}/autogroup")
        if autogroup.exists():
            await until(lambda: autogroup.read_text().endswith("nice 5\n"), 5.0)

    with_child(tmp_path, monkeypatch, "tells", scenario, environment={"PATH": os.environ["PATH"]}, niceness=5)


def test_a_child_that_cannot_be_started_is_an_error_that_says_where_to_look(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "keeper_file", str(tmp_path / "nowhere.py"))

    async def main() -> None:
        with pytest.raises(ComponentDied, match=r"kept ended unexpectedly: it could not be started: .*kept\.log"):
            await processes.spawn("kept", "nowhere:start", {}, logs=tmp_path)

    asyncio.run(main())
    assert "nowhere.py" in (tmp_path / "kept.log").read_text()
