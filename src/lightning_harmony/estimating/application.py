"""An application in words: a model by its import path, the shapes of a batch, a LightningCLI's configuration."""

from __future__ import annotations

import ast
import re
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor

from lightning_harmony.estimating.subject import needs_numbers

# The name of a model on the Hugging Face Hub, perhaps with its owner's before it.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*|[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# How long the Hub has to answer.
_PATIENCE_SECONDS = 3.0
_TENSOR = re.compile(r"\s*(?:(\w+)\s*=\s*)?(\w+)\s*\[([\d\s,]*)\]\s*(?:,|$)")


def find_model(path: str, arguments: Mapping[str, Any]) -> Any:
    """What an import path names, ready for `estimate`.

    Args:
        path: of a LightningModule's class, of a function that returns a module, or of a Hugging Face configuration's
            class; or a file or folder with such a configuration, or a model's name on the Hugging Face Hub.
        arguments: to call it with.

    Returns:
        A configuration, or a function that builds the module.

    Raises:
        ValueError: if there is no such thing.
    """
    _look_in_current_folder()
    is_file = Path(path).exists() and Path(path).suffix != ".py"
    if is_file or (_HUB_NAME.fullmatch(path) and ("/" in path or find_spec(path) is None)):
        return _hugging_face_config(path, arguments)
    found = import_by_path(path)
    build = partial(_build, path, found, arguments)
    if not (isinstance(found, type) and hasattr(found, "model_type") and hasattr(found, "to_dict")):
        return build
    config = build()
    known = found()
    _refuse_unknown(path, [name for name in arguments if not hasattr(known, name)], known)
    return config


def _hugging_face_config(path: str, arguments: Mapping[str, Any]) -> Any:
    """The configuration in a file or folder, or of a model on the Hugging Face Hub, which may be in the cache."""
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ValueError(f"{path}: to read a Hugging Face configuration, pip install transformers") from error
    # The Hub's own library tries for half a minute, and tells of each attempt.
    is_here = Path(path).exists() or not _answers(import_module("huggingface_hub").constants.ENDPOINT)
    try:
        config, unused = transformers.AutoConfig.from_pretrained(
            path, return_unused_kwargs=True, local_files_only=is_here, **arguments
        )
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        if Path(path).exists():
            raise ValueError(f"{path} holds no configuration of a Hugging Face model: {why}") from error
        raise ValueError(
            f"{path!r} is neither a file nor a folder here, nor an import path such as package.module.Name, and as a model "
            f"of the Hugging Face Hub it cannot be read: {why} Offline, give a folder with its config.json, or its "
            "configuration in figures, as in transformers.GPT2Config n_layer=24"
        ) from error
    _refuse_unknown(path, unused, config)
    return config


def _answers(url: str) -> bool:
    """Whether a server can be reached; taken to be so by way of a proxy."""
    if getproxies():
        return True
    parts = urlsplit(url)
    with suppress(OSError), socket.create_connection((parts.hostname, parts.port or 443), _PATIENCE_SECONDS):
        return True
    return False


def _refuse_unknown(path: str, names: Collection[str], config: Any) -> None:
    for name in names:
        close = get_close_matches(name, config.to_dict(), 1)
        raise ValueError(f"{path} has no setting {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))


def _build(path: str, found: Any, arguments: Mapping[str, Any]) -> Any:
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return _made(f"{path}({given})", lambda: found(**arguments))


def _made(what: str, make: Callable[[], Any]) -> Any:
    """What a function of the user's makes; its errors name what could not be made."""
    try:
        return make()
    except Exception as error:
        if needs_numbers(error):
            raise
        why = " ".join(str(error).split())
        raise ValueError(f"{what} cannot be built: {type(error).__name__}: {why}") from error


def import_by_path(path: str) -> Any:
    """Import "package.module.Name", the current folder included.

    Raises:
        ValueError: if there is no such thing.
    """
    _look_in_current_folder()
    module, _, name = path.replace(":", ".").rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        missing = ", and there is no such file or folder" if "/" in path and not Path(path).exists() else ""
        raise ValueError(
            f"{path!r} is no import path{missing}: give package.module.Name, as seen from the current folder"
        )
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path!r} cannot be imported: {error}. Give package.module.Name, as seen from the current folder, of a package "
            "that is installed"
        ) from error


