"""The cache of profiles: what was measured in one fit, kept in a file for the next ones."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.record import Origin, Record


def default_folder() -> Path | None:
    """Where profiles are kept: the user's folder for what can be made anew; None if the user has none."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen) / "lightning-harmony"
    try:
        return Path.home() / ".cache" / "lightning-harmony"
    except RuntimeError:
        return None


class ProfileCache:
    """The file of one model on one machine.

    Nothing depends on it but time: what is wrong with it is said in a warning, and all is measured anew.

    Args:
        folder: where it lies.
        origin: of what is measured.
        warn: says something to the user.
        is_chosen: whether the user chose the folder, and wants to be told if nothing can be written there.
    """

    def __init__(self, folder: Path, origin: Origin, warn: Callable[[str], None], *, is_chosen: bool) -> None:
        self.origin = origin
        key = hashlib.sha256(json.dumps([origin.model, origin.machine]).encode()).hexdigest()[:16]
        self.file = folder / f"{key}.json"
        self._warn = warn
        self._is_chosen = is_chosen

    def read(self) -> Record | None:
        """What is known; None if there is no file, or none of this model, machine and version."""
        try:
            record = Record.from_json(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, PlanError) as error:
            self._warn(f"the cached profile {str(self.file)!r} is not used, and measured anew: {error}")
            return None
        differences = [
            f"{part} {found!r}, here {here!r}"
            for (part, found), here in zip(asdict(record.origin).items(), asdict(self.origin).values(), strict=True)
            if found != here
        ]
        if differences:
            self._warn(
                f"the cached profile {str(self.file)!r} is not used, and measured anew: it is of {'; '.join(differences)}"
            )
            return None
        return record

    def write(self, record: Record) -> None:
        """Keep a record: whole, or not at all. Of several that are written at a time the last one stays."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{self.file.stem}-", dir=self.file.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(record.to_json())
                os.replace(name, self.file)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            if self._is_chosen:
                self._warn(f"no profile is kept in HarmonyStrategy(profile_cache={str(self.file.parent)!r}): {error}")

    def discard(self) -> str:
        """Remove the file; what to call it."""
        try:
            self.file.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"the cached profile {str(self.file)!r} cannot be removed: {error}")
        return f"the cached profile {str(self.file)!r}"
