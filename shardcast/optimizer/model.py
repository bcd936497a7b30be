"""A sharded model: its modules, the note that it is sharded, hooks on it, and loads of it.

The hooks notice events that the optimizer cannot see by itself: a backward that begins (so that the
outermost one flushes the reduction), weights that ``load_state_dict`` has at full precision, a
converted model, and a DDP wrapper around a sharded model.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast._compat import dtensor
from shardcast.comm import Comm, ProcessGroups, is_dense, warn_first
from shardcast.hook import Hook
from shardcast.memory.convert import convert_tensor_
from shardcast.memory.pack import as_packed
from shardcast.memory.packed_param import PackedParam, note_of
from shardcast.memory.shard import Shard, take_moved
from shardcast.messages import SHOWN
from shardcast.optimizer.setup import Plan
from shardcast.plan.parallel_dims import PLAIN
from shardcast.step.decide.refusal import Loads
from shardcast.step.reduce.reducer import is_reduced
from shardcast.step.sync.sync import Sync

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

NOTE = "_shardcast_model"  # attribute of a model that is or was sharded
WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DDP and torch.compile add to names


def called_by_script(module: nn.Module) -> list[nn.Module]:
    """Return ``module``, or its submodules if it has no forward, like a list of models."""
    children = list(module.children())
    owns = any(True for _ in _compat.parameters(module, recurse=False))
    if type(module).forward is not nn.Module.forward or owns or not children:
        return [module]
    return [inner for child in children for inner in called_by_script(child)]


class Tree:
    """The modules below ``stages`` and their parameters, at the time when this was made.

    Args:
        names: names of the trained parameters.
    """

    def __init__(self, stages: Sequence[nn.Module], names: Mapping[nn.Parameter, str]) -> None:
        self._stages, self._names = stages, names
        self._places: list[tuple[Callable[[str], object], str, object]] = [
            (held.get, key, value)
            for module in _modules(stages)
            for held in (module._modules, module._parameters)
            for key, value in held.items()
        ]

    def left(self) -> str:
        """Return trained parameters that are no longer in the model, by name; usually empty. Local.

        It checks each place, in a tenth of a microsecond, while nothing is replaced.
        """
        if all(get(key) is value for get, key, value in self._places):
            return ""
        present = {param for stage in self._stages for param in _compat.parameters(stage)}
        return ", ".join(repr(name) for param, name in self._names.items() if param not in present)


def _modules(stages: Sequence[nn.Module]) -> Iterable[nn.Module]:
    return (module for stage in stages for module in stage.modules())


class Stages(nn.Module):
    """Several stages with the names of the whole model; it is never called."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._stages = tuple(stages)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all stages; torch finds parameters and buffers with it."""
        memo = set() if memo is None else memo
        for stage in self._stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """Return a single stage itself, and for several stages a module that holds their modules.

    Raises:
        ValueError: two stages have different parameters with one name.
    """
    if len(stages) == 1:
        return stages[0]
    root = Stages(stages)
    params: dict[str, nn.Parameter] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        if params.setdefault(name, param) is not param:
            raise ValueError(
                f"model: two pipeline stages of this rank have a tensor named {name!r}; keep the "
                "names of the whole model, for example by deleting layers from copies of it. If "
                "these models are not stages of a pipeline, pass "
                "nn.ModuleDict({'first': first, 'second': second})"
            )
    holders = Counter(param for stage in stages for param in set(_compat.parameters(stage)))
    if any(count > 1 and param.requires_grad for param, count in holders.items()):
        warn_first(
            "model: two pipeline stages of this rank share a Parameter, whose gradient torch's "
            "schedules divide once for each stage: pass scale_grads=False to the schedule and "
            "divide the loss"
        )
    return root


