"""What every transport of weights does. Both of its ends are under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch

from headrace.errors import SyncError
from headrace.records import WeightVersion, decode, encode
from headrace.sync import check_manifest, verify
from headrace.sync.base import Manifest, Receiver, Sender

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Link:
    """A transport's two ends. `dtype` is what floating-point weights are published as; None: as they are."""

    sender: Sender
    open_receiver: Callable[[], Receiver]
    dtype: torch.dtype | None = None


def weights(seed: int, rows: int = 7) -> Tensors:
    """Tensors of all sorts: large, empty of dimensions, not contiguous, integers."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(rows, 5, generator=draw),
        "scalar": torch.randn((), generator=draw),
        "transposed": torch.randn(4, 6, generator=draw).t(),
        "halves": torch.randn(3, generator=draw).to(torch.bfloat16),
        "counts": torch.randint(0, 1 << 40, (9,), generator=draw),
    }


class TransportContract:
    """Subclass as TestMyTransport with a fixture `link` that gives a fresh Link."""

    @pytest.fixture
    def link(self) -> Link:
        raise NotImplementedError("give a fixture `link` that returns a Link")

    def test_every_bit_of_every_version_arrives_in_the_published_dtype(self, link: Link) -> None:
        receiver = link.open_receiver()
        for number in range(1, 6):
            manifest, standby = _send(link, number, weights(number))
            receiver.receive(manifest, standby)
            verify(manifest, standby)
            assert manifest.version.number == number
            assert _same(standby, _published(link, weights(number)))

    def test_a_manifest_describes_what_an_engine_of_these_tensors_expects(self, link: Link) -> None:
        manifest, standby = _send(link, 1, weights(1))
        check_manifest(manifest, standby)
        assert manifest.nbytes >= sum(t.numel() * t.itemsize for t in standby.values())
        del standby["scalar"]
        with pytest.raises(SyncError, match="unexpected: scalar"):
            check_manifest(manifest, standby)

    def test_what_is_sent_does_not_change_when_training_goes_on(self, link: Link) -> None:
        tensors = weights(1)
        manifest, standby = _send(link, 1, tensors)
        for tensor in tensors.values():
            tensor.zero_()
        link.open_receiver().receive(manifest, standby)
        assert _same(standby, _published(link, weights(1)))

    def test_several_receivers_get_the_same_version(self, link: Link) -> None:
        manifest, _ = _send(link, 1, weights(1))
        for receiver in [link.open_receiver() for _ in range(3)]:
            standby = _empty(link, weights(1))
            receiver.receive(manifest, standby)
            assert _same(standby, _published(link, weights(1)))
            receiver.close()

    def test_a_receiver_that_comes_late_gets_the_version_on_offer(self, link: Link) -> None:
        early = link.open_receiver()
        for number in (1, 2):
            manifest, standby = _send(link, number, weights(number))
            early.receive(manifest, standby)
        late = _empty(link, weights(2))
        link.open_receiver().receive(manifest, late)
        assert _same(late, _published(link, weights(2)))

    def test_versions_may_grow_and_shrink(self, link: Link) -> None:
        receiver = link.open_receiver()
        for number, rows in enumerate((3, 5000, 1), start=1):
            manifest, standby = _send(link, number, weights(number, rows))
            receiver.receive(manifest, standby)
            assert _same(standby, _published(link, weights(number, rows)))

    def test_a_version_that_a_later_one_replaced_is_refused_and_the_later_one_still_arrives(
        self, link: Link
    ) -> None:
        receiver = link.open_receiver()
        old, standby = _send(link, 1, weights(1))
        new, _ = _send(link, 2, weights(2))
        with pytest.raises(SyncError, match="version 1") as caught:
            receiver.receive(old, standby)
        assert caught.value.stage == "transfer"
        receiver.receive(new, standby)
        assert _same(standby, _published(link, weights(2)))

    def test_a_single_flipped_bit_is_found_by_verify_and_named(self, link: Link) -> None:
        manifest, standby = _send(link, 1, weights(1))
        link.open_receiver().receive(manifest, standby)
        standby["counts"][4] ^= 1
        with pytest.raises(SyncError, match=r"checksums differ for counts($|;)") as caught:
            verify(manifest, standby, who="engine-7")
        assert (caught.value.stage, caught.value.who) == ("verify", "engine-7")


def _send(link: Link, number: int, tensors: Tensors) -> tuple[Manifest, Tensors]:
    """Publish, take the manifest over the wire, and make room for what it describes."""
    manifest = link.sender.send(WeightVersion(number=number, parent=number - 1, step=number), tensors)
    return decode(encode(manifest)), _empty(link, tensors)


def _published(link: Link, tensors: Tensors) -> Tensors:
    return {
        name: tensor.to(link.dtype) if link.dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _empty(link: Link, tensors: Tensors) -> Tensors:
    return {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in _published(link, tensors).items()
    }


def _same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
