"""What scripts hand to `put`, `get` and `match`: token ids, a block layout and a namespace. This docstring is the
format.

*Token ids* (`--tokens FILE`), whole numbers from 0 to 4294967295; the format follows from the name:

    *.npy           one-dimensional NumPy array of an integer type
    *.u32           little-endian unsigned 32-bit integers, nothing else
    anything else   decimal numbers separated by white space or commas; square brackets around them are allowed, so that
                    a JSON list is such a file

*Text* (`--text FILE`): any file. The store has no tokenizer: each byte of the file is one token, its id the byte's
value, 0 to 255. Keys made so match only keys made so.

`-` instead of a name reads standard input (decimal numbers, or text).

*Blocks* (`--blocks FILE`, `--output FILE`): the bytes of the blocks one after the other, block-major, without any
header.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from kvstore.cli.failures import UsageMistake
from kvstore.config import parse_size
from kvstore.layout import V41_FLASH, BlockLayout

LAYOUTS = {"v41-flash": V41_FLASH}
MAX_TOKENS = 1 << 26
"""Half a million blocks; a file of more is not a prompt."""
_MOST_TOKEN = (1 << 32) - 1

TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="FILE", help="Token ids: decimal text, .u32, .npy; - is standard input."),
]
TextOption = Annotated[
    str | None, typer.Option("--text", metavar="FILE", help="A file whose bytes are the tokens; - is standard input.")
]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", metavar="NAME", help=f"A known layout: {', '.join(LAYOUTS)}.")
]
BlockBytesOption = Annotated[
    str | None, typer.Option("--block-bytes", metavar="SIZE", help="Opaque blocks of this size, such as 4096 or 2MiB.")
]
BlockTokensOption = Annotated[
    int | None, typer.Option("--block-tokens", metavar="N", help="Tokens of an opaque block.  [default: 128]")
]
ModelOption = Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model; part of every key.")]
WeightsOption = Annotated[
    str, typer.Option("--weights", metavar="DIGEST", help="Digest of its weights; part of every key.")
]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Whose blocks; see `kvstore tenant`.")
]
LoraOption = Annotated[
    str | None, typer.Option("--lora", metavar="DIGEST", help="Digest of a LoRA adapter; part of every key.")
]
SaltOption = Annotated[str | None, typer.Option("--salt", metavar="TEXT", help="Cache salt; part of every key.")]


@dataclass(frozen=True, slots=True)
class Addressing:
    """Everything but the tokens that decides which keys are meant."""

    model: str
    weights: str
    layout: BlockLayout
    tenant: str | None
    lora: str | None
    salt: str | None


def layout_of(name: str | None, block_bytes: str | None, block_tokens: int | None) -> BlockLayout:
    """The layout that the options name; exactly one of --layout and --block-bytes must be given."""
    if (name is None) == (block_bytes is None):
        raise UsageMistake("give one of --layout NAME and --block-bytes SIZE")
    if name is None:
        return BlockLayout.opaque(
            parse_size(str(block_bytes), "--block-bytes"), 128 if block_tokens is None else block_tokens
        )
    if block_tokens is not None:
        raise UsageMistake("--block-tokens goes with --block-bytes; a named layout has its own")
    if name not in LAYOUTS:
        raise UsageMistake(f"unknown layout {name!r}; there are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def read_tokens(tokens: str | None, text: str | None) -> NDArray[np.uint32]:
    """(n,) token ids of the one file that was given; UsageMistake names the file and what is wrong with it."""
    if (tokens is None) == (text is None):
        raise UsageMistake("give one of --tokens FILE and --text FILE")
    if text is not None:
        ids: NDArray[np.uint32] = np.frombuffer(_bytes_of(text), np.uint8).astype(np.uint32)
        return _bounded(ids, text)
    name = str(tokens)
    data = _bytes_of(name)
    if name.endswith(".npy"):
        return _bounded(_from_npy(data, name), name)
    if name.endswith(".u32"):
        if len(data) % 4:
            raise UsageMistake(f"{name}: {len(data)} bytes is not a whole number of 4-byte token ids")
        return _bounded(np.frombuffer(data, "<u4").astype(np.uint32), name)
    return _bounded(_from_decimals(data, name), name)


def _bytes_of(name: str) -> bytes:
    if name != "-":
        return Path(name).read_bytes()
    if sys.stdin is None:
        raise UsageMistake("-: standard input is closed")
    return sys.stdin.buffer.read()


def _bounded(ids: NDArray[np.uint32], name: str) -> NDArray[np.uint32]:
    if len(ids) > MAX_TOKENS:
        raise UsageMistake(f"{name}: {len(ids)} tokens, at most {MAX_TOKENS} are read")
    return ids


def _from_npy(data: bytes, name: str) -> NDArray[np.uint32]:
    try:
        array = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    except Exception as error:  # A header is Python text: what reading a wrong one raises has no end.
        raise UsageMistake(f"{name}: not a NumPy array: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageMistake(f"{name}: not a one-dimensional array of integers")
    bad = np.flatnonzero((array < 0) | (array > _MOST_TOKEN))
    if len(bad):
        raise UsageMistake(f"{name}: token {bad[0]} is {array[bad[0]]}, must be 0 to {_MOST_TOKEN}")
    return array.astype(np.uint32)


def _from_decimals(data: bytes, name: str) -> NDArray[np.uint32]:
    words = data.translate(bytes.maketrans(b",[]", b"   ")).split()
    ids = np.empty(len(words), np.uint32)
    for position, word in enumerate(words):
        if not word.isdigit() or len(word) > 10 or int(word) > _MOST_TOKEN:
            shown = word[:40].decode("utf-8", "replace")
            raise UsageMistake(f"{name}: token {position} is {shown!r}, must be a number from 0 to {_MOST_TOKEN}")
        ids[position] = int(word)
    return ids
