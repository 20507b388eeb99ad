"""The commands that this package adds to `kvstore`, through the entry-point group `kvstore.commands`.

Importing this module imports neither torch nor anything that does.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.options import JsonOption, root_options, terminal_of
from kvstore.demo.source import require_extras

_HELP = """Prefill a real model cold and warm, and draw what ran when: fetch, copy, compute.

Needs the extra `transformers` (in a clone: pip install ".[transformers]") and, for the picture, matplotlib. Writes
swap-in-timeline.json (chrome://tracing, Perfetto) and swap-in-timeline.png. Exits non-zero when the warm run does
not give the cold run's tokens.

\b
Examples:
  kvstore engine demo
  kvstore engine demo --out /tmp --prompt-tokens 1000
  kvstore --json engine demo > engine.json
"""


def register(app: typer.Typer) -> None:
    """Add the group `engine`."""
    engine = typer.Typer(
        help="The engine side: swap-in of stored blocks under a model's forward pass.", no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    engine.callback()(_group)
    engine.command("demo", help=_HELP, short_help="A real model cold and warm, with a timeline.")(demo)
    app.add_typer(engine, name="engine")


def _group() -> None:
    """Makes `engine` a group although it has one command today."""


def demo(
    context: typer.Context,
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="A store or cluster to use.  [default: a new store]")
    ] = None,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Where the timeline goes.")] = ".",
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", metavar="N", min=2, help="Length of the prompt.  [default: 2,478]")
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", metavar="N", min=1, help="Tokens to compare.")] = 64,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Threads of torch.  [default: cores, at most 8]")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    require_extras()
    from gdr.demo import run  # Lazily: see the module docstring.

    terminal = terminal_of(context, as_json)
    url = store if store is not None else root_options(context).store
    found = run(store=url, out=out, prompt_tokens=prompt_tokens, new_tokens=new_tokens, threads=threads,
                remark=terminal.remark)
    terminal.result(found.document(), lambda console: console.print(found.table()))
    return found.exit_code
