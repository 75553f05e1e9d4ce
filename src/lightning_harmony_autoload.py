"""The entry point that torch calls while it is imported: it registers `Trainer(strategy="harmony")`.

It is a module beside the package, and imports nothing when it is imported itself: `import torch` has to work, too, where the
package cannot be imported. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` in the environment keeps torch from calling it.
"""


def install() -> None:
    """Register the strategy; where that fails, log it."""
    try:
        from lightning_harmony import autoload

        autoload.install()
    except Exception:
        from logging import getLogger

        getLogger(__name__).warning(
            'Trainer(strategy="harmony") is not available, for lightning-harmony cannot be imported. Install it anew, or '
            "uninstall it; TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment keeps torch from importing it",
            exc_info=True,
        )
