"""What every transport of weights does, with every payload. Both of its ends are under test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import pytest
import torch

from headrace.errors import DeadlineExceeded, SyncError
from headrace.records import WeightVersion, decode, encode
from headrace.sync.base import Destination, Inlet, Manifest, Outlet, Seal
from headrace.sync.receiver import Receiver
from headrace.sync.sender import Sender

Tensors = dict[str, torch.Tensor]
ENGINE = "engine-0"


@dataclass(frozen=True)
class Link:
    """A transport's ends. `together`: bytes reach only the engines they were sent to, while they are sent."""

    outlet: Outlet
    open_inlet: Callable[[str], Inlet]
    together: bool = False

    def sender(self, payload: str = "full", dtype: torch.dtype | None = None, anchor_every: int = 50) -> Sender:
        return Sender(self.outlet, payload=payload, dtype=dtype, anchor_every=anchor_every)

    def receiver(self, name: str = ENGINE, deadline_s: float = 20.0) -> Receiver:
        return Receiver(self.open_inlet(name), deadline_s=deadline_s, who=name)


def weights(seed: int, rows: int = 7) -> Tensors:
    """Tensors of all sorts: large, empty of dimensions, not contiguous, integers, neighbours of one input."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(rows, 5, generator=draw),
        "scalar": torch.randn((), generator=draw),
        "transposed": torch.randn(4, 6, generator=draw).t(),
        "halves": torch.randn(3, generator=draw).to(torch.bfloat16),
        "counts": torch.randint(0, 1 << 40, (9,), generator=draw),
        "a.q_proj.weight": torch.randn(6, 3, generator=draw),
        "a.k_proj.weight": torch.randn(2, 3, generator=draw),
        "a.v_proj.weight": torch.randn(2, 3, generator=draw),
    }


def nudged(tensors: Tensors, seed: int, share: float = 0.05) -> Tensors:
    """Almost the same tensors."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.where(torch.rand(t.shape, generator=draw) < share, t + 1, t) for name, t in tensors.items()}


