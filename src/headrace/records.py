"""The nouns, in the order they flow, and the one encoding that carries them. No torch here.

    Task ──▶ Turn ──▶ Episode ──▶ Group ──▶ Batch          WeightVersion flows back

A record is immutable data. Columns are NumPy arrays of equal length, one entry per sampled token. Whatever
crosses a queue, a socket or a file does so through `encode` and `decode`:

    offset  size  field
    0       4     magic "HDRC"
    4       2     format version
    6       2     reserved, zero
    8       8     length of everything after the prelude
    16      4     CRC-32 of everything after the prelude
    20      4     length of the header
    24      8     reserved, zero
    32      …     header: MessagePack [kind, record, [[dtype, shape, offset], …]]
    …       …     the columns' raw bytes, each on a 16-byte boundary; `offset` counts from the prelude's end

`decode` copies nothing: its columns are read-only views into the bytes it was given. It accepts what `encode`
writes and refuses anything else, before it takes memory for it (`message_limits`).
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform

import msgspec
import numpy as np

from headrace.errors import CorruptMessage, NewerMessage, RecordError, TruncatedMessage, short
from headrace.message_limits import check_header

FORMAT_VERSION = 1


# Type checkers do not see that a Struct's options are inherited; the transform states them for all subclasses.
@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(msgspec.Struct, frozen=True, kw_only=True, eq=False, array_like=True):
    """Base of everything that travels. A field added at the end, with a default, keeps old messages readable."""


R = TypeVar("R", bound=type)
_KINDS: dict[str, type] = {}


def message(cls: R) -> R:
    """Make a record class one that `encode` accepts at the top level; its name is its kind on the wire."""
    if cls.__name__ in _KINDS:
        raise RecordError("a message kind is registered once", cls.__name__, "rename one of the two classes")
    _KINDS[cls.__name__] = cls
    return cls


# ── Task ─────────────────────────────────────────────────────────────────────────────────────────────────


@message
class Task(Record):
    """One thing to attempt. `prompt` is text or chat messages; `answer` and `data` are for the scorer."""

    id: str
    prompt: str | list[dict[str, Any]]
    answer: str | None = None
    data: dict[str, Any] = {}


# ── Turn ─────────────────────────────────────────────────────────────────────────────────────────────────


LARGEST_INT32 = 2**31 - 1
LEAST_SAMPLING = 1e-6
"""Of temperature, top_p and min_p where they are above 0: what is smaller is meant to be 0, or a mistake."""


class Sampling(Record):
    """The distribution a turn is sampled from: what is needed, with the logits, to recompute a log-prob."""

    temperature: float = 1.0
    """Logits are divided by it. 0 means greedy: the support is the single best token."""
    top_k: int = 0
    """Keep the k most probable tokens. 0 keeps all."""
    top_p: float = 1.0
    """Then keep the smallest set of most probable tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Then keep tokens at least min_p times as probable as the most probable one."""

    @property
    def truncates(self) -> bool:
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def fault(self) -> tuple[str, float] | None:
        """(rule, value) of a parameter that cannot be served, None if all can.

        Devices compute in float32 and int32: there they must say the same of what is kept, and whether.
        """
        least, warmest = LEAST_SAMPLING, 1 / LEAST_SAMPLING
        below_1 = self.top_p == 1 or bool(np.float32(self.top_p) < 1)
        rules = [
            (self.temperature == 0 or least <= self.temperature <= warmest, "temperature",
             f"a temperature is 0 or lies in [{least}, {warmest:g}]"),
            (0 <= self.top_k <= LARGEST_INT32, "top_k", f"top_k lies in [0, {LARGEST_INT32}]"),
            (least <= self.top_p <= 1, "top_p", f"top_p lies in [{least}, 1]"),
            (below_1, "top_p", "top_p is 1, or less than 1 in float32 too"),
            (self.min_p == 0 or least <= self.min_p <= 1, "min_p", f"min_p is 0 or lies in [{least}, 1]"),
        ]  # fmt: skip
        return next(((rule, getattr(self, name)) for holds, name, rule in rules if not holds), None)


class Support(Record):
    """Per token, the ids that could have been sampled: row t is `ids[offsets[t]:offsets[t + 1]]`."""

    ids: np.ndarray
    offsets: np.ndarray

    def row(self, t: int) -> np.ndarray:
        return self.ids[self.offsets[t] : self.offsets[t + 1]]

    @staticmethod
    def from_rows(rows: Sequence[np.ndarray]) -> Support:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        ids = np.concatenate(rows) if rows else np.empty(0)
        return Support(ids=ids.astype(np.int32, copy=False), offsets=offsets)


class Routes(Record):
    """Mixture-of-experts routing, (tokens, layers, experts per token): expert ids and gate weights."""

    experts: np.ndarray
    gates: np.ndarray


class KvEvent(Record):
    """A point of a sequence's KV lineage: from `position` on, keys and values are computed under `version`.

    What lies before `position` was kept as older versions left it, or recomputed under `version`. Of a turn with an
    adapter, versions are the adapter's.
    """

    position: int
    version: int
    before: Literal["kept", "recomputed"]
    cause: Literal["start", "swap", "preempt", "fork", "resume", "sleep"] = "swap"
    base: int | None = None
    """Version of the weights beneath the adapter. None where there is no adapter."""


Stop = Literal["end", "stop_string", "length", "cancelled"]
"""Why a turn has no more tokens: its last one ends completions, its text got to a stop string, it has as many as it
may have, or it was cut."""


def text_before(text: str, stop_string: str | None) -> str:
    """What users see of a turn whose tokens have this text: it comes without the stop string that ended it."""
    return text if stop_string is None else text.partition(stop_string)[0]


class Turn(Record):
    """One model call. Context is by reference: the parent turn's whole sequence, then `context`."""

    tokens: np.ndarray
    """int32 (T,): sampled ids, the stop token included."""
    logprobs: np.ndarray
    """float32 (T,): log-prob of each under the very distribution it was sampled from."""
    versions: np.ndarray
    """int32 (T,): version of the weights that produced each, or of the adapter where one was used."""
    context: np.ndarray
    """int32: tokens between the parent's last one (or the beginning) and the first sampled one."""
    stop: Stop
    sampling: Sampling = Sampling()
    lineage: tuple[KvEvent, ...] = ()
    support: Support | None = None
    """Present whenever sampling truncates."""
    routes: Routes | None = None
    policy: str = "policy"
    adapter: str | None = None
    """Name of the adapter it was sampled with; None: the policy's weights alone."""
    parent: int | None = None
    """Index, in the episode, of the turn whose sequence this one continues."""
    joins: tuple[int, ...] = ()
    """Other turns this one's context was made from (an agent that read another's answer)."""
    engine: str = ""
    seed: int = 0
    stop_string: str | None = None
    """The text that ended it, where one did."""
    asked: tuple[str, ...] = ()
    """Names of the parameters of `sampling` that the environment asked for in this very call."""

    def fault(self) -> tuple[str, Any] | None:
        """(rule, value) of columns that do not fit together, None if all do.

        A record can hold such: what an engine got wrong costs its episode, not the connection it came by.
        """
        shapes = {"logprobs": self.logprobs.shape, "versions": self.versions.shape}
        if self.support is not None:
            ids, offsets = self.support.ids, self.support.offsets
            rises = ids.ndim == offsets.ndim == 1 and len(offsets) and offsets[0] == 0 and offsets[-1] == len(ids)
            if not rises or (np.diff(offsets) < 0).any():
                return "support offsets rise from 0 to the number of ids", offsets.tolist()
            shapes["support"] = (len(offsets) - 1,)
        if self.routes is not None:
            experts, gates = self.routes.experts, self.routes.gates
            if experts.ndim != 3 or experts.shape != gates.shape:
                return "routes are two (tokens, layers, k) arrays", (experts.shape, gates.shape)
            shapes["routes"] = experts.shape[:1]
        if self.tokens.ndim != 1 or any(shape != self.tokens.shape for shape in shapes.values()):
            return f"a turn's columns have one entry per sampled token, here {self.tokens.shape}", shapes
        if self.context.ndim != 1:
            return "a turn's context is one row of tokens", self.context.shape
        if (self.stop == "stop_string") != bool(self.stop_string):
            return (
                f"a turn that a stop string ended names it, and no other does, here {self.stop}",
                self.stop_string,
            )
        return None


