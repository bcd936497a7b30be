"""F2, update: unscale, clip, update and cast the own spans.

:class:`FusedUpdate` runs Adam, AdamW and SGD over flat memory; :class:`shardcast.inner.InnerUpdate`
hands masters to any other torch optimizer. Both leave absent gradients untouched, as
``torch.optim`` does.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardcast import _compat, kernels
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.inner import InnerUpdate
from shardcast.kernels import Flat, Rule
from shardcast.master import Master
from shardcast.precision import MASTER_DTYPE
from shardcast.scaler import Verdict

CHUNK = 1 << 16  # elements per thread and eager call on CPU: all operands stay in its cache
PIECE = 1 << 24  # elements per eager call on an accelerator, where each is a kernel launch
COMPILERS = {"cpu": ("c++", "g++", "clang++"), "cuda": ("cc", "gcc", "clang")}
ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def make_update(optimizer: torch.optim.Optimizer, config: ShardcastConfig, comm: Comm) -> Update:
    """The update for the class of ``optimizer``, whose groups it reads in every step."""
    if type(optimizer) in kernels.STATE_NAMES:
        return FusedUpdate(optimizer, config)
    elementwise = type(optimizer) in ELEMENTWISE
    return InnerUpdate(optimizer, comm, elementwise)


class ChunkedKernel:
    """The eager update on CPU, where the step's numbers and verdict are on the host anyway."""

    on_host = True

    def __call__(
        self,
        rule: Rule,
        flat: Flat,
        numbers: tuple[Any, ...],
        factor: Tensor | None,
        skip: Tensor,
    ) -> None:
        """See :func:`shardcast.kernels.update_`; a skipped step is not to come here."""
        size = max(1, min(CHUNK * torch.get_num_threads(), flat.master.numel()))
        scratch = [torch.empty(size, dtype=MASTER_DTYPE) for _ in range(2)]
        kernels.update_in_chunks_(rule, flat, numbers, factor, scratch)


class WholeKernel:
    """:func:`shardcast.kernels.update_`, compiled into one kernel or, as a fallback, eager."""

    on_host = False

    def __init__(self, compile: bool) -> None:
        self._run: Callable[..., None] = _compiled() if compile else _by_pieces

    def __call__(
        self,
        rule: Rule,
        flat: Flat,
        numbers: tuple[Any, ...],
        factor: Tensor | None,
        skip: Tensor,
    ) -> None:
        self._run(rule, flat.alone(), numbers, factor, skip)


Kernel = ChunkedKernel | WholeKernel


def _by_pieces(rule: Rule, flat: Flat, *rest: Any) -> None:
    """The eager form allocates several times the operands: not of more than so much at a time."""
    for piece in flat.chunks(PIECE):
        kernels.update_(rule, piece, *rest)


@functools.cache  # one compiled function, so that models of one process share its graphs
def _compiled() -> Callable[..., None]:
    return _compat.compiled(kernels.update_)


def choose_kernel(config: ShardcastConfig, device: torch.device) -> Kernel:
    """How to run the update on ``device``.

    ``auto`` compiles where Triton can, and stays eager on CPU: there the eager form equals
    ``torch.optim`` to the bit, a compiler may be missing, and a short job would not earn its
    compile time back.

    Raises:
        ValueError: ``compile`` on CPU without a C++ compiler.
    """
    if device.type == "cpu":
        if config.fuse != "compile":
            return ChunkedKernel()
        if not _has_compiler("cpu", "CXX"):
            raise ValueError(
                "fuse: expected a C++ compiler on the PATH for 'compile' on CPU, found none; "
                "install g++ or use fuse 'eager'"
            )
        return WholeKernel(compile=True)
    return WholeKernel(compile=config.fuse == "compile" or (config.fuse == "auto" and _triton()))


def _triton() -> bool:
    """Whether Triton is installed, with the C compiler that it builds its launchers with."""
    return importlib.util.find_spec("triton") is not None and _has_compiler("cuda", "CC")


def _has_compiler(kind: str, variable: str) -> bool:
    chosen = os.environ.get(variable, "").split()[:1]  # it may have arguments
    return any(shutil.which(name) for name in chosen or COMPILERS[kind])


