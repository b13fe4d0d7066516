"""What `--resume` makes of a damaged folder: it refuses and says what to do, or goes on rightly. Never silently."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from integration_project import CONFIG, USER_CODE, Project

from headrace.errors import InputError
from headrace.ledger import Ledger
from headrace.orchestration.folder import prepare
from headrace.orchestration.vault import FolderVault, checkpoint_steps
from headrace.resume import open_session
from headrace.telemetry.folder import RunFolder
from headrace.training.checkpoint_state import _digest, read_state

Harm = Callable[[Path], object]
Trial = Callable[..., None]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Project:
    """A run whose controller was killed some steps beyond its second checkpoint, with all in the ledger's -wal."""
    return killed_run(tmp_path_factory.mktemp("killed"), small_model, seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Project:
    """Likewise another, with another seed."""
    return killed_run(tmp_path_factory.mktemp("other"), small_model, seed=1)


def killed_run(folder: Path, model: Path, seed: int) -> Project:
    """Where the signal falls into the writing of a checkpoint, the ledger does not know of it yet: begun again."""
    for attempt in range(8):
        project = _killed_once(folder / str(attempt), model, seed)
        if knows_its_newest_checkpoint(project.run) and published_beyond(project.run):
            assert (project.run / "ledger.sqlite").stat().st_size == 4096, "all of it is in the -wal"
            return project
    raise AssertionError("the run was never killed between two checkpoints")


def _killed_once(folder: Path, model: Path, seed: int) -> Project:
    folder.mkdir()
    (folder / "user.py").write_text(USER_CODE)
    config = CONFIG.replace('path = "model"', f'path = "{model}"').replace('"user.py:', f'"{folder}/user.py:')
    (folder / "config.toml").write_text(f"seed = {seed}\n" + config.replace("steps = 12", "steps = 60"))
    project = Project(folder)
    process = project.start("train", "config.toml")
    end = time.monotonic() + 180
    while len(checkpoint_steps(project.run)) < 2 or not published_beyond(project.run):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the run makes no steps"
        time.sleep(0.005)
    children = project.children()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for child in children.values():
        child.wait(30)
    return project


def knows_its_newest_checkpoint(run: Path) -> bool:
    """Whether the ledger has the newest checkpoint, and just one more is there. The run's own files stay as they
    are: whoever opens a ledger last folds its -wal into the main file."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in run.glob("ledger.sqlite*"):
            shutil.copy(file, scratch)
        with closing(sqlite3.connect(Path(scratch) / "ledger.sqlite")) as db:
            known = [step for (step,) in db.execute("SELECT step FROM checkpoints ORDER BY version")]
    return known[-2:] == sorted(checkpoint_steps(run))


def published_beyond(run: Path) -> bool:
    """Whether a version later than the newest checkpoint's was published."""
    versions = [event["version"] for event in RunFolder(run).read_events("published")]
    return max(versions, default=0) > max(checkpoint_steps(run)) + 1


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def oldest(run: Path) -> Path:
    return min((run / "checkpoints").glob("step-*"))


def sql(*statements: str) -> Harm:
    def harm(run: Path) -> None:
        with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as db:
            for statement in statements:
                assert db.execute(statement).rowcount > 0, statement

    return harm


def flush(run: Path) -> None:
    """All of the ledger in its main file."""
    with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def without_wal(run: Path) -> None:
    (run / "ledger.sqlite-wal").unlink()


def empty_ledger(run: Path) -> None:
    without_wal(run)
    (run / "ledger.sqlite").write_bytes(b"")


def no_ledger(run: Path) -> None:
    for file in run.glob("ledger.sqlite*"):
        file.unlink()


def flipped_ledger(run: Path) -> None:
    flush(run)
    data = bytearray((run / "ledger.sqlite").read_bytes())
    for place in range(4096, len(data), 4096):
        data[place + 3] ^= 0xFF
    (run / "ledger.sqlite").write_bytes(data)


def no_sqlite(run: Path) -> None:
    without_wal(run)
    (run / "ledger.sqlite").write_bytes(b"not SQLite at all" * 300)


def older_ledger(run: Path) -> None:
    """As it was some steps before the newest checkpoint."""
    version = read_state(newest(run))["version"] - 2
    sql(
        f"DELETE FROM episodes WHERE produced > {version} OR produced IS NULL",
        f"DELETE FROM versions WHERE number > {version}",
        f"DELETE FROM checkpoints WHERE version > {version}",
    )(run)


def a_little_older_ledger(run: Path) -> None:
    """As it was right after the newest checkpoint, before the versions that were published then."""
    version = read_state(newest(run))["version"]
    sql(
        f"DELETE FROM episodes WHERE produced > {version} OR produced IS NULL",
        f"DELETE FROM versions WHERE number > {version}",
    )(run)


def state(change: Callable[[dict], object], *, seal: bool = True) -> Harm:
    """Change the newest checkpoint's state.json, with the digest that fits it unless told otherwise."""

    def harm(run: Path) -> None:
        file = newest(run) / "state.json"
        content = json.loads(file.read_text())
        change(content)
        if seal:
            content["digest"] = _digest(content)
        file.write_text(json.dumps(content, indent=1))

    return harm


def wrong_version(content: dict) -> None:
    content["version"] = content["state"]["version"] = 1


def wrong_step(content: dict) -> None:
    content["step"] = content["state"]["step"] = 1


def older_in_its_place(run: Path) -> None:
    place, older = newest(run), oldest(run)
    shutil.rmtree(place)
    older.rename(place)


def of_newest(name: str, change: Callable[[Path], object]) -> Harm:
    return lambda run: change(newest(run) / name)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x10
    file.write_bytes(data)


def line(name: str, number: int, text: str) -> Harm:
    """Replace one line of a file."""

    def harm(run: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        lines[number] = text
        (run / name).write_text("".join(lines))

    return harm


def not_text(name: str) -> Harm:
    """The third line of a file is no UTF-8."""

    def harm(run: Path) -> None:
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join([*lines[:2], b"\xff\xfe\n", *lines[3:]]))

    return harm


def last_step(run: Path, step: int | None = None) -> Path:
    return run / "episodes" / f"step-{step or int(newest(run).name[5:]):06d}.jsonl"


def another_version_stored(run: Path) -> None:
    file = last_step(run)
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    lines[1]["produced_version"] -= 1
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))


