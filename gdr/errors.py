"""What can go wrong on the engine's side, and what the caller should do about it.

A block that could not be loaded is never an error here: it is recomputed and counted. What remains are wrong
arguments, a request that was aborted, a device that does not answer, and a request that is larger than the machine.
"""

from __future__ import annotations

from efs.errors import EfsError


class EngineError(EfsError):
    """Base of every error that this package raises on purpose; `str(error)` is one line for a person."""


class InvalidEngineArgument(EngineError, ValueError):
    """The caller's argument is wrong: a size, a type, a limit. Correct the call."""

    exit_code = 2


class RequestTooLarge(EngineError):
    """A sequence needs more pages than the whole pool has. Give the engine more pages."""

    exit_code = 2


class PagesExhausted(EngineError):
    """No free page now; finish or preempt a sequence and call again."""

    retryable = True


class Aborted(EngineError):
    """The request was aborted by its owner; nothing of it is left on the device."""


class EngineClosed(EngineError):
    """The engine was closed; make a new one."""


class StaleLease(EngineError):
    """A host region or page was used after it had been given back: a defect of the caller."""


class DeviceError(EngineError):
    """The device refused an operation: a copy, a scatter, a page lock. The message has the device's own words.

    A CUDA error that surfaces in a later call is sticky and ends the context; only refusals at the call are survivable.
    """


class SwapInStalled(EngineError):
    """A swap-in did not end within its bound; its pages stay out of use until it does."""

    retryable = True
