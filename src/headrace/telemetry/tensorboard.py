"""Scalars and texts for TensorBoard, written with its own record format and none of torch or TensorFlow."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ScalarLog:
    """One event file. Not thread-safe; a failed write raises OSError."""

    def __init__(self, folder: Path):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))

        def tensor(texts: Sequence[str]) -> Any:
            shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(texts))])
            values = [text.encode(errors="replace") for text in texts]
            return TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=values)

        self._tensor = tensor
        folder.mkdir(parents=True, exist_ok=True)
        unique = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        name = f"events.out.tfevents.{int(time.time()):010d}.{unique}"
        self._records = RecordWriter((folder / name).open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, Any], prefix: str = "") -> None:
        """Every finite number in `values`, its name after `prefix`."""
        numbers = {key: float(value) for key, value in values.items() if type(value) in (int, float)}
        summary = self._summary(
            value=[
                self._summary.Value(tag=f"{prefix}{key}", simple_value=value)
                for key, value in numbers.items()
                if math.isfinite(value)
            ]
        )
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def texts(self, step: int, tag: str, texts: Sequence[str]) -> None:
        """Some Markdown, which the text page shows as a table of one column."""
        value = self._summary.Value(tag=tag, metadata=self._metadata, tensor=self._tensor(texts))
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def close(self) -> None:
        self._records.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
