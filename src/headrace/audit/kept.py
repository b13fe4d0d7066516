"""The versions whose weights a run kept, as models."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.config import NativeEngineConfig

if TYPE_CHECKING:
    from headrace.models import CausalLM, Ops
    from headrace.training.config import LoraConfig


class KeptVersions:
    """Loads a version when it is asked for, in the type the engine served it in.

    On the CPU; an engine that was exact is replayed exactly, on the kind of device it had. What an engine computed
    in FP8 is computed so by definition. With `lora` a version is the adapter alone, over the weights of the folder,
    which all versions share.
    """

    def __init__(
        self, model_folder: Path, versions: Path, engine: NativeEngineConfig, lora: LoraConfig | None = None
    ):
        self._model_folder = model_folder
        self._engine = engine
        self._lora = lora
        self._files = {int(file.stem): file for file in versions.glob("*.safetensors") if file.stem.isdecimal()}
        self._base = cache(self._load_base)
        self.model = lru_cache(maxsize=8)(self._load)
        self.shaken = lru_cache(maxsize=8)(lambda number: shaken(self.model(number), seed=number))

    @property
    def numbers(self) -> set[int]:
        return set(self._files)

    def _load(self, number: int) -> CausalLM:
        from safetensors.torch import load_file

        tensors = load_file(self._files[number])
        if self._lora is None:
            model = self._load_base()
            model.load_state_dict(tensors)
            return model
        from headrace.training.backends.lora import attach

        base = self._base()
        return attach(deepcopy(base, {id(p): p for p in base.parameters()}), self._lora, tensors)

    def _load_base(self) -> CausalLM:
        import torch

        from headrace.models import dtype_on, load_model

        exact = self._engine.numerics == "exact"
        had_cuda = exact and self._engine.device != "cpu" and torch.cuda.is_available()
        device = "cuda" if had_cuda else "cpu"
        return load_model(
            self._model_folder,
            dtype=dtype_on(device, self._engine.dtype),
            device=device,
            ops=replay_ops(self._engine),
        )


def shaken(model: CausalLM, seed: int) -> CausalLM:
    """The model, every weight of its norms off by one rounding: what it computes differs as two orders of a sum do.

    It has all else in common with the given one.
    """
    import torch

    norms = {id(p) for name, p in model.named_parameters() if name.endswith("norm.weight")}
    other = deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in norms})
    signs = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in other.named_parameters():
            if name.endswith("norm.weight"):
                up = torch.randint(0, 2, p.shape, generator=signs).to(p.device, p.dtype)
                p.mul_(1 + torch.finfo(p.dtype).eps * (2 * up - 1))
    return other


def replay_ops(engine: NativeEngineConfig) -> Ops | None:
    """What a model that replays this engine's turns computes with; None: as a model does by itself."""
    from headrace.models import ExactOps, Fp8Ops, quantize_together

    if engine.numerics == "exact":
        return ExactOps()
    kv, weights = engine.kv_dtype == "fp8", engine.weight_dtype == "fp8"
    if not (kv or weights):
        return None
    # A version's weights never change, so each is quantised once.
    return Fp8Ops(cache(quantize_together) if weights else None, kv=kv)
