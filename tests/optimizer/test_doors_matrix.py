"""``owned()`` and ``whole()`` with each form, partition, optimizer and option, next to plain torch.

Each rank also trains its parameters in plain torch, with the gradients of its sharded model and the
same edits. Masters, moments and averages must be bitwise equal. With low-precision moments, only
single edits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from bag import Bag
from models import assert_same_bits, exact_muon, local, parts, values
from pairwise import pairwise
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import shardcast
from shardcast.memory.codecs import row_of
from shardcast.optimizer.sharded import packed_of
from shardcast.testing import threaded_world

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

STEPS = 2
SHAPES = {"first": (256, 128), "second": (128, 256), "odd": (7, 13), "bias": (13,), "kept": (5, 7)}
EDITED = [name for name in SHAPES if name != "kept"]
LOW = ("int8", "moments in bf16")

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"param_dtype": "fp32"},
    "bf16": {"param_dtype": "bf16"},
    "split16": {"param_dtype": "bf16", "master": "split16"},
    "int8": {"param_dtype": "bf16", "moments": "int8"},
    "moments in bf16": {"param_dtype": "bf16", "moments": "bf16"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap_sync": {"overlap_sync": True},
    "published": {"published": {"fp8_block128": ["first", "second"]}},
    "changes": {"changes": True},
    "averages": {"averages": {"ema": 0.9}},
}
MESHES = {
    "even": ({"dp": 2}, {}),
    "whole": ({"dp": 2}, {"partition": "whole"}),
    "shard_ranks": ({"runs": 2, "within": 2}, {"shard_ranks": 2}),
    "tensor-parallel": ({"dp": 2, "tp": 2}, {}),
    "copies along tp": ({"dp": 2, "tp": 2}, {}),
}
Optimizers = list[torch.optim.Optimizer]


def adamw(params: Mapping[str, nn.Parameter]) -> Optimizers:
    return [torch.optim.AdamW(params.values(), lr=1e-2)]


def sgd(params: Mapping[str, nn.Parameter]) -> Optimizers:
    return [torch.optim.SGD(params.values(), lr=1e-2, momentum=0.9)]


def muon(params: Mapping[str, nn.Parameter]) -> Optimizers:
    vectors = [param for param in params.values() if param.dim() != 2]
    matrices = [param for param in params.values() if param.dim() == 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=1e-2)]


def adafactor(params: Mapping[str, nn.Parameter]) -> Optimizers:
    return [torch.optim.Adafactor(params.values(), lr=1e-2)]


CLASSES = {"AdamW": adamw, "SGD": sgd, "Muon": muon, "Adafactor": adafactor}
DOORS = ("owned", "whole")
AXES = {
    "door": DOORS,
    "form": [*FORMS],
    "mesh": [*MESHES],
    "kind": [*CLASSES],
    "option": [*OPTIONS],
    "home": ["device", "host"],
}


def fits(_door: str, form: str, mesh: str, kind: str, option: str, home: str) -> bool:
    """Return whether ``shard()`` accepts this combination."""
    if kind in ("Muon", "Adafactor") and (
        form in ("split16", *LOW) or mesh in ("even", "tensor-parallel") or home == "host"
    ):
        return False
    return not (option == "published" and form in ("fp32", "split16"))


# -- the edits, of values of any shape that start at element ``start`` of the flat parameter ------


def decay(it: Any, _start: int) -> None:
    it.master.mul_(1 - 1e-3)


def add_noise(it: Any, start: int) -> None:
    """Add noise to the first half; the other half must not change."""
    noise = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1))
    flat = it.master.view(-1)
    end = max(0, min(flat.numel(), len(noise) - start))
    flat[:end] += noise[start : start + end]


def mask(it: Any, start: int) -> None:
    it.master = it.master * kept(it.master, start)
    for moment in it.state.values():
        moment *= kept(moment, start)


def kept(like: Tensor, start: int) -> Tensor:
    return (torch.arange(start, start + like.numel()) % 3 > 0).view(like.shape)


def shrink(it: Any, _start: int) -> None:
    it.master = nn.functional.softshrink(it.master, 0.05)
    for name in it.state:
        it.state[name] = it.state[name] * 0.5


EDITS: dict[str, Callable[[Any, int], None]] = {
    "first": decay,
    "second": add_noise,
    "odd": mask,
    "bias": shrink,
}


class Flat:
    """Plain tensors, or the local tensors of DTensors, with the interface that edits use."""

    def __init__(self, master: Tensor, state: Mapping[str, Tensor]) -> None:
        self._master, self.state = master, {name: value.clone() for name, value in state.items()}

    @property
    def master(self) -> Tensor:
        return self._master

    @master.setter
    def master(self, values: Tensor) -> None:
        self._master.copy_(values)


class Edited:
    """Local tensors of a parameter from ``whole()``, to which assignments are passed on."""

    def __init__(self, whole: Any) -> None:
        self._whole, self.state = whole, self
        self._names = tuple(whole.state)

    @property
    def master(self) -> Tensor:
        return local(self._whole.master)

    @master.setter
    def master(self, values: Tensor) -> None:
        if hasattr(self._whole.master, "to_local"):
            self.master.copy_(values)
        else:
            self._whole.master = values

    def values(self) -> list[Tensor]:
        return [self[name] for name in self._names]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        return local(self._whole.state[name])

    def __setitem__(self, name: str, values: Tensor) -> None:
        self[name].copy_(values)


# -- one run --------------------------------------------------------------------------------------


class Run:
    """A sharded model and its oracle on one rank."""

    def __init__(self, mesh: Any, case: Mapping[str, str]) -> None:
        shape, more = MESHES[case["mesh"]]
        self.case, self.low = case, case["form"] in LOW
        model = self.model = Bag(**SHAPES)
        for number, param in enumerate(model.parameters()):
            torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
        placements = {}
        if case["mesh"] == "tensor-parallel":
            placements = {"first": Shard(0), "second": Shard(1)}
        if case["mesh"] == "copies along tp":
            placements = {"first": Replicate(), "odd": Replicate()}
        if "tp" in shape:
            model.place(mesh["tp"], **placements)
        self.params = {
            name: nn.Parameter(local(param).clone()) for name, param in model.named_parameters()
        }
        cut = [name for name, placement in placements.items() if placement.is_shard()]
        self.seed = {name: mesh.get_local_rank("tp") if name in cut else 0 for name in SHAPES}
        build = CLASSES[case["kind"]]
        self.plain = build(self.params)
        options = {**FORMS[case["form"]], **OPTIONS[case["option"]], **more}
        options |= {"mesh": mesh} if "tp" in shape else {}
        options["offload"] = case["home"] == "host"
        self.optimizer = shardcast.shard(
            model, build(dict(model.named_parameters())), fuse="eager", pack_params=3, **options
        )
        self.packed = packed_of(self.optimizer)
        self.average = {name: param.detach().clone() for name, param in self.params.items()}
        self.told: dict[str, Tensor] = {}
        self.version: str | None = None

    def step(self, number: int) -> None:
        low = FORMS[self.case["form"]]["param_dtype"] == "bf16"
        grads = {}
        for place, (name, param) in enumerate(self.params.items()):
            seed = 100 * number + 10 * place + self.seed[name]
            generator = torch.Generator().manual_seed(seed)
            grads[name] = torch.randn(param.shape, generator=generator)
            param.grad = grads[name].to(torch.bfloat16).float() if low else grads[name].clone()
        self.model(grads).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for optimizer in self.plain:
            optimizer.step()
        for name, param in self.params.items():
            self.average[name].lerp_(param.detach(), 1 - 0.9)

    def state(self, name: str) -> dict[str, Tensor]:
        """Return plain torch's state tensors of the parameter's shape."""
        param = self.params[name]
        owner = next(o for o in self.plain if any(param is p for p in o.param_groups[0]["params"]))
        return {
            key: value
            for key, value in owner.state[param].items()
            if isinstance(value, Tensor) and value.shape == param.shape
        }

    @torch.no_grad()
    def edit(self) -> None:
        if self.case["door"] == "owned":
            with self.optimizer.owned() as parts:
                for part in parts:
                    if part.name in EDITS:
                        EDITS[part.name](part, part.start)
        else:
            with self.optimizer.whole("first", "second", "odd", self.model.bias) as params:
                assert set(params) == set(EDITED)
                for name, whole in params.items():
                    assert whole.master.shape == getattr(self.model, name).shape
                    EDITS[name](Edited(whole), 0)
        for name in EDITED:
            flat = Flat(self.params[name].data, self.state(name))
            EDITS[name](flat, 0)
            for key, value in self.state(name).items():
                value.copy_(flat.state[key])

    def parts(self) -> dict[tuple[str, int, int, str], Tensor]:
        """Return masters, state and averages of this rank."""
        return {key: value.reshape(-1) for key, value in parts(self.optimizer).items()}

    def expected(self, parts: Mapping[tuple[str, int, int, str], Tensor]) -> dict[Any, Tensor]:
        """Return the same of the oracle."""
        found = {}
        for name, start, stop, kind in parts:
            whole = {"master": self.params[name].detach(), "average.ema": self.average[name]}
            whole |= self.state(name)
            if kind in whole:  # skips step counts, even for parameters of one element
                found[name, start, stop, kind] = whole[kind].reshape(-1)[start:stop].clone()
        return found

    def check(self) -> None:
        parts = self.parts()
        expected = self.expected(parts)
        kinds = {kind for *_, kind in parts}
        assert not self.low or "exp_avg" in kinds or "momentum_buffer" in kinds
        if not self.low and self.case["kind"] in ("AdamW", "SGD"):
            assert_same_bits({key: parts[key] for key in expected}, expected)
        elif not self.low:
            for key, value in expected.items():
                torch.testing.assert_close(parts[key], value, rtol=0, atol=1e-6)
        for shard in self.packed.shards:  # published values must be the casts
            for fragment in shard.fragments:
                if fragment.slot.name != "kept":  # written by the script
                    own = shard.published[shard.local(fragment.start, fragment.stop)]
                    cast = shard.rounded(fragment.slot, shard.exact(fragment))
                    assert_same_bits({"": own}, {"": cast})
        self.optimizer.check_copies()

    def check_edit(self, before: Mapping[Any, Tensor], after: Mapping[Any, Tensor]) -> None:
        """Compare one edit with the same edit of the previous values in plain torch."""
        assert before.keys() == after.keys()
        by_part: dict[Any, dict[str, Tensor]] = {}
        for (*place, kind), value in before.items():
            by_part.setdefault((*place,), {})[kind] = value.clone()
        for (name, start, stop), had in by_part.items():
            shape = self.params[name].shape
            state = {kind: value for kind, value in had.items() if kind in self.state(name)}
            flat = Flat(had["master"].clone(), state)
            if name in EDITS:
                EDITS[name](flat, start)
            want = {**had, "master": flat.master, **flat.state}
            for kind, value in want.items():
                now = after[name, start, stop, kind]
                if kind in state and self.low and not torch.equal(value, had[kind]):
                    if self.case["form"] == "int8":
                        row = row_of(self.packed.config, torch.bfloat16)
                        size = nn.functional.pad(value.abs(), (0, -len(value) % row)).view(-1, row)
                        room = 0.02 * size.amax(1).repeat_interleave(row)[: len(value)]
                        assert ((now - value).abs() <= room).all(), (name, kind, shape)
                    else:
                        assert_same_bits({kind: now}, {kind: value.to(torch.bfloat16).float()})
                else:
                    assert_same_bits({kind: now}, {kind: value})

    def follow(self) -> None:
        """Apply the changes like a reader of the weights."""
        if self.case["option"] != "changes" or "tp" in MESHES[self.case["mesh"]][0]:
            return
        found = self.optimizer.changes(since=self.version)
        assert found.is_full == (self.version is None)
        self.version = found.version
        for name, shape, dtype, value, indices in found.patches:
            told = self.told.setdefault(name, torch.zeros(shape, dtype=dtype).view(-1))
            told[indices.long()] = value
        for shard in self.packed.shards if found.patches else ():
            for fragment in shard.fragments:
                own = shard.published[shard.local(fragment.start, fragment.stop)]
                told = self.told[fragment.slot.name][slice(*fragment.param_range)]
                assert_same_bits({"": told}, {"": own})


def train(mesh: Any, case: Mapping[str, str]) -> dict[str, Tensor]:
    run = Run(mesh, case)
    for number in range(STEPS):
        run.step(number)
        run.check()
        run.follow()
        if number % 2:
            if case["form"] != "split16":  # split masters would keep their low bits
                with torch.no_grad():  # a script's write, which an edit must not undo
                    run.model.kept.mul_(1.25)
                    run.params["kept"].copy_(run.model.kept)
            before, shown, digest = run.parts(), local_values(run), run.optimizer.digest()
            versions = [param._version for param in run.model.parameters()]
            with getattr(run.optimizer, case["door"])(*["*"] * (case["door"] == "whole")) as seen:
                for one in seen if case["door"] == "owned" else seen.values():
                    local(one.master).mul_(1)
                    assert one.grad is None
            assert run.optimizer.digest() == digest
            assert [param._version for param in run.model.parameters()] == versions, "for autograd"
            assert_same_bits({**run.parts(), **local_values(run)}, {**before, **shown})
            run.edit()
            assert run.model.kept._version == versions[[*SHAPES].index("kept")]
            run.check_edit(before, run.parts())
            assert torch.equal(run.model.kept, shown["kept"])
            run.check()
            run.follow()
    return local_values(run)


def local_values(run: Run) -> dict[str, Tensor]:
    return {name: local(value) for name, value in values(run.model).items()}


CASES = [dict(zip(AXES, case, strict=True)) for case in pairwise(*AXES.values(), fits=fits)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_doors_edit_what_plain_torch_edits(case: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    if case["kind"] == "Muon":
        exact_muon(monkeypatch)
    ranks = threaded_world(MESHES[case["mesh"]][0], train, case)
    for other in ranks[1:]:
        same = EDITED if case["mesh"] != "tensor-parallel" else ["odd", "bias", "kept"]
        assert_same_bits({n: other[n] for n in same}, {n: ranks[0][n] for n in same})
