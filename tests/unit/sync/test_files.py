from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from sync_builders import deadline, draft, empty_like, noise, opened, run_python, until, version

from headrace.errors import ConfigError, DeadlineExceeded, SyncError
from headrace.records import decode, encode
from headrace.sync import open_channel, open_receiver, open_sender
from headrace.sync.base import AdapterSpec, Destination
from headrace.sync.layout import ALIGN
from headrace.sync.transport import version_folder
from headrace.sync.transport.files import FilesInlet, FilesOutlet
from headrace.testing.transport import nudged, weights

Tensors = dict[str, torch.Tensor]
RUN = "0123abcd"


def visible(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def hidden(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("."))


def numbers(folder: Path) -> list[int]:
    return [int(name.split("-")[1]) for name in visible(folder)]


def published(folder: Path, number: int, tensors: Tensors, **options: Any) -> Path:
    """The directory of a version, once it is there."""
    sender = open_sender(open_channel("files", folder=str(folder)))
    manifest, _ = sender.send(version(number), tensors, **options)
    sender.close()
    return Path(manifest.streams[-1].location["path"])


# ── What is in a directory ───────────────────────────────────────────────────────────────────────────────


def test_a_version_is_a_safetensors_file_of_the_published_tensors(tmp_path: Path) -> None:
    tensors = weights(1) | {
        "eighths": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
        "doubles": torch.randn(3, dtype=torch.float64),
    }
    path = published(tmp_path, 12, tensors)
    assert re.fullmatch(r"version-00000012-[0-9a-f]{16}", path.name)
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors"]
    found = load_file(path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_file_is_a_header_and_then_the_image(tmp_path: Path) -> None:
    path = published(tmp_path, 1, {"b": torch.tensor([1, 2], dtype=torch.uint8), "a": torch.tensor([1.0])})
    raw = (path / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    assert (8 + length) % ALIGN == 0
    assert raw[8 + length :] == struct.pack("<fBB", 1.0, 1, 2)
    assert json.loads(raw[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
    }


def test_the_manifest_tells_a_reader_everything_by_name(tmp_path: Path) -> None:
    path = published(tmp_path, 3, {"a": torch.ones(2, 2), "b": torch.zeros(3, dtype=torch.bfloat16)})
    head = (path / "model.safetensors").stat().st_size - 22
    assert json.loads((path / "manifest.json").read_text()) == {
        "format": "headrace version 1",
        "version": {"number": 3, "parent": 2, "step": 3},
        "payload": "full",
        "base": None,
        "file": "model.safetensors",
        "start": head,
        "nbytes": 22,
        "image_nbytes": 22,
        "after": [],
        "adapter": None,
        "tensors": [
            {"name": "a", "dtype": "float32", "shape": [2, 2], "offset": 0, "nbytes": 16},
            {"name": "b", "dtype": "bfloat16", "shape": [3], "offset": 16, "nbytes": 6},
        ],
    }


def test_changes_are_a_file_of_their_own_beside_a_manifest_that_names_the_directories_before(
    tmp_path: Path,
) -> None:
    sender, tensors = open_sender(open_channel("files", folder=str(tmp_path)), payload="delta"), weights(1, 4000)
    paths = []
    for number in (1, 2, 3):
        manifest, _ = sender.send(version(number), tensors, to=[Destination(name="engine", version=number - 1)])
        paths.append(Path(manifest.streams[-1].location["path"]))
        tensors = nudged(tensors, number)
    sender.close()
    assert [sorted(os.listdir(path)) for path in paths] == [
        ["manifest.json", "model.safetensors"],
        ["delta.bin", "manifest.json"],
        ["delta.bin", "manifest.json"],
    ]
    told = json.loads((paths[2] / "manifest.json").read_text())
    assert (told["payload"], told["base"], told["file"], told["start"]) == ("delta", 2, "delta.bin", 0)
    assert told["after"] == [paths[0].name, paths[1].name]
    assert told["nbytes"] == (paths[2] / "delta.bin").stat().st_size == manifest.streams[-1].nbytes


def test_peft_loads_an_adapter_and_computes_with_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=11, **size)
    plain, merged = (transformers.LlamaForCausalLM(config) for _ in range(2))
    merged.load_state_dict(plain.state_dict())
    tensors: Tensors = {}
    for layer in range(2):
        for module in ("self_attn.q_proj", "mlp.up_proj"):
            weight = merged.get_submodule(f"model.layers.{layer}.{module}").weight
            rows, columns = weight.shape
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(3, columns)
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, 3)
            weight.data += 6 / 3 * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    adapter = AdapterSpec(name="policy", rank=3, alpha=6.0, targets=("q_proj", "up_proj"))
    path = published(tmp_path, 1, tensors, adapter=adapter)
    assert sorted(os.listdir(path)) == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    told = json.loads((path / "manifest.json").read_text())["adapter"]
    assert told == {"name": "policy", "rank": 3, "alpha": 6.0, "targets": ["q_proj", "up_proj"]}
    loaded = peft.PeftModel.from_pretrained(plain, str(path))
    used = loaded.peft_config["default"]
    assert (used.peft_type, used.task_type, used.r, used.lora_alpha) == ("LORA", "CAUSAL_LM", 3, 6)
    assert used.target_modules == {"q_proj", "up_proj"}
    assert isinstance(used.lora_alpha, int)
    tokens = torch.arange(11)[None]
    assert torch.allclose(loaded(tokens).logits, merged(tokens).logits, atol=1e-5)


def test_a_dtype_that_safetensors_does_not_have_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    sender = open_sender(open_channel("files", folder=str(tmp_path)))
    with pytest.raises(SyncError, match="z is complex128") as caught:
        sender.stage(version(1), {"z": torch.zeros(2, dtype=torch.complex128)})
    assert caught.value.stage == "announce"
    assert os.listdir(tmp_path) == []


def test_a_version_of_no_bytes_appears_too(tmp_path: Path) -> None:
    outlet = FilesOutlet(str(tmp_path), RUN)
    stream = opened(outlet, 1, noise(0))
    assert list(FilesInlet().chunks(stream, deadline(), None)) == []
    path = published(tmp_path, 2, {"nothing": torch.empty(0)})
    assert load_file(path / "model.safetensors")["nothing"].shape == (0,)
    outlet.close()
    assert numbers(tmp_path) == [1, 2]


# ── Whole or not at all ──────────────────────────────────────────────────────────────────────────────────


def test_a_version_is_not_seen_before_its_last_byte(tmp_path: Path) -> None:
    outlet, content = FilesOutlet(str(tmp_path), RUN), noise(10_000)
    stream = opened(outlet, 1, content, filled=9_999)
    time.sleep(0.05)
    assert visible(tmp_path) == []
    assert hidden(tmp_path) == [Path(stream.location["writing"]).name]
    outlet.advance(10_000)
    outlet.close()
    assert visible(tmp_path) == [Path(stream.location["path"]).name]
    assert hidden(tmp_path) == []
    chunks = list(FilesInlet().chunks(stream, deadline(), None))
    assert torch.equal(chunks[0][1], content)


WRITER = """
import json, sys, time, torch
from headrace.records import encode
from headrace.sync import open_sender
from sync_builders import version

sender = open_sender(json.loads(sys.argv[1]))
sender.send(version(1), {"w": torch.ones(100_000)})
manifest = sender.stage(version(2), {"w": torch.full((5_000_000,), 2.0)})
sender._outlet.advance(10_000_000)
sys.stdout.write(encode(manifest).hex() + "\\n")
sys.stdout.flush()
time.sleep(600)
"""


def test_a_sender_that_is_killed_leaves_no_version_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    channel = open_channel("files", folder=str(tmp_path))
    child = run_python(WRITER, json.dumps(channel))
    assert child.stdout is not None
    manifest = decode(bytes.fromhex(child.stdout.readline()))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        open_receiver(channel, deadline_s=1.0).receive(manifest, {"w": torch.zeros(5_000_000)})
    assert 1.0 <= time.monotonic() - started < 6.0
    other = FilesOutlet(str(tmp_path), RUN)  # a living sender's draft is not touched
    assert (numbers(tmp_path), len(hidden(tmp_path))) == ([1], 1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert (numbers(tmp_path), len(hidden(tmp_path))) == ([1], 1)
    FilesOutlet(str(tmp_path), "ffffffff").close()
    assert (numbers(tmp_path), hidden(tmp_path)) == ([1], [])
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"version 2 is not in .* given up") as caught:
        open_receiver(channel, deadline_s=60.0).receive(manifest, {"w": torch.zeros(5_000_000)})
    assert caught.value.stage == "transfer"
    assert time.monotonic() - started < 10.0
    other.close()


@pytest.mark.parametrize(("age", "stays"), [(0, True), (version_folder.ABANDONED_S + 60, False)])
def test_what_a_sender_on_another_machine_writes_stays_for_a_day(tmp_path: Path, age: float, stays: bool) -> None:
    theirs = tmp_path / ".version-00000007-00000000ffffffff.00000000.1"
    theirs.mkdir()
    os.utime(theirs, (time.time() - age, time.time() - age))
    FilesOutlet(str(tmp_path), RUN).close()
    assert theirs.exists() == stays


def test_a_sender_that_takes_anothers_place_sweeps_up_after_it(tmp_path: Path) -> None:
    first = FilesOutlet(str(tmp_path), RUN)
    opened(first, 1, noise(100), filled=50)
    FilesOutlet(str(tmp_path), "ffffffff").close()
    assert len(hidden(tmp_path)) == 1
    second = FilesOutlet(str(tmp_path), RUN)
    assert hidden(tmp_path) == []
    first.advance(100)
    with pytest.raises(SyncError, match="version 1 could not be brought to the disk") as caught:
        first.close()
    assert caught.value.stage == "transfer"
    assert os.listdir(tmp_path) == []
    second.close()


def test_what_is_no_version_stays_as_it_is(tmp_path: Path) -> None:
    for name in ("notes", ".hidden", "version-1-old", ".version-00000007-zz"):
        (tmp_path / name).mkdir()
    outlet = FilesOutlet(str(tmp_path), RUN)
    outlet.retain([9])
    outlet.close()
    assert len(os.listdir(tmp_path)) == 4


def test_a_version_that_the_disk_did_not_take_is_not_shown_and_the_sender_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    outlet = FilesOutlet(str(tmp_path), RUN)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        stream = opened(outlet, 1, noise(100))
        with pytest.raises(SyncError, match="version 1 is not in"):
            list(FilesInlet().chunks(stream, deadline(), None))
        with pytest.raises(SyncError, match="Input/output error"):
            outlet.reopen(())
    assert os.listdir(tmp_path) == []
    with pytest.raises(SyncError, match=r"version 1 could not be brought to the disk .*Input/output") as caught:
        opened(outlet, 2, noise(100))
    assert caught.value.stage == "transfer"
    opened(outlet, 3, noise(100))
    outlet.close()
    assert numbers(tmp_path) == [3]


def test_bytes_reach_the_disk_before_the_version_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_rename(source: Any, target: Any) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    sender = open_sender(open_channel("files", folder=str(tmp_path)))
    manifest, _ = sender.send(version(1), weights(1))
    sender.close()
    writing = Path(manifest.streams[-1].location["writing"]).name
    assert sorted(events[:2]) == ["manifest.json", "model.safetensors"]
    assert events[2:] == [writing, "rename", tmp_path.name]


LIMITED = """
import json, os, resource, sys, torch
from headrace.errors import SyncError
from headrace.sync import open_sender
from sync_builders import version

channel = json.loads(sys.argv[1])
sender = open_sender(channel)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    sender.stage(version(1), {"w": torch.ones(500_000)})
except SyncError as error:
    print(error.stage, str(error), os.listdir(channel["folder"]))
sender.send(version(2), {"w": torch.ones(1000)})
sender.close()
"""


def test_too_little_room_is_an_error_when_a_version_is_announced_and_leaves_nothing(tmp_path: Path) -> None:
    child = run_python(LIMITED, json.dumps(open_channel("files", folder=str(tmp_path))))
    told, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert told.startswith("announce ")
    assert f"{tmp_path} takes no version 1 of 2000000 bytes: [Errno 27] File too large" in told
    assert told.endswith(" []\n")
    assert numbers(tmp_path) == [2]


def test_a_full_disk_is_an_error_that_names_the_folder_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outlet = FilesOutlet(str(tmp_path), RUN)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SyncError, match=rf"{tmp_path} takes no version 4 of 123 bytes: .*No space left") as caught:
        outlet.open(draft(4, 123, "files"), (), torch.device("cpu"))
    assert caught.value.stage == "announce"
    assert os.listdir(tmp_path) == []
    outlet.close()


def test_a_folder_that_cannot_be_made_is_an_error_when_the_sender_opens_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SyncError, match=r"versions cannot be kept in .*file"):
        FilesOutlet(str(tmp_path / "file"), RUN)


