"""YAML as users mean it: the YAML 1.2 core schema, the line of every key, comments on the way out.

Owns reading and writing of YAML text and the addressing of plain data (mappings, lists, scalars) by path. Must not
know the configuration tree.

PyYAML alone follows YAML 1.1, where `2e-5` is text and `off`, `no`, `1_000` and `1:30` are not. Here only `true` and
`false` are booleans, `2e-5` is a float, and everything else that is no number is text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from grpofit.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Where a value sits in plain data: keys and list indices from the root."""

_TAG = "tag:yaml.org,2002:"
# YAML 1.2.2, section 10.3.2, with the first characters that PyYAML uses as an index.
_CORE_SCHEMA = [
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]
_SYNTAX_FIXES = [
    ("'\\t'", "indent with spaces, not tabs"),
    ("mapping values are not allowed", "put text that contains ': ' in quotes, or correct the indentation of the line"),
    ("cannot start any token", "put the value in quotes: it begins with a character that YAML reserves"),
    ("contains itself", "remove the alias (the * and its name)"),
    ("undefined alias", "put the value in quotes: a leading * names an anchor"),
    ("expected ',' or", "close the bracket or brace, and put text that contains , [ ] { } in quotes"),
    ("quoted scalar", "close the quote"),
    ("document", "keep one document: remove the line '---' between two"),
]
_TEMPLATE_FIX = "put the template in quotes: prompt: '{{ question }}'"


class _Loader(yaml.SafeLoader):
    """Scans, parses and composes; the resolvers are the core schema's, `_build` makes the Python values."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own class attribute, emptied)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever would not come back as text, under YAML 1.1 as well, so that other tools read the same."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes keep a text with line breaks on one line, where a comment can follow.
    one_line = text.isprintable() or not text
    return dumper.represent_scalar(_TAG + "str", text, style=None if one_line else '"')


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    node: yaml.ScalarNode = yaml.SafeDumper.represent_float(dumper, value)
    node.value = re.sub(r"(?<=e[-+])0+", "", node.value)  # 1.0e-6: a float in YAML 1.1 and 1.2 alike
    return node


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)
for _name, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed text: `data` as plain Python, `lines` the line number (from 1) of every key and list entry."""

    data: Any
    lines: dict[KeyPath, int]


def parse(text: str, source: str) -> Document:
    """Parse one YAML document; `source` names it in errors.

    Raises:
        ConfigError: syntax, a duplicate key, a key that is not text, a tag, an alias inside itself.
    """
    lines: dict[KeyPath, int] = {}
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else _build(node, (), lines, frozenset())
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, source) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{source} is not YAML",
            values=str(error).splitlines()[0],
            why="the text holds a character that YAML does not allow",
            fix="save the file as UTF-8 text without control characters",
        ) from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be a configuration") from None
    finally:
        if loader is not None:
            loader.dispose()
    return Document(data, lines)


def _build(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], parents: frozenset[int]) -> Any:
    if id(node) in parents:
        raise _marked("an alias that contains itself", node)
    parents = parents | {id(node)}
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.MappingNode) and kind == "map":
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _key(key_node)
            if key in data:
                raise _marked(f"duplicate key {key!r}, first in line {lines[(*path, key)]}", key_node)
            lines[(*path, key)] = key_node.start_mark.line + 1
            data[key] = _build(value_node, (*path, key), lines, parents)
        return data
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        entries = []
        for index, entry in enumerate(node.value):
            lines[(*path, index)] = entry.start_mark.line + 1
            entries.append(_build(entry, (*path, index), lines, parents))
        return entries
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, kind)
    raise _marked(f"the tag {node.tag!r}", node)


def _key(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "str":
        return str(node.value)
    shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
    raise _marked(f"a key that is not text: {shown}", node)


def _scalar(node: yaml.ScalarNode, kind: str) -> Any:
    text: str = node.value
    try:
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if kind == "float":
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    except (ValueError, KeyError):
        raise _marked(f"{text[:40]!r} is not a valid {kind}", node) from None
    raise _marked(f"the tag {node.tag!r}", node)


def _marked(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _syntax_error(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    number = mark.line + 1 if mark else 1
    rows = text.splitlines()
    row = rows[number - 1].rstrip() if number <= len(rows) else ""
    problem = (error.problem or "not YAML").removeprefix("but ")
    about = f"{error.context or ''} {problem}"
    if "duplicate key" in problem:
        why, fix = "only one of the two could count", f"remove line {number} or the earlier one"
    elif "{{" in row:
        why, fix = "a brace begins a YAML mapping", _TEMPLATE_FIX
    elif "tag" in problem:
        why, fix = "only plain values are read: a tag could run code", "remove the tag, or put the value in quotes"
    elif "not text" in problem:
        why, fix = "every key of a configuration is a name", "put the key in quotes"
    else:
        why = "nothing after this place can be read with certainty"
        fix = next((fix for part, fix in _SYNTAX_FIXES if part in about), "correct the indentation and the quotes")
    return ConfigError(
        f"{source}, line {number}: {problem}",
        values=f"{number} | {row}",
        why=why,
        fix=f"{fix} ({source}, line {number})",
    )


def inline(value: Any) -> str:
    """`value` as YAML on one line; floats are written so that the same float is read."""
    text: str = yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, width=sys.maxsize, allow_unicode=True, sort_keys=False
    )
    return text.rstrip("\n")[1:-1]


def dump(data: Mapping[str, Any], comments: Mapping[KeyPath, str] | None = None) -> str:
    """Block YAML, one leaf a line, in the order of `data`; `comments` are put behind the leaves they name."""
    rows = list(_rows(data, (), ""))
    column = min(40, max((len(text) for text, _ in rows), default=0))
    shown = comments or {}
    return "".join(f"{text:<{column}}  # {shown[path]}\n" if path in shown else f"{text}\n" for text, path in rows)


def _rows(data: Any, path: KeyPath, pad: str) -> Iterator[tuple[str, KeyPath]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            head = f"{pad}{inline(key)}:"
            if _is_branch(value):
                yield head, ()
                yield from _rows(value, (*path, key), pad + "  ")
            else:
                yield f"{head} {inline(value)}", (*path, key)
        return
    for index, entry in enumerate(data):
        rows = _rows(entry, (*path, index), pad + "  ")
        first, first_path = next(rows)
        yield f"{pad}- {first.removeprefix(pad + '  ')}", first_path
        yield from rows


def _is_branch(value: Any) -> bool:
    """A mapping with entries, or a list of such: what has leaves of its own."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(entry, Mapping) and entry for entry in value)
    return isinstance(value, Mapping) and bool(value)


def leaves(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every leaf with its path: scalars, lists of scalars, empty mappings."""
    if not _is_branch(data):
        yield path, data
        return
    for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
        yield from leaves(value, (*path, key))


def dotted(path: KeyPath) -> str:
    """`('rewards', 0, 'weight')` as `rewards.0.weight`."""
    return ".".join(map(str, path))
