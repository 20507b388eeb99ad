"""`kvstore engine demo`: the engine on a real model and a real store, cold against warm, with a picture of what ran
when.

The model is the store demonstration's (`kvstore.demo`), as is its text: source files of the Python standard library,
as a coding assistant reads them. The store is a fresh one in a temporary directory, or one that is given; then the
prompt gets a head of its own, so that its blocks cannot be there yet.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from transformers.utils import logging as transformers_logging

from efs.errors import InvalidArgument
from efs.fs import FileSystem
from efs.limits import GIB
from gdr.compare import Comparison, WarmRun, compare
from gdr.engine import EngineConfig
from gdr.timeline import Panel, save_picture, save_trace
from kvstore.connectors.transformers import namespace_of
from kvstore.demo.conversation import user_additions
from kvstore.demo.model import load_model, load_tokenizer, prepare
from kvstore.demo.source import MODEL_NAME, cache_root, gguf_path, require_extras
from kvstore.store import KVStore

CAPACITY_BYTES: Final = 1 * GIB
NEW_TOKENS: Final = 64
TRACE_FILE: Final = "swap-in-timeline.json"
PICTURE_FILE: Final = "swap-in-timeline.png"
MISMATCH: Final = 1
_HEADINGS: Final = ("blocks", "MB", "prefilled", "first token s", "×", "fetch", "copy", "compute", "hidden",
                    "max Δ logprob")

Remark = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineDemo:
    """The outcome. picture: None when matplotlib is not installed."""

    model: str
    threads: int
    comparison: Comparison
    trace: Path
    picture: Path | None

    @property
    def exit_code(self) -> int:
        return 0 if self.comparison.ok else MISMATCH

    def document(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "threads": self.threads,
            **self.comparison.document(),
            "trace": str(self.trace),
            "picture": None if self.picture is None else str(self.picture),
        }

    def table(self) -> Screen:
        return Screen(self)


@dataclass(frozen=True, slots=True)
class Screen:
    """The outcome on a console."""

    demo: EngineDemo

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self.demo.comparison
        yield (
            f"[bold]{self.demo.model}[/bold] on {found.device}, {self.demo.threads} threads: a prompt of "
            f"{found.prompt_tokens:,} tokens, blocks of {found.block_bytes:,} bytes"
        )
        yield ""
        yield _table(found)
        yield "[dim]first token: match, fetch, swap-in and prefill · fetch, copy, compute: milliseconds busy[/dim]"
        yield "[dim]hidden: share of the copies that ran while a layer was computing[/dim]"
        yield ""
        yield f"timeline: {self.demo.trace} (chrome://tracing or Perfetto)"
        yield f"picture:  {self.demo.picture or 'not drawn, matplotlib is not installed'}"
        yield (
            f"[bold green]{len(found.tokens)} tokens, warm as cold[/bold green]"
            if found.ok
            else "[bold red]warm and cold differ[/bold red]"
        )


def _table(found: Comparison) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("cold", "0", "0.0", f"{found.prompt_tokens:,}", f"{found.cold_first_token_s:.2f}", "1.0")
    table.add_row("warm", *_cells(found, found.warm))
    table.add_row("warm, streamed", *_cells(found, found.stream))
    return table


def _cells(found: Comparison, run: WarmRun) -> tuple[str, ...]:
    return (
        str(run.loaded_blocks),
        f"{run.loaded_blocks * found.block_bytes / 1e6:.1f}",
        f"{run.prefilled_tokens:,}",
        f"{run.first_token_s:.2f}",
        f"{found.cold_first_token_s / run.first_token_s:.1f}" if run.first_token_s else "-",
        f"{run.fetch_ms:.0f}",
        f"{run.copy_ms:.0f}",
        f"{run.compute_ms:.0f}",
        f"{run.hidden_share:.0%}",
        f"{run.max_delta_logprob:.3g}" + ("" if run.same_tokens else " (tokens differ)"),
    )


def run(*, store: str | None = None, out: str = ".", prompt_tokens: int | None = None, new_tokens: int = NEW_TOKENS,
        threads: int | None = None, remark: Remark = lambda _text: None) -> EngineDemo:
    """Run the demonstration, a minute on two cores.

    store: an existing store; else a temporary one. out: an existing directory for the timeline. prompt_tokens: at most
    as many as the text has, all by default. threads: of torch. MissingExtra, InvalidArgument.
    """
    require_extras()
    place = Path(out)
    if not place.is_dir():
        raise InvalidArgument(f"{out} is not a directory")
    threads = threads or min(os.cpu_count() or 1, 8)
    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    remark("loading the model; the first time its weights are converted")
    made = prepare(gguf_path(), cache_root())
    model, tokenizer = load_model(made.directory), load_tokenizer(made.directory)
    prompt = user_additions(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, 1)[0]
    if prompt_tokens is not None:
        if not 1 < prompt_tokens <= len(prompt):
            raise InvalidArgument(f"prompt tokens are {prompt_tokens}, must be 2 to {len(prompt)}")
        prompt = prompt[:prompt_tokens]
    if store is not None:
        prompt = [int.from_bytes(os.urandom(2), "little") % model.config.vocab_size for _ in range(8)] + prompt[8:]
    remark("cold run, then two warm ones")
    with _place_for(store) as root, KVStore.blocking(root) as opened:
        namespace = namespace_of(opened, model, name=MODEL_NAME, weights=made.weights)
        config = EngineConfig(pages=(len(prompt) + new_tokens) // namespace.layout.block_tokens + 2)
        found = compare(model, opened, namespace, prompt, new_tokens, config)
    save_trace(found.warm.spans, place / TRACE_FILE)
    picture = None
    if find_spec("matplotlib") is not None:
        picture = place / PICTURE_FILE
        save_picture(_panels(found), picture)
    return EngineDemo(MODEL_NAME, threads, found, place / TRACE_FILE, picture)


@contextmanager
def _place_for(store: str | None) -> Iterator[str]:
    """The given store, or one made for the occasion."""
    if store is not None:
        yield store
        return
    temporary = tempfile.mkdtemp(prefix="kvstore-engine-demo-")
    try:
        FileSystem.init(temporary, CAPACITY_BYTES)
        yield temporary
    finally:
        shutil.rmtree(temporary)


def _panels(found: Comparison) -> list[Panel]:
    """The warm request as a whole, its beginning, and the beginning of the streamed one."""
    megabytes = found.warm.loaded_blocks * found.block_bytes / 1e6
    whole = (
        f"Warm request on {found.device}: {found.warm.loaded_blocks} blocks, {megabytes:.0f} MB loaded, "
        f"{found.warm.prefilled_tokens} of {found.prompt_tokens:,} tokens computed; first token after "
        f"{found.warm.first_token_s * 1000:.0f} ms (cold: {found.cold_first_token_s * 1000:.0f} ms)"
    )
    return [
        Panel(whole, found.warm.spans),
        Panel("Its beginning: fetch, then copies under the first layers", found.warm.spans, _loaded_ms(found.warm)),
        Panel("Streamed: layers run while later ones are fetched", found.stream.spans, _loaded_ms(found.stream)),
    ]


def _loaded_ms(run: WarmRun) -> float | None:
    """A little after the last copy."""
    stops = [span.stop_ms for span in run.spans if span.lane in ("fetch", "copy", "scatter")]
    return max(stops) * 1.4 if stops else None
