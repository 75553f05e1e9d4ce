"""A JSON document that says in its head what it is, and of which version."""

import json
from dataclasses import dataclass
from typing import Any

from lightning_harmony.errors import PlanError


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

    def head(self) -> dict[str, Any]:
        """What a document begins with."""
        return {"format": self.format, "version": self.version}

    def read(self, text: str) -> dict[str, Any]:
        """What a document holds behind its head.

        Raises:
            PlanError: if it is something else, or of another version.
        """
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"this is not a {self.name}, for it is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != self.format:
            raise PlanError(f'this is not a {self.name}: it has no "format": "{self.format}"{self.origin}')
        version = data.pop("version", None)
        if version != self.version:
            raise PlanError(
                f"the {self.short_name} has version {version!r}, but this release reads version {self.version}{self.way_out}"
            )
        return data
