"""Effect of an error on a target, and hints for a hole and a floor; pure functions."""

from collections.abc import Sequence

from common.archive.documents import hole_remedies
from common.archive.store import quarantine_command
from common.chain import Chain
from common.errors import ConfigError, DataError, FloeError, OtherWriter, OutcomeUnknown, Refused, Stopped, Unavailable
from common.exits import config_source, position_command
from common.nats.protocol import ApiError
from common.sequences import SequenceRange
from common.settings.ingress import IngressSettings

# Errors that stop one chain and do not affect the others.
CHAIN_ERRORS = (Stopped, DataError, Refused, ConfigError)
STOPPED_RECHECK_S = 60.0  # seconds until a stopped chain is checked again


def is_transient(error: BaseException) -> bool:
    """True if a later retry may succeed without an operator."""
    if isinstance(error, ApiError):
        return error.status >= 500 or error.status == 429
    return isinstance(error, Unavailable | OutcomeUnknown)


def is_fatal_for_target(error: FloeError, *, was_checked: bool) -> bool:
    """True if this process stops its target until a restart: another writer, or a configuration that cannot work.

    `was_checked`: configuration and target matched once. The target has changed since then, and may change again.
    """
    if isinstance(error, ConfigError):
        return not was_checked or error.code == "E-SOURCES"
    return isinstance(error, OtherWriter)


def most_important_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the most important error of a group: one that needs an operator comes before one that passes by itself."""
    return min(_flat(group), key=lambda error: (is_transient(error), not isinstance(error, FloeError)))


def _flat(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [inner for each in error.exceptions for inner in _flat(each)]
    return [error]


def check_targets(settings: IngressSettings) -> None:
    """Raise ConfigError if the configuration has no target, for example that of a site."""
    if not settings.targets:
        raise ConfigError(f"{config_source()}: ingress.targets: expected at least one target, found none")


MAX_SHOWN_ITEMS = 5  # damaged segments or missing partitions that one message names


def hole_hint(chain: Chain, hole: SequenceRange, damaged: Sequence[str]) -> str:
    """Return the commands for a hole. `damaged`: keys of segments that would cover it; their commands come first."""
    if not damaged:
        return hole_remedies(chain, hole)
    commands = "\n".join(quarantine_command(key, "--yes") for key in damaged[:MAX_SHOWN_ITEMS])
    text = "put a good copy of the damaged segment back; or quarantine it, so that egress can archive it again:"
    return f"{text}\n{commands}\n{hole_remedies(chain, hole)}"


def floor_remedy(target: str, chain: Chain, floor: int) -> tuple[str, str]:
    """Return the advice for a position below the floor of retention, and its command."""
    return "put the segments back from a copy of the bucket; or continue with the remaining ones", position_command(
        target, chain, floor
    )
