"""A LoRA adapter inside a model, by PEFT.

Its tensors have the names and shapes of PEFT's adapter_model.safetensors. They are made in float32. A back end may
keep those as masters (`backends.masters`) and have the model compute in the frozen weights' dtype; `merged` and
`save` are then for within `Masters.in_place`:

    y = W x + (alpha / rank) · B (A x)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headrace.errors import MissingExtra, RunFolderError
from headrace.models import CausalLM, Ops
from headrace.training.adapter import NAME, bound_modules
from headrace.training.config import LoraConfig

FOLDER = "adapter"
"""Where an exported model's folder has the adapter itself, beside the weights it was merged into."""
HEAD_AND_EMBEDDING = ("lm_head", "model.embed_tokens")
"""In Headrace's own models."""
_PREFIX, _WRAPPED = "base_model.model.", ".base_layer."
"""How PEFT begins names in its files, and names what it has wrapped."""


class Adapter:
    """Puts an adapter into `model`, which computes with it from here on; the model's own weights are frozen."""

    def __init__(self, model: nn.Module, config: LoraConfig, *, head_and_embedding: Collection[str], seed: int = 0):
        """B is zero and A is drawn by PEFT from `seed`, on the CPU; the process's generators are left alone.

        Raises ConfigError for a target that binds to nothing, to the head or to the embedding.
        """
        try:
            import peft
        except ModuleNotFoundError as error:
            raise MissingExtra("peft", "lora") from error
        names = {name for name, _ in model.named_modules() if name} | set(head_and_embedding)
        projections = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name not in head_and_embedding
        ]
        bound = bound_modules(config.targets, projections, names.difference(projections))
        self._model = model
        self._peft_config = peft.LoraConfig(
            r=config.rank,
            # Readers of the file expect an integer where it is one.
            lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,  # type: ignore[arg-type]
            target_modules=sorted(set(config.targets)),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(self._peft_config, model, adapter_name=NAME)
        self._layers: dict[str, Any] = {name: model.get_submodule(name) for name in bound}
        self.inside: dict[str, nn.Parameter] = dict(self._named())
        """By their names in the model."""
        self.parameters = {_PREFIX + _without_adapter(name): p for name, p in self.inside.items()}
        """By their names in a file."""
        for parameter in self.inside.values():
            parameter.data = parameter.data.float()  # PEFT gives it the frozen weights' dtype

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Within it the model computes without the adapter."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def merged(self) -> dict[str, Tensor]:
        """All tensors of the model without an adapter, which is added to the weights it belongs to.

        Floating-point ones are float32, on the CPU; tied ones are one tensor.
        """
        once: dict[tuple[Any, ...], Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            if name in self.inside:
                continue
            place = (tensor.data_ptr(), tensor.shape)
            if place not in once:
                once[place] = self._with_adapter(name, tensor)
            state[name.replace(_WRAPPED, ".")] = once[place]
        return state

    def save(self, folder: str | Path, base: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the folder that PEFT loads over the model of the folder `base`, its tensors in `dtype`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in self.parameters.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        content = self._peft_config.to_dict() | {"base_model_name_or_path": str(base), "inference_mode": True}
        text = json.dumps(content, indent=2, sort_keys=True, default=sorted)  # PEFT has sets
        (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, layer in self._layers.items():
            for part in ("lora_A", "lora_B"):
                yield f"{name}.{part}.{NAME}.weight", getattr(layer, part)[NAME].weight

    def _with_adapter(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.float()
        layer = self._layers.get(name.removesuffix(_WRAPPED + "weight"))
        if layer is not None:
            tensor = tensor + layer.get_delta_weight(NAME).detach()
        return tensor.cpu()


def attach(model: CausalLM, config: LoraConfig, tensors: Mapping[str, Tensor]) -> CausalLM:
    """Put a stored adapter into a model of ours, for inference: A and B in the model's dtype, and W x computed by
    the model's operations, as it is without an adapter."""
    adapter = Adapter(model, config, head_and_embedding=HEAD_AND_EMBEDDING)
    own = adapter.parameters
    differing = {n for n in own.keys() | tensors.keys() if _shape(own.get(n)) != _shape(tensors.get(n))}
    if differing:
        raise RunFolderError(
            "weights kept by a run with training.lora are its adapter's tensors",
            sorted(differing)[:5],
            "audit the run with the model and the configuration it had",
        )
    for name, parameter in own.items():
        parameter.data = tensors[name].to(model.head_weight)
    for layer in adapter._layers.values():
        layer.base_layer = _ByOps(layer.base_layer, model.ops)
    return model


class _ByOps(nn.Module):
    """A projection that the model's operations compute, though PEFT calls it."""

    def __init__(self, linear: nn.Linear, ops: Ops):
        super().__init__()
        self.linear, self.ops = linear, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.linear.weight, self.linear.bias)


def _without_adapter(name: str) -> str:
    return name.removesuffix(f".{NAME}.weight") + ".weight"


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