def test_a_channel_of_files_needs_a_folder_and_makes_its_path_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs a folder"):
        open_channel("files")
    monkeypatch.chdir(tmp_path)
    channel = open_channel("files", folder="versions")
    assert channel["folder"] == str(tmp_path / "versions")
    assert json.loads(json.dumps(channel)) == channel
    assert channel["run"] != open_channel("files", folder="versions")["run"]


# ── What goes ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_current_version_and_the_one_before_are_kept(tmp_path: Path) -> None:
    foreign = published(tmp_path, 1, weights(0))
    sender = open_sender(open_channel("files", folder=str(tmp_path)))
    for number in range(2, 6):
        sender.send(version(number), weights(number))
        sender.again(number, ())
    sender.close()
    assert numbers(tmp_path) == [1, 4, 5]
    assert hidden(tmp_path) == []
    assert foreign.is_dir()


def test_changes_are_kept_as_long_as_what_they_lead_to(tmp_path: Path) -> None:
    channel = open_channel("files", folder=str(tmp_path))
    sender, tensors = open_sender(channel, payload="delta", anchor_every=3), weights(0, rows=4000)
    kept = []
    for number in range(1, 8):
        sender.send(version(number), tensors, to=[Destination(name="engine", version=number - 1)])
        sender._outlet._disk.submit(int).result()  # type: ignore[attr-defined]
        kept.append(numbers(tmp_path))
        tensors = nudged(tensors, number)
    sender.close()
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7]]


