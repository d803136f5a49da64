"""Entry point of ``python -m lightning_fp8``."""

import sys


def run() -> None:
    """Run one of our commands or Lightning's command line, or say which package that needs."""
    if sys.argv[1:2] == ["bench"]:
        sys.exit("The benchmarks run from a checkout of the repository: python -m benchmarks --suite cast")
    if sys.argv[1:2] == ["doctor"]:
        from lightning_fp8.tools.doctor.command import main as doctor

        doctor(sys.argv[2:])
        return
    if sys.argv[1:2] == ["report"]:
        from lightning_fp8.tools.report.command import main as report

        report(sys.argv[2:])
        return
    if sys.argv[1:2] == ["tune"]:
        from lightning_fp8.tools.tune.command import main as tune

        tune(sys.argv[2:])
        return
    try:
        import jsonargparse  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("The command line needs jsonargparse: pip install 'lightning-fp8[cli]'")
    if sys.argv[1:2] == ["compare"]:
        from lightning_fp8.tools.compare.command import main as compare

        compare(sys.argv[2:])
        return
    from lightning_fp8.cli import main

    main()


if __name__ == "__main__":
    run()