@dataclass
class _Shard:
    """What is updated together: one master, its state and its steps.

    Attributes:
        steps: per fragment, a 0-dim fp32 count of its steps, ``None`` before the first one.
        flat: torch's state by name, fp32, parallel to the master's data; made when first used.
    """

    master: Master
    steps: list[Tensor | None]
    flat: dict[str, Tensor] = field(default_factory=dict)

    def state(self, name: str) -> Tensor:
        """One state tensor, zeros at first."""
        if name not in self.flat:
            self.flat[name] = torch.zeros_like(self.master.data)
        return self.flat[name]

    def operands(self, part: slice, rule: Rule) -> Flat:
        """The operands of the update of ``part`` of the own span."""
        master = self.master
        assert master.grads is not None
        return Flat(
            master.data[part], master.grads.own[part],
            tuple(self.state(name)[part] for name in rule.state),
            None if master.in_place else master.pack.span(master.pack.own)[part],
        )  # fmt: skip

    def runs(self, present: Sequence[bool]) -> Iterator[tuple[slice, Tensor]]:
        """Maximal ranges of the own span that take one and the same step.

        A run ends where the next fragment begins: the padding between is zero in gradient, master
        and state, and stays so.
        """
        begin: int | None = None
        for position, fragment in enumerate(self.master.fragments):
            if not present[position]:
                begin = None
                continue
            step, start = self.steps[position], fragment.start
            assert step is not None
            begin = self.master.local(start, start).start if begin is None else begin
            last = position + 1 == len(self.master.fragments)
            if last or not present[position + 1] or self.steps[position + 1] is not step:
                own = self.master.pack.own.stop
                stop = own if last else self.master.fragments[position + 1].start
                yield slice(begin, self.master.local(start, stop).stop), step
                begin = None


