"""JSON documents of values: frozen dataclasses as text that tells its format and version, checked when it is read."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, TypeVar, cast

from msgspec import Meta, ValidationError, convert, to_builtins
from typing_extensions import Self

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.task import KINDS, Kind

T = TypeVar("T")

# The largest number that fits a signed integer of 64 bits.
_LARGEST = 2**63 - 1
# Bytes, positions and numbers of things; seconds; and what is done in a second.
Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=_LARGEST)]
Speed = Annotated[float, Meta(gt=0, le=_LARGEST)]


@dataclass(frozen=True)
class DocumentKind:
    """A kind of documents.

    Attributes:
        format: what their heads say.
        version: what this release writes. It reads no other.
        name: what errors call one, as "recorded step".
        short_name: the same where it is known to be one.
        origin: what an error says of where such documents come from.
        way_out: what it says to do with one of another version.
    """

    format: str
    version: int
    name: str
    short_name: str
    origin: str = ""
    way_out: str = ""


class Document:
    """A frozen dataclass that is written as JSON, and read back.

    Attributes:
        kind: what its text says that it is.
    """

    kind: ClassVar[DocumentKind]

    def to_json(self) -> str:
        """All of it as JSON, which `from_json` reads."""
        head = {"format": self.kind.format, "version": self.kind.version}
        return json.dumps({**head, **to_builtins(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            PlanError: if it is something else, or of another version, or contradicts itself.
        """
        kind = cls.kind
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"this is not a {kind.name}, for it is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != kind.format:
            raise PlanError(f'this is not a {kind.name}: it has no "format": "{kind.format}"{kind.origin}')
        version = data.pop("version", None)
        if version != kind.version:
            raise PlanError(
                f"the {kind.short_name} has version {version!r}, but this release reads version {kind.version}{kind.way_out}"
            )
        value = decode(cls, data, kind.short_name)
        value.refuse_contradictions()
        return value

    def refuse_contradictions(self) -> None:
        """Refuse what was read if its parts do not belong together.

        Raises:
            PlanError: naming what does not.
        """


def decode(expected: type[T], data: Any, name: str) -> T:
    """Read a dataclass from JSON.

    Args:
        expected: the dataclass.
        data: from JSON.
        name: what errors call it.

    Raises:
        PlanError: if anything is missing, unknown, of another type, or out of range.
    """
    try:
        value = convert(data, expected, dec_hook=_decode_kind)
    except ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise PlanError(f"{name}{path.rstrip('`')}: {problem}") from error
    # Of a dataclass, msgspec takes names that it does not know, and what it has left out it would not encode.
    _refuse_other_names(data, asdict(cast(Any, value)), name)
    return value


def _decode_kind(expected: type, data: Any) -> Kind:
    if expected is not Kind or data not in [*KINDS]:
        raise ValueError(f"Expected one of {', '.join(KINDS)}, got {data!r}")
    return KINDS[data]


def _refuse_other_names(data: Any, known: Any, name: str) -> None:
    """Refuse names that no field has, and fields that have defaults but are missing."""
    if isinstance(known, dict):
        for field in dict.fromkeys([*data, *known]):
            if field not in data:
                raise PlanError(f"{name} has no {field!r}")
            if field not in known:
                raise PlanError(f"{name} has {field!r}, which is not known")
            _refuse_other_names(data[field], known[field], f"{name}.{field}")
    elif isinstance(known, tuple):
        for number, (one, other) in enumerate(zip(data, known, strict=False)):
            _refuse_other_names(one, other, f"{name}[{number}]")
