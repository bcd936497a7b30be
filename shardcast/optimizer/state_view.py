"""``optimizer.state`` as a mapping: this rank's part of torch's state, to be read.

And who reads it: torch's own checkpoints take the optimizer for a plain one.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from shardcast.comm import warn_first
from shardcast.memory.shard import Shard
from shardcast.plan.layout import Fragment
from shardcast.step.update import Update

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
        "state: optimizer.state is read-only, each rank having its own part of it; to replace or "
        "forget state on every rank: state = optimizer.state_dict(), edit state['state'], "
        "optimizer.load_state_dict(state)"
    )


class ReadOnly(dict[str, Any]):
    """A dictionary that refuses to be changed; copies of it are plain ones."""

    __setitem__ = __delitem__ = __ior__ = refuse_write
    clear = pop = popitem = setdefault = update = refuse_write

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class StateView(Mapping[Any, ReadOnly]):
    """torch's state by model parameter, of this rank's fragments; read when it is asked for.

    A parameter of which this rank owns no part has an empty state.
    """

    __setitem__ = __delitem__ = __ior__ = refuse_write
    clear = pop = popitem = setdefault = update = refuse_write

    def __init__(self, shards: Sequence[Shard], update_of: Callable[[Shard], Update]) -> None:
        self._fragments = {
            param: (shard, number) for shard in shards for number, _, param in shard.owned()
        }
        self._update_of = update_of

    def __getitem__(self, param: Any) -> ReadOnly:
        return ReadOnly(self._state_of(param) if param in self._fragments else {})

    def _state_of(self, param: Any, decode: bool = True) -> Mapping[str, Any]:
        shard, number = self._fragments[param]
        return self._update_of(shard).fragment_state(shard, number, decode)

    def __iter__(self) -> Iterator[Any]:
        return iter([param for param in self._fragments if param in self])

    def __contains__(self, param: Any) -> bool:
        return param in self._fragments and bool(self._state_of(param, decode=False))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, {param: dict(values) for param, values in self.items()})


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
