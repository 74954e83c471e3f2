"""Jinja templates over the columns of a row.

Owns rendering and the errors of templates. Must not know tokenizers, nor where rows come from. The environment is
sandboxed: a template comes from a YAML file that somebody may have shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from grpofit.errors import DataError

_ENVIRONMENT = SandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True)


class RowTemplate:
    """A compiled template with the config key it came from."""

    def __init__(self, source: str, key: str) -> None:
        """Raises DataError for a syntax error."""
        self.source, self.key = source, key
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{key} is not a Jinja template",
                values=f"{source!r}: {error.message} (line {error.lineno})",
                why="no prompt can be built from it",
                fix=f'{key}: "{{{{ column }}}}" with the name of a column in double braces',
            ) from None

    def render(self, row: Mapping[str, Any], where: str) -> str:
        """The text for one row. Raises DataError naming `where`, the row's place, and the columns there are."""
        try:
            return self._template.render(row)
        except jinja2.UndefinedError as error:
            raise DataError(
                f"{self.key} names something that {where} does not have",
                values=f"{error.message}; template {self.source!r}; columns: {', '.join(row) or '(none)'}",
                why="a hole in the prompt would be trained on",
                fix=f"use one of the columns in {self.key}, or add the column to the row",
            ) from None
        except Exception as error:  # a filter or an operator of the template may raise anything
            raise DataError(
                f"{self.key} could not be rendered for {where}",
                values=f"{type(error).__name__}: {error}; template {self.source!r}; columns: {', '.join(row)}",
                why="no prompt can be built from this row",
                fix=f"correct {self.key}, or the row",
            ) from None
