"""``optimizer.state`` as a dictionary: what scripts write into it reaches the shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from shardcast.memory.shard import Shard
from shardcast.plan.layout import Fragment
from shardcast.step.update.several import Updates


class NotifyingDict(dict[Any, Any]):
    """A dictionary that tells ``changed`` the key of every item that is set or removed.

    Copies of it are plain ones. By default nobody is told, for tools that rebuild mappings.
    """

    def __init__(self, items: Any = (), changed: Callable[[Any], None] = lambda _key: None) -> None:
        super().__init__(items)
        self._changed = changed

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self.get(key)
        super().__setitem__(key, value)
        if value is not before:
            self._changed(key)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._changed(key)

    # The others by these two: a dictionary's own would change it without a word.
    clear, pop, popitem = MutableMapping.clear, MutableMapping.pop, MutableMapping.popitem
    setdefault, update = MutableMapping.setdefault, MutableMapping.update

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class StateView(NotifyingDict):
    """torch's state by model parameter; what is assigned in it is so in the shards too."""

    def __init__(self, shards: Sequence[Shard], update: Updates) -> None:
        self._places = {
            param: (shard, number) for shard in shards for number, _, param in shard.owned()
        }
        self._update = update
        super().__init__(
            {p: values for p in self._places if (values := self._notifying(p))}, self._write
        )

    def _notifying(self, param: Any) -> NotifyingDict:
        return NotifyingDict(
            self._update.fragment_state(*self._places[param]), lambda _: self._write(param)
        )

    def _write(self, param: Any) -> None:
        if param in self._places:  # else another rank's
            shard, number = self._places[param]
            found = dict(self.get(param, {}))
            elementwise = self._update.elementwise(shard)
            values = check_sizes(elementwise, shard.fragments[number], found)
            self._update.load_fragment(shard, number, values)

    def pop(self, param: Any, *_default: Any) -> Any:
        """As of a dictionary that has an item for every parameter."""
        values = _apart(self[param])
        del self[param]
        return values

    def replace(self, items: Mapping[Any, Mapping[str, Any]]) -> None:
        """Have these items and no others; they may be views of what is cleared."""
        new = {param: _apart(values) for param, values in items.items()}
        self.clear()
        self.update(new)

    def __missing__(self, param: Any) -> dict[str, Any]:
        values = self._notifying(param) if param in self._places else {}
        dict.__setitem__(self, param, values)  # as a defaultdict does, and nothing to tell
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))


def _apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter with tensors of its own: what is removed is zeroed where it lies."""
    return {n: value.clone() if isinstance(value, Tensor) else value for n, value in values.items()}


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