class TransportContract:
    """Subclass as TestMyTransport with a fixture `link` that gives a fresh Link."""

    @pytest.fixture
    def link(self) -> Link:
        raise NotImplementedError("give a fixture `link` that returns a Link")

    @pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
    def test_every_bit_of_every_version_arrives_in_the_published_dtype(
        self, link: Link, dtype: torch.dtype | None
    ) -> None:
        sender, receiver = link.sender(dtype=dtype), link.receiver()
        standby = _empty(weights(0), dtype)
        for number in range(1, 6):
            _deliver(sender, receiver, number, weights(number), standby)
            assert _same(standby, _published(weights(number), dtype))

    def test_buckets_cut_tensors_anywhere(self, link: Link) -> None:
        tensors = {"large": torch.arange(9_000_001, dtype=torch.float32), "small": torch.ones(3)}
        standby = _empty(tensors)
        _deliver(link.sender(), link.receiver(), 1, tensors, standby)
        assert _same(standby, tensors)

    def test_buffers_that_lie_as_in_the_image_and_buffers_that_do_not_get_the_same(self, link: Link) -> None:
        sender, receiver = link.sender(), link.receiver()
        together, apart = _in_one_block(weights(0)), _empty(weights(0))
        for number, standby in ((1, together), (2, apart), (3, together)):
            _deliver(sender, receiver, number, weights(number), standby)
            assert _same(standby, weights(number))

    def test_what_is_sent_does_not_change_when_training_goes_on(self, link: Link) -> None:
        tensors, receiver, standby = weights(1), link.receiver(), _empty(weights(1))

        def train_on() -> None:
            for tensor in tensors.values():
                tensor.zero_()

        _deliver(link.sender(), receiver, 1, tensors, standby, once_packed=train_on)
        assert _same(standby, weights(1))

    def test_several_receivers_get_the_same_version(self, link: Link) -> None:
        names = [f"engine-{i}" for i in range(3)]
        to = [Destination(name=name, version=0) for name in names]
        receivers = [link.receiver(name) for name in names]
        standbys = [_empty(weights(1)) for _ in names]
        manifest, seal = _send(link.sender(), 1, weights(1), to)
        _all(
            [
                lambda r=r, s=s: _take(r, manifest, seal, s)  # type: ignore[misc]
                for r, s in zip(receivers, standbys, strict=True)
            ]
        )
        assert all(_same(standby, weights(1)) for standby in standbys)

    def test_an_engine_that_comes_late_is_offered_the_version_again(self, link: Link) -> None:
        sender, early = link.sender(), link.receiver()
        for number in (1, 2):
            _deliver(sender, early, number, weights(number), _empty(weights(2)))
        late, standby = link.receiver("engine-1"), _empty(weights(2))
        manifest, seal = sender.again(2, [Destination(name="engine-1", version=-1)])
        _take(late, _over_the_wire(manifest), seal, standby)
        assert _same(standby, weights(2))

    def test_versions_may_grow_and_shrink(self, link: Link) -> None:
        sender, receiver = link.sender(), link.receiver()
        for number, rows in enumerate((3, 5000, 1), start=1):
            standby = _empty(weights(number, rows))
            _deliver(sender, receiver, number, weights(number, rows), standby)
            assert _same(standby, weights(number, rows))

    def test_a_version_that_a_later_one_replaced_arrives_whole_or_is_refused_and_the_later_one_arrives(
        self, link: Link
    ) -> None:
        sender, receiver, standby = link.sender(), link.receiver(deadline_s=3.0), _empty(weights(1))
        old, seal = _send(sender, 1, weights(1))
        new, new_seal = _send(sender, 2, weights(2))
        if link.outlet.keeps:
            _take(receiver, old, seal, standby)
            assert _same(standby, weights(1))
        else:
            with pytest.raises((SyncError, DeadlineExceeded), match="version 1"):
                receiver.receive(old, standby)
        if link.together:
            new, new_seal = sender.again(2, [Destination(name=ENGINE, version=-1)])
        _take(receiver, new, new_seal, standby)
        assert _same(standby, weights(2))

    def test_a_receiver_in_the_middle_of_a_version_that_is_replaced_is_told_long_before_its_deadline(
        self, link: Link
    ) -> None:
        if link.outlet.keeps:
            return  # Nothing is replaced there.
        sender, receiver = link.sender(), link.receiver(deadline_s=60.0)
        to, version = [Destination(name=ENGINE, version=0)], WeightVersion(number=1, parent=0, step=1)
        errors: list[Exception] = []
        unfilled = _over_the_wire(sender.stage(version, weights(1), to=to))

        def receive() -> None:
            try:
                receiver.receive(unfilled, _empty(weights(1)))
            except (SyncError, DeadlineExceeded) as error:
                errors.append(error)

        waiting = threading.Thread(target=receive)
        waiting.start()
        time.sleep(0.2)
        manifest, seal = _send(sender, 2, weights(2))
        waiting.join(20.0)
        assert [type(error) for error in errors] == [SyncError]
        assert "version 1" in str(errors[0])
        standby = _empty(weights(2))
        _take(receiver, manifest, seal, standby)
        assert _same(standby, weights(2))

    def test_a_sender_does_not_wait_for_engines_that_never_come(self, link: Link) -> None:
        sender = link.sender()
        to = [Destination(name=f"nobody-{i}", version=0) for i in range(2)]
        began = time.monotonic()
        for number in range(1, 6):
            _send(sender, number, weights(number), to)
        sender.again(5, to)
        assert time.monotonic() - began < 5.0

    def test_a_sender_that_never_fills_its_stream_is_given_up_at_the_deadline(self, link: Link) -> None:
        sender, receiver = link.sender(), link.receiver(deadline_s=0.5)
        to = [Destination(name=ENGINE, version=0)]
        version = WeightVersion(number=1, parent=0, step=1)
        manifest = sender.stage(version, weights(1), to=to)
        with pytest.raises((SyncError, DeadlineExceeded)):
            receiver.receive(manifest, _empty(weights(1)))

    def test_a_single_flipped_bit_is_found_by_verify_and_named(self, link: Link) -> None:
        receiver, standby = link.receiver("engine-7"), _empty(weights(1))
        manifest, seal = _send(link.sender(), 1, weights(1), [Destination(name="engine-7", version=0)])
        receiver.receive(manifest, standby)
        receiver.verify(manifest, seal, standby)
        standby["counts"][4] ^= 1
        with pytest.raises(SyncError, match=r"checksums differ for counts($|;)") as caught:
            receiver.verify(manifest, seal, standby)
        assert (caught.value.stage, caught.value.who) == ("verify", "engine-7")

    # ── Changes ──────────────────────────────────────────────────────────────────────────────────────────

    def test_changes_arrive_bit_for_bit_and_are_smaller(self, link: Link) -> None:
        sender, receiver = link.sender("delta"), link.receiver()
        tensors = weights(0, rows=4000)
        live, standby = _empty(tensors), _empty(tensors)
        for number in range(1, 8):
            manifest = _deliver(sender, receiver, number, tensors, standby, has=number - 1, live=live)
            assert _same(standby, tensors)
            assert manifest.streams[-1].base == (None if number == 1 else number - 1)
            if number > 1:
                assert manifest.streams[-1].nbytes < 0.3 * manifest.nbytes
            live = {name: tensor.clone() for name, tensor in standby.items()}
            tensors = nudged(tensors, number)

    def test_a_version_in_which_nothing_changed_arrives_all_the_same(self, link: Link) -> None:
        sender, receiver = link.sender("delta"), link.receiver()
        live = standby = _empty(weights(0))
        for number in (1, 2, 3):
            manifest = _deliver(sender, receiver, number, weights(0), standby, has=number - 1, live=live)
            live = {name: tensor.clone() for name, tensor in standby.items()}
        assert manifest.streams[-1].nbytes == 0
        assert _same(standby, weights(0))

    def test_an_engine_that_is_too_far_behind_gets_the_version_by_another_way(self, link: Link) -> None:
        sender, receiver = link.sender("delta"), link.receiver()
        tensors = weights(0, rows=4000)
        live, standby = _empty(tensors), _empty(tensors)
        _deliver(sender, receiver, 1, tensors, standby, has=0, live=live)
        behind = {name: tensor.clone() for name, tensor in standby.items()}
        tensors = nudged(tensors, 1)
        _deliver(sender, receiver, 2, tensors, standby, has=1, live=behind)
        tensors = nudged(tensors, 2)
        _deliver(sender, receiver, 3, tensors, standby, has=1, live=behind)
        assert _same(standby, tensors)

    def test_anchors_come_at_intervals_and_when_everything_changed(self, link: Link) -> None:
        sender, receiver = link.sender("delta", anchor_every=3), link.receiver()
        tensors = weights(0, rows=500)
        standby, whole = _empty(tensors), []
        for number in range(1, 8):
            live = {name: tensor.clone() for name, tensor in standby.items()}
            manifest = _deliver(sender, receiver, number, tensors, standby, has=number - 1, live=live)
            assert _same(standby, tensors)
            whole.append(manifest.streams[-1].base is None)
            tensors = nudged(tensors, number) if number != 5 else weights(number, rows=500)
        assert whole == [True, False, False, True, False, True, False]

    def test_changes_against_another_version_are_refused_when_they_are_announced(self, link: Link) -> None:
        sender, receiver = link.sender("delta"), link.receiver()
        tensors = weights(0, rows=500)
        standby = _empty(tensors)
        _deliver(sender, receiver, 1, tensors, standby, has=0, live=standby)
        manifest, _ = _send(sender, 2, nudged(tensors, 1), [Destination(name=ENGINE, version=1)])
        alone = msgspec.structs.replace(manifest, streams=manifest.streams[-1:])
        with pytest.raises(SyncError, match=r"changes since \[1\], and here is 7") as caught:
            receiver.check(alone, standby, has=7)
        assert caught.value.stage == "announce"


