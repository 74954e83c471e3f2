"""YAML 1.2's core schema, the errors of broken text, and that what is written is read again."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpofit.config.yaml import dump, inline, leaves, parse
from grpofit.errors import ConfigError


def read(text: str):
    return parse(text, "my.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("+.5", 0.5),
        ("3.", 3.0),
        ("-.INF", -math.inf),
        ("17", 17),
        ("-017", -17),  # YAML 1.1 reads octal
        ("0o17", 15),
        ("0x1F", 31),
        ("true", True),
        ("FALSE", False),
        ("", None),
        ("~", None),
        ("null", None),
    ],
)
def test_core_schema_numbers_booleans_null(text, value):
    found = read(f"key: {text}")["key"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["off", "no", "on", "yes", "Yes", "y", "1_000", "1:30", "2024-01-01", "0b11", "1e", "="]
)
def test_what_only_yaml_1_1_converts_stays_text(text):
    assert read(f"key: {text}") == {"key": text}


def test_quotes_and_explicit_tags_decide():
    assert read("{a: '2e-5', b: !!str 7, c: !!float 7}") == {"a": "2e-5", "b": "7", "c": 7.0}


def test_nan_is_read():
    assert math.isnan(read("key: .nan")["key"])


def test_merge_keys_are_not_core_schema():
    assert read("a: {<<: 1}") == {"a": {"<<": 1}}


def test_aliases_give_independent_copies():
    data = read("a: &x {k: 1}\nb: *x\n")
    data["a"]["k"] = 2
    assert data["b"] == {"k": 1}


def test_every_key_and_entry_has_its_line():
    document = parse("model: {name: x}\nrewards:\n  - name: a\n    weight: 2\n  - name: b\n", "my.yaml")
    assert document.lines == {
        ("model",): 1,
        ("model", "name"): 1,
        ("rewards",): 2,
        ("rewards", 0): 3,
        ("rewards", 0, "name"): 3,
        ("rewards", 0, "weight"): 4,
        ("rewards", 1): 5,
        ("rewards", 1, "name"): 5,
    }


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key 'a', first in line 1", "remove line 3"),
        ("s:\n  x: 1\n  y: 2\n  x: 1\n", 4, "duplicate key 'x', first in line 2", "remove line 4"),
        ("a: 1\n\tb: 2\n", 2, "cannot start any token", "spaces, not tabs"),
        ("a: b: c\n", 1, "mapping values are not allowed", "in quotes"),
        ("a: 1\nprompt: {{ question }}\n", 2, "not text", "prompt: '{{ question }}'"),
        ("prompt: {{ question }} now\n", 1, "", "prompt: '{{ question }}'"),
        ("a: [1, 2\nb: 3\n", 2, "expected ',' or ']'", "close the bracket"),
        ("a: 'x\n", 2, "end of stream", "close the quote"),
        ("a: @x\n", 1, "cannot start any token", "quotes"),
        ("a: *x\n", 1, "undefined alias", "quotes"),
        ("a: &x [*x]\n", 1, "contains itself", "alias"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tag", "remove the tag"),
        ("a: !!int seven\n", 1, "'seven' is not a valid int", "quotes"),
        ("a: 1\n1: 2\n", 2, "not text: 1", "put the key in quotes"),
        ("a: 1\n---\nb: 2\n", 2, "another document", "keep one document"),
    ],
)
def test_broken_text_names_file_line_and_fix(text, line, what, fix):
    with pytest.raises(ConfigError) as caught:
        read(text)
    error = caught.value
    assert error.what.startswith(f"my.yaml, line {line}: ") and what in error.what
    assert fix in error.fix and f"(my.yaml, line {line})" in error.fix
    assert error.why and error.values.startswith(f"{line} | ")


def test_unacceptable_characters_and_depth_are_config_errors():
    for text in ("a: \x01", "[" * 1000):
        with pytest.raises(ConfigError):
            read(text)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "off",
        "2e-5",
        "0o17",
        "null",
        "~",
        "",
        " x ",
        "# no",
        "a # b",
        "{{ q }}",
        "- a",
        "'",
        '"',
        "\\n",
        "a: b",
        "<<",
        "1_0",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_inline_is_one_line_that_reads_back(value):
    text = inline(value)
    assert "\n" not in text
    found = read(text)
    assert found == value and repr(found) == repr(value)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_dump_with_comments_reads_back(data):
    comments = {path: "--set 'x': #" for path, _ in leaves(data)}
    assert repr(read(dump(data, comments) or "{}")) == repr(data)
    assert repr(read(dump(data) or "{}")) == repr(data)


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False))
def test_floats_come_back_as_the_same_float_in_yaml_1_1_too(value):
    assert repr(read(inline(value))) == repr(value) == repr(yaml.safe_load(inline(value)))


def test_floats_are_short():
    assert [inline(value) for value in (1e-6, 2e-5, 1.0, 0.28, 1e22)] == ["1.0e-6", "2.0e-5", "1.0", "0.28", "1.0e+22"]


def test_dump_layout():
    data = {"a": {"b": 1, "c": []}, "l": [{"x": "off", "y": [1, 2]}, {"x": None}], "e": {}}
    assert dump(data, {("a", "b"): "here", ("l", 0, "x"): "there"}) == (
        "a:\n  b: 1         # here\n  c: []\nl:\n  - x: 'off'   # there\n    y: [1, 2]\n  - x: null\ne: {}\n"
    )
