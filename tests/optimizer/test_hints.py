"""Attributes of a DDP wrapper that a script still asks a sharded model for."""

from __future__ import annotations

import pytest
import torch
from commands import python
from torch import nn

import shardcast
from shardcast.optimizer import hints

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import sys, threading
import torch
import shardcast

def former(kind, error, trace):
    print("former hook", file=sys.stderr)
    sys.__excepthook__(kind, error, trace)

sys.excepthook = former
model = torch.nn.Linear(2, 2)
shardcast.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), param_dtype="fp32")

def script():
    {statement}

{call}
"""
SYNC, MODULE = "`with optimizer.no_sync():`", "use the model itself"


@pytest.mark.parametrize(
    ("statement", "call", "told"),
    [
        ("model.no_sync()", "script()", SYNC),
        ("model.module.state_dict()", "script()", MODULE),
        ("model.module", "t = threading.Thread(target=script); t.start(); t.join()", MODULE),
    ],
)
def test_an_error_that_ends_the_script_names_what_to_use(statement: str, call: str, told: str):
    script = SCRIPT.format(statement=statement, call=call)
    stderr = python("-c", script).stderr
    name = statement.split(".")[1].strip("()")
    assert f"AttributeError: 'Linear' object has no attribute '{name}'" in stderr
    assert told in stderr.rpartition("AttributeError")[2]
    assert stderr.count("stays a plain module") == 1
    assert ("former hook" in stderr) == (call == "script()"), "hooks before it are called"


def note_of(model: nn.Module, name: str) -> str:
    with pytest.raises(AttributeError) as raised:
        getattr(model, name)
    hints.explain(raised.value)
    return "".join(getattr(raised.value, "__notes__", ()))


def test_only_names_of_ddp_on_a_sharded_model_are_explained():
    model = nn.Linear(2, 2)
    assert note_of(model, "no_sync") == ""
    optimizer = shardcast.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), param_dtype="fp32"
    )
    assert SYNC in note_of(model, "no_sync") and SYNC in note_of(
        model, "require_backward_grad_sync"
    )
    assert "coming-from" in note_of(model, "register_comm_hook")
    assert note_of(model, "weigth") == ""
    assert not hasattr(model, "no_sync"), "code that asks gets the right answer"
    optimizer.close()
    assert note_of(model, "no_sync") == ""


def test_torchs_errors_of_dtypes_say_which_parameters_are_low(monkeypatch: pytest.MonkeyPatch):
    """As of a script that multiplies fp32 copies of weights with weights."""
    monkeypatch.setattr(hints, "_low", type(hints._low)())  # models of other tests may live

    def note() -> str:
        with pytest.raises(RuntimeError, match="dtype") as raised:
            torch.dot(torch.ones(4), torch.ones(4, dtype=torch.bfloat16))
        hints.explain(raised.value)
        return "".join(getattr(raised.value, "__notes__", ()))

    low, exact = nn.Linear(2, 2), nn.Linear(2, 2)
    for model, dtype in ((exact, "fp32"), (low, "bf16")):
        assert note() == ""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = shardcast.shard(model, optimizer, param_dtype=dtype)
    assert "bfloat16" in note() and "keep_fp32" in note()
    other = ValueError("dtype")
    hints.explain(other)
    assert not hasattr(other, "__notes__")
    optimizer.close()
    assert note() == ""
