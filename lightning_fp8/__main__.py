"""Entry point of ``python -m lightning_fp8`` and of the program ``lightning-fp8``."""

import os
import sys
from importlib.util import find_spec

from lightning_fp8.runtime.did_you_mean import did_you_mean
from lightning_fp8.runtime.program import program
from lightning_fp8.runtime.version import __version__

_COMMANDS = {
    "fit": "train a model",
    "validate": "evaluate a model on its validation data",
    "test": "evaluate a model on its test data",
    "predict": "predict with a model",
    "compare": "train a configuration under several precisions, and recommend one",
    "estimate": "whether FP8 pays for a model, on a GPU that need not be here",
    "doctor": "what runs in FP8 on this machine, and what to install",
    "report": "one HTML page about runs, from their logs",
}
_LIGHTNINGS = ("fit", "validate", "test", "predict")
# what the command lines of Lightning need
_NEEDED = ("jsonargparse", "docstring_parser", "typeshed_client")


def run() -> None:
    """Run one of our commands or Lightning's command line, or say which packages are missing."""
    command, arguments = (sys.argv[1] if sys.argv[1:] else "--help"), sys.argv[2:]
    if command in ("--help", "-h"):
        print(_help())
    # no command has an option of this name
    elif "--version" in sys.argv[1:]:
        print(f"lightning-fp8 {__version__}")
    elif command == "doctor":
        from lightning_fp8.tools.doctor import main as doctor

        doctor(arguments)
    elif command == "report":
        from lightning_fp8.tools.report.command import main as report

        report(arguments)
    elif command == "compare":
        if not {"-h", "--help"} & {*arguments}:
            _check_needed()
        from lightning_fp8.tools.compare.command import main as compare

        compare(arguments)
    elif command == "estimate":
        if not {"-h", "--help"} & {*arguments}:
            _check_needed()
        from lightning_fp8.tools.estimate import main as estimate

        estimate(arguments)
    # options may come before the command
    elif command in _LIGHTNINGS or command.startswith("-"):
        _check_needed()
        # `python -m` finds the user's modules in the current folder
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())
        from lightning_fp8.cli import main

        main()
    else:
        print(
            f"{program()}: error: there is no command {command!r}.{did_you_mean(command, _COMMANDS)}", file=sys.stderr
        )
        print(f"The commands are {', '.join(_COMMANDS)}; `{program()} --help` describes them.", file=sys.stderr)
        sys.exit(2)


def _help() -> str:
    width = max(map(len, _COMMANDS))
    return "\n".join(
        (
            f"usage: {program()} COMMAND ...",
            "\nTraining in FP8 with PyTorch Lightning.\n\ncommands:",
            *(f"  {name.ljust(width)}  {line}" for name, line in _COMMANDS.items()),
            f"\n`{program()} COMMAND --help` lists the options of a command,",
            "and --version prints the version.",
            "fit, validate, test, predict, compare and estimate read a configuration: -c FILE.",
        )
    )


def _check_needed() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"The command line needs {' and '.join(missing)}: pip install 'jsonargparse[signatures]>=4.41'."
            " doctor and report run without them."
        )


if __name__ == "__main__":
    run()
