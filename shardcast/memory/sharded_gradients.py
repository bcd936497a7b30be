"""Gradients of a pack of which only the own span stays; ``.grad`` are marks without memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcast._compat import no_torch_function, tree_iter, tree_map
from shardcast.memory.gradients import GradPack, check_dense, own_part
from shardcast.memory.pack import Pack
from shardcast.plan.precision import MASTER_DTYPE

COMING = 1 << 22  # bytes of gradients that wait to be copied in, so that one call copies several
ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class Mark(Tensor):
    """Stands as ``.grad`` for a sharded gradient: all NaN, or zeros once it is zeroed.

    To zero it zeroes the gradient. Any other edit of it or of a view, as the schema of the
    operation says, would be lost and is refused.
    """

    plain: Tensor  # the same without refusals
    zeroed = False
    # Weak: a parameter holds its .grad where no collector looks. None: of a view.
    grads: weakref.ref[ShardedGradients] | None
    position: int

    __torch_function__ = no_torch_function

    @staticmethod
    def of(plain: Tensor, grads: ShardedGradients | None = None, position: int = -1) -> Mark:
        """A mark that reads as ``plain``."""
        mark = plain.as_subclass(Mark)
        mark.plain, mark.position = plain, position
        mark.grads = None if grads is None else weakref.ref(grads)
        return mark

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = [
            args[number] if number < len(args) else kwargs.get(argument.name)
            for number, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        marks = [item for item in tree_iter(written) if type(item) is Mark]
        if marks:
            if func not in ZEROING or any(mark.grads is None for mark in marks):
                raise _lost(func.overloadpacket.__name__)
            for mark in marks:
                mark._zero()
            return marks[0] if func is ZEROING[0] else None
        found = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        aliases = (item.alias_info for item in func._schema.returns)
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        return tree_map(Mark.of, found) if is_view else found

    def _zero(self) -> None:
        grads = None if self.grads is None else self.grads()
        if grads is not None and grads.holds(self.position):
            grads.own[own_part(grads.pack, self.position)].zero_()
            self.zeroed = True

    @property
    def data(self) -> Mark:
        """The mark itself, to which edits come too."""
        return self

    @data.setter
    def data(self, _value: Tensor) -> None:
        raise _lost("grad.data = ...")

    def detach(self) -> Mark:
        """The mark itself, to which edits come too."""
        return self

    # As of any tensor; torch has none for subclasses.
    def numpy(self, **options: Any) -> Any:
        return _plain(self).numpy(**options)

    def tolist(self) -> Any:
        return _plain(self).tolist()

    def __deepcopy__(self, _memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _plain(item: Any) -> Any:
    if type(item) is not Mark:
        return item
    return torch.zeros_like(item.plain) if item.zeroed else item.plain


def _lost(edit: str) -> RuntimeError:
    return RuntimeError(
        f"{edit}: with grads 'sharded' .grad is a placeholder after backward, and an edit of it "
        "would be lost; use optimizer.clip_grad_norm_ or clip_grad_value_, edit gradients in hooks "
        "(register_post_accumulate_grad_hook), or use grads 'full'"
    )


class ShardedGradients(GradPack):
    """Their ``data`` is there from the first gradients to ``landed()`` only; edits are refused.

    Gradients are copied in while others still come, so that the pack is not there twice.
    Over several backwards the own span is fp32, in which they are added up.
    """

    def __init__(self, pack: Pack, dtype: torch.dtype) -> None:
        super().__init__(pack, dtype)
        self._coming: list[int] = []  # gradients to be copied in, when the next one comes
        self._waiting = 0  # bytes of them
        self._graph = False  # one of those in ``data`` had a graph of its own
        self._own: Tensor | None = None
        self._marks: list[Mark] = []

    @property
    def data(self) -> Tensor:
        assert self._data is not None, "gradients are sent when they are collected"
        return self._data

    @property
    def own(self) -> Tensor:
        if self._own is None:
            self._own = torch.zeros(self.pack.own.numel, dtype=self.dtype, device=self._device)
        return self._own

    @property
    def nbytes(self) -> int:
        held = (self._data, self._own)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def holds(self, position: int) -> bool:
        return bool(self._marks) and self.pack.params[position].grad is self._marks[position]

    def show(self, position: int) -> None:
        if not self._marks:
            nan = torch.full((), math.nan, dtype=self.dtype, device=self._device)
            self._marks = [
                Mark.of(nan.expand(slot.shape), self, number)
                for number, slot in enumerate(self.pack.layout.slots)
            ]
        self._marks[position].zeroed = False
        self.pack.params[position].grad = self._marks[position]

    def clear_way(self, position: int) -> bool:
        if self.holds(position):  # or autograd would add to the mark
            self.pack.params[position].grad = None
        if self._waiting >= COMING:
            self._take(self._coming)
        self._coming.append(position)
        self._waiting += self.pack.layout.slots[position].numel * self.dtype.itemsize
        return True

    @torch.no_grad()  # a backward with create_graph runs hooks with gradients on
    def _take(self, positions: Iterable[int]) -> None:
        """Copy gradients into ``data``; ``.grad`` is a view of it, to which autograd may add."""
        if self._data is None:
            self._allocate()
        found = self._found(positions)
        if found:
            torch._foreach_copy_([self._views[n] for n in found], list(found.values()))
        self._graph = self._graph or any(grad.requires_grad for grad in found.values())
        for position in found:
            self.pack.params[position].grad = self._views[position]
        self._coming, self._waiting = [], 0

    def _found(self, positions: Iterable[int]) -> dict[int, Tensor]:
        """Gradients that are neither marks nor views of ``data``."""
        found = {}
        for position in positions:
            grad = self.pack.params[position].grad
            if grad is None or self.holds(position):
                continue
            if self._views and grad is self._views[position]:
                slot = self.pack.layout.slots[position]
                place = self.data[slot.offset : slot.end].view(size=slot.shape)
                if grad.data_ptr() == place.data_ptr():
                    continue
                self._views[position] = place  # a script did .grad.data = ...
            check_dense(self.pack, position, grad)
            found[position] = grad
        return found

    def collect(self) -> tuple[set[int], bool]:
        params = self.pack.params
        self._take(range(len(params)))
        absent = set()
        for position, param in enumerate(params):
            if param.grad is self._views[position]:
                self.show(position)
            else:  # cleared since it was copied in, it may be
                self._views[position].zero_()
                if param.grad is None:
                    absent.add(position)
        has_graph, self._graph, self._views = self._graph, False, []
        return absent, has_graph

    @torch.no_grad()
    def adopt(self, positions: Iterable[int] | None = None) -> bool:
        found = self._found(range(len(self.pack.params)) if positions is None else positions)
        for position, grad in found.items():
            part = own_part(self.pack, position)
            shift = self.pack.own.start - self.pack.layout.slots[position].offset
            self.own[part].copy_(grad.reshape(-1)[part.start + shift : part.stop + shift])
            self.show(position)
        return any(grad.requires_grad for grad in found.values())

    def landed(self, pieces: Sequence[Tensor]) -> None:
        """Give the storage back.

        Nobody could be asked later for the gradients that spoil the mean. So they are looked for
        here, on CPU, where a report names the element: one more sum over the own span, which would
        copy it into another dtype first; where it overflows for nothing, nobody is named.
        """
        self._data = None
        self._unzero()
        own = self.own
        if own.device.type != "cpu" or len(pieces) == 1 or self.culprits:
            return
        if not bool(own.sum().isfinite()):
            index = int(torch.argmax((~own.isfinite()).to(torch.uint8)))
            self.culprits = [r for r, piece in enumerate(pieces) if not piece[index].isfinite()]

    def reopen(self, kept: Collection[int]) -> Tensor | None:
        """The own span becomes the fp32 sum; not where a script zeroed all that is kept."""
        zeros = all(self._marks and self._marks[position].zeroed for position in kept)
        self._unzero()
        if zeros:
            self.culprits = ()
            if self.own.dtype != self.dtype:
                self._own = None
            return None
        for position in range(len(self.pack.params)):
            if position not in kept:
                self.own[own_part(self.pack, position)].zero_()
        self._own = self.own.to(MASTER_DTYPE)
        return self._own

    def _unzero(self) -> None:
        for mark in self._marks:
            mark.zeroed = False