# ── Episode ──────────────────────────────────────────────────────────────────────────────────────────────


@message
class Episode(Record):
    """A directed graph of turns: an edge leads from a turn to those whose context was made from it."""

    id: str
    task: Task
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    failure: str | None = None
    """Why it cannot be trained on, as the ledger counts it; None when it can."""
    detail: str = ""
    """What a person wants to read about the failure."""
    metrics: dict[str, float] = {}
    started: float = 0.0
    """Seconds on the run's clock."""
    finished: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def version_min(self) -> int | None:
        return min((int(turn.versions.min()) for turn in self.turns if len(turn.versions)), default=None)

    @property
    def version_max(self) -> int | None:
        return max((int(turn.versions.max()) for turn in self.turns if len(turn.versions)), default=None)

    def full_context(self, index: int) -> np.ndarray:
        """Every token before the first sampled one of turn `index`."""
        turn = self.turns[index]
        if turn.parent is None:
            return turn.context
        parent = self.turns[turn.parent]
        return np.concatenate([self.full_context(turn.parent), parent.tokens, turn.context])

    def with_(self, **changes: Any) -> Episode:
        return msgspec.structs.replace(self, **changes)


# ── Group ────────────────────────────────────────────────────────────────────────────────────────────────


@message
class Group(Record):
    """The episodes of one task: the unit of admission and of advantage."""

    id: str
    sequence: int
    """Position in the order of admission."""
    task: Task
    episodes: tuple[Episode, ...] = ()
    admitted_version: int = 0
    """Version the slowest serving engine had at admission: no token of the group is older."""


