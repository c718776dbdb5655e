"""Error classes, one for each action of the operator (`docs/reference/errors.md` lists the codes).

FloeError
├── ConfigError          78  correct the configuration
├── UsageError            2  correct the command line
├── Refused              77  provide the missing credential or permission
├── Unavailable          75  wait: Floe retries with backoff, then fails
│   ├── StoreUnavailable 75  the object store does not answer
│   └── LeaseLost        75  another instance has the work
├── OutcomeUnknown       75  unknown if it is done: settled by reading, never by guessing
├── OtherWriter           4  another writer changes data that only this program may change
├── Stopped               1  a verdict that needs an operator; names the choices
├── UnexpectedError       1  a defect, or no memory left: the work that failed is restarted (`common/tasks.py`)
└── DataError             3  stored data is invalid
    └── SegmentCorrupt    3
"""

from __future__ import annotations


class FloeError(Exception):
    """An error that Floe explains in one line.

    `message` is lower case without a full stop and names both sides ("expected 1, found 2"). `hint` is the next step or
    empty: a sentence, then commands to paste, each on its own line. `code` is the stable name of the cause, such as
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

    def as_text(self) -> str:
        """Return the text for stderr: one line, then the further lines of the hint.

        Control characters are escaped, so that data cannot forge lines.
        """
        message, hint = f"error[{self.code}]: {self.message}", self.hint.split("\n")
        first = f"{message}; {hint[0]}" if hint[0] else message
        return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in text) for text in (first, *hint[1:]))


class ConfigError(FloeError):
    """An invalid configuration. `problems` has one line for each fault; all faults are found at once."""

    exit_code = 78
    default_code = "E-CONFIG"

    def __init__(self, *problems: str, hint: str = "", code: str = "") -> None:
        super().__init__("\n".join(problems), hint=hint, code=code)
        self.problems = problems

    def as_text(self) -> str:
        if len(self.problems) == 1:
            return super().as_text()
        return "\n".join(FloeError(problem, code=self.code).as_text() for problem in self.problems) + (
            f"\n{self.hint}" if self.hint else ""
        )


class UsageError(FloeError):
    """An invalid command line."""

    exit_code = 2
    default_code = "E-USAGE"


class Refused(FloeError):
    """A refusal by a server: of the credential, or of a request for which the credential lacks the right."""

    exit_code = 77
    default_code = "E-REFUSED"


class Unavailable(FloeError):
    """A server that cannot be reached or cannot serve now; nothing was done."""

    exit_code = 75
    default_code = "E-UNAVAILABLE"


class StoreUnavailable(Unavailable):
    """An object store that cannot be reached, or does not answer in time."""


class LeaseLost(Unavailable):
    """A lease that another owner holds, or that was not renewed before its deadline."""

    default_code = "E-LEASE"


class OutcomeUnknown(FloeError):
    """A request that was sent and got no answer: it may be done or not done."""

    exit_code = 75
    default_code = "E-UNKNOWN"


class OtherWriter(FloeError):
    """Another writer that changes data that only this program may change."""

    exit_code = 4
    default_code = "E-WRITER"


class Stopped(FloeError):
    """A verdict that stops a chain until an operator decides; the hint is the command to paste."""

    default_code = "E-STOPPED"


class UnexpectedError(FloeError):
    """An unexpected error: a defect, or memory that ran out."""

    default_code = "E-UNEXPECTED"

    @classmethod
    def wrap(cls, error: BaseException, work: str = "") -> UnexpectedError:
        """Wrap `error`, or one error of a group; return an UnexpectedError as it is. `work`: the work that it ended."""
        while isinstance(error, BaseExceptionGroup):
            # Of several errors, one that is not a FloeError explains most.
            error = min(error.exceptions, key=lambda each: isinstance(each, FloeError))
        if isinstance(error, UnexpectedError):
            return error
        known = cls(
            f"{work}: {type(error).__name__}: {error}" if work else f"{type(error).__name__}: {error}",
            hint="this is a defect, or memory ran out: keep the log; the work that ended restarts by itself",
        )
        known.__cause__ = error
        return known


class DataError(FloeError):
    """Stored data that does not match its name or its footer."""

    exit_code = 3
    default_code = "E-DATA"


class SegmentCorrupt(DataError):
    """A segment with wrong bytes, schema, footer or rows; covers leave it out, and it is reported."""

    default_code = "E-SEG-CORRUPT"


def certificate_hint(message: str, address: str, server: str) -> str:
    """Return a remedy for the certificate of `server` that OpenSSL rejected with the message `message`.

    Empty if its authority is unknown, or for any other cause. `address`: the configuration key that names the server.
    """
    if any(text in message for text in ("mismatch", "not valid for", "doesn't match", "no appropriate subjectAltName")):
        return f"set {address} to a name of the {server} in its certificate"
    if is_out_of_date(message):
        return f"renew the certificate of the {server}, or correct the clock that is wrong"
    return ""


def is_out_of_date(message: str) -> bool:
    """True if a certificate was rejected only for its dates: a renewal, or a clock that is set after boot, ends that
    without a change here.
    """
    return "expired" in message or "not yet valid" in message
