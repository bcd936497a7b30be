"""What ``memory_report()`` returns: bytes by kind, printed as a table."""

from __future__ import annotations


class MemoryReport(dict[str, int]):
    """Bytes that this rank holds, by kind; ``print`` shows them in one line, with the total."""

    @property
    def total(self) -> int:
        """The sum of all kinds, in bytes."""
        return sum(self.values())

    def __str__(self) -> str:
        scale, unit = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        rows = [*self.items(), ("total", self.total)]
        return ", ".join(f"{kind} {nbytes / scale:.3f} {unit}" for kind, nbytes in rows)