# ── Batch ────────────────────────────────────────────────────────────────────────────────────────────────


@message
class Batch(Record):
    """What one training step consumes. `version` is the trainer's version when it consumes it."""

    step: int
    """Number of the training step that consumes it, from 1."""
    version: int
    groups: tuple[Group, ...]
    advantages: np.ndarray
    """float32, one per episode, in the order of `episodes`."""

    def __post_init__(self) -> None:
        n = sum(len(group.episodes) for group in self.groups)
        if len(self.advantages) != n:
            raise RecordError(f"a batch has one advantage per episode, here {n}", len(self.advantages))

    @property
    def episodes(self) -> Iterator[Episode]:
        for group in self.groups:
            yield from group.episodes


# ── WeightVersion ────────────────────────────────────────────────────────────────────────────────────────


@message
class WeightVersion(Record):
    """A set of weights by number. A number is never used twice; `parent` is the version it was trained from."""

    number: int
    parent: int | None
    step: int


# ── The encoding ─────────────────────────────────────────────────────────────────────────────────────────

_PRELUDE = struct.Struct("<4sHHQIIQ")
_MAGIC = b"HDRC"
_COLUMN, _RECORD = 1, 2
_ALIGN = 16
_PADDING = [bytes(size) for size in range(_ALIGN)]
_MOST_SIDES = 32
PRELUDE_BYTES = _PRELUDE.size
MOST_BYTES = 4 << 30
"""No message is longer: a batch of 300 million tokens fits. Readers may set a lower limit."""

_DTYPES = {
    name: np.dtype(name)
    for name in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
}
"""What a column can hold: numbers of a fixed width, lowest byte first, and booleans."""
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Nested:
    """A message of any kind as a field of another: an envelope's content, which is no envelope itself."""

    __slots__ = ("record",)

    def __init__(self, record: Any):
        self.record = record