def test_what_the_sender_before_left_is_kept_for_slow_readers_and_then_goes(tmp_path: Path) -> None:
    channel = open_channel("files", folder=str(tmp_path))
    for first in (1, 4):
        sender = open_sender(channel)
        sender.send(version(first), weights(1))
        sender._outlet._disk.submit(int).result()  # type: ignore[attr-defined]
        assert numbers(tmp_path) == ([1] if first == 1 else [1, 2, 4])
        sender.send(version(first + 1), weights(1))
        sender.close()
    assert numbers(tmp_path) == [4, 5]


def test_a_reader_goes_on_reading_a_version_that_is_removed(tmp_path: Path) -> None:
    outlet, content = FilesOutlet(str(tmp_path), RUN), noise(9 << 20)
    chunks = FilesInlet().chunks(opened(outlet, 1, content), deadline(), None)
    found = [next(chunks)[1].clone()]
    for number in (2, 3):
        opened(outlet, number, noise(10))
        outlet.retain([number])
    outlet.close()
    assert numbers(tmp_path) == [2, 3]
    found += [chunk.clone() for _, chunk in chunks]
    assert torch.equal(torch.cat(found), content)


def test_old_versions_that_cannot_be_removed_do_not_stop_the_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outlet = FilesOutlet(str(tmp_path), RUN)
    with monkeypatch.context() as broken:
        broken.setattr(version_folder.VersionFolder, "_visible", lambda self: {tmp_path / "gone": 0})
        outlet.retain([1])
        until(lambda: bool(caplog.records))
    assert f"old versions stay in {tmp_path}" in caplog.text
    opened(outlet, 2, noise(10))
    outlet.close()
    assert numbers(tmp_path) == [2]


