"""`python tools/replay_trace.py FILE [options]`: the same as `kvstore replay`, for a checkout that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from kvstore.cli import main

    main(["replay", *sys.argv[1:]])