def half_replaced(run: Path) -> None:
    """The newest checkpoint was being written once more when the run died."""
    place = newest(run)
    old = place.with_name(place.name + ".old-x")
    old.mkdir()
    place.rename(old / place.name)


def truncate_line(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 20)


@dataclass(frozen=True)
class Damage:
    """`refused` matches what is said, OLD and NEW being the steps of the two checkpoints; where it is empty the run
    is resumed. `instead`: the state to resume from then, which ends with a clean audit."""

    name: str
    harm: Callable[..., object]
    refused: str = ""
    instead: str = ""


NEWEST = "(SELECT MAX(version) FROM checkpoints)"
OLDER = "(SELECT version FROM checkpoints ORDER BY version DESC LIMIT 1 OFFSET 1)"
LOST = r"ledger.*(empty|lost|has its tables).*restore it and the file ledger.sqlite-wal"
DAMAGES = [
    Damage("the -wal file is gone", without_wal, LOST),
    Damage("a ledger of 0 bytes", empty_ledger, LOST),
    Damage("no ledger", no_ledger, r"a run has a ledger"),
    Damage("flipped bits in the ledger", flipped_ledger, r"sound SQLite file.*damaged.*restore"),
    Damage("the ledger is another file", no_sqlite, r"sound SQLite file.*damaged.*restore"),
    Damage("all versions deleted", sql("DELETE FROM versions"), r"which the ledger does not have.*--from 0"),
    Damage("the newest versions deleted", sql(f"DELETE FROM versions WHERE number > {OLDER}"),
           r"--from OLD", "old"),
    Damage("no sessions", sql("DELETE FROM sessions"), r"ledger.*older than the run"),
    Damage("an older ledger", older_ledger, r"older than the run.*--from OLD", "old"),
    Damage("a ledger a few commits older", a_little_older_ledger, r"older than the run.*--from NEW", "new"),
    Damage("another digest of the checkpoint", sql(f"UPDATE checkpoints SET digest = 'x' WHERE version = {NEWEST}"),
           r"not the checkpoint that the ledger has.*--from OLD", "old"),
    Damage("the version in state.json", state(wrong_version, seal=False), r"does not say what was written"),
    Damage("the version in state.json, sealed", state(wrong_version), r"version 1, which the ledger has at step 1"),
    Damage("the step in state.json, sealed", state(wrong_step), r"says that it is of steps"),
    Damage("the best evaluation in state.json, sealed", state(lambda c: c["state"].update(best=1.0)),
           r"not the checkpoint that the ledger has.*--from OLD", "old"),
    Damage("state.json cut off", of_newest("state.json", truncate), r"state.json.*--from OLD", "old"),
    Damage("state.json deleted", of_newest("state.json", Path.unlink), r"state.json.*--from OLD", "old"),
    Damage("weights cut off", of_newest("weights.safetensors", truncate),
           r"weights.safetensors.*--from OLD", "old"),
    Damage("the optimizer deleted", of_newest("optimizer.safetensors", Path.unlink),
           r"optimizer.*--from OLD", "old"),
    Damage("the newest checkpoint deleted", lambda run: shutil.rmtree(newest(run)),
           r"is missing.*--from OLD", "old"),
    Damage("all checkpoints deleted", lambda run: shutil.rmtree(run / "checkpoints"),
           r"is missing.*--from 0", "first"),
    Damage("the newest checkpoint renamed", lambda run: newest(run).rename(run / "checkpoints/step-000100"),
           r"step-\d+, which the ledger has, is missing"),
    Damage("an older checkpoint in the newest one's place",
           older_in_its_place,
           r"says that it is of steps"),
    Damage("a stored version that is another", another_version_stored, r"trained into version \d+, and the ledger"),
    Damage("a stored step that is cut off", lambda run: truncate(last_step(run)), r"stored episodes can be read"),
    Damage("a line of metrics that is none", line("metrics.jsonl", 2, "{\n"), r"metrics.jsonl, line 3.*damaged"),
    Damage("a line of events that is none", line("events.jsonl", 2, "{\n"), r"events.jsonl, line 3.*damaged"),
    Damage("a line of events that is a number", line("events.jsonl", 2, "5\n"), r"events.jsonl, line 3.*damaged"),
    Damage("a line of metrics that is no text", not_text("metrics.jsonl"), r"metrics.jsonl, line 3.*damaged"),
    Damage("a line of events that is no text", not_text("events.jsonl"), r"events.jsonl, line 3.*damaged"),
    Damage("a line of metrics without a step", line("metrics.jsonl", 2, "{}\n"), r"line 3 names its step.*damaged"),
    Damage("a torn last line of metrics", lambda run: truncate_line(run / "metrics.jsonl")),
    Damage("a torn last line of events", lambda run: truncate_line(run / "events.jsonl")),
    Damage("config.toml is cut off", lambda run: truncate(run / "config.toml")),
    Damage("episodes removed to free disk", lambda run: last_step(run, 2).unlink()),
    Damage("kept versions removed to free disk", lambda run: shutil.rmtree(run / "versions")),
    Damage("what a crash leaves of a checkpoint", half_replaced),
]  # fmt: skip


