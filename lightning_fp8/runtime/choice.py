"""The rule for an argument that is one of a few strings."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_fp8.runtime.did_you_mean import did_you_mean


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Check the value of an argument.

    Args:
        argument: what the message calls it, such as ``"`gemm`"``.
        value: what was given.
        choices: the strings that are allowed.

    Raises:
        ValueError: for any other value; the message has the choices, the value, and the closest choice.
    """
    allowed = tuple(choices)
    if not isinstance(value, str) or value not in allowed:
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{hint}")
