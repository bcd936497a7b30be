"""``optimizer.state`` as a mapping: numbers of torch's state, and errors for what is spread.

And who reads it: torch's own checkpoints take the optimizer for a plain one.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardcast.comm import warn_first
from shardcast.memory.shard import Shard
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.plan.layout import Fragment
from shardcast.step.update.epilogues import STEPS

DCP = "torch.distributed.checkpoint"


def caller_of(function: str) -> str:
    """The module of the code that called ``function``, beyond wrappers of the same name.

    To be called in that function itself, or by what it calls.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == function:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def called_by_dcp(function: str) -> bool:
    """Return whether ``torch.distributed.checkpoint`` called ``function``; see :func:`caller_of`.

    It takes an optimizer for a plain one, and would save one rank's part as the whole.
    """
    return caller_of(function).startswith(DCP)


def outside_as_plain(call: str) -> RuntimeError:
    """Return what DCP gets that asks a sharded optimizer as it is."""
    return RuntimeError(
        f"{call}: torch.distributed.checkpoint was given a sharded optimizer, of which each rank "
        "has a part; call it inside `with optimizer.as_plain():` on every rank, optimizer being "
        "what shardcast.shard returned, which stands for all of several, or use "
        "shardcast.checkpoint.save"
    )


def refuse_write(*_args: Any, **_named: Any) -> NoReturn:
    """Raise TypeError for a write to ``optimizer.state``."""
    raise TypeError(
        "state: optimizer.state is read-only, each rank having its own part of it; edit tensors in "
        "`with optimizer.whole(...) as params:` or `with optimizer.owned() as parts:`; to replace "
        "or forget state on every rank: state = optimizer.state_dict(), edit state['state'], "
        "optimizer.load_state_dict(state)"
    )


class StateView(Mapping[Any, "StateOfParameter"]):
    """torch's state by model parameter: numbers can be read, tensors raise on every rank alike.

    Args:
        place: of the optimizer whose parameters it has; of all without it.
    """

    __setitem__ = __delitem__ = __ior__ = refuse_write
    clear = pop = popitem = setdefault = update = refuse_write

    def __init__(self, packed: PackedOptimizer, place: int | None = None) -> None:
        self._packed = packed
        self._shards = {
            param: (shard, slot.name)
            for shard in packed.shards
            if shard.grads is not None and place in (None, shard.pack.layout.optimizer)
            for slot, param in zip(shard.pack.layout.slots, shard.pack.in_model, strict=True)
        }
        self._numbers = {
            param: number for shard in packed.shards for number, _, param in shard.owned()
        }

    def __getitem__(self, param: Any) -> StateOfParameter:
        shard, name = self._shards.get(param, (None, ""))
        if shard is None:
            return StateOfParameter(name, {})
        if param in self._numbers:
            return StateOfParameter(name, self._own(shard, self._numbers[param]))
        return StateOfParameter(name, dict.fromkeys(self._others(shard)), is_here=False)

    def _own(self, shard: Shard, number: int) -> dict[str, Any]:
        return self._packed.update_of(shard).fragment_state(shard, number, decode=False)

    def _others(self, shard: Shard) -> Collection[str]:
        """Return the names of the state of a parameter of which this rank owns nothing."""
        update = self._packed.update_of(shard)
        for other in self._packed.shards:
            if other.grads is not None and self._packed.update_of(other) is update:
                for number in range(len(other.fragments)):
                    if names := self._own(other, number).keys():
                        return names
        return update.state_names if self._packed.comm.steps else ()

    def __iter__(self) -> Iterator[Any]:
        return iter([param for param in self._shards if param in self])

    def __contains__(self, param: Any) -> bool:
        return param in self._shards and bool(self[param])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "state: optimizer.state of a sharded optimizer cannot be copied or pickled, as each "
            "rank has a part of it; use optimizer.state_dict() for this rank's part, and "
            "optimizer.full_state_dict() on every rank for all of it"
        )


