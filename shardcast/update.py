"""F2, update: unscale, clip, update and cast the own spans.

:class:`FusedUpdate` runs Adam, AdamW and SGD over flat memory; :class:`InnerUpdate` hands masters
to any other torch optimizer. Both leave absent gradients untouched, as ``torch.optim`` does.
"""

from __future__ import annotations

import functools
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcast import _compat, kernels
from shardcast.comm import Comm
from shardcast.config import ShardcastConfig
from shardcast.layout import Fragment
from shardcast.master import Master
from shardcast.precision import MASTER_DTYPE
from shardcast.scaler import Verdict

CHUNK = 1 << 16  # elements per eager call on CPU: all operands stay in cache
PROBATION = 10  # steps in which an unknown class is watched
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
Kernel = Callable[..., None]


def make_update(optimizer: torch.optim.Optimizer, config: ShardcastConfig, comm: Comm) -> Update:
    """The update for the class of ``optimizer``, whose groups it reads in every step."""
    if type(optimizer) in kernels.STATE_NAMES:
        return FusedUpdate(optimizer, config)
    return InnerUpdate(optimizer, comm)


def choose_kernel(config: ShardcastConfig, device: torch.device) -> Kernel:
    """:func:`shardcast.kernels.update_`, eager in chunks or compiled.

    ``auto`` compiles on accelerators, and stays eager on CPU where a compiler may be missing and
    a short job would not earn its compile time back.
    """
    compiled = config.fuse == "compile" or (config.fuse == "auto" and device.type != "cpu")
    if not compiled:
        return _in_chunks
    if device.type == "cpu" and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise ValueError(
            "fuse: expected a C++ compiler on the PATH for 'compile' on CPU, found none; install "
            "g++ or use fuse 'eager'"
        )
    return _compiled()


def _in_chunks(
    rule: kernels.Rule,
    master: Tensor,
    grad: Tensor,
    state: tuple[Tensor, ...],
    published: Tensor | None,
    *scalars: Any,
) -> None:
    chunk = CHUNK if master.device.type == "cpu" else max(1, master.numel())
    for start in range(0, master.numel(), chunk):
        part = slice(start, start + chunk)
        kernels.update_(
            rule, master[part], grad[part], tuple(flat[part] for flat in state),
            None if published is None else published[part], *scalars,
        )  # fmt: skip