def _send(
    sender: Sender, number: int, tensors: Tensors, to: list[Destination] | None = None
) -> tuple[Manifest, Seal]:
    """Publish and take what says so over the wire."""
    version = WeightVersion(number=number, parent=number - 1, step=number)
    to = [Destination(name=ENGINE, version=number - 1)] if to is None else to
    manifest, seal = sender.send(version, tensors, to=to)
    return _over_the_wire(manifest), decode(encode(seal))


def _over_the_wire(manifest: Manifest) -> Manifest:
    found = decode(encode(manifest))
    assert isinstance(found, Manifest)
    return found


def _deliver(
    sender: Sender,
    receiver: Receiver,
    number: int,
    tensors: Tensors,
    standby: Tensors,
    *,
    has: int = -1,
    live: Tensors | None = None,
    once_packed: Callable[[], None] = lambda: None,
) -> Manifest:
    """One version from end to end, into `standby`. `live` is what the engine has as version `has`."""
    version = WeightVersion(number=number, parent=number - 1, step=number)
    manifest = _over_the_wire(sender.stage(version, tensors, to=[Destination(name=ENGINE, version=has)]))
    receiver.check(manifest, standby, has=has)

    def refresh() -> None:
        for name, buffer in standby.items():
            buffer.copy_((live or {})[name])

    seals: list[Seal] = []

    def fill() -> None:
        seals.append(sender.pack())
        once_packed()

    _all([fill, lambda: receiver.receive(manifest, standby, has=has, refresh=refresh)])
    receiver.verify(manifest, seals[0], standby)
    return manifest


def _take(receiver: Receiver, manifest: Manifest, seal: Seal, standby: Tensors) -> None:
    receiver.receive(manifest, standby)
    receiver.verify(manifest, seal, standby)


def _all(works: list[Callable[[], None]]) -> None:
    """At the same time, in threads; the first error is raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _published(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _empty(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in _published(tensors, dtype).items()}


def _in_one_block(tensors: Tensors) -> Tensors:
    """Buffers in one block of memory, in the layout of an aligned image."""
    from headrace.sync.payload.full import image_of, place

    specs, nbytes = image_of(tensors, None)
    block = torch.zeros(nbytes, dtype=torch.uint8)
    return {spec.name: place(spec, block) for spec in specs}


def _same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
