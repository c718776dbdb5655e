"""Errors, by what the operator does about them (`docs/operations.md` lists the codes).

FloeError
├── ConfigError          78  fix the configuration
├── UsageError            2  call it differently
├── Refused              77  a credential or a permission is missing
├── Unavailable          75  wait: retried with backoff, then given up
│   ├── StoreAway        75  the object store gives no answer
│   └── LeaseLost        75  another instance holds the work
├── OutcomeUnknown       75  neither done nor not done: settled by reading, never by guessing
├── AnotherWriter         4  another writer writes where only this program may
├── Stopped               1  a verdict that needs an operator; names the choices
├── Unforeseen            1  a defect, or no memory: what it ended begins again (`common/tasks.py`)
└── DataError             3  the data is not what it must be
    └── SegmentCorrupt    3
"""

from __future__ import annotations


class FloeError(Exception):
    """An error that Floe explains in one line.

    `message` is lower case without a full stop and says both sides ("expected 1, found 2"); `hint` is what to do next,
    or empty: a sentence, then commands to paste, each on its own line; `code` is the stable name of the cause, such as
    `E-SEG-CORRUPT`.
    """

    exit_code = 1
    default_code = "E-FAILED"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def line(self) -> str:
        """What is printed to stderr: one line, then the further lines of the hint.

        Control characters are escaped, so that data cannot forge lines.
        """
        message, hint = f"error[{self.code}]: {self.message}", self.hint.split("\n")
        first = f"{message}; {hint[0]}" if hint[0] else message
        return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in text) for text in (first, *hint[1:]))


class ConfigError(FloeError):
    """The configuration is wrong. `problems` holds a line for each fault found, all at once."""

    exit_code = 78
    default_code = "E-CONFIG"

    def __init__(self, *problems: str, hint: str = "", code: str = "") -> None:
        super().__init__("\n".join(problems), hint=hint, code=code)
        self.problems = problems

    def line(self) -> str:
        if len(self.problems) == 1:
            return super().line()
        return "\n".join(FloeError(problem, code=self.code).line() for problem in self.problems) + (
            f"\n{self.hint}" if self.hint else ""
        )


class UsageError(FloeError):
    """The command line is wrong."""

    exit_code = 2
    default_code = "E-USAGE"


class Refused(FloeError):
    """A server refused the credential, or the credential lacks a right."""

    exit_code = 77
    default_code = "E-REFUSED"


class Unavailable(FloeError):
    """A server cannot be reached or cannot serve now; nothing was done."""

    exit_code = 75
    default_code = "E-UNAVAILABLE"


class StoreAway(Unavailable):
    """The object store cannot be reached, or gives no answer in time."""


class LeaseLost(Unavailable):
    """The lease is held by another owner, or could not be renewed before its deadline."""

    default_code = "E-LEASE"


class OutcomeUnknown(FloeError):
    """A request was sent and its answer lost: it is neither done nor not done."""

    exit_code = 75
    default_code = "E-UNKNOWN"


class AnotherWriter(FloeError):
    """Another writer changes what only this program may change."""

    exit_code = 4
    default_code = "E-WRITER"


class Stopped(FloeError):
    """A verdict that stops a chain until an operator decides; the hint is the command to paste."""

    default_code = "E-STOPPED"


class Unforeseen(FloeError):
    """An error that was not foreseen: a defect, or memory that ran out."""

    default_code = "E-UNEXPECTED"

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> Unforeseen:
        """Wraps `error`, or the first error of a group. `where`: the work that it ended."""
        while isinstance(error, BaseExceptionGroup):
            # Of several errors, the unforeseen one says most.
            error = min(error.exceptions, key=lambda each: isinstance(each, FloeError))
        if isinstance(error, Unforeseen):
            return error
        known = cls(
            f"{where}: {type(error).__name__}: {error}" if where else f"{type(error).__name__}: {error}",
            hint="this is a bug, or memory ran out: keep the log; what it ended begins again by itself",
        )
        known.__cause__ = error
        return known


class DataError(FloeError):
    """Stored data is not what its name or its footer promises."""

    exit_code = 3
    default_code = "E-DATA"


class SegmentCorrupt(DataError):
    """A segment's bytes, schema, footer or rows are wrong; it is left out of covers and reported."""

    default_code = "E-SEG-CORRUPT"


def certificate_hint(said: str, address: str, server: str) -> str:
    """What to do about the certificate of `server` that OpenSSL did not believe, as it `said`; empty where
    its authority is not known, or something else. `address`: the key that names the server.
    """
    if any(words in said for words in ("mismatch", "not valid for", "doesn't match", "no appropriate subjectAltName")):
        return f"have {address} name the {server} as its certificate does"
    if is_out_of_date(said):
        return f"renew the certificate of the {server}, or set the clock that is wrong"
    return ""


def is_out_of_date(said: str) -> bool:
    """Whether a certificate was refused for its dates only: a renewal, or a clock set after boot, ends that without a
    change here.
    """
    return "expired" in said or "not yet valid" in said