def saved_buffers(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that ``state_dict`` saves, each under its first name.

    It reads them from the modules, because hooks may rename the keys of ``state_dict``.
    """
    names: dict[Tensor, str] = {}
    for prefix, module in (pair for stage in stages for pair in stage.named_modules()):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(buffer, f"{prefix}.{name}" if prefix else name)
    return {name: buffer for buffer, name in names.items()}


class ShardedModel:
    """A model's note on its sharding; its copies and pickles have none.

    Args:
        restore: restores a model in fp32 from the masters that are still kept.
    """

    def __init__(self, restore: Callable[[], None] | None) -> None:
        self.restore = restore

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def note_model(model: nn.Module, restore: Callable[[], None] | None = None) -> None:
    """Note that ``model`` is sharded, or was, and that ``restore`` restores it in fp32."""
    setattr(model, NOTE, ShardedModel(restore))


def forget_model(model: nn.Module) -> None:
    """Remove the note, if there is one."""
    vars(model).pop(NOTE, None)


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``model`` itself is sharded, rather than the model it was copied from."""
    note: ShardedModel | None = getattr(model, NOTE, None)
    return note is not None and note.restore is None


def waiting_restores(models: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Return the functions that restore these models, or a part of them, each once."""
    notes: list[ShardedModel | PackedParam | None] = []
    for model in models:
        notes += [getattr(model, NOTE, None), *map(note_of, _compat.parameters(model))]
    return list(dict.fromkeys(note.restore for note in notes if note and note.restore))


class ModelHooks:
    """Hooks of one model.

    Args:
        stages: the unwrapped root module, or this rank's pipeline stages.
        shards: shards of all packs; the list may grow.
        begins: called when a backward reaches an output of the model; the list may change.
        sync: may still be in flight.
        loads: notes the loaded parameters.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        shards: Sequence[Shard],
        begins: list[Callable[[], None]],
        sync: Sync,
        loads: Loads,
    ) -> None:
        self._shards, self.begins, self._sync, self._loads = shards, begins, sync, loads
        self._in_vain: dict[nn.Module, str] = {}  # loads that matched no name, as messages
        self._looked = False  # whether the effect of the first forward on parameters was checked
        self._handles: list[RemovableHandle] = []
        for stage in stages:
            self._handles += [
                # One of each kind, because Dynamo keeps few graphs for hooks that share their code.
                stage.register_forward_pre_hook(Hook(self._before_forward)),
                stage.register_forward_hook(Hook(self._after_forward)),
            ]
            self._handles += [
                module.register_load_state_dict_pre_hook(Hook(self._before_load))
                for module in stage.modules()
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, module: nn.Module, _args: object) -> None:
        """Raise early for mistakes on which torch would fail without a reason."""
        if torch.compiler.is_compiling():
            return
        if vars(module).get("_is_replica"):  # torch's own flag
            raise RuntimeError(
                "model: a sharded model was wrapped in nn.DataParallel, whose copies train "
                "nothing; use the model without DataParallel, in one process per device"
            )
        if _compat.inside_ddp(module):
            raise RuntimeError(
                "model: a sharded model was wrapped in DistributedDataParallel, so gradients "
                "would be averaged twice; use the model without DDP"
            )
        # With strict=True torch has raised, and the script has loaded other names after that.
        for message in filter(None, self._in_vain.values()):
            warn_first(message)
        self._in_vain.clear()
        if not (module.training and torch.is_grad_enabled()):  # it may be converted for inference
            return
        first = next(_compat.parameters(module), None)
        if first is not None and first.is_meta:
            raise RuntimeError(
                "model: its parameters lost their memory after shardcast.shard "
                "(model.to('meta') does this), so it cannot be trained; the masters still exist "
                "(optimizer.full_parameters(), checkpoint.save). To free memory between steps, "
                "use optimizer.sleep() and optimizer.wake()"
            )
        for shard in self._shards:
            shard.forget_before_load()
            if shard.pack.converted:
                take_moved(self._shards)

    def _after_forward(self, module: nn.Module, _args: object, output: object) -> None:
        if torch.compiler.is_compiling():  # then the first gradient hook begins the backward
            return
        if module.training and torch.is_grad_enabled() and not self._looked:
            self._looked = True
            self._refuse_conversion_inside()
        begins = self.begins  # not this whole object, because a graph may be kept

        def begin(_grad: Tensor) -> None:
            for each in begins:
                each()

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def _refuse_conversion_inside(self) -> None:
        """Raise if the first forward converted a module, as some routers do."""
        for shard in self._shards:
            pack = shard.pack
            for slot, param in zip(pack.layout.slots, pack.params, strict=True):
                if param.dtype != pack.layout.dtype:
                    owner = slot.name.rpartition(".")[0]
                    pattern = f"{owner}.*" if owner else slot.name
                    raise RuntimeError(
                        f"model: its forward converted parameter {slot.name!r} from "
                        f"{pack.layout.dtype} to {param.dtype}, which moved it out of its pack; "
                        "give it that dtype from the start: shardcast.shard(..., "
                        f"keep_fp32=({pattern!r},)) with a new model"
                    )

    @torch.no_grad()
    def _before_load(
        self,
        module: nn.Module,
        state_dict: MutableMapping[str, object],
        prefix: str,
        metadata: Mapping[str, Any],
        *_strictness: object,
    ) -> None:
        """Load masters at full precision; the model gets them cast. Local.

        If a value is the cast of its master, the master stays as it is, see :meth:`.Shard.load`.
        While an average is in the model, loaded values replace the average, and go with it. In
        packs with their own cast, published values replace those in ``state_dict``.
        """
        if not prefix:  # the module whose load_state_dict() the script calls
            self._in_vain[module] = in_vain(module, state_dict)
        if metadata.get("assign_to_params_buffers"):  # torch's own key for assign=True
            raise RuntimeError(
                "model: load_state_dict(assign=True) would replace parameters of a sharded model; "
                "load without assign, or before shardcast.shard"
            )
        self._sync.wait()  # loading split masters writes to the packs
        loaded: dict[nn.Parameter, Tensor] = {}
        for name, param in module.named_parameters(recurse=False):  # which torch loads next
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor):
                value = _compat.local_tensor(value)
                if value.shape == _compat.local_tensor(param).shape:
                    loaded[param] = value
        for shard in self._shards:
            if shard.is_lent or loaded.keys().isdisjoint(shard.pack.in_model):
                continue
            is_shared = shard.pack.layout.pack_groups.shard == PLAIN
            for slot, param in zip(shard.pack.layout.slots, shard.pack.in_model, strict=True):
                if param in loaded:
                    self._loads.note(param, slot.name, is_shared)
            if shard.in_place:
                continue
            for _, fragment, param in shard.owned():
                if param in loaded:
                    shard.load(fragment, loaded[param].reshape(-1)[slice(*fragment.param_range)])
            if shard.in_blocks:
                _round(shard, module, state_dict, prefix, loaded)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def in_vain(module: nn.Module, state_dict: Mapping[str, object]) -> str:
    """Return a warning if ``state_dict`` has none of ``module``'s names; else nothing."""
    own = (*module.named_parameters(), *module.named_buffers())
    names = {key for name, _ in own for key in (name, _compat.state_key(name))}
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
    shard: Shard,
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    loaded: Mapping[nn.Parameter, Tensor],
) -> None:
    """Let torch copy the published values of a load, whose cast differs from torch's."""
    pack = shard.pack
    names = {param: name for name, param in module.named_parameters(recurse=False)}
    for slot, param in zip(pack.layout.slots, pack.in_model, strict=True):
        if param in loaded:
            values = shard.rounded(slot, loaded[param].detach().reshape(-1)).view(slot.shape)
            shard.note_loaded(slot, values)
            if _compat.is_dtensor(param):
                whole: Any = param
                values = dtensor.wrap_local(values, param, whole.placements)
            state_dict[prefix + names[param]] = values