class FusedUpdate:
    """Adam, AdamW or SGD over flat memory: one call per run of present parameters of a pack.

    The state is flat fp32 like the masters, allocated when the first gradient comes. Fragments
    that have had gradients in the same steps share one ``step`` tensor; usually that is all.
    """

    elementwise = True  # state tensors have one element per element of the parameter

    def __init__(self, optimizer: torch.optim.Optimizer, config: ShardcastConfig) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._config = config
        self._shards: dict[Master, _Shard] = {}
        self._common: Tensor | None = None  # the step that all fragments of all masters share
        self._kernel: Kernel = ChunkedKernel()

    def add(self, master: Master) -> None:
        """Update ``master`` too, from now on."""
        if master.fragments:
            if not self._shards:
                self._kernel = choose_kernel(self._config, master.data.device)
            self._shards[master] = _Shard(master, [None] * len(master.fragments))
            self._common = None

    @torch.no_grad()
    def __call__(self, verdict: Verdict, present: Mapping[Master, Sequence[bool]]) -> None:
        """Update, cast and publish the own spans.

        Args:
            present: per master and fragment, whether some rank has a gradient.
        """
        if not self._shards or (self._kernel.on_host and bool(verdict.skip)):
            return
        everything = all(all(present[master]) for master in self._shards)
        self._advance(verdict, None if everything else present)
        known: dict[tuple[int, int], tuple[Rule, tuple[Any, ...]]] = {}
        for master, shard in self._shards.items():
            number = master.pack.layout.group
            if everything and self._common is not None:
                runs = iter([(slice(0, master.data.numel()), self._common)])
            else:
                runs = shard.runs(present[master])
            for part, step in runs:
                key = (number, id(step))
                if key not in known:
                    known[key] = self._prepared(number, step)
                rule, numbers = known[key]
                flat = shard.operands(part, rule)
                self._kernel(rule, flat, numbers, verdict.factors[number], verdict.skip)

    def _prepared(self, number: int, step: Tensor) -> tuple[Rule, tuple[Any, ...]]:
        """The rule of a group, and its numbers in this step."""
        group = self._optimizer.param_groups[number]
        if not self._kernel.on_host:
            rule = kernels.rule_of(self._kind, group)
            return rule, kernels.as_tensors(rule.numbers(group, step.double()), step)
        rule = kernels.rule_of(self._kind, group, fused=bool(group.get("fused")))
        numeric = {key: _plain(value) for key, value in group.items() if key != "params"}
        return rule, rule.numbers(numeric, float(step))

    def _advance(self, verdict: Verdict, present: Mapping[Master, Sequence[bool]] | None) -> None:
        """Count the step for the fragments that take part in it, without asking the device.

        A step tensor shared by fragments that take part and others is split first. SGD counts
        only while it has momentum: the first step with a buffer is special.

        Args:
            present: as for a call, or ``None`` for all.
        """
        taken = 1.0 - verdict.skip.float()
        groups = self._optimizer.param_groups
        counts = {m: bool(groups[m.pack.layout.group].get("momentum", True)) for m in self._shards}
        uniform = len(set(counts.values())) == 1
        if present is None and self._common is not None and uniform:
            if all(counts.values()):
                self._common += taken
            return
        fresh = torch.zeros((), dtype=torch.float32, device=verdict.skip.device)
        moving: dict[int, Tensor] = {}
        staying: dict[int, Tensor] = {}
        for master, shard in self._shards.items():
            for position, step in enumerate(shard.steps):
                if present is None or present[master][position]:
                    step = shard.steps[position] = fresh if step is None else step
                    if counts[master]:
                        moving[id(step)] = step
        for master, shard in self._shards.items():
            for position, step in enumerate(shard.steps):
                absent = present is not None and not present[master][position]
                still = absent or not counts[master]
                if still and step is not None and id(step) in moving:
                    if id(step) not in staying:
                        staying[id(step)] = step.clone()
                    shard.steps[position] = staying[id(step)]
        for step in moving.values():
            step += taken
        used = {id(step): step for shard in self._shards.values() for step in shard.steps}
        self._common = used.popitem()[1] if len(used) == 1 and uniform else None

    def switch(self, _mode: str) -> bool:
        """These classes have no ``train`` and ``eval``."""
        return False

    def nbytes(self) -> int:
        """Bytes of the flat state; the 0-dim steps aside."""
        return sum(t.nbytes for shard in self._shards.values() for t in shard.flat.values())

    def fragment_state(self, master: Master, position: int) -> dict[str, Tensor]:
        """torch's state of one fragment, as 1-d views and a 0-dim ``step``; empty before use."""
        shard = self._shards.get(master)
        step = None if shard is None else shard.steps[position]
        if shard is None or step is None:
            return {}
        fragment = master.fragments[position]
        part = master.local(fragment.start, fragment.stop)
        views = {name: flat[part] for name, flat in shard.flat.items()}
        if self._kind is torch.optim.SGD:  # torch keeps no step for it
            return views if float(step) else {}
        return {"step": step, **views}

    def load_fragment(self, master: Master, position: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment by 1-d tensors of its length."""
        shard = self._shards.get(master)
        if shard is None:  # frozen: it has none
            return
        self._common = None
        fragment = master.fragments[position]
        part = master.local(fragment.start, fragment.stop)
        if not state:
            shard.steps[position] = None
            for flat in shard.flat.values():
                flat[part].zero_()
            return
        for name in kernels.STATE_NAMES[self._kind]:
            value = state.get(name)
            if value is not None:
                shard.state(name)[part].copy_(value.reshape(-1))
        started = 2.0  # of SGD, which keeps no step: its buffer is past the first one
        if self._kind is torch.optim.SGD and state.get("momentum_buffer") is None:
            started = 0.0
        shard.steps[position] = self._shared_step(float(state.get("step", started)), master)

    def _shared_step(self, value: float, master: Master) -> Tensor:
        """A step tensor of this value, shared with the fragments that have the same."""
        for shard in self._shards.values():
            for step in shard.steps:
                if step is not None and float(step) == value:
                    return step
        return torch.tensor(value, dtype=torch.float32, device=master.data.device)


def _plain(value: Any) -> Any:
    """A learning rate or betas given as tensors, as numbers of the host."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value


Update = FusedUpdate | InnerUpdate
