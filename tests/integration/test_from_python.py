"""Runs that Python code starts: a script, a loop that runs already, a notebook."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

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


def test_ctrl_c_ends_a_run_in_order_whose_caller_has_a_loop_and_it_goes_on(project: Project) -> None:
    run = start(project, "2000")
    wait_until(lambda: project.steps_done() >= 3, 60, "three steps")
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert "stopping after this step" in err
    done = json.loads((project.run / "summary.json").read_text())["steps"]
    assert 3 <= done < 2000
    assert out == f"ended {done} False\n"
    assert (project.run / "checkpoints" / f"step-{done:06d}" / "state.json").exists()
    assert project.children() == {}

    out, err = start(project, str(done + 2), "resume").communicate(timeout=120)
    assert out == f"ended {done + 2} True\n", err
    assert project.audit()["ok"]


def test_a_second_signal_ends_such_a_run_at_once(project: Project) -> None:
    """While it starts the first one does so."""
    run = start(project, "2000")
    wait_until(lambda: "engine-0" in project.children(), 60, "an engine")
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=120)
    assert (out, run.returncode) == ("", -signal.SIGINT), err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert project.children() == {}
    assert project.steps_done() == 0


# ── A notebook ───────────────────────────────────────────────────────────────────────────────────────────

KERNEL = """
import asyncio, json, sys, types

cells = json.loads(sys.argv[1])
sys.modules["__main__"] = main = types.ModuleType("__main__")  # as IPython's is: without a file
main.In = [""]

async def kernel():
    for number, cell in enumerate(cells):
        main.In.append(cell)
        exec(compile(cell, f"/nowhere/ipykernel_1/{number}.py", "exec"), vars(main))

loop = asyncio.new_event_loop()
try:
    loop.run_until_complete(kernel())
finally:
    print("left", file=sys.stderr)
"""

CELLS = [
    "import headrace\nfrom headrace import Attempt, Completion, Policy, Task\nWORTH = {'odd': 1 / 8}",
    "def tasks(count):\n    for i in range(count):\n"
    "        yield Task(id=f't{i}', prompt=' '.join(f'w{(i * 7 + j) % 16}' for j in range(3)), answer='w1')",
    "def odd(tokens):\n    return sum(token % 2 for token in tokens)",
    "class Scorer:\n    def score(self, task: Task, attempt: Attempt) -> float:\n"
    "        return WORTH['odd'] * odd(attempt.turns[-1].tokens)",
    "async def once(task: Task, policy: Policy) -> dict[str, float]:\n"
    "    first: Completion = await policy.sample(task.prompt)\n    return {'odd': float(odd(first.tokens))}",
    "config = {'model': {'path': 'model'}, 'name': 'config',\n"
    "          'tasks': {'type': 'python', 'source': tasks, 'options': {'count': 64}},\n"
    "          'environment': {'max_tokens': 8}, 'engine': {'max_context': 32, 'max_running': 64},\n"
    "          'training': {'steps': 2000, 'groups_per_batch': 4, 'group_size': 4}}",
]


def notebook(project: Project, *cells: str) -> subprocess.Popen[str]:
    (project.path / "kernel.py").write_text(KERNEL)
    command = [sys.executable, "kernel.py", json.dumps([*CELLS, *cells])]
    # A kernel's first handler is Python's own, whatever the tests were started with.
    signals = "import signal, runpy, sys; signal.signal(2, signal.default_int_handler); sys.argv = sys.argv[1:]; "
    command[1:2] = ["-c", signals + "runpy.run_path(sys.argv[0], run_name='kernel')", "kernel.py"]
    return subprocess.Popen(command, cwd=project.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_notebooks_run_uses_its_cells_is_interrupted_and_goes_on(project: Project) -> None:
    train = "headrace.train(config, environment=once, scorer=Scorer, progress=False"
    run = notebook(project, f"found = {train})", "print('next cell', found['finished'])")
    wait_until(lambda: project.steps_done() >= 3, 60, "three steps")
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=120)
    assert (out, run.returncode) == ("next cell False\n", 0), err
    done = project.steps_done()
    assert sorted(path.name.partition("_")[0] for path in (project.run / "interactive").glob("*.py")) == [
        "Scorer",
        "once",
        "tasks",
    ]
    [episode, *_] = (json.loads(line) for line in (project.run / "episodes/step-000001.jsonl").open())
    assert (
        episode["reward"] == episode["metrics"]["odd"] / 8 == sum(n % 2 for n in episode["turns"][0]["tokens"]) / 8
    )

    # In a kernel that was started anew; then by the folder alone, from the command line.
    more = f"config['training']['steps'] = {done + 2}"
    run = notebook(project, more, f"found = {train}, resume=True)", "print(found['steps'], found['finished'])")
    out, err = run.communicate(timeout=120)
    assert out == f"{done + 2} True\n", err
    ended = project.headrace("train", "--resume", "runs/config", "--set", f"training.steps={done + 3}", "--json")
    assert json.loads(ended.stdout)["steps"] == done + 3
    assert project.audit("--recompute", "5")["ok"]


def test_a_run_from_python_overwrites_only_when_told(project: Project) -> None:
    short = "config['training']['steps'] = 1"
    train = "headrace.train(config, scorer=Scorer, run='runs/config', progress=False"
    for more, last in (("", "1"), (", overwrite=True", "1"), ("", "a new run begins in a folder of its own")):
        out, err = notebook(project, short, f"print({train}{more})['steps'])").communicate(timeout=120)
        assert last in out + err