def convert_rest(plan: Plan, stages: Sequence[nn.Module], process_groups: ProcessGroups) -> None:
    """Make parameters outside the optimizer, and buffers, equal on all ranks. Collective.

    It casts those that should not keep their dtype.

    Args:
        stages: the model, or this rank's stages of it.
    """
    precision = plan.precision
    for name, param in sorted(
        plan.outside.items(),
        key=lambda pair: process_groups.parallel_dims.set_up_order(
            plan.pack_groups_by_name[pair[0]]
        ),
    ):
        local, pack_groups = as_packed(param), plan.pack_groups_by_name[name]
        for comm in (
            *process_groups.comms(pack_groups.replicate),
            process_groups.data_parallel(pack_groups),
        ):
            comm.broadcast(local.data, 0)
        convert_tensor_(local, precision.rest_dtype(param))
    for module in (module for stage in stages for module in stage.modules()):
        for name, buffer in module.named_buffers(recurse=False):
            equal = _broadcast(name, buffer, process_groups.dp)
            module._buffers[name] = equal.to(precision.buffer_dtype(module, buffer))


def _broadcast(name: str, buffer: Tensor, comm: Comm) -> Tensor:
    """Return rank 0's buffer; for a sparse or quantized one other ranks get a new object."""
    local = _compat.local_tensor(buffer)
    if is_dense(local):
        comm.broadcast(local, 0)
        return buffer
    if comm.size == 1:
        return buffer

    def pickled() -> bytes:
        try:
            return pickle.dumps(local.cpu()) if comm.rank == 0 else b""
        except (NotImplementedError, RuntimeError, TypeError, pickle.PicklingError) as error:
            raise TypeError(
                f"model: buffer {name!r} is {local.layout} {local.dtype}, which cannot be sent to "
                f"other ranks ({error}); expected a dense tensor, or one that can be pickled"
            ) from error

    data = comm.share(comm.together(pickled, buffer.device, "shard"), buffer.device)
    return buffer if comm.rank == 0 else pickle.loads(data).to(buffer.device)


