"""Registration without an import: `Trainer(strategy="harmony")` works wherever this package is installed.

Lightning loads no strategies from entry points, but torch calls those of the group `torch.backends` while it is
imported, and Lightning always imports torch before its strategies. So `install` leaves a finder on `sys.meta_path` that
waits for the modules with the registries. It runs in the middle of every `import torch` of every program of the
environment, which sets two rules: import nothing heavy, and never raise. What torch calls is `lightning_harmony_autoload`,
which is there also where this package cannot be imported.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_harmony.setup import registration

_log = logging.getLogger(__name__)
_TREE_OF_MODULE = {registration.strategies_module(tree): tree for tree in registration.TREES}


def install() -> None:
    """Register the strategy in each Lightning tree, at once if it is loaded, else as soon as it is.

    Safe to call any number of times. A failure is logged and never raised.
    """
    if not any(isinstance(finder, _StrategiesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StrategiesFinder())
    _attempt(registration.register_loaded_trees)


class _StrategiesFinder(MetaPathFinder):
    """Finds the modules with the registries as the other finders do, with a loader that then registers."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another package's finder may ask every other finder too, this one included: do not go round in circles.
        if fullname not in _TREE_OF_MODULE or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = self._ask_others(fullname, path, target)
        finally:
            self._finding.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _RegisteringLoader(spec.loader, _TREE_OF_MODULE[fullname])
        return spec

    def _ask_others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _RegisteringLoader(Loader):
    """Stands in for a module's loader until the module is executed, then hands over to it and registers."""

    def __init__(self, loader: Any, tree: str) -> None:
        self._loader = loader
        self._tree = tree

    def __getattr__(self, name: str) -> Any:
        # Through __dict__, because copying and unpickling look attributes up before `_loader` is there.
        return getattr(self.__dict__.get("_loader"), name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module looks as if it had been imported without us.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _attempt(registration.register, self._tree)


def _attempt(register: Callable[..., None], *args: str) -> None:
    try:
        register(*args)
    except Exception:
        _log.warning('Trainer(strategy="harmony") is not available: its registration failed', exc_info=True)
