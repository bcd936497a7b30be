"""Numbers from the device to the host, without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Mailbox:
    """Holds one letter: what is posted before the last one was read is dropped.

    So what is posted should tell all that happened, not only the news. On CPU a letter is there
    at once; on an accelerator when its copy is done, which is usually in the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._letter: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def post(self, numbers: Tensor) -> None:
        """Send a 1-d tensor; it may be overwritten afterwards."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._copied is not None and not capturing:
            return
        if self._letter is None or self._letter.numel() != numbers.numel():
            pinned = self._device.type == "cuda"
            self._letter = torch.zeros_like(numbers, device="cpu", pin_memory=pinned)
        self._letter.copy_(numbers, non_blocking=True)
        if self._device.type == "cuda" and not capturing:
            # Of the model's device: another one may be the current one.
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def read(self) -> list[float] | None:
        """The letter, or ``None`` while it is on its way."""
        if self._copied is not None:
            if torch.cuda.is_current_stream_capturing() or not self._copied.query():
                return None
            self._copied = None
        return None if self._letter is None else self._letter.tolist()
