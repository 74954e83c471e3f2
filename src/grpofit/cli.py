"""The command line: parses, calls the verbs of `api.py`, prints, and turns failures into exit codes.

Owns wording of help, `next:` lines and error output. Must not import torch (nor anything that does) before a verb
needs it: `--help` answers within half a second.
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from grpofit import __version__
from grpofit.errors import EXIT_BUG, EXIT_INTERRUPTED, GrpofitError, UserError

if TYPE_CHECKING:
    from grpofit.api import EvalResult

P = ParamSpec("P")

_EXIT_CODES = (
    "Exit codes: 0 ok, 1 a bug in grpofit, 2 something you wrote, 3 the plan does not fit, "
    "4 the run stopped itself and kept its checkpoint, 130 interrupted."
)
_show_traceback = ContextVar("show_traceback", default=False)
_DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")


def _ending(*examples: str) -> str:
    """The end of a help text; \\b keeps the lines of a paragraph as they are."""
    return "\n\n".join(["\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples), _EXIT_CODES])


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the configuration. May be repeated."),
]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the script `grpofit`; always ends with SystemExit, its code one of those in `errors.py`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal cannot show must not end a run
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--traceback" in arguments:  # an option of the program, accepted wherever it is written
        arguments = ["--traceback", *(argument for argument in arguments if argument != "--traceback")]
    app(arguments, prog_name="grpofit")


def _verb(function: Callable[P, None]) -> Callable[P, None]:
    """Turn what a verb raises into a message and an exit code."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (GrpofitError, KeyboardInterrupt) as error:
            if _show_traceback.get():
                traceback.print_exc()
            if isinstance(error, GrpofitError):
                _print_error(error)
            raise typer.Exit(error.exit_code if isinstance(error, GrpofitError) else EXIT_INTERRUPTED) from None
        except (typer.Exit, BrokenPipeError):
            raise
        except Exception as error:
            _print_bug(error)
            raise typer.Exit(EXIT_BUG) from None

    return guarded


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"grpofit {__version__}")
        raise typer.Exit


@app.callback(
    epilog=_ending(
        "grpofit recipes",
        "grpofit train smollm2-arithmetic",
        "grpofit train my.yaml --set run.steps=50",
        "grpofit VERB -h",
    )
)
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="With an error, print where in the code it was raised.")
    ] = False,
) -> None:
    """Train language models with GRPO on the GPU you own."""
    _show_traceback.set(show_traceback)


@app.command(
    epilog=_ending(
        "grpofit train smollm2-arithmetic",
        "grpofit train my.yaml --set optim.lr=2e-5 --set run.steps=50 --out runs/first",
        "grpofit train --resume runs/latest",
    )
)
@_verb
def train(
    source: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE|FILE", help="A packaged recipe, or your YAML file.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the run writes; must not exist. Default: runs/NAME-MMDD-HHMM."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue this run from its last checkpoint.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole configuration, each value with its origin, and stop.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live screen.")] = False,
) -> None:
    """Train a model; Ctrl-C saves and stops."""
    if (source is None) == (resume is None):
        raise UserError(
            "train needs a recipe or file, or --resume with a run directory" + (", not both" if resume else ""),
            values=f"RECIPE|FILE: {source or 'none'}   --resume: {resume or 'none'}",
            why="a resumed run has its configuration in its directory",
            fix=f"grpofit train --resume {resume}" if resume else "grpofit train smollm2-arithmetic",
        )
    if dry_run:
        from grpofit import config

        shown = str(resume / "config.yaml") if resume is not None else str(source)
        typer.echo(config.load(shown, overrides or ()).to_yaml(comment_origins=True), nl=False)
        target = ["--resume", str(resume)] if resume is not None else [str(source)]
        _next("train", *target, *(word for text in overrides or () for word in ("--set", text)), to_stderr=True)
        return
    from grpofit import api

    result = api.train(source, overrides=overrides or (), out=out, resume=resume, plain=True if plain else None)
    _next("eval", str(result.run_dir))


