"""``on_error``: an error inside ``optimizer.attempt()`` costs at most one step, not the run.

Inside an attempt, backwards send nothing, as in ``no_sync``, and the one reduction runs in
``step()``. There a failed rank sends zeros, so that all ranks make the same collectives. It reports
the failure in the step's one all-reduce. If gradients were sent during the backward, owners could
not subtract those of a rank that fails later.
"""

from __future__ import annotations

import string
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import format_exc
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcast import _compat
from shardcast.comm import ProcessGroups, warn_once_for
from shardcast.config import ShardcastConfig
from shardcast.messages import LOG, by_rank
from shardcast.optimizer.packed import PackedOptimizer
from shardcast.optimizer.setup import Plan
from shardcast.option_values import COUNT, Option, ValidatedOptions, one_of, option, read_mapping
from shardcast.plan.parallel_dims import ParallelDims
from shardcast.step.decide.decision import Decision
from shardcast.step.decide.signal import Signal, Verdict, known, to_device
from shardcast.step.decide.tokens import Tokens
from shardcast.step.step_hook import StepHook

KEPT = 1000  # failures that failures() lists at most
TEXT = 1000  # letters of an error message
# The name of an error is sent as doubles; each holds eight letters of six bits.
LETTERS = "\0" + string.ascii_letters + string.digits + "_"
WORDS, LENGTH, BITS = 2, 8, 6
COLLECTIVES = {"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"}


@dataclass(frozen=True)
class ErrorRule(ValidatedOptions):
    """The rule for steps in which ranks failed.

    Attributes:
        action: ``skip`` the step on all ranks, or ``drop`` the failed ranks' gradients.
        max_failed_steps: this many failed steps in a row raise an error.
    """

    action: str = option(None, within=one_of("skip", "drop"))
    max_failed_steps: int = option(5, within=COUNT)


class Failure(NamedTuple):
    """An error of a rank in a step. On an accelerator other ranks know 16 letters of its name."""

    step: int
    rank: int
    error: str


class FailureSignal(Signal):
    """Which ranks failed; each sends the name of its error in ``WORDS`` doubles at its place.

    Its numbers: failed steps in a row; whether the last skipped step was one; the summed words.

    Attributes:
        error_here: this rank's error since the last step, or an empty string.
        tokens: token signal of the step; a failed rank has no tokens.
        failures: latest failures of all ranks that the host knows of.
    """

    name = "on_error"
    agrees_scale = True  # a failed rank finds out in the decision whether the others count tokens
    tokens: Tokens

    def __init__(
        self, rule: ErrorRule, process_groups: ProcessGroups, device: torch.device
    ) -> None:
        self._rule, self._device = rule, device
        self._comm, self._ranks = process_groups.dp, process_groups.dp.size
        self._drops = rule.action == "drop"
        self.skips = (False,) * self._ranks
        self._nothing = torch.zeros(WORDS * self._ranks, dtype=torch.float64, device=device)
        self._part = self._seen = self._nothing
        self._count = self._nothing[0]
        self.noted = 2 + self._nothing.numel()
        self.error_here = ""
        self._gives_loss = False
        self.takers: Sequence[Signal] = ()  # signals that take a loss
        self.failures: deque[Failure] = deque(maxlen=KEPT)

    def fail(self, error: Exception) -> None:
        """Count this rank as failed in the coming step. Keeps no traceback and so no tensors."""
        kind = type(error).__name__
        self.error_here = f"{kind}: {error}"[:TEXT]
        words = [kind[LENGTH * n :][:LENGTH] for n in range(WORDS)]
        numbers = [0.0] * self._nothing.numel()
        for n, word in enumerate(words):
            numbers[WORDS * self._comm.rank + n] = _encoded(word)
        self._part = to_device(numbers, torch.float64, self._device)

    def arguments(self) -> Mapping[str, Any]:
        """Return this rank's arguments; a failed one passes a loss if the last step had one."""
        if not (self.error_here and self._gives_loss):
            return {}
        for signal in self.takers:
            if signal.loss is None:
                signal.loss = 0.0
        return {"loss": True}

    def local(self) -> Tensor:
        return self._part

    def read(self, total: Tensor) -> Tensor:
        """Return which ranks failed, how many, and their words."""
        failed = (total.view(self._ranks, WORDS)[:, 0] > 0).double()
        return torch.cat([failed, failed.sum().view(1), total])

    def scale(self, reading: Tensor | None) -> Tensor | None:
        """Return the correction for failed ranks, which the divisor of the sum includes."""
        if not self._drops or self.tokens.counted or reading is None:
            return None
        return (self._ranks - reading[self._ranks]).clamp(min=1) / self._ranks

    def judge(self, reading: Tensor, norm: Tensor) -> Verdict:
        self._count, self._seen = reading[self._ranks], reading[self._ranks + 1 :]
        return Verdict(skip=self._count >= (self._ranks if self._drops else 1))

    def error(self, mistakes: Sequence[float]) -> RuntimeError | None:
        """Note failed ranks; return an error only after too many failed steps in a row."""
        step = self._comm.steps
        if on_host := _compat.is_host(self._device):
            step += 1
            if self.failures and self.failures[-1].step == step:  # a clip has decided already
                return None
            texts = known(self.error_here, self._comm, self._device)
            in_row = int(self.numbers[0]) + 1
        else:
            in_row, _, *letters = self.numbers.tolist()
            texts = dict(enumerate(_names(letters)))
        facts = [(rank, text) for rank, text in texts.items() if text]
        self.failures += [Failure(step, *fact) for fact in facts]
        if in_row >= self._rule.max_failed_steps:
            return RuntimeError(
                f"step: ranks failed in optimizer.attempt() in {int(in_row)} steps in a row "
                f"(max_failed_steps); {'in this one' if on_host else 'last'} {by_rank(facts)}"
            )
        if self._drops:
            warn_once_for(self._comm, f"step made without ranks that failed: {by_rank(facts)}")
        return None

    def note(self, decision: Decision) -> None:
        in_row, by_failure, letters = self.numbers.split([1, 1, self._nothing.numel()])
        has_failed = self._count > 0
        in_row.copy_(torch.where(has_failed, in_row + 1, 0.0))
        by_failure.copy_(torch.where(decision.skip, has_failed, by_failure))
        letters.copy_(torch.where(has_failed, self._seen, letters))

    def reason(self, numbers: Sequence[float]) -> tuple[str, str] | None:
        if not numbers[1]:
            return None
        names = [(rank, name) for rank, name in enumerate(_names(numbers[2:])) if name]
        last = self.failures[-1].step if self.failures else 0
        texts = [(rank, error) for step, rank, error in self.failures if step == last]
        if [rank for rank, _ in names] == [rank for rank, _ in texts]:
            names = texts
        return (
            f"because ranks raised in optimizer.attempt(): {by_rank(names)}",
            "Look at the data of these steps, or at the memory of these ranks.",
        )

    def cleared(self) -> None:
        self._part, self.error_here = self._nothing, ""

    def conclude(self, decision: Decision) -> None:
        if not self.error_here:
            self._gives_loss = any(signal.loss is not None for signal in self.takers)
        self.cleared()


