"""What was trained on can be read back from disk, number for number."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from batch_builders import make_batch, make_turn

from headrace.errors import RunFolderError
from headrace.records import Batch, Episode, Group, encode
from headrace.telemetry.episodes import StoredEpisode, episode_lines, is_kept, read_episodes
from headrace.telemetry.folder import RunFolder


def write(folder: Path, batch: Batch, produced: int = 7) -> list[StoredEpisode]:
    file = RunFolder(folder).step_file(batch.step)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"".join(episode_lines(batch, produced, lambda group: True, lambda ids: f"<{len(ids)}>")))
    return list(read_episodes(folder))


def test_every_field_of_every_record_survives_bit_for_bit(tmp_path: Path) -> None:
    batch = make_batch()
    stored = write(tmp_path, batch)
    originals = list(batch.episodes)
    assert len(stored) == len(originals) == 4
    for one, original in zip(stored, originals, strict=True):
        # The wire encoding covers every field, dtype and shape.
        assert encode(one.episode) == encode(original)


def test_how_an_episode_was_trained_is_stored_beside_it(tmp_path: Path) -> None:
    first, *_, last = write(tmp_path, make_batch(step=11))
    assert (first.group, first.sequence, first.admitted_version) == ("s11-g0", 0, 3)
    assert (first.step, first.trained_version, first.produced_version) == (11, 6, 7)
    assert (first.advantage, last.advantage) == (-1.0, 1.0)
    assert first.text == "<5>\n<3>"
    assert first.lag == 6 - int(first.episode.version_min or 0)


def test_a_text_is_stored_without_the_stop_string_that_ended_its_turn(tmp_path: Path) -> None:
    task = make_batch().groups[0].task
    turns = (make_turn(0, stop="stop_string", stop_string="5>"), make_turn(1))
    group = Group(id="g", sequence=0, task=task, episodes=(Episode(id="e", task=task, turns=turns, reward=1.0),))
    [stored] = write(tmp_path, Batch(step=1, version=6, groups=(group,), advantages=np.zeros(1, np.float32)))
    assert stored.text == "<\n<5>"
    stops = [(turn.stop, turn.stop_string) for turn in stored.episode.turns]
    assert stops == [("stop_string", "5>"), ("end", None)]
    assert [len(turn.tokens) for turn in stored.episode.turns] == [5, 5]


def test_the_teacher_is_stored_beside_an_episode_where_there_is_one(tmp_path: Path) -> None:
    file = RunFolder(tmp_path).step_file(1)
    file.parent.mkdir()
    batch = make_batch(step=1)
    lines = [next(episode_lines(batch, 7, lambda group: True, None, teacher)) for teacher in (0, None)]
    before_it_was_kept = msgspec.json.decode(lines[1])
    del before_it_was_kept["teacher"]
    file.write_bytes(b"".join([*lines, msgspec.json.encode(before_it_was_kept) + b"\n"]))
    assert [one.teacher for one in read_episodes(tmp_path)] == [0, None, None]


@pytest.mark.parametrize(
    "values",
    [
        [1e-45, -1e-38, -0.1, -3.4028235e38],
        [-0.0, -1.17549435e-38, -16777217.0, -1 / 3],
        [float("-inf"), float("nan"), float("inf"), -1.5],
    ],
)
def test_float32_log_probs_come_back_with_the_same_bits(tmp_path: Path, values: list[float]) -> None:
    logprobs = np.array(values, np.float32)
    task = make_batch().groups[0].task
    episode = Episode(id="e", task=task, turns=(make_turn(0, length=4, logprobs=logprobs),), reward=float("nan"))
    group = Group(id="g", sequence=0, task=task, episodes=(episode,))
    batch = Batch(step=0, version=6, groups=(group,), advantages=np.array([np.inf], np.float32))
    [stored] = write(tmp_path, batch)
    read = stored.episode.turns[0].logprobs
    assert read.dtype == np.float32
    assert read.view(np.uint32).tolist() == logprobs.view(np.uint32).tolist()
    assert np.isnan(stored.episode.reward)
    assert stored.advantage == np.inf


def test_a_line_is_plain_json_that_anyone_can_read(tmp_path: Path) -> None:
    write(tmp_path, make_batch(step=1))
    line = msgspec.json.decode((tmp_path / "episodes" / "step-000001.jsonl").read_bytes().splitlines()[0])
    assert line["task"] == {"id": "task-0", "prompt": "0+1=", "answer": "1", "data": {"level": 0}}
    assert line["turns"][1]["support"] == {"ids": [4, 9, 7, 1, 2], "offsets": [0, 2, 3, 5]}
    assert line["turns"][1]["lineage"][1] == {"position": 5, "version": 4, "before": "kept", "cause": "swap"}
    assert line["turns"][0]["support"] is None


def test_episodes_come_in_the_order_of_steps_and_one_step_can_be_asked_for(tmp_path: Path) -> None:
    for step in (10, 2, 7):
        write(tmp_path, make_batch(step=step, groups=1, size=1))
    assert [one.step for one in read_episodes(tmp_path)] == [2, 7, 10]
    assert [one.step for one in read_episodes(tmp_path, step=7)] == [7]
    assert list(read_episodes(tmp_path / "nowhere")) == []


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    write(tmp_path, make_batch(step=1, groups=1))
    file = tmp_path / "episodes" / "step-000001.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:40] + b"\n")
    with pytest.raises(RunFolderError, match=r"step-000001\.jsonl, line 2 is one episode"):
        list(read_episodes(tmp_path))


def test_the_recorded_sample_of_groups_is_a_fraction_that_only_grows_with_it() -> None:
    ids = [f"group-{number}" for number in range(10_000)]
    half = {one for one in ids if is_kept(one, 0.5)}
    quarter = {one for one in ids if is_kept(one, 0.25)}
    assert abs(len(half) - 5000) < 200
    assert quarter < half
    assert all(is_kept(one, 1.0) for one in ids)
    assert not any(is_kept(one, 0.0) for one in ids)
