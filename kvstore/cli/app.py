"""The program: which commands there are, and what happens around each of them.

A command returns an exit code, or None for 0. Whatever it raises ends in `failures.report`. Other packages add commands
through the entry-point group `kvstore.commands`: each entry point loads a function that takes the `typer.Typer` app
and registers its commands on it. One that cannot be loaded costs a line on standard error, never the program.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvstore.cli import (
    bench_cmd,
    cluster_cmd,
    config_cmd,
    demo_cmd,
    doctor_cmd,
    fsck_cmd,
    gc_cmd,
    get_cmd,
    init_cmd,
    inspect_cmd,
    ls_cmd,
    match_cmd,
    node_cmd,
    put_cmd,
    repair_cmd,
    replay_cmd,
    scrub_cmd,
    status_cmd,
    sweep_cmd,
    tenant_cmd,
    top_cmd,
)
from kvstore.cli.failures import BROKEN_PIPE, keep_tracebacks_away, one_line, report
from kvstore.cli.options import RootOptions, parse_assignment
from kvstore.cli.streams import OutputClosed, keep_streams, require_output

ENTRY_POINT_GROUP = "kvstore.commands"
REGISTER: tuple[Callable[[typer.Typer], None], ...] = (
    init_cmd.register,
    status_cmd.register,
    top_cmd.register,
    put_cmd.register,
    get_cmd.register,
    match_cmd.register,
    ls_cmd.register,
    inspect_cmd.register,
    fsck_cmd.register,
    repair_cmd.register,
    scrub_cmd.register,
    gc_cmd.register,
    sweep_cmd.register,
    node_cmd.register,
    cluster_cmd.register,
    tenant_cmd.register,
    config_cmd.register,
    doctor_cmd.register,
    bench_cmd.register,
    replay_cmd.register,
    demo_cmd.register,
)

_HELP = """A KV cache store for LLM inference: blocks of KV by hash of their tokens, erasure-coded 10+2 over twelve
nodes.

\b
Examples:
  kvstore init /var/lib/kvstore --capacity 100GiB
  export KVSTORE_STORE=/var/lib/kvstore
  kvstore status

Exit codes: 0 done; 1 not all of it; 2 wrong request; 4 damage left; 8 could not run.
"""


class CommandGroup(TyperGroup):
    """The group at the root: ends every failure of a command as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; with --traceback show where its failure came from, before `main` ends it as one line."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(_reader_is_gone()) from None
        except Exception:
            if isinstance(ctx.obj, RootOptions) and ctx.obj.traceback:
                traceback.print_exc()
            raise

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; exits the process unless `standalone_mode` is off, then returns the exit code."""
        try:
            words = list(sys.argv[1:] if args is None else args) or ["--help"]
            outcome = super().main(words, prog_name or "kvstore", complete_var, False, windows_expand_args, **extra)
            code = outcome if isinstance(outcome, int) else 0
            sys.stdout.flush()
        except BrokenPipeError:
            code = _reader_is_gone()
        except (Exception, KeyboardInterrupt) as error:
            code = report(error)
        if standalone_mode:
            sys.exit(code)
        return code


def _reader_is_gone() -> int:
    """The reader of our output went away: what is still buffered must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"kvstore {version('kvstore')}")
        except PackageNotFoundError:
            print("kvstore, not installed")
        raise typer.Exit


def _root(
    context: typer.Context,
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="The store, for whichever command follows.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON output, for whichever command follows.")] = False,
    config_path: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="TOML file with settings. Default: $KVSTORE_CONFIG.")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting; may be given several times.")
    ] = None,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    settings = tuple(parse_assignment(text) for text in assignments or ())
    context.obj = RootOptions(store, as_json, config_path, settings, show_traceback)


def make_app() -> typer.Typer:
    """The program with its own commands and those of installed packages."""
    app = typer.Typer(
        name="kvstore",
        cls=CommandGroup,
        help=_HELP,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for register in REGISTER:
        register(app)
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda found: found.name):
        try:
            entry.load()(app)
        except Exception as error:  # Whatever a foreign package raises must not take the store's own commands away.
            print(
                one_line(f"kvstore: commands of {entry.value} are left out: {type(error).__name__}: {error}"),
                file=sys.stderr,
            )
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the program `kvstore`."""
    keep_streams()
    keep_tracebacks_away()
    try:
        require_output()
    except OutputClosed as error:
        sys.exit(report(error))
    make_app()(args=argv, prog_name="kvstore")
