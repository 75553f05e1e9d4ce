"""Train a GPT by LightningCLI: `python lightning_cli.py fit --config lightning_cli.yaml`.

The file names the strategy, and each of its arguments can be given on the command line, too:
`--trainer.strategy.init_args.device_memory=48MiB`.
"""

from collections.abc import Sequence

from gpt import GPT
from lightning.pytorch.cli import LightningCLI
from text import Manual


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    """Run the command that the arguments, or the command line, name."""
    return LightningCLI(
        GPT,
        Manual,
        args=None if arguments is None else list(arguments),
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
