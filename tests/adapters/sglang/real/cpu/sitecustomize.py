"""Let torchvision be imported beside a torch without CUDA, in every process that has this folder on PYTHONPATH.

PyPI's torchvision is built for CUDA: beside PyPI's torch for the CPU its own library does not load, and the schemas of
its operators, which it describes to torch as it is imported (torchvision/_meta_registrations.py), are missing. SGLang
imports it and calls none of them.
"""

import os
import sys

if os.environ.get("SGLANG_ADAPTER_CPU") == "1":
    import torch

    sys._torchvision_schemas = torch.library.Library("torchvision", "DEF")  # it ends with its last reference
    sys._torchvision_schemas.define("nms(Tensor dets, Tensor scores, float t) -> Tensor")
    sys._torchvision_schemas.define("qnms(Tensor dets, Tensor scores, float t) -> Tensor")