def restore_rest(stages: Sequence[nn.Module], dtypes: Sequence[Mapping[str, torch.dtype]]) -> None:
    """Undo the casts of :func:`convert_rest`, except for their rounding. Local.

    Args:
        dtypes: dtypes before, from :func:`.setup.dtypes_of`.
    """
    for stage, given in zip(stages, dtypes, strict=True):
        # A script may have compiled a module in place since, which changes names.
        dtype_of = {_compat.bare_name(name): dtype for name, dtype in given.items()}
        for name, param in stage.named_parameters():
            convert_tensor_(as_packed(param), dtype_of.get(_compat.bare_name(name), param.dtype))
        for prefix, module in stage.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                own_name = name.rpartition(".")[2]
                dtype = dtype_of.get(_compat.bare_name(name), buffer.dtype)
                module._buffers[own_name] = buffer.to(dtype)


def name_unheld(outside: Mapping[str, nn.Parameter]) -> None:
    """Warn once about parameters with a gradient that no sharded optimizer holds. Local.

    These gradients are not averaged over ranks. Called after the first step.
    """
    unheld = [
        repr(name)
        for name, param in outside.items()
        if param.requires_grad and param.grad is not None and not is_reduced(param)
    ]
    if unheld:
        listed = ", ".join(unheld[:SHOWN]) + ", ..." * (len(unheld) > SHOWN)
        warn_first(
            f"{listed} of a sharded model: no optimizer that was passed to shardcast.shard holds "
            "these parameters, but they have gradients. DDP would average the gradients over the "
            "ranks; here each rank keeps its own. If another optimizer trains them, shard both "
            "together, shardcast.shard(model, [one, other]), or average the gradients yourself; "
            "if none does, freeze the parameters: requires_grad_(False)"
        )
