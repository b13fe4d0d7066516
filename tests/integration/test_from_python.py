"""Runs that Python code starts: a script, a loop that runs already, a notebook."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from integration_project import Project, wait_until

IN_A_LOOP = """
import asyncio, signal, sys
import headrace

async def main(steps, resume):
    config = headrace.load_config("config.toml", [f"training.steps={steps}"])
    summary = headrace.train(config, run="runs/config", resume=resume, progress=False)
    await asyncio.sleep(0)  # the loop around it is whole
    return summary

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal's programs have it
    summary = asyncio.run(main(int(sys.argv[1]), sys.argv[2:] == ["resume"]))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("ended", summary["steps"], summary["finished"])
"""


def start(project: Project, *words: str) -> subprocess.Popen[str]:
    (project.path / "script.py").write_text(IN_A_LOOP)
    command = [sys.executable, "script.py", *words]
    return subprocess.Popen(command, cwd=project.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_order_whose_caller_has_a_loop_and_it_goes_on(project: Project, number: int) -> None:
    run = start(project, "2000")
    wait_until(lambda: project.steps_done() >= 3, 60, "three steps")
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert "stopping after this step" in err
    done = json.loads((project.run / "summary.json").read_text())["steps"]
    assert 3 <= done < 2000
    assert out == f"ended {done} False\n"
    assert (project.run / "checkpoints" / f"step-{done:06d}" / "state.json").exists()
    assert project.children() == {}

    out, err = start(project, str(done + 2), "resume").communicate(timeout=60)
    assert out == f"ended {done + 2} True\n", err
    assert project.audit()["ok"]


def test_a_second_signal_ends_such_a_run_at_once(project: Project) -> None:
    """While it starts the first one does so."""
    run = start(project, "2000")
    wait_until(lambda: "engine-0" in project.children(), 60, "an engine")
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (out, run.returncode) == ("", -signal.SIGINT), err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert project.children() == {}
    assert project.steps_done() == 0
