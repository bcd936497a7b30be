"""Changes of parameters that have a published form, as codes and scales of whole blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardcast import _compat
from shardcast.extensions.chance import global_index
from shardcast.extensions.changes.patches import WeightPatch, in_32_bits
from shardcast.extensions.published_forms.forms import FORMS
from shardcast.extensions.published_forms.reading import SCALE, as_exported


def coded(
    name: str, values: Tensor, param: nn.Parameter, start: int, places: Tensor, form_name: str
) -> Iterator[WeightPatch]:
    """Return the codes, and scales, of the blocks in which something has changed.

    A block is told whole: another scale changes all of its codes, and the values of few. They have
    the names, dtypes and shapes that ``checkpoint.export(..., weights="published")`` writes.

    Args:
        values: what is published of a part of the parameter, 1-d, whole blocks.
        start: of that part in the flat local tensor.
        places: of what has changed in that part.
    """
    form = FORMS[form_name]
    whole: Tensor = param  # of a DTensor the shape of all ranks' parts
    rows, columns, width = form.block_rows, form.block_columns, whole.shape[-1]
    local_width = _compat.local_tensor(param).shape[-1]
    row, column = places // local_width // rows * rows, places % local_width // columns * columns
    first = (row * local_width + column).unique()  # elements of blocks, in the part
    down = torch.arange(rows, device=places.device)[:, None] * local_width
    elements = first[:, None, None] + down + torch.arange(columns, device=places.device)
    codes, scales = form.quantize(values[elements].view(-1, columns))
    codes, scales = as_exported(form, codes.view(-1), scales.view(-1))
    in_whole = global_index(param, elements.view(-1) + start)
    per_code = elements.numel() // max(1, codes.numel()) or 1  # two in a byte, of neighbors
    shape = (*whole.shape[:-1], width // per_code)
    at = in_whole[::per_code] // per_code
    yield WeightPatch(name, shape, codes.dtype, codes, in_32_bits(at, whole))
    corner = in_whole.view(elements.shape)[:, 0, 0]
    at = corner // width // rows * (width // columns) + corner % width // columns
    shape = form.scale_shape(tuple(whole.shape))
    yield WeightPatch(name + SCALE, shape, scales.dtype, scales, in_32_bits(at, whole))
