"""`kvstore node serve` as it is, over a disk that a chaos run can hurt: the words of the command follow the module.

Commands come as lines of JSON on standard input, {"do": "arm", "kind": …}, "disarm" or "look"; each is answered with
{"struck": {kind: count}}. The process ends with whoever started it, stopped or not.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from typing import Final

from kvstore.cli import main, serve_cmd
from tools.chaosrig.faultio import ChaosIo

_PR_SET_PDEATHSIG: Final = 1


def serve(words: list[str]) -> None:
    """Until the command ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    io = ChaosIo()
    directory = words[words.index("serve") + 1]
    vars(serve_cmd)["SystemIo"] = lambda: io
    threading.Thread(target=_obey, args=(io, directory), name="chaos", daemon=True).start()
    main(words)


def _obey(io: ChaosIo, directory: str) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "arm":
            io.arm(command["kind"], directory)
        elif command["do"] == "disarm":
            io.disarm()
        sys.stdout.write(json.dumps({"struck": dict(io.struck)}) + "\n")
        sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1:])
