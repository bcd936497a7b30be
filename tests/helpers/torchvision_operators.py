"""Define torchvision's operators if its wheel cannot; import this before torchvision.

A wheel for CUDA cannot load its operators next to a CPU torch. timm and others import torchvision
but call none of its operators.
"""

import importlib.util

import torch

library = torch.library.Library("torchvision", "FRAGMENT")  # operators live as long as it does
if importlib.util.find_spec("torchvision") and torch.version.cuda is None:
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