def encode(record: Any) -> bytearray:
    """The record as one self-contained message. Raises RecordError for what `decode` would not read."""
    kind = _kind(record)
    columns: list[np.ndarray] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            columns.append(value)
            return msgspec.msgpack.Ext(_COLUMN, (len(columns) - 1).to_bytes(4, "little"))
        if isinstance(value, Nested):
            inside = (_kind(value.record), msgspec.Raw(encoder.encode(value.record)))
            return msgspec.msgpack.Ext(_RECORD, msgspec.msgpack.encode(inside))
        if isinstance(value, np.generic):
            return value.item()
        raise RecordError("a record holds plain values, records and NumPy columns", type(value).__name__)

    encoder = msgspec.msgpack.Encoder(enc_hook=hook)
    try:
        body = encoder.encode(record)
    except (TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
        raise _unfit(kind, error) from error
    # A column's place depends on the header's length, which depends on the places: count from after the header.
    table: list[tuple[str, tuple[int, ...], int]] = []
    parts: list[Any] = [b"", b"", b""]
    offset = 0
    for column in columns:
        name = _DTYPE_NAMES.get(column.dtype)
        if name is None or column.ndim > _MOST_SIDES:
            what = f"{column.dtype.str[:40]}, {column.ndim} dimensions"
            raise RecordError(f"a column has one of the types {', '.join(_DTYPES)}", what, "convert it with astype")
        table.append((name, column.shape, offset))
        size = column.nbytes
        padding = -size % _ALIGN
        offset += size + padding
        parts.append(column if column.flags.c_contiguous else np.ascontiguousarray(column))
        parts.append(_PADDING[padding])
    header = msgspec.msgpack.encode((kind, msgspec.Raw(body), table))
    padding = -(PRELUDE_BYTES + len(header)) % _ALIGN
    length = len(header) + padding + offset
    if length > MOST_BYTES:
        raise RecordError(f"a message has at most {MOST_BYTES} bytes", length, "send it in several messages")
    try:
        check_header(body, length - offset - len(body), length)
        _build(kind, body, columns)
    except _MISFITS as error:
        raise _unfit(kind, error) from error
    parts[0], parts[1], parts[2] = bytes(PRELUDE_BYTES), header, _PADDING[padding]
    out = bytearray().join(parts)
    checksum = zlib.crc32(memoryview(out)[PRELUDE_BYTES:])
    _PRELUDE.pack_into(out, 0, _MAGIC, FORMAT_VERSION, 0, length, checksum, len(header), 0)
    return out


def _unfit(kind: str, error: Exception) -> RecordError:
    rule = f"the fields of {kind} hold values of their types, and only what a message can carry"
    return RecordError(rule, short(error), "use text, numbers of up to 64 bits, lists, tables and NumPy columns")


def _kind(record: Any) -> str:
    kind = type(record).__name__
    if _KINDS.get(kind) is not type(record):
        raise RecordError("only registered message kinds travel", kind, "decorate the class with @message")
    return kind


def body_length(prelude: bytes | bytearray | memoryview, limit: int = MOST_BYTES) -> int:
    """How many bytes follow this prelude. Refuses what is not a message of a known version, or above the limit."""
    return _read_prelude(prelude, limit)[0]


def _read_prelude(data: bytes | bytearray | memoryview, limit: int) -> tuple[int, int, int]:
    """Length of what follows, its checksum, and the header's length."""
    if len(data) < PRELUDE_BYTES:
        raise TruncatedMessage(f"a message begins with {PRELUDE_BYTES} bytes", len(data))
    magic, version, reserved, length, checksum, header_length, reserved_too = _PRELUDE.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptMessage("a message begins with the magic bytes", bytes(magic))
    if version != FORMAT_VERSION:
        rule = f"this Headrace reads message versions up to {FORMAT_VERSION}"
        if version > FORMAT_VERSION:
            raise NewerMessage(rule, version, "upgrade the reading side")
        raise CorruptMessage(f"{rule}, from 1", version)
    if reserved or reserved_too:
        raise CorruptMessage("reserved fields are zero", (reserved, reserved_too))
    if header_length > length:
        raise CorruptMessage(f"the header lies within the {length} bytes after the prelude", header_length)
    if length > limit:
        raise CorruptMessage(f"a message has at most {limit} bytes here", length)
    return length, checksum, header_length


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The record in `data`. Its columns are read-only views into `data`: keep that buffer unchanged.

    Whatever the bytes are, it returns a record or raises a RecordError, and takes at most 64 MiB more memory than
    they have bytes (`message_limits`).
    """
    view = memoryview(data).toreadonly()
    length, checksum, header_length = _read_prelude(view, MOST_BYTES)
    if len(view) != PRELUDE_BYTES + length:
        if len(view) < PRELUDE_BYTES + length:
            raise TruncatedMessage(f"the message has {PRELUDE_BYTES + length} bytes", len(view))
        raise CorruptMessage(f"the message has {PRELUDE_BYTES + length} bytes", len(view))
    body = view[PRELUDE_BYTES:]
    if (found := zlib.crc32(body)) != checksum:
        raise CorruptMessage("the message's checksum matches its bytes", f"{found:#x}")
    try:
        kind, record, table = map(bytes, _HEADER.decode(body[:header_length]))
        check_header(record, len(table), length)
        return _build(_KIND.decode(kind[:_LONGEST_KIND]), record, _columns(body, header_length, table))
    except CorruptMessage:
        raise
    except _MISFITS as error:
        raise CorruptMessage("the message's header describes its record", short(error)) from error


_HEADER = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw])
_KIND = msgspec.msgpack.Decoder(str)
_TABLE = msgspec.msgpack.Decoder(list[tuple[str, tuple[int, ...], int]])
_INSIDE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_LONGEST_KIND = 200
_MISFITS = (msgspec.MsgspecError, IndexError, ValueError, TypeError, OverflowError, RecursionError, RecordError)
"""What MessagePack, NumPy and records raise of values that do not fit."""


def _columns(body: memoryview, header_length: int, table: bytes) -> list[np.ndarray]:
    """The columns where `encode` puts them: one after the other, each on a boundary, up to the message's end."""
    start = end = header_length + -(PRELUDE_BYTES + header_length) % _ALIGN
    found = []
    for name, shape, offset in _TABLE.decode(table):
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise CorruptMessage(f"a column has one of the types {', '.join(_DTYPES)}", short(name))
        if len(shape) > _MOST_SIDES:
            raise CorruptMessage(f"a column has at most {_MOST_SIDES} dimensions", len(shape))
        size = extent = dtype.itemsize
        for side in shape:
            if side < 0:
                raise CorruptMessage("a column's sides are 0 or more", side)
            size *= side
            extent *= side or 1
        if start + offset != end:
            raise CorruptMessage(f"the column's bytes begin after those before them, at {end - start}", offset)
        if extent > _LARGEST_EXTENT or size > len(body) - end:
            raise CorruptMessage(f"a column lies within the message's {len(body)} bytes", f"{shape} of {name}")
        found.append(np.ndarray(shape, dtype, body, end))
        end += size + -size % _ALIGN
    if end != len(body):
        raise CorruptMessage(f"a message's columns end where it ends, at {len(body)}", end)
    return found


_LARGEST_EXTENT = 2**63 - 1
"""NumPy counts the bytes of an empty array, too, as if none of its sides were 0."""


class _Reading(threading.local):
    """What the thread's present `_build` refers to."""

    columns: Sequence[np.ndarray] = ()
    nested = False


_reading = _Reading()
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}


def _build(kind: str, record: bytes, columns: Sequence[np.ndarray]) -> Any:
    before = _reading.columns
    _reading.columns = columns
    try:
        return _decoder(kind).decode(record)
    finally:
        _reading.columns = before


def _decoder(kind: str) -> msgspec.msgpack.Decoder[Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        if kind not in _KINDS:
            raise CorruptMessage("the message's kind is known", short(kind), "import the module that defines it")
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(_KINDS[kind], ext_hook=_referred)
    return decoder


def _referred(code: int, payload: memoryview) -> Any:
    """The column or the message that an extension stands for."""
    if code == _COLUMN and len(payload) == 4:
        return _reading.columns[int.from_bytes(payload, "little")]
    if code != _RECORD:
        raise CorruptMessage(
            "an extension is the number of a column, or a message", f"{code}, {len(payload)} bytes"
        )
    if _reading.nested:
        raise CorruptMessage("an envelope's content is no envelope", code)
    _reading.nested = True
    try:
        kind, raw = _INSIDE.decode(payload)
        return Nested(_decoder(kind).decode(raw))
    finally:
        _reading.nested = False
