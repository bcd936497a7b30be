"""ModelHooks: hooks on the model that notice what the optimizer cannot see by itself.

A backward that begins (so that the outermost one flushes the reduction), weights that
``load_state_dict`` has in full precision, a model that was converted, and a DDP wrapper put around
a sharded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import warn_first
from shardcast.hook import Hook
from shardcast.memory.packed_param import PackedParam, note_of
from shardcast.memory.shard import Shard
from shardcast.step.decide.loads import Loads
from shardcast.step.sync.sync import Sync

MARK = "_shardcast_model"  # attribute of a model that is sharded, or was


class ShardedModel:
    """A model's knowledge of its sharding; its copies and pickles know nothing.

    Args:
        restore: gives a model that was sharded back in fp32, with the masters that are still kept.
    """

    def __init__(self, restore: Callable[[], None] | None) -> None:
        self.restore = restore

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def mark(model: nn.Module, restore: Callable[[], None] | None = None) -> None:
    """Note that ``model`` is sharded; or was, and that ``restore`` gives it back in fp32."""
    setattr(model, MARK, ShardedModel(restore))


def unmark(model: nn.Module) -> None:
    """Take the note away, if there is one."""
    vars(model).pop(MARK, None)


def is_marked(model: nn.Module) -> bool:
    """Return whether ``model`` itself, not the model it was copied from, is sharded."""
    note: ShardedModel | None = getattr(model, MARK, None)
    return note is not None and note.restore is None


def waiting_restores(models: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Return what gives these models, or a part of them, back in fp32, each once."""
    notes: list[ShardedModel | PackedParam | None] = []
    for model in models:
        notes += [getattr(model, MARK, None), *map(note_of, model.parameters())]
    return list(dict.fromkeys(note.restore for note in notes if note and note.restore))


class ModelHooks:
    """Hooks of one model.

    Args:
        stages: the unwrapped root module, or those of the pipeline stages that are here.
        shards: those of all packs; the list may grow.
        begins: called when a backward reaches an output of the model.
        sync: what may be under way still.
        loads: notes the parameters that are loaded.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        shards: Sequence[Shard],
        begins: Sequence[Callable[[], None]],
        sync: Sync,
        loads: Loads,
    ) -> None:
        self._shards, self._begins, self._sync, self._loads = shards, begins, sync, loads
        self._in_vain: dict[nn.Module, str] = {}  # loads that matched no name, as messages
        self._looked = False  # at what the first forward did to parameters
        self._handles: list[Any] = []
        for stage in stages:
            self._handles += [
                # One of each kind: Dynamo keeps few graphs for hooks, which share their code.
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

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        """Refuse what torch would stop at somewhere without saying why."""
        if torch.compiler.is_compiling():
            return
        if vars(module).get("_is_replica"):  # torch's own mark
            raise RuntimeError(
                "model: a sharded model was wrapped in nn.DataParallel, whose copies train "
                "nothing; use the model as shardcast.shard left it, in a process for each device"
            )
        if _compat.inside_ddp(module):
            raise RuntimeError(
                "model: a sharded model was wrapped in DistributedDataParallel, so gradients "
                "would be averaged twice; use the model as shardcast.shard left it, without DDP"
            )
        # With strict=True torch has raised, and the script has loaded other names since.
        for message in filter(None, self._in_vain.values()):
            warn_first(message)
        self._in_vain.clear()
        if not (module.training and torch.is_grad_enabled()):  # it may be converted to be used
            return
        first = next(module.parameters(), None)
        if first is not None and first.is_meta:
            raise RuntimeError(
                "model: its parameters were replaced by some without memory after shardcast.shard, "
                "as model.to('meta') does, so that it cannot be trained; masters are still there "
                "(optimizer.full_parameters(), checkpoint.save). To give memory away between steps "
                "use optimizer.sleep() and optimizer.wake()"
            )
        for shard in self._shards:
            shard.forget_before_load()
            if shard.pack.converted:
                shard.pack.take_moved()

    def _after_forward(self, module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # the first gradient hook begins the backward then
            return
        if module.training and torch.is_grad_enabled() and not self._looked:
            self._looked = True
            self._refuse_conversion_inside()
        begins = self._begins  # not all of this object: a graph may be kept

        def begin(_grad: Tensor) -> None:
            for each in begins:
                each()

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def _refuse_conversion_inside(self) -> None:
        """After the first forward: some routers do ``self.classifier.to(torch.float32)`` in it."""
        for shard in self._shards:
            pack = shard.pack
            for slot, param in zip(pack.layout.slots, pack.params, strict=True):
                if param.dtype != pack.layout.dtype:
                    owner = slot.name.rpartition(".")[0]
                    pattern = f"{owner}.*" if owner else slot.name
                    raise RuntimeError(
                        f"model: its forward converted parameter {slot.name!r} from "
                        f"{pack.layout.dtype} to {param.dtype}, so that it left its pack; have it "
                        f"so from the start: shardcast.shard(..., keep_fp32=({pattern!r},)) with "
                        "a new model"
                    )

    def _before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any],
        *_strictness: Any,
    ) -> None:  # fmt: skip
        # Only where a script loads.
        from shardcast.optimizer.model_loading import before_load, in_vain

        if not prefix:  # what the script calls load_state_dict() of
            self._in_vain[module] = in_vain(module, state_dict)
        before_load(self._shards, self._sync, self._loads, module, state_dict, prefix, metadata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