def _encoded(word: str) -> float:
    """Encode the letters of a name as an exact double, above 0 unless the name is empty."""
    places = (LETTERS.find(letter) for letter in word)
    return float(sum((place if place > 0 else 63) << BITS * n for n, place in enumerate(places)))


def _names(numbers: Sequence[float]) -> list[str]:
    """Decode the names of all ranks from what :func:`_encoded` returned."""
    shifts, mask = range(0, BITS * LENGTH, BITS), (1 << BITS) - 1
    words = [[int(number) >> shift & mask for shift in shifts] for number in numbers]
    letters = ["".join(LETTERS[place] for place in word if place) for word in words]
    return ["".join(letters[n : n + WORDS]) for n in range(0, len(letters), WORDS)]


class Attempts(StepHook):
    """Attempts of one optimizer."""

    name = "on_error"

    def __init__(self, optimizer: PackedOptimizer) -> None:
        if optimizer.config.on_error == "raise":
            raise AttributeError(  # so that hasattr() works
                "attempt: the option on_error is not set; pass on_error='skip' or "
                "on_error='drop' to shard()"
            )
        self._optimizer = optimizer
        self._signal: FailureSignal = optimizer.decider.signal_of(self.name)
        signals = optimizer.decider.signals
        self._signal.tokens = optimizer.decider.tokens
        self._signal.takers = [signal for signal in signals if signal.takes_loss]
        modules = (module for stage in optimizer.stages for module in stage.modules())
        self._synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in modules)
        self._is_open = False
        self._misuse: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run the forwards and backwards of a step: ``with optimizer.attempt():``.

        An error inside does not end the run. The rank's gradients of this step do not count,
        including gradients of its other attempts in the step. ``on_error="skip"`` skips the step on
        all ranks. ``"drop"`` uses the mean over the ranks, or tokens, that took part; if all ranks
        failed, the step is skipped, too. Rank 0 warns and names ranks and errors
        (:meth:`failures`); the failed rank also logs its traceback.

        Backwards inside send nothing; their gradients are reduced in ``step()``. Errors of
        collectives, ``StopIteration`` and exceptions such as ``KeyboardInterrupt`` are raised as
        usual. Do not call collectives inside, because other ranks would wait for a failed one.

        Collective: every rank must enter it, and call ``step()`` after it.

        Raises:
            AttributeError: without the option ``on_error``.
            RuntimeError: inside another attempt; after gradients of this step were reduced; with
                ``"drop"`` if :attr:`divisor` is assigned. In ``step()``, on all ranks: after
                ``max_failed_steps`` failed steps in a row.
        """
        self._check()
        self._is_open, reduce = True, self._optimizer.reduce
        self._optimizer.in_no_sync = False  # step() must reduce
        try:
            with reduce.no_sync():
                self._send_buffers()
                try:
                    yield
                except Exception as error:
                    if self._is_to_be_raised(error):
                        raise
                    self._signal.fail(error)
                    # As text, because a log may keep the error object and everything in its frames.
                    LOG.warning("attempt: this rank failed and continues:\n%s", format_exc())
                    # From CPython 3.12 on, contextlib leaves a cycle that keeps the error: without
                    # this, its frames would hold their tensors until the next garbage collection.
                    error.__traceback__ = None
        finally:
            self._is_open, self._misuse = False, None

    def failures(self) -> list[Failure]:
        """List the errors of ranks in the steps so far: step number, rank, error.

        Local; equal on all ranks. On an accelerator an entry appears one or two steps later and has
        only the first letters of the error's class name; that rank's log has the whole error.
        """
        return [*self._signal.failures]

    def _check(self) -> None:
        reduce = self._optimizer.reduce
        if self._is_open:
            self._misuse = RuntimeError("attempt: another attempt is still open; leave it first")
            raise self._misuse
        # Since a call that all ranks make, so that all of them raise.
        has_run = reduce.last_backward is not None
        if has_run and not (reduce.due or reduce.alone):
            raise RuntimeError(
                "attempt: gradients of this step were already reduced outside an attempt; run "
                "all backwards of a step inside attempts, or call optimizer.zero_grad() first"
            )
        if self._optimizer.comm.size > 1 and self._synchronized:
            raise RuntimeError(
                "attempt: expected a model without collectives in its forward, got "
                "nn.SyncBatchNorm; a rank that fails before it would leave the others waiting"
            )
        has_divisor = reduce.divisor.given is not None
        if has_divisor and self._optimizer.config.on_error.action == "drop":
            raise RuntimeError(
                "attempt: optimizer.divisor cannot be set with on_error='drop', because the "
                "number of ranks may change; leave it unset, and call optimizer.count for a "
                "mean over tokens"
            )

    def _send_buffers(self) -> None:
        """Send a forward's buffers, because a rank may fail before its forward. Collective."""
        buffers = self._optimizer.hook_of("broadcast_buffers")
        for root in self._optimizer.called if buffers is not None else ():
            buffers.before(root)

    def _is_to_be_raised(self, error: BaseException) -> bool:
        if error is self._misuse or isinstance(error, (StopIteration, StopAsyncIteration)):
            return True
        groups = self._optimizer.process_groups
        gave_up = any(comm.gave_up for comm in (groups.everyone, groups.dp, groups.shard))
        return gave_up or _is_of_collective(error)

    def before_reduce(self) -> None:
        """Replace a failed rank's gradients by zeros and its tokens by none."""
        if self._is_open:
            self._misuse = RuntimeError(
                "step, or another call that reduces gradients, was made inside "
                "optimizer.attempt(); leave the block first"
            )
            raise self._misuse
        optimizer, signal = self._optimizer, self._signal
        reduce, tokens = optimizer.reduce, optimizer.decider.tokens
        if signal.error_here and (reduce.due or reduce.alone):
            for shard in optimizer.shards:
                for param in shard.pack.in_model:
                    param.grad = None
            reduce.last_backward = None
            tokens.abstain()  # the rank may have failed before count()