@app.command(
    "eval",
    epilog=_ending(
        "grpofit eval runs/latest",
        "grpofit eval runs/latest --samples 8 --show 3",
        "grpofit eval Qwen/Qwen2.5-0.5B-Instruct --task gsm8k",
    ),
)
@_verb
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL|RECIPE", help="What to evaluate.", show_default=False)],
    task: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Another task: arithmetic, gsm8k, or a data file of yours.")
    ] = None,
    overrides: Overrides = None,
    samples: Annotated[
        int,
        typer.Option(
            min=0, metavar="K", show_default=False, help="Besides greedy accuracy, pass@k from k samples a prompt."
        ),
    ] = 0,
    show: Annotated[int, typer.Option(min=0, metavar="N", show_default=False, help="Print this many completions.")] = 0,
) -> None:
    """Measure accuracy on held-out prompts."""
    from grpofit import api

    changes = [*([_task_override(task)] if task else []), *(overrides or ())]
    result = api.evaluate(
        target, overrides=changes, samples=samples, show=show, say=typer.echo, progress=_progress_line()
    )
    _print_evaluation(result)
    if show == 0:
        _next("eval", target, *(["--task", task] if task else []), "--show", "3")
    else:
        _next("recipes")


@app.command(
    epilog=_ending(
        "grpofit recipes",
        "grpofit recipes smollm2-arithmetic",
        "grpofit recipes smollm2-arithmetic --copy my.yaml",
    )
)
@_verb
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this recipe's YAML.", show_default=False)
    ] = None,
    copy: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it here, to change it.")] = None,
) -> None:
    """List, print or copy the packaged recipes."""
    from grpofit import config

    if name is None:
        if copy is not None:
            raise UserError(
                "--copy needs the name of a recipe",
                why="there is more than one",
                fix=f"grpofit recipes NAME --copy {copy}",
            )
        known = config.recipes()
        width = max(len(recipe.name) for recipe in known)
        for recipe in known:
            typer.echo(f"{recipe.name:<{width}}  {recipe.summary}")
        _next("train", known[0].name)
    elif copy is None:
        typer.echo(config.recipe_text(name), nl=False)
        _next("recipes", name, "--copy", f"{name}.yaml", to_stderr=True)
    else:
        _write_new(copy, config.recipe_text(name))
        _next("train", str(copy))


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(
            f"cannot write '{path}'",
            values=error.strerror or str(error),
            why="a file that exists is never overwritten",
            fix="choose another name after --copy",
        ) from None
    typer.echo(f"wrote {path}")


def _task_override(task: str) -> str:
    """The whole section is replaced: a template written for another task's columns would not fit."""
    key = "file" if task.endswith(_DATA_FILES) else "name"
    return f"task={{{key}: {json.dumps(task)}}}"


def _progress_line() -> Callable[[int, int], None] | None:
    """A line on the terminal that counts completions and goes away at the end; None where there is no terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        text = f"\revaluating {done}/{total}" if done < total else "\r\x1b[K"
        sys.stderr.write(text)
        sys.stderr.flush()

    return show


def _print_evaluation(result: EvalResult) -> None:
    from grpofit.training.screen import evaluation_line, printable

    metrics = dict(result.metrics)
    typer.echo(evaluation_line(metrics))
    shown = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/n")
    for key, value in metrics.items():
        if key not in shown:
            typer.echo(f"  {key.removeprefix('eval/'):<14} {value:.3g}")
    for rollout in result.samples:
        prompt = rollout.prompt.columns.get("question", rollout.prompt.text)
        answer = rollout.prompt.columns.get("answer")
        reasons = ", ".join(score.reason for score in rollout.scores.values())
        typer.echo(printable(str(prompt)) + ("" if answer is None else f"   (answer {printable(str(answer))})"))
        typer.echo(f'  "{printable(rollout.completion.text)}"   {reasons}')


def _next(*words: str, to_stderr: bool = False) -> None:
    """What to do next; on stderr where stdout is a document."""
    typer.echo(f"next: {shlex.join(['grpofit', *words])}", err=to_stderr)


def _print_error(error: GrpofitError) -> None:
    from rich.console import Console
    from rich.text import Text

    styles = {"fix": "green"}
    console = Console(stderr=True)
    console.print(Text.assemble(("error", "bold red"), f"  {error.what}"), soft_wrap=True)
    for label, text in error.parts():
        indented = text.replace("\n", "\n       ")
        console.print(Text.assemble((f"  {label:<5}", "bold"), (indented, styles.get(label, ""))), soft_wrap=True)


def _print_bug(error: Exception) -> None:
    text = "".join(traceback.format_exception(error))
    if _show_traceback.get():
        sys.stderr.write(text)
    with tempfile.NamedTemporaryFile("w", prefix="grpofit-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(f"grpofit {__version__}\n{shlex.join(sys.argv)}\n\n{text}")
    _print_error(
        GrpofitError(
            f"{type(error).__name__}: {error}",
            why="grpofit did not expect this; it is a bug in it, or in a package it uses",
            fix=f"report it with the traceback in {file.name}   (or see it here: add --traceback)",
        )
    )
