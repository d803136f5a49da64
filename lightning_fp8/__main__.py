"""Entry point of ``python -m lightning_fp8``."""

import sys


def run() -> None:
    """Hand over to :mod:`lightning_fp8.cli`, or say what it needs."""
    try:
        import jsonargparse  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("The command line needs jsonargparse: pip install 'lightning-fp8[cli]'")
    from lightning_fp8.cli import main

    main()


if __name__ == "__main__":
    run()
