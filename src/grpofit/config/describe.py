"""The tree in words: what each key accepts, and where a key belongs.

Owns the sentence "needs a whole number >= 1, or auto, or none" that errors and `docs/config.md` share, and the walk
over the tree by path. Must not know any value a user wrote.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic.fields import FieldInfo

from grpofit.config.tree import Config, Section
from grpofit.config.yaml import KeyPath

_BOUNDS = ((">=", bounds.Ge, "ge"), (">", bounds.Gt, "gt"), ("<=", bounds.Le, "le"), ("<", bounds.Lt, "lt"))
_COUNTS = {2: "two", 3: "three"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the tree: its path with `0` for a list index, and pydantic's record of it."""

    path: KeyPath
    field: FieldInfo


def keys(section: type[Section] = Config, path: KeyPath = ()) -> Iterator[Key]:
    """Every key that holds a value, in the tree's order."""
    for name, field in section.model_fields.items():
        inner, index = section_of(field)
        if inner is None:
            yield Key((*path, name), field)
        else:
            yield from keys(inner, (*path, name, *index))


def section_of(field: FieldInfo) -> tuple[type[Section] | None, KeyPath]:
    """The section a field holds, and `(0,)` when it holds a list of them; `(None, ())` for a value."""
    many = get_origin(field.annotation) is list
    inner = get_args(field.annotation)[0] if many else field.annotation
    if isinstance(inner, type) and issubclass(inner, Section):
        return inner, (0,) if many else ()
    return None, ()


def locate(path: KeyPath) -> tuple[KeyPath, FieldInfo | None, type[Section]]:
    """Follow `path` as far as the tree knows it.

    Returns:
        the path of the deepest known field on the way (without what lies inside its value); that field, or None when
        the first key is unknown; the section in which the next key was looked for.
    """
    section: type[Section] = Config
    known: KeyPath = ()
    field: FieldInfo | None = None
    for place, part in enumerate(path):
        if isinstance(part, int):
            continue
        if part not in section.model_fields:
            break
        known, field = path[: place + 1], section.model_fields[part]
        inner, _ = section_of(field)
        if inner is None:
            break
        section = inner
    return known, field, section


def expected(field: FieldInfo, quote: str = "{}") -> str:
    """What the field accepts, as the rest of a sentence that begins with "needs". `quote` wraps literal words."""
    if field.examples:
        return _either([quote.format(example) for example in field.examples])
    inner, index = section_of(field)
    if inner is not None:
        return "a list of mappings, at least one" if index else "a mapping of keys"
    return _either(_alternatives(field.annotation, field.metadata, quote))


def choices(field: FieldInfo) -> list[str]:
    """The literal words among what the field accepts."""
    return re.findall("`([^`]*)`", expected(field, quote="`{}`"))


def _either(words: Sequence[str]) -> str:
    if any(" " in word for word in words):
        return ", or ".join(words)
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _alternatives(annotation: Any, metadata: Sequence[Any], quote: str) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner: list[Any] = []
        for extra in arguments[1:]:
            inner += extra.metadata if isinstance(extra, FieldInfo) else [extra]
        return _alternatives(arguments[0], [*metadata, *inner], quote)
    if origin in (Union, types.UnionType):
        return [word for member in arguments for word in _alternatives(member, metadata, quote)]
    if origin is Literal:
        return [quote.format(word) for word in arguments]
    if origin is list:
        some = ", at least one" if any(isinstance(entry, bounds.MinLen) for entry in metadata) else ""
        return [f"a list of {_either(_alternatives(arguments[0], (), quote)).removeprefix('a ')}{some}"]
    if origin is tuple:
        one = _alternatives(arguments[0], (), quote)[0].removeprefix("a ")
        return [f"a list of {_COUNTS[len(arguments)]} {one}s"]
    if origin is dict:
        return ["a mapping of keys"]
    return [_simple(annotation, metadata)]


def _simple(annotation: Any, metadata: Sequence[Any]) -> str:
    if annotation is types.NoneType:
        return "null"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "text"
    noun = {int: "a whole number", float: "a number"}[annotation]
    limits = [
        f"{sign} {'2**63' if limit == 2**63 else limit}"
        for sign, kind, name in _BOUNDS
        for limit in [getattr(entry, name) for entry in metadata if isinstance(entry, kind)]
    ]
    return f"{noun} {' and '.join(limits)}".rstrip()