@pytest.fixture
def copied(killed: Project, tmp_path: Path) -> Project:
    """The killed run, to be damaged."""
    return copy_of(killed, tmp_path)


def copy_of(project: Project, folder: Path) -> Project:
    shutil.copytree(project.path, folder / "copy")
    return Project(folder / "copy")


def states(run: Path) -> dict[str, int]:
    """Steps that a run may go on from."""
    steps = checkpoint_steps(run)
    return {"first": 0, "old": min(steps), "new": max(steps)}


def refusal(project: Project, from_step: int | None = None) -> str:
    """What resuming is refused with, empty if it is not."""
    from headrace.config.load import read_config

    run = RunFolder(project.run)
    try:
        prepare(run, read_config(project.path / "config.toml"), resume=True, overwrite=False, from_step=from_step)
    except InputError as error:
        return str(error)
    run.release()
    return ""


def goes_on(project: Project, *words: str) -> None:
    done = project.headrace("train", "config.toml", "--resume", "--json", *words, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 60
    report = project.audit()
    assert report["ok"], report["violations"][:5]


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d.refused], ids=lambda damage: damage.name)
def test_damage_is_refused_with_what_to_do(damage: Damage, copied: Project, trial: Trial) -> None:
    trial("resume-damages", name=damage.name)
    steps = states(copied.run)
    damage.harm(copied.run)
    said = refusal(copied)
    expected = damage.refused.replace("OLD", str(steps["old"])).replace("NEW", str(steps["new"]))
    assert re.search(expected, said), said
    if damage.instead:
        assert refusal(copied, steps[damage.instead]) == ""


