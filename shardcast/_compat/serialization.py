"""The way ``torch.save`` writes."""

from __future__ import annotations

import contextvars

import torch


def _is_of_context() -> bool:
    """Return whether ``torch.save``'s checksums are set for a context, not for the process."""
    get, change = torch.serialization.get_crc32_options, torch.serialization.set_crc32_options
    setting = get()
    contextvars.copy_context().run(change, not setting)
    if get() == setting:
        return True
    change(setting)
    return False


CRC_IS_OF_CONTEXT = _is_of_context()  # at the import: the process's setting changes for a moment


def context_without_crc() -> contextvars.Context:
    """A context in which ``torch.save`` leaves out checksums, which ``torch.load`` never compares.

    Where that is a setting of the whole process (torch 2.11), other threads save meanwhile, and the
    context changes nothing.
    """
    context = contextvars.copy_context()
    if CRC_IS_OF_CONTEXT:
        context.run(torch.serialization.set_crc32_options, False)
    return context
