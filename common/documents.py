"""Small JSON documents of one version: typed, and checked before anything acts on them."""

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class JsonForm(Generic[T]):
    """Reads and writes values of `kind`, a msgspec struct tagged with `version`.

    To be made at import: a type that two threads decode for the first time at once ends the process. `field`:
    where the version stands, the struct's `tag_field`.
    """

    def __init__(self, kind: type[T], version: int = 1, field: str = "format_version") -> None:
        self._version, self._field = version, field
        self._versions = msgspec.json.Decoder(msgspec.defstruct("Version", [(field, int)]))
        self._decoder, self._encoder = msgspec.json.Decoder(kind), msgspec.json.Encoder(order="sorted")

    def encode(self, value: T) -> bytes:
        """With the keys in order: the same value gives the same bytes."""
        return self._encoder.encode(msgspec.to_builtins(value, str_keys=True))

    def decode(self, raw: bytes) -> T:
        """What `encode` wrote. Raises ValueError."""
        try:
            # First alone: another version may have other fields.
            if (found := getattr(self._versions.decode(raw), self._field)) != self._version:
                raise ValueError(f"{self._field}: expected {self._version}, found {found}")
            return self._decoder.decode(raw)
        except RecursionError:
            raise ValueError("nested too deeply") from None