@pytest.mark.full
@pytest.mark.parametrize("damage", [d for d in DAMAGES if d.instead], ids=lambda damage: damage.name)
def test_an_older_state_that_is_named_does(damage: Damage, copied: Project) -> None:
    steps = states(copied.run)
    damage.harm(copied.run)
    goes_on(copied, "--from", str(steps[damage.instead]))


@pytest.mark.parametrize("damage", [d for d in DAMAGES if not d.refused], ids=lambda damage: damage.name)
def test_what_is_no_damage_is_gone_on_with(damage: Damage, copied: Project, trial: Trial) -> None:
    trial("resume-damages", name=damage.name)
    damage.harm(copied.run)
    assert refusal(copied) == ""
    goes_on(copied)


def test_an_older_ledger_and_a_deleted_checkpoint_are_survived_from_older_states(killed, tmp_path) -> None:
    for number, harm in enumerate([older_ledger, lambda run: shutil.rmtree(newest(run))]):
        project = copy_of(killed, tmp_path / str(number))
        step = states(project.run)["old"]
        harm(project.run)
        goes_on(project, "--from", str(step))


def test_a_flipped_bit_of_the_weights_is_refused_by_the_trainer(copied: Project, trial: Trial) -> None:
    trial("resume-damages", name="a flipped bit in the weights")
    flip(newest(copied.run) / "weights.safetensors")
    done = copied.headrace("train", "config.toml", "--resume")
    assert done.returncode == 2
    assert "weights.safetensors" in done.stderr
    assert "--from STEP" in done.stderr


def test_the_ledger_of_another_run_is_refused(copied: Project, other: Project, trial: Trial) -> None:
    trial("resume-damages", name="the ledger of another run")
    no_ledger(copied.run)
    for file in other.run.glob("ledger.sqlite*"):
        shutil.copy(file, copied.run)
    assert "resumed from what its files agree on" in refusal(copied)


def test_a_configuration_that_was_changed_in_both_places_is_refused(copied: Project, trial: Trial) -> None:
    trial("resume-damages", name="another bound in config.toml")
    for file in (copied.run / "config.toml", copied.path / "config.toml"):
        file.write_text(file.read_text().replace("max_staleness = 2", "max_staleness = 5"))
    assert "buffer.max_staleness: 2 became 5" in refusal(copied)


def test_a_run_killed_while_it_started_begins_anew(copied: Project, trial: Trial) -> None:
    trial("resume-damages", name="all is gone but what a start leaves")
    for path in copied.run.iterdir():
        if path.name not in ("config.toml", ".headrace.lock", "logs"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    goes_on(copied)


def test_from_needs_resume(copied: Project) -> None:
    done = copied.headrace("train", "config.toml", "--from", "3")
    assert done.returncode == 2
    assert "give --resume too" in done.stderr


def test_a_run_killed_again_before_it_has_set_its_files_aside_is_sound(copied: Project, trial: Trial) -> None:
    trial("resume-damages", name="killed between the restore's booking and its files")
    run = RunFolder(copied.run)
    state = read_state(newest(copied.run))
    ledger = Ledger(run.ledger)
    open_session(ledger, state["state"], config=run.config.read_text())
    ledger.close()
    assert [step for step, _ in run.step_files() if step > state["step"]], "something is to be set aside"
    assert copied.audit()["violations"] == []
    goes_on(copied)


def test_a_finished_run_whose_resumption_never_began_is_sound(copied: Project, trial: Trial) -> None:
    trial("resume-damages", name="a resumption that fails at the start")
    done = copied.headrace("train", "config.toml", "--resume", "--json", timeout=240)
    assert done.returncode == 0, done.stderr
    more = ["--set", "training.steps=70", "--set", "limits.start_s=0.01"]
    assert copied.headrace("train", "config.toml", "--resume", *more).returncode == 1
    assert copied.audit()["violations"] == []


def test_files_whose_names_only_look_like_numbers_are_left_alone(copied: Project) -> None:
    shutil.copytree(newest(copied.run), copied.run / "checkpoints" / "step-²")
    (copied.run / "versions" / "².safetensors").write_bytes(b"")
    (copied.run / "versions" / "notes.safetensors").write_bytes(b"")
    assert refusal(copied) == ""
    assert copied.audit("--recompute", "5")["violations"] == []
    FolderVault(copied.run, keep=2).forget_versions(0)
    assert (copied.run / "versions" / "notes.safetensors").exists()