@functools.cache
def _compiled() -> Kernel:
    return torch.compile(kernels.update_, dynamic=True, fullgraph=True)


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
        self._masters: list[Master] = []
        self._flat: list[dict[str, Tensor]] = []
        self._steps: list[list[Tensor | None]] = []
        self._kernel: Kernel = _in_chunks

    def add(self, master: Master) -> None:
        """Update ``master`` too, from now on."""
        if master.fragments:
            self._kernel = choose_kernel(self._config, master.data.device)
            self._masters.append(master)
            self._flat.append({})
            self._steps.append([None] * len(master.fragments))

    @torch.no_grad()
    def __call__(self, verdict: Verdict, present: Mapping[Master, Sequence[bool]]) -> None:
        """Update, cast and publish the own spans.

        Args:
            present: per master and fragment, whether some rank has a gradient.
        """
        self._advance(verdict, present)
        counted: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for number, master in enumerate(self._masters):
            group = self._optimizer.param_groups[master.pack.layout.group]
            rule = self._rule(master)
            for start, stop, step in self._runs(number, present[master]):
                key = (master.pack.layout.group, id(step))
                if key not in counted:
                    counted[key] = rule.coefficients(group, step)
                self._run(number, slice(start, stop), rule, counted[key], verdict)

    def _run(
        self,
        number: int,
        part: slice,
        rule: kernels.Rule,
        coefficients: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        master = self._masters[number]
        assert master.grads is not None
        published = None if master.in_place else master.pack.span(master.pack.own)[part]
        self._kernel(
            rule, master.data[part], master.grads.own[part],
            tuple(self._state(number, name)[part] for name in rule.state),
            published, coefficients, verdict.factors[master.pack.layout.group], verdict.skip,
        )  # fmt: skip

    def _advance(self, verdict: Verdict, present: Mapping[Master, Sequence[bool]]) -> None:
        """Count the step for the fragments that take part in it, without asking the device.

        A step tensor shared by fragments that take part and others is split first. SGD counts
        only while it has momentum: its first step with a buffer is special.
        """
        device = verdict.skip.device
        counts = [bool(self._rule(master).state) for master in self._masters]
        fresh = torch.zeros((), dtype=torch.float32, device=device)
        moving: dict[int, Tensor] = {}
        staying: dict[int, Tensor] = {}
        for number, master in enumerate(self._masters):
            steps = self._steps[number]
            for position, here in enumerate(present[master]):
                step = steps[position]
                if here:
                    step = steps[position] = fresh if step is None else step
                    if counts[number]:
                        moving[id(step)] = step
        for number, master in enumerate(self._masters):
            steps = self._steps[number]
            for position, here in enumerate(present[master]):
                step = steps[position]
                still = not (here and counts[number])
                if still and step is not None and id(step) in moving:
                    if id(step) not in staying:
                        staying[id(step)] = step.clone()
                    steps[position] = staying[id(step)]
        taken = 1.0 - verdict.skip.float()
        for step in moving.values():
            step += taken

    def _rule(self, master: Master) -> kernels.Rule:
        group = self._optimizer.param_groups[master.pack.layout.group]
        return kernels.rule_of(self._kind, group)

    def _runs(self, number: int, present: Sequence[bool]) -> Iterator[tuple[int, int, Tensor]]:
        """Maximal ranges of the own span that take one and the same step.

        Where nothing is absent that is the whole span, padding and all: padding is zero in
        gradient, master and state, and stays so.
        """
        master, steps = self._masters[number], self._steps[number]
        first = steps[0]
        if all(present) and first is not None and all(step is first for step in steps):
            yield 0, master.data.numel(), first
            return
        begin: int | None = None
        for position, fragment in enumerate(master.fragments):
            if not present[position]:
                begin = None
                continue
            part = master.local(fragment.start, fragment.stop)
            begin = part.start if begin is None else begin
            step = steps[position]
            assert step is not None
            last = position + 1 == len(master.fragments)
            if last or not present[position + 1] or steps[position + 1] is not step:
                yield begin, part.stop, step
                begin = None

    def switch(self, _mode: str) -> bool:
        """These classes have no ``train`` and ``eval``."""
        return False

    def _state(self, number: int, name: str) -> Tensor:
        flat = self._flat[number]
        if name not in flat:
            flat[name] = torch.zeros_like(self._masters[number].data)
        return flat[name]

    def nbytes(self) -> int:
        """Bytes of the flat state; the 0-dim steps aside."""
        return sum(tensor.nbytes for flat in self._flat for tensor in flat.values())

    def fragment_state(self, master: Master, position: int) -> dict[str, Tensor]:
        """torch's state of one fragment, as 1-d views and a 0-dim ``step``; empty before use."""
        if master not in self._masters:
            return {}
        number = self._masters.index(master)
        step = self._steps[number][position]
        if step is None:
            return {}
        fragment = master.fragments[position]
        part = master.local(fragment.start, fragment.stop)
        views = {name: flat[part] for name, flat in self._flat[number].items()}
        if self._kind is torch.optim.SGD:  # torch keeps no step for it
            return views if float(step) else {}
        return {"step": step, **views}

    def load_fragment(self, master: Master, position: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment by 1-d tensors of its length."""
        if master not in self._masters:  # frozen: it has none
            return
        number = self._masters.index(master)
        fragment = master.fragments[position]
        part = master.local(fragment.start, fragment.stop)
        if not state:
            self._steps[number][position] = None
            for flat in self._flat[number].values():
                flat[part].zero_()
            return
        for name in kernels.STATE_NAMES[self._kind]:
            value = state.get(name)
            if value is not None:
                self._state(number, name)[part].copy_(value.reshape(-1))
        started = 2.0  # of SGD, which keeps no step: its buffer is past the first one
        if self._kind is torch.optim.SGD and state.get("momentum_buffer") is None:
            started = 0.0
        step = self._shared_step(float(state.get("step", started)), master)
        self._steps[number][position] = step

    def _shared_step(self, value: float, master: Master) -> Tensor:
        """A step tensor of this value, shared with the fragments that have the same."""
        for steps in self._steps:
            for step in steps:
                if step is not None and float(step) == value:
                    return step
        return torch.tensor(value, dtype=torch.float32, device=master.data.device)


class InnerUpdate:
    """Any torch optimizer, run on masters: one master parameter per fragment, in its group.

    The inner optimizer is the user's own object's twin: same class, same attributes, but masters
    in place of model parameters. Under the ``whole`` partition masters have their parameter's
    shape, under ``even`` they are 1-d.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Comm) -> None:
        self._optimizer, self._comm = optimizer, comm
        foreign = not type(optimizer).__module__.startswith("torch.optim")
        self._unproven = PROBATION if foreign else 0  # steps after which options are compared
        self.elementwise = type(optimizer) in ELEMENTWISE
        self._params: dict[Master, list[nn.Parameter]] = {}
        self._inner = object.__new__(type(optimizer))  # copy.copy keeps but three attributes
        self._inner.__dict__.update(optimizer.__dict__)
        self._inner.__dict__.pop("step", None)  # a scheduler's wrapper steps the original
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(self._inner, hooks, OrderedDict())  # they run on the sharded optimizer
        self._inner.state = defaultdict(dict)
        self._inner.param_groups = []

    def add(self, master: Master) -> None:
        """Update ``master`` too, from now on."""
        if master.fragments:
            self._params[master] = [
                self._master_parameter(master, part) for part in master.fragments
            ]
            self._read_groups()

    @staticmethod
    def _master_parameter(master: Master, fragment: Fragment) -> nn.Parameter:
        flat = master.data[master.local(fragment.start, fragment.stop)]
        whole = fragment.numel == fragment.slot.numel
        return nn.Parameter(flat.view(fragment.slot.shape) if whole else flat)

    def _read_groups(self) -> None:
        """Give the inner groups the outer ones' present options, masters as parameters."""
        for index, outer in enumerate(self._optimizer.param_groups):
            if index == len(self._inner.param_groups):
                self._inner.param_groups.append({})
            inner = self._inner.param_groups[index]
            inner.update((key, value) for key, value in outer.items() if key != "params")
            inner["params"] = [
                param
                for master, params in self._params.items()
                if master.pack.layout.group == index
                for param in params
            ]

    @torch.no_grad()
    def __call__(self, verdict: Verdict, present: Mapping[Master, Sequence[bool]]) -> None:
        """Update and publish the own spans; see :meth:`FusedUpdate.__call__`.

        The class decides on the host whether to step, so on an accelerator this waits for the
        verdict once.
        """
        if verdict.skip.tolist():
            return
        self._read_groups()
        for master, params in self._params.items():
            assert master.grads is not None
            factor = verdict.factors[master.pack.layout.group]
            exact = master.grads.own.to(MASTER_DTYPE)
            exact = exact if factor is None else exact * factor
            for param, part, here in zip(params, master.fragments, present[master], strict=True):
                if here:
                    grad = exact[master.local(part.start, part.stop)]
                    param.grad = grad.view(param.shape)
        with torch.enable_grad():  # some optimizers compute with autograd
            _compat.bare_step(self._inner)()
        if self._unproven and self._comm.size > 1:
            self._unproven -= 1
            self._compare_options(verdict.skip.device)
        self._write_groups()
        for params in self._params.values():
            for param in params:
                param.grad = None
        self.publish()

    def _write_groups(self) -> None:
        """Give the outer groups what the inner optimizer keeps in its own, such as counters."""
        groups = zip(self._optimizer.param_groups, self._inner.param_groups, strict=True)
        for outer, inner in groups:
            outer.update((key, value) for key, value in inner.items() if key != "params")

    def _compare_options(self, device: torch.device) -> None:
        """Raise if what the class keeps in its groups differs between ranks.

        Then it was computed from all of a rank's parameters, as the step size of Prodigy and
        D-Adaptation is, and no partition can be right. Such classes are not known by name.
        """
        mine = {
            f"{key!r} of group {number}": float(value)
            for number, group in enumerate(self._inner.param_groups)
            for key, value in group.items()
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        everyone = self._comm.exchange(mine, device)
        for option in mine:
            values = [theirs[option] for theirs in everyone if option in theirs]
            if any(value != values[0] for value in values):
                raise RuntimeError(
                    f"optimizer: {type(self._optimizer).__name__} computed {option} as "
                    f"{', '.join(map(str, values))} on the ranks: its update of one parameter "
                    "depends on all of them, so it cannot be sharded; use it with DDP, or use "
                    "another optimizer"
                )

    def publish(self) -> None:
        """Cast the masters into the packs; takes in what an optimizer put elsewhere."""
        for master, params in self._params.items():
            for param, part in zip(params, master.fragments, strict=True):
                flat = master.data[master.local(part.start, part.stop)]
                if param.data_ptr() != flat.data_ptr():  # it assigned param.data
                    flat.copy_(param.detach().reshape(-1))
                    param.data = flat.view(param.shape)
            master.publish()

    def switch(self, mode: str) -> bool:
        """Call ``train`` or ``eval`` of optimizers that have it (schedule-free ones).

        Returns:
            Whether the masters may have changed and were published; a sync must follow.
        """
        method = getattr(self._inner, mode, None)
        if not callable(method):
            return False
        self._read_groups()
        method()
        self._write_groups()
        self.publish()
        return True

    def nbytes(self) -> int:
        """Bytes of the inner optimizer's tensors, 0-dim ones aside."""
        return sum(
            value.nbytes
            for state in self._inner.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim()
        )

    def fragment_state(self, master: Master, position: int) -> dict[str, Any]:
        """The inner optimizer's own state of one fragment."""
        if master not in self._params:
            return {}
        return dict(self._inner.state.get(self._params[master][position], {}))

    def load_fragment(self, master: Master, position: int, state: Mapping[str, Any]) -> None:
        """Overwrite the state of one fragment; tensors of its length take its master's shape."""
        if master not in self._params:  # frozen: it has none
            return
        param = self._params[master][position]
        loaded = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                value = value.detach().clone().to(param.device)
                if value.dim() and value.numel() == param.numel():
                    value = value.view(param.shape)
            loaded[name] = value
        self._inner.state.pop(param, None)
        if loaded:
            self._inner.state[param] = loaded


Update = FusedUpdate | InnerUpdate
