"""The masters' part in ``model.load_state_dict``: they take what is loaded in full precision."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.memory.shard import Shard
from shardcast.plan.pack_groups import PLAIN
from shardcast.step.decide.loads import Loads
from shardcast.step.sync.sync import Sync

WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before names


@torch.no_grad()
def before_load(
    shards: Sequence[Shard], sync: Sync, loads: Loads, module: nn.Module,
    state_dict: MutableMapping[str, Any], prefix: str, metadata: Mapping[str, Any],
) -> None:  # fmt: skip
    """Give masters the loaded values in full precision; the model gets them cast. Local.

    A value that is the cast of its master leaves the master as it is, see :meth:`.Shard.load`. What
    is loaded while an average is in the model takes the average's place, and leaves with it.

    Args:
        shards: those of all packs of the model.
        sync: what may be under way still.
        loads: notes the parameters that are loaded.
        module: one of the model's, whose own parameters torch loads next.
        state_dict: the values, by names that begin with ``prefix``; those of packs with a cast of
            their own are replaced by what is published of them.

    Raises:
        RuntimeError: ``assign=True``, which would replace parameters; nothing is changed.
    """
    if metadata.get("assign_to_params_buffers"):  # torch's own key for it
        raise RuntimeError(
            "model: load_state_dict(assign=True) would replace parameters of a sharded model; "
            "load without assign, or before shardcast.shard"
        )
    sync.wait()  # split masters are written into the packs
    loaded: dict[nn.Parameter, Tensor] = {}
    for name, param in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            value = _compat.local_tensor(value)
            if value.shape == _compat.local_tensor(param).shape:
                loaded[param] = value
    for shard in shards:
        if shard.is_lent or loaded.keys().isdisjoint(shard.pack.in_model):
            continue
        is_shared = shard.pack.layout.pack_groups.shard == PLAIN
        for slot, param in zip(shard.pack.layout.slots, shard.pack.in_model, strict=True):
            if param in loaded:
                loads.note(param, slot.name, is_shared)
        if shard.in_place:
            continue
        for _, fragment, param in shard.owned():
            if param in loaded:
                shard.load(fragment, loaded[param].reshape(-1)[slice(*fragment.param_range)])
        if shard.pack.cast is not None:
            _round(shard, module, state_dict, prefix, loaded)


def in_vain(module: nn.Module, state_dict: Mapping[str, Any]) -> str:
    """Return what to warn of where no name of ``state_dict`` is one of ``module``'s; or nothing."""
    own = (*module.named_parameters(), *module.named_buffers())
    # Its wrapper takes this part out of the names of state dictionaries.
    names = {name.replace("_checkpoint_wrapped_module.", "") for name, _ in own}
    names |= {name for name, _ in own}
    if not names or not state_dict or not names.isdisjoint(state_dict):
        return ""
    given = next(iter(state_dict))
    prefix = next((p for p in WRAPPERS if given.startswith(p)), "")
    strip = f"consume_prefix_in_state_dict_if_present(state, {prefix!r}) of torch.nn.modules.utils"
    return (
        f"model.load_state_dict loaded nothing: none of {len(state_dict)} names, such as "
        f"{given!r}, is one of this {type(module).__name__}, such as {min(names)!r}"
        + f"; take the prefix of a wrapper off before: {strip}"
        * bool(prefix)
    )


def _round(
    shard: Shard, module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str,
    loaded: Mapping[nn.Parameter, Tensor],
) -> None:  # fmt: skip
    """Have torch copy what is published of loaded values; its own cast is another one."""
    pack = shard.pack
    names = {param: name for name, param in module.named_parameters(recurse=False)}
    for slot, param in zip(pack.layout.slots, pack.in_model, strict=True):
        if param in loaded:
            values = pack.rounded(slot, loaded[param].detach().reshape(-1)).view(slot.shape)
            shard.note_loaded(slot, values)
            if _compat.is_dtensor(param):
                whole: Any = param
                values = dtensor.wrap_local(values, param, whole.placements)
            state_dict[prefix + names[param]] = values