def _look_in_current_folder() -> None:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Read "name=value", where a value is a Python literal, or else text.

    Raises:
        ValueError: if one has no name.
    """
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{text!r} is no argument of the model: write name=value, as in n_layer=24")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            arguments[name] = value
    return arguments


def parse_batch(text: str) -> Any:
    """Read the shapes of a batch: "int64[8, 128], int64[8, 128]", each perhaps with a name before it, as in "x=float32[8]".

    Returns:
        A tensor on the meta device, a tuple of several, or a dict of those with names.

    Raises:
        ValueError: if it isn't written so.
    """
    tensors: list[tuple[str | None, Tensor]] = []
    place = 0
    while place < len(text):
        match = _TENSOR.match(text, place)
        dtype = getattr(torch, match[2], None) if match is not None else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise ValueError(
                f'{text!r} is no batch: write types and shapes, as in "int64[8, 128], int64[8, 128]" or '
                '"input_ids=int64[8, 128], labels=int64[8, 128]"'
            )
        shape = [int(number) for number in match[3].replace(",", " ").split()]
        try:
            tensors.append((match[1], torch.empty(shape, dtype=dtype, device="meta")))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{text!r} is no batch: {str(error).splitlines()[0]}") from error
        place = match.end()
    names = [name for name, _ in tensors if name is not None]
    if not tensors or (names and len(set(names)) < len(tensors)):
        raise ValueError(f"{text!r} is no batch: give at least one tensor, and to each a name of its own, or to none")
    if names:
        return dict(tensors)
    return tensors[0][1] if len(tensors) == 1 else tuple(tensor for _, tensor in tensors)


def read_config(path: str, model: str | None) -> dict[str, Any]:
    """What the configuration of a LightningCLI application says, as arguments of `estimate`.

    Args:
        path: the YAML file.
        model: the import path of the module's class, where the file holds its arguments alone.

    Raises:
        ValueError: if the file cannot be read, or names no class.
    """
    values = _read_yaml(path)
    section, trainer = values.get("model") or {}, values.get("trainer") or {}
    strategy = trainer.get("strategy") if isinstance(trainer, dict) else None
    given = (strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}
    if not all(isinstance(each, dict) for each in (trainer, section, given)):
        raise ValueError(
            f"{path}: its sections model and trainer, and init_args of a strategy, must hold names and values"
        )
    arguments: dict[str, Any] = {
        "model": _builder(_with_class(section, model, path), "lightning.pytorch.LightningModule")
    }
    if isinstance(values.get("data"), dict) and "class_path" in values["data"]:
        data = _builder(values["data"], "lightning.pytorch.LightningDataModule")()
        arguments["batch"] = _made(f"a batch of {values['data']['class_path']}", lambda: _first_batch(data))
    if trainer.get("precision") is not None:
        arguments["precision"] = trainer["precision"]
    if trainer.get("gradient_clip_val") or (trainer.get("accumulate_grad_batches") or 1) != 1:
        arguments["update"] = "deferred"
    for name in ("device_memory", "num_microbatches", "microbatch_size"):
        if given.get(name) not in (None, "auto"):
            arguments[name] = given[name]
    if given.get("update") == "deferred":
        arguments["update"] = "deferred"
    return arguments


def _first_batch(data: Any) -> Any:
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def _read_yaml(path: str) -> dict[str, Any]:
    yaml = import_module("yaml")
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path} is no configuration of a LightningCLI application: {why}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no configuration of a LightningCLI application: it has no sections")
    # Those that an application writes itself may stand below its subcommand.
    fit = values.get("fit")
    return fit if isinstance(fit, dict) and "model" not in values else values


def _with_class(section: Any, name: str | None, path: str) -> dict[str, Any]:
    if "class_path" in section:
        return dict(section)
    if name is None:
        raise ValueError(
            f"{path} holds the arguments of the model, and not its class: name that before --config, as in "
            "`lightning-harmony estimate package.module.Model --config config.yaml`"
        )
    return {"class_path": name, "init_args": section}


def _builder(section: dict[str, Any], base: str) -> Callable[[], Any]:
    """A function that builds what a section with a class path describes, as LightningCLI would."""
    try:
        jsonargparse = import_module("jsonargparse")
    except ImportError as error:
        raise ValueError("--config needs jsonargparse: pip install 'jsonargparse[signatures]'") from error
    import_by_path(str(section["class_path"]))
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(import_by_path(base), "it")
    try:
        parsed = parser.parse_object({"it": section})
    except (jsonargparse.ArgumentError, TypeError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{section['class_path']} cannot be built as the configuration says: {why}") from error
    return lambda: _made(section["class_path"], lambda: parser.instantiate_classes(parsed).it)
