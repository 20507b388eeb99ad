"""The command line `kvstore`: a frame (`app`, `options`, `terminal`, `failures`) and a file for each command.

Exit codes, the same for every command:

    0   done, nothing wrong
    1   done, but not all of it: a block was missing, a put was not acknowledged (`fsck`: everything found was repaired)
    2   the request was wrong: an unknown command, option, key, file, URL, setting or unit, named in one line
    4   damage was found and is left
    8   could not run: no access, owned by another process, too many nodes gone
    130 interrupted
    143 ended by SIGTERM

Results go to standard output, everything else to standard error. With `--json` standard output is exactly one JSON
document. A traceback never reaches a user who did not ask for it with `kvstore --traceback COMMAND`.
"""

from __future__ import annotations

from kvstore.cli.app import main

__all__ = ["main"]
