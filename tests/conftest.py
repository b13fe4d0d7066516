"""Triton kernels run in Triton's interpreter where there is no GPU; it must know before they are imported."""

from __future__ import annotations

import os
from typing import Any

import torch
from hypothesis import settings

# A busy machine takes its time for a case now and then; what must not hang has pytest's own limit.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    import triton.runtime.interpreter as interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _with_scalar_index(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 no longer makes an integer of an array with one element, as the interpreter's loops ask."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _with_scalar_index