class StateOfParameter(Mapping[str, Any]):
    """torch's state of one parameter; see :class:`StateView`.

    Args:
        state: by name.
        is_here: whether this rank owns a part; else names alone are known.
    """

    __setitem__ = __delitem__ = __ior__ = refuse_write
    clear = pop = popitem = setdefault = update = refuse_write

    def __init__(self, param: str, state: Mapping[str, Any], is_here: bool = True) -> None:
        self._param, self._state, self._is_here = param, state, is_here

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        value = self._state[name]
        if not self._is_here and (name == "step" or name.endswith(STEPS)):
            raise RuntimeError(
                f"state: {name!r} of {self._param!r} is at its owners, and this rank owns nothing "
                "of it: read it there, or from optimizer.full_state_dict() on every rank"
            )
        if not self._is_here or (isinstance(value, Tensor) and value.dim()):
            raise RuntimeError(
                f"state: {name!r} of {self._param!r} is spread over the ranks, each of which has a "
                f"part: read and edit all of it inside `with optimizer.whole({self._param!r}) as "
                f"params:` on every rank, params[{self._param!r}].state[{name!r}], or each rank "
                "its own part inside `with optimizer.owned() as parts:`"
            )
        if isinstance(value, Tensor):
            with torch.inference_mode():  # torch refuses to edit it, which would change nothing
                return value.clone()
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __repr__(self) -> str:
        return f"state of {self._param!r}: {', '.join(self._state)}"


def is_elementwise(value: Any, fragment: Fragment, flat: bool) -> bool:
    """Return whether a fragment's state is a tensor with one value per element of the fragment.

    Args:
        flat: the optimizer keeps such state flat, whatever the shape of the parameter.
    """
    shapes = (fragment.shape, (fragment.numel,)) if flat else (fragment.shape,)
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) in shapes


def check_sizes(elementwise: bool, fragment: Fragment, values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dim() and elementwise:
            check_numel(value, fragment.numel, (fragment.numel,), fragment, name)
    return values


def check_numel(
    value: Tensor, numel: int, shape: tuple[int, ...], fragment: Fragment, name: str
) -> None:
    if value.numel() != numel:
        raise ValueError(
            f"state_dict: {name!r} of parameter {fragment.slot.name!r} has shape "
            f"{tuple(value.shape)}, expected {shape}; load the state of this very model (one that "
            "is not elementwise needs partition 'whole')"
        )


class RankPart(dict[str, Any]):
    """One rank's state dictionary, which warns when its state is taken out of it, as by a save.

    A script that reads a learning rate, or goes back to it in memory, hears nothing. Copies are the
    same, pickles are plain dictionaries.

    Args:
        size: how many ranks there are.
    """

    def __init__(self, values: Mapping[str, Any], size: int) -> None:
        super().__init__(values)
        self._size = size

    def plain(self) -> dict[str, Any]:
        """Return an ordinary dictionary of the same, quietly."""
        return {key: super(RankPart, self).__getitem__(key) for key in super().__iter__()}

    def _warn(self) -> None:
        warn_first(
            f"state_dict: this is the part of one rank of {self._size} alone, without which the "
            "others cannot resume: save with shardcast.checkpoint.save, or call full_state_dict() "
            "on every rank, which gives rank 0 the state of all"
        )

    def __getitem__(self, key: str) -> Any:
        if key == "state":
            self._warn()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value."""
        if key not in self:
            return default
        return self[key]

    def __iter__(self) -> Iterator[str]:  # dict(part) and {**part} come here, and to __getitem__
        return super().__iter__()

    def items(self) -> Any:
        """Return keys and values."""
        self._warn()
        return super().items()

    def values(self) -> Any:
        """Return the values."""
        self._warn()
        return super().values()

    def __copy__(self) -> RankPart:
        return RankPart(self.plain(), self._size)

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> RankPart:
        return RankPart(copy.deepcopy(self.plain(), memo), self._size)

    def __reduce__(self) -> tuple[Any, ...]:
        self._warn()  # torch.load(weights_only=True) knows the class
        return OrderedDict, (), None, None, iter(self.plain().items())