def _is_of_collective(error: BaseException | None) -> bool:
    """Return whether a collective raised it; other ranks then wait or raise elsewhere."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__") in COLLECTIVES:
                return True
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return False


def _check(config: ShardcastConfig) -> None:
    """Refuse options that need every rank in a step."""
    loss = getattr(config.guard, "loss", None)
    _refuse(
        config,
        {
            "accumulate 'sharded', with which every backward is reduced": config.accumulate
            == "sharded",
            "a guard on the loss, which a failed rank does not have": loss is not None
            and config.on_error.action == "drop",
        },
    )


def _fits(plan: Plan, dims: ParallelDims) -> None:
    """Refuse ranks that wait for one another inside a forward or backward."""
    _refuse(
        plan.config,
        {
            "a pipeline, whose stages wait for one another": dims.in_pipeline,
            "a model-parallel mesh, whose ranks communicate in each forward": bool(dims.model),
            "experts, for which ranks communicate in each forward": bool(dims.experts),
        },
    )


def _refuse(config: ShardcastConfig, conflicts: Mapping[str, bool]) -> None:
    if names := [name for name, is_so in conflicts.items() if is_so]:
        raise ValueError(
            f"on_error: expected 'raise' with {names[0]}, got {config.on_error.action!r}; the "
            "other ranks could not continue without a rank that fails"
        )


def _read(name: str, value: object) -> object:
    if value == "raise" or isinstance(value, ErrorRule):
        return value
    return read_mapping(ErrorRule, value if isinstance(value, Mapping) else {"action": value}, name)


def _signal(
    config: ShardcastConfig, process_groups: ProcessGroups, device: torch.device
) -> FailureSignal:
    return FailureSignal(config.on_error, process_groups, device)


OPTION = Option(
    help="if a rank raises inside optimizer.attempt(): skip the step on all ranks, or drop that "
    "rank's gradients and use the mean of the others; {action: skip, max_failed_steps: 5} raises "
    "after 5 failed steps in a row",
    within=("raise, skip, drop or a mapping", lambda _: True),
    read=_read,
    check=_check,
    fits=_fits,
    hook=Attempts,
    signal=_signal,
)
