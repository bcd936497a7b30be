"""``optimizer.state`` as a mapping: what scripts write into it reaches the shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardcast.memory.shard import Shard
from shardcast.plan.layout import Fragment
from shardcast.step.update import Update


class StateView(MutableMapping[Any, Any]):
    """torch's state by model parameter, of this rank's fragments; read when it is asked for.

    Parameters of other ranks have an empty state, and what is written for them is theirs to write.
    """

    def __init__(self, shards: Sequence[Shard], update_of: Callable[[Shard], Update]) -> None:
        self._fragments = {
            param: (shard, number) for shard in shards for number, _, param in shard.owned()
        }
        self._update_of = update_of

    def __getitem__(self, param: Any) -> ParamState:
        values = self._state_of(param) if param in self._fragments else {}
        return ParamState(values, partial(self.__setitem__, param))

    def __setitem__(self, param: Any, values: Mapping[str, Any]) -> None:
        if param in self._fragments:
            shard, number = self._fragments[param]
            update = self._update_of(shard)
            checked = check_sizes(update.elementwise, shard.fragments[number], dict(values))
            update.load_fragment(shard, number, checked)

    def _state_of(self, param: Any, decode: bool = True) -> Mapping[str, Any]:
        shard, number = self._fragments[param]
        return self._update_of(shard).fragment_state(shard, number, decode)

    def __delitem__(self, param: Any) -> None:
        self[param] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter([param for param in self._fragments if param in self])

    def __contains__(self, param: Any) -> bool:
        return param in self._fragments and bool(self._state_of(param, decode=False))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def pop(self, param: Any, *_default: Any) -> Any:
        """As of a dictionary that has an item for every parameter."""
        values = _cloned(self[param])  # what is removed is zeroed where it lies
        del self[param]
        return values

    def popitem(self) -> tuple[Any, Any]:
        """Remove, and return, the state of the first parameter."""
        param = next(iter(self))
        return param, self.pop(param)

    def clear(self) -> None:
        """Forget all state."""
        for param in self:
            del self[param]

    def replace(self, items: Mapping[Any, Mapping[str, Any]]) -> None:
        """Have these items and no others; they may be views of what is cleared."""
        values = {param: _cloned(state) for param, state in items.items()}
        self.clear()
        self.update(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, {param: dict(values) for param, values in self.items()})


class ParamState(dict[str, Any]):
    """The state of one parameter; ``write`` takes all of it when an item is set or removed.

    Copies of it are plain ones; tools that rebuild mappings write nothing.
    """

    def __init__(
        self, items: Any = (), write: Callable[[Any], None] = lambda _values: None
    ) -> None:
        super().__init__(items)
        self._write = write

    def __setitem__(self, name: str, value: Any) -> None:
        is_new = value is not self.get(name)
        super().__setitem__(name, value)
        if is_new:
            self._write(self)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._write(self)

    # A dictionary's own would change it without a word.
    clear, pop, popitem = MutableMapping.clear, MutableMapping.pop, MutableMapping.popitem
    setdefault, update = MutableMapping.setdefault, MutableMapping.update

    def __ior__(self, items: Any) -> Any:  # type: ignore[misc]
        self.update(items)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: value.clone() if isinstance(value, Tensor) else value for n, value in values.items()}


def is_elementwise(value: Any, fragment: Fragment, flat: bool) -> bool:
    """Whether a fragment's state is a tensor with one value per element of the fragment.

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
