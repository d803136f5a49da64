"""Entry point of ``python -m lightning_fp8``."""

import sys


def run() -> None:
    """Hand over to :mod:`lightning_fp8.bench`, ``report`` or :mod:`lightning_fp8.cli`, or say what the latter needs."""
    if sys.argv[1:2] == ["bench"]:
        from lightning_fp8.bench.command import main as bench

        bench(sys.argv[2:])
        return
    if sys.argv[1:2] == ["report"]:
        from lightning_fp8.report.command import main as report

        report(sys.argv[2:])
        return
    try:
        import jsonargparse  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("The command line needs jsonargparse: pip install 'lightning-fp8[cli]'")
    from lightning_fp8.cli import main

    main()


if __name__ == "__main__":
    run()
