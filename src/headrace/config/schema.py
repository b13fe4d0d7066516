"""The configuration's shape as data: which keys exist, what each accepts and what it is when left out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from msgspec import NODEFAULT, inspect

from headrace.config.base import Config
from headrace.config.run import RunConfig


@dataclass(frozen=True)
class Key:
    """One key of the configuration. `path` is dotted; a variant of a union has its tag in brackets."""

    path: str
    accepts: str
    default: str


def all_keys() -> list[Key]:
    """Every key a configuration file may have, in the order of the classes."""
    return list(_keys(_root(), ""))


@cache
def _root() -> inspect.Type:
    return inspect.type_info(RunConfig)


def _keys(table: inspect.Type, prefix: str) -> Iterator[Key]:
    assert isinstance(table, inspect.StructType)
    for field in table.fields:
        several = isinstance(field.type, inspect.VarTupleType | inspect.DictType)
        named = _named_tables(field.type)
        variants = _variants(field.type if named is None else named)
        path = f"{prefix}{field.encode_name}"
        if not variants or several or field.default is None:
            yield Key(path, describe(field.type), _default(field))
        path += "" if named is None else ".NAME"
        for variant in variants:
            tagged = len(variants) > 1 or variant.tag is not None
            yield from _keys(variant, f"{path}[{variant.tag}]." if tagged else f"{path}.")


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default is not NODEFAULT:
        return repr(field.default)
    return repr(field.default_factory())


def _variants(kind: inspect.Type) -> list[inspect.StructType]:
    if isinstance(kind, inspect.UnionType):
        return [variant for one in kind.types for variant in _variants(one)]
    if isinstance(kind, inspect.VarTupleType):
        return _variants(kind.item_type)
    return [kind] if isinstance(kind, inspect.StructType) else []


def _named_tables(kind: inspect.Type) -> inspect.StructType | None:
    """What each table is in a table of tables whose names the user chooses; None where a place is no such."""
    inner = kind.value_type if isinstance(kind, inspect.DictType) else None
    return inner if isinstance(inner, inspect.StructType) else None


def with_default_types(data: Any, kind: inspect.Type | None = None) -> Any:
    """The same, where a table that says no type has the type that the place has by default."""
    kind = _root() if kind is None else kind
    if not isinstance(data, Mapping) or not isinstance(kind, inspect.StructType):
        return data
    found = dict(data)
    for field in kind.fields:
        table = found.get(field.encode_name)
        if isinstance(table, Mapping) and (named := _named_tables(field.type)) is not None:
            found[field.encode_name] = {name: with_default_types(one, named) for name, one in table.items()}
            continue
        if not isinstance(table, Mapping) or not (variants := _variants(field.type)):
            continue
        default = field.default.__struct_config__ if isinstance(field.default, Config) else None
        if len(variants) > 1 and default is not None and default.tag_field and default.tag_field not in table:
            table = {default.tag_field: default.tag, **table}
        found[field.encode_name] = with_default_types(table, tables(field.type, table)[0])
    return found


def type_at(path: Sequence[str], data: Any) -> inspect.Type | None:
    """What the schema says of a place. In `data`, a table's own tag chooses among a union's variants."""
    kind: inspect.Type = _root()
    for part in path:
        if isinstance(kind, inspect.VarTupleType | inspect.ListType):
            kind = kind.item_type
            data = _within(data, part)
            continue
        if isinstance(kind, inspect.TupleType):
            if not part.isdecimal() or int(part) >= len(kind.item_types):
                return None
            kind = kind.item_types[int(part)]
            data = None
            continue
        if (named := _named_tables(kind)) is not None:
            kind, data = named, _within(data, part)
            continue
        fields = [field for variant in tables(kind, data) for field in variant.fields]
        found = [field.type for field in fields if field.encode_name == part]
        if not found:
            return None
        kind = found[0]
        data = _within(data, part)
    return kind


def _within(data: Any, part: str) -> Any:
    """What is there under a key or, in a list, a number; None where nothing is."""
    if isinstance(data, list):
        return data[int(part)] if part.isdecimal() and int(part) < len(data) else None
    return data.get(part) if isinstance(data, Mapping) else None


def is_text(kind: inspect.Type | None) -> bool:
    """Whether a place holds text, or nothing."""
    if isinstance(kind, inspect.UnionType):
        return all(isinstance(one, inspect.StrType | inspect.NoneType) for one in kind.types)
    return isinstance(kind, inspect.StrType)


def tables(kind: inspect.Type, data: Any = None) -> list[inspect.StructType]:
    """The tables a place may hold: the one whose tag `data` has, or all."""
    variants = _variants(kind)
    if isinstance(data, Mapping):
        chosen = [
            variant for variant in variants if variant.tag_field and data.get(variant.tag_field) == variant.tag
        ]
        return chosen or variants
    return variants


def names(table: inspect.StructType) -> list[str]:
    """The keys of one table, its tag included."""
    tag = [table.tag_field] if table.tag_field else []
    return tag + [field.encode_name for field in table.fields]


_ELSEWHERE = {
    "num_generations": "training.group_size",
    "n_samples": "training.group_size",
    "rollouts_per_example": "training.group_size",
    "batch_size": "training.groups_per_batch (in groups) with training.group_size",
    "train_batch_size": "training.groups_per_batch (in groups) with training.group_size",
    "per_device_train_batch_size": "training.micro_batch_tokens (in tokens) with training.groups_per_batch",
    "max_steps": "training.steps",
    "max_completion_length": "environment.max_tokens",
    "max_new_tokens": "environment.max_tokens",
    "max_model_len": "engine.max_context",
    "max_prompt_length": "engine.max_context (prompt and completion together)",
    "beta": "training.reference.coefficient",
    "kl_coef": "training.reference.coefficient",
    "lr": "training.optimizer.learning_rate",
    "reward_funcs": "scorer.source",
    "reward_function": "scorer.source",
    "model_name_or_path": "model.path",
}
"""Keys of other libraries, and ours for the same."""


def suggest(path: Sequence[str], data: Any) -> str:
    """What the user may have meant by an unknown key."""
    *parents, wanted = path
    kind = type_at(parents, data)
    table = ".".join(parents)
    if kind is None:
        return "check the spelling"
    for part in parents:
        data = _within(data, part)
    known = sorted({name for variant in tables(kind, data) for name in names(variant)})
    for variant in _variants(kind):
        if wanted in names(variant) and wanted not in known:
            return f'{wanted} belongs to {table}.{variant.tag_field} = "{variant.tag}"'
    if (ours := _ELSEWHERE.get(wanted)) is not None:
        return f"what others call {wanted} is {ours}"
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {'.'.join([*parents, close[0]])}?"
    elsewhere = [key.path for key in all_keys() if key.path.rsplit(".", 1)[-1] == wanted]
    all_known = f"known {'in ' + table if table else 'at the top'}: {', '.join(known)}"
    if elsewhere:
        few = f" {all_known}" if len(known) <= _FEW_KEYS else ""
        return f"did you mean {elsewhere[0]}?{few}"
    return all_known


_FEW_KEYS = 3


def describe(kind: inspect.Type) -> str:
    """In words, what a place accepts."""
    if isinstance(kind, inspect.UnionType):
        if variants := _variants(kind):
            tags = [f'"{variant.tag}"' for variant in variants if variant.tag is not None]
            return f"a table of type {' or '.join(tags)}" if tags else "a table"
        return " or ".join(describe(one) for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        word = "an integer" if isinstance(kind, inspect.IntType) else "a number"
        limits = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
        stated = [f"{sign} {limit:.15g}" for sign, limit in limits if limit is not None]
        return f"{word} {' and '.join(stated)}".strip()
    if isinstance(kind, inspect.TupleType):
        return f"an array of {len(kind.item_types)}: {', '.join(describe(one) for one in kind.item_types)}"
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return f"an array, each item {describe(kind.item_type)}"
    return _WORDS.get(type(kind), "a value")


_WORDS: dict[type, str] = {
    inspect.BoolType: "true or false",
    inspect.StrType: "a text",
    inspect.DictType: "a table",
    inspect.StructType: "a table",
}
