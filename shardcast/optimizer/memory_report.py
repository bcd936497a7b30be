"""What ``memory_report()`` returns: bytes by kind, printed as a table."""

from __future__ import annotations


class MemoryReport(dict[str, int]):
    """Bytes that this rank holds, by kind; ``print`` shows a table with the total."""

    @property
    def total(self) -> int:
        """The sum of all kinds, in bytes."""
        return sum(self.values())

    def __str__(self) -> str:
        rows = [*self.items(), ("total", self.total)]
        width = max(len(kind) for kind, _ in rows)
        scale, unit = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        return "\n".join(f"{kind:{width}}  {nbytes / scale:9.3f} {unit}" for kind, nbytes in rows)
