"""The versions whose weights a run kept, as models."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.models import CausalLM


class KeptVersions:
    """Loads a version when it is asked for, on the CPU, in the type the engine served it in."""

    def __init__(self, model_folder: Path, versions: Path, *, dtype: str):
        self._model_folder = model_folder
        self._dtype = dtype
        self._files = {int(file.stem): file for file in versions.glob("*.safetensors") if file.stem.isdigit()}
        self.model = lru_cache(maxsize=8)(self._load)

    @property
    def numbers(self) -> set[int]:
        return set(self._files)

    def _load(self, number: int) -> CausalLM:
        import torch
        from safetensors.torch import load_file

        from headrace.models import load_model

        model = load_model(self._model_folder, dtype=getattr(torch, self._dtype), device="cpu")
        model.load_state_dict(load_file(self._files[number]))
        return model