# ── Receiving ────────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_go_straight_into_memory_that_lies_as_the_stream_does(tmp_path: Path) -> None:
    outlet, content = FilesOutlet(str(tmp_path), RUN), noise((8 << 20) + 5)
    stream, into = opened(outlet, 1, content), torch.zeros(len(content), dtype=torch.uint8)
    offsets = []
    for offset, chunk in FilesInlet().chunks(stream, deadline(), into):
        assert chunk.data_ptr() == into.data_ptr() + offset
        offsets.append((offset, len(chunk)))
    assert offsets == [(0, 4 << 20), (4 << 20, 4 << 20), (8 << 20, 5)]
    assert torch.equal(into, content)
    outlet.close()


@pytest.mark.parametrize("size", [0, 1000, 70_000])
def test_a_file_of_another_size_is_an_error_not_a_signal(tmp_path: Path, size: int) -> None:
    outlet = FilesOutlet(str(tmp_path), RUN)
    stream = opened(outlet, 1, noise(50_000))
    outlet.close()
    file = Path(stream.location["path"]) / stream.location["file"]
    announced = file.stat().st_size
    os.truncate(file, size)
    with pytest.raises(SyncError, match=f"has {size} bytes of the {announced} announced") as caught:
        list(FilesInlet().chunks(stream, deadline(), None))
    assert caught.value.stage == "transfer"


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    outlet = FilesOutlet(str(tmp_path), RUN)
    stream = opened(outlet, 1, noise(9 << 20))
    outlet.close()
    chunks = FilesInlet().chunks(stream, deadline(), None)
    next(chunks)
    os.truncate(Path(stream.location["path"]) / stream.location["file"], 5 << 20)
    with pytest.raises(SyncError, match=f"version 1 ends at byte {5 << 20} of its file"):
        list(chunks)


