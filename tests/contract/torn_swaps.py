"""Engines whose swaps are wrong, each the entry of a process like `headrace.engine.serve:start`."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from torch import Tensor

from headrace.engine import serve
from headrace.engine.base import Interrupt, SwapReport
from headrace.engine.native import core


class _Torn(core.NativeEngine):
    """After a swap some tensors are still the old ones; they follow."""

    def _late(self) -> list[str]:
        raise NotImplementedError

    def _follow(self, new: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def swap(self, version: int, interrupt: Interrupt = "keep", only: Any = None) -> SwapReport:
        old = {name: tensor.clone() for name, tensor in self.live().items()}
        report = super().swap(version, interrupt, only)
        new = {name: self.live()[name].clone() for name in self._late()}
        self._put({name: old[name] for name in new})
        self._follow(new)
        return report

    def _put(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.live()[name].copy_(tensor)


class _OnePassLate(_Torn):
    def _late(self) -> list[str]:
        return [*self.live()][len(self.live()) // 2 :]

    def _follow(self, new: dict[str, Tensor]) -> None:
        self._new = new

    def step(self, **options: Any) -> Any:
        steps, ended = self.steps, super().step(**options)
        if self.steps > steps:
            self._put(getattr(self, "_new", {}))
            self._new: dict[str, Tensor] = {}
        return ended


class _OneTensorOnePassLate(_OnePassLate):
    def _late(self) -> list[str]:
        return ["model.layers.1.post_attention_layernorm.weight"]


class _OneByOne(_Torn):
    """While passes run."""

    def _late(self) -> list[str]:
        return [*self.live()]

    def _follow(self, new: dict[str, Tensor]) -> None:
        def exchange() -> None:
            for name, tensor in new.items():
                self._put({name: tensor})
                time.sleep(0.0002)

        if hasattr(self, "_exchange"):
            self._exchange.join()
        self._exchange = threading.Thread(target=exchange)
        self._exchange.start()


class _OneLeftOut(_Torn):
    """For good."""

    def _late(self) -> list[str]:
        return ["model.layers.0.self_attn.k_proj.bias"]

    def _follow(self, new: dict[str, Tensor]) -> None: ...


def half_one_pass_late(sock: socket.socket, options: dict[str, Any]) -> None:
    _start(_OnePassLate, sock, options)


def one_tensor_one_pass_late(sock: socket.socket, options: dict[str, Any]) -> None:
    _start(_OneTensorOnePassLate, sock, options)


def one_by_one(sock: socket.socket, options: dict[str, Any]) -> None:
    _start(_OneByOne, sock, options)


def one_left_out(sock: socket.socket, options: dict[str, Any]) -> None:
    _start(_OneLeftOut, sock, options)


def _start(engine: type[core.NativeEngine], sock: socket.socket, options: dict[str, Any]) -> None:
    core.NativeEngine = engine  # type: ignore[misc]
    serve.start(sock, options)
