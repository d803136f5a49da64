"""Which tensors have a history, known on the host without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class KnownHistories:
    """Each update asks the device, which answers a step or two later. A tensor that is not known to have a history may
    still have one, so its cast must leave the decision to the device.

    Args:
        count: D, the number of tensors.
        in_fp8: ``[D] bool`` on the CPU. Tensors that are never cast get no history, so none is waited for.
        device: where the histories are.

    Attributes:
        every: whether all tensors that are cast are known to have a history.
    """

    def __init__(self, count: int, in_fp8: Tensor, device: torch.device) -> None:
        self.every = False
        with torch.inference_mode(False):
            self._never_cast = None if bool(in_fp8.all()) else ~in_fp8.to(device)
            self._answer = torch.zeros(count, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")
            # the same memory
            self._seen = self._answer.numpy()

    def see_answer(self) -> bool:
        """``every``, updated with what the device has answered so far."""
        if not self.every:
            self.every = bool(self._seen.all())
        return self.every

    def has(self, row: int | None) -> bool:
        """Whether this tensor is known to have one; tensors of layers that do not run never get one."""
        return row is not None and bool(self._seen[row])

    def ask(self, newest: Tensor) -> None:
        """Let the device answer, from the newest entries of all histories, ``[D] float32``, unless all are known."""
        if self.see_answer():
            return
        filled = newest > 0
        self._answer.copy_(filled if self._never_cast is None else filled | self._never_cast, non_blocking=True)