def test_a_file_that_vanished_is_an_error_at_once(tmp_path: Path) -> None:
    outlet = FilesOutlet(str(tmp_path), RUN)
    stream = opened(outlet, 1, noise(100))
    outlet.advance(100)
    until(lambda: numbers(tmp_path) == [1])
    (Path(stream.location["path"]) / stream.location["file"]).unlink()
    with pytest.raises(SyncError, match=r"version 1 cannot be read: .*No such file") as caught:
        list(FilesInlet().chunks(stream, deadline(), None))
    assert caught.value.stage == "transfer"
    for entry in Path(stream.location["path"]).iterdir():
        entry.unlink()
    Path(stream.location["path"]).rmdir()
    with pytest.raises(SyncError, match="is gone; somebody removed it"):
        outlet.reopen(())
    outlet.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    outlet = FilesOutlet(str(tmp_path / "here"), RUN)
    stream = opened(outlet, 1, noise(100), filled=1)
    outlet.close()
    (tmp_path / "here").rmdir()
    with pytest.raises(SyncError, match=r"is it the same on this machine\? .*here"):
        list(FilesInlet().chunks(stream, deadline(), None))


def test_who_waits_for_a_version_that_a_later_one_replaced_hears_of_it_long_before_the_deadline(
    tmp_path: Path,
) -> None:
    outlet = FilesOutlet(str(tmp_path), RUN)
    stream = opened(outlet, 1, noise(100), filled=50)
    replacing = threading.Timer(0.1, lambda: opened(outlet, 2, noise(100)))
    replacing.start()
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"version 1 is not in .*: replaced by a later one") as caught:
        list(FilesInlet().chunks(stream, deadline(60.0), None))
    assert caught.value.stage == "transfer"
    assert time.monotonic() - started < 10.0
    replacing.join()
    outlet.close()


def test_a_flipped_bit_in_a_file_is_found_by_verify_and_named(tmp_path: Path) -> None:
    channel = open_channel("files", folder=str(tmp_path))
    sender, receiver, standby = open_sender(channel), open_receiver(channel), empty_like(weights(1))
    manifest, seal = sender.send(version(1), weights(1))
    sender.close()
    location = manifest.streams[-1].location
    counts = next(spec for spec in manifest.tensors if spec.name == "counts")
    with open(Path(location["path"]) / location["file"], "r+b") as file:
        place = location["start"] + counts.offset + 11
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, place)[0] ^ 0x10]), place)
    receiver.receive(manifest, standby)
    with pytest.raises(SyncError, match=r"checksums differ for counts($|;)") as caught:
        receiver.verify(manifest, seal, standby)
    assert caught.value.stage == "verify"


ENGINE = """
import json, sys, torch
from headrace.records import decode
from headrace.sync import open_receiver

receiver = open_receiver(json.loads(sys.argv[1]))
manifest, seal = (decode(bytes.fromhex(text)) for text in sys.argv[2:])
standby = {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in manifest.tensors}
receiver.receive(manifest, standby)
receiver.verify(manifest, seal, standby)
print({name: float(t.double().sum()) for name, t in sorted(standby.items())})
"""


def test_another_process_receives_by_what_it_was_told_alone(tmp_path: Path) -> None:
    channel = open_channel("files", folder=str(tmp_path))
    sender = open_sender(channel)
    told = sender.send(version(1), weights(1))
    child = run_python(ENGINE, json.dumps(channel), *(encode(one).hex() for one in told))
    found, _ = child.communicate(timeout=60)
    expected = {name: float(tensor.double().sum()) for name, tensor in sorted(weights(1).items())}
    assert found == f"{expected}\n"
    sender.close()
