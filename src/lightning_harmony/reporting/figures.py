"""Where pictures come from: matplotlib, which is installed only for those who draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_class() -> type[Figure]:
    """The class of matplotlib's figures.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from error
    return Figure


def refuse_format(file: Path) -> None:
    """Refuse a file that no picture can be written to, before the work whose result it is to show.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the suffix names no format, or there is no such folder.
    """
    formats = figure_class()().canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise ValueError(f"{file}: a picture is a file such as {file.stem or 'step'}.png, .svg or .pdf")
    refuse_without_folder(file)


def refuse_without_folder(file: Path) -> None:
    """Refuse a file that nothing can be written to.

    Raises:
        ValueError: if there is no such folder.
    """
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{file}: there is no folder {file.parent}")
