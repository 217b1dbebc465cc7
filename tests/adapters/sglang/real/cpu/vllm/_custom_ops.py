"""One name: SGLang imports it as it makes a rotary embedding without CUDA (layers/rotary_embedding/base.py:138), whose
forward on a CPU is torch's. Nothing else is here, so that every other try to find vLLM finds it missing.
"""

from typing import Any, NoReturn


def rotary_embedding(*_: Any) -> NoReturn:
    """Refuse: it is not to be reached."""
    raise NotImplementedError("vLLM's rotary embedding is not here; SGLang on a CPU has torch's")
