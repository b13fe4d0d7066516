"""A process that decodes with transformers' own model, given the same shape and weights, and says how fast.

    python -m headrace.bench.engine.transformers_peer JOB     (JSON in, one line of JSON out)

`generate` is timed twice, for few and for many new tokens, so that prefill and whatever else a call costs once
cancel out. Continuous batching is timed by the timestamps that it puts on its tokens, from the moment when all
requests have begun until the first one ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.bench.engine.peers import Job

FEW_TOKENS = 16


def run(job: Job) -> dict[str, Any]:
    """tok_s, with what else there is to say; raises what transformers raises."""
    import torch

    model = _model(job)
    prompt = max(1, job.context - FEW_TOKENS - job.tokens // 2)
    prompts_bt = np.random.default_rng(job.seed).integers(0, model.config.vocab_size, (job.sequences, prompt))
    if job.mode == "continuous":
        return _continuous(model, prompts_bt.tolist(), FEW_TOKENS + job.tokens)
    return _generate(model, torch.from_numpy(prompts_bt).to(model.device), job)


def _model(job: Job) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from headrace.bench.engine.shapes import DTYPE, config_of, random_weights

    config, device = config_of(job.shape), torch.device(job.device)
    written = config.to_hf()
    theirs = AutoConfig.for_model(written.pop("model_type"), **written)
    with device:
        model = AutoModelForCausalLM.from_config(theirs, dtype=DTYPE, attn_implementation="sdpa")
    # A tied head is the embedding itself and is left out of the state.
    missing, unexpected = model.load_state_dict(random_weights(config, device, job.seed).state_dict(), strict=False)
    assert (unexpected, set(missing) - {"lm_head.weight"}) == ([], set())
    return model.eval()


def _sampling(tokens: int, **more: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0, **more
    )


def _generate(model: Any, prompts_bt: Any, job: Job) -> dict[str, Any]:
    import torch

    more = {"cache_implementation": "static"} if job.mode == "compiled" else {}

    def seconds(tokens: int) -> float:
        _wait(job)
        began = time.perf_counter()
        out = model.generate(
            prompts_bt,
            attention_mask=torch.ones_like(prompts_bt),
            generation_config=_sampling(tokens, **more),
        )
        _wait(job)
        assert out.shape[1] == prompts_bt.shape[1] + tokens
        return time.perf_counter() - began

    many = FEW_TOKENS + job.tokens
    # The longest call first: a static cache keeps that size, and with it the compiled code.
    for tokens in (many, FEW_TOKENS) if job.mode == "compiled" else (FEW_TOKENS,):
        seconds(tokens)
    if job.mode == "compiled" and not hasattr(model, "_compiled_call"):
        raise RuntimeError(f"generate did not compile the forward pass on {job.device}")
    step_s = (seconds(many) - seconds(FEW_TOKENS)) / job.tokens
    return {"tok_s": job.sequences / step_s, "attention": model.config._attn_implementation}


def _continuous(model: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    from transformers import ContinuousBatchingConfig

    # On a CPU its defaults would take most of the machine's memory.
    small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512) if model.device.type == "cpu" else None
    used: list[str] = []
    switch = model.set_attn_implementation

    def noted(name: str, *rest: Any, **more: Any) -> Any:
        used.append(name)
        return switch(name, *rest, **more)

    model.set_attn_implementation = noted
    attention = model.config._attn_implementation
    answers = model.generate_batch(
        prompts,
        generation_config=_sampling(tokens, eos_token_id=-1),
        continuous_batching_config=small,
        record_timestamps=True,
    )
    failed = [answer.error for answer in answers.values() if answer.error]
    if failed or len(answers) < len(prompts):
        raise RuntimeError(f"{len(answers) - len(failed)} of {len(prompts)} requests were answered {failed[:1]}")
    stamps = [np.asarray(answer.timestamps) for answer in answers.values()]
    rate, whole = rate_between(stamps)
    return {"tok_s": rate, "attention": used[0] if used else attention, "prefill_within": whole}


def rate_between(stamps: Sequence[np.ndarray]) -> tuple[float, bool]:
    """(tokens a second while all sequences decode, False); over everything, and True, where they never all do."""
    first = max(float(stamp[0]) for stamp in stamps)
    last = min(float(stamp[-1]) for stamp in stamps)
    whole = last <= first
    if whole:
        first, last = min(float(stamp[0]) for stamp in stamps), max(float(stamp[-1]) for stamp in stamps)
    count = sum(int(((stamp > first) & (stamp <= last)).sum()) for stamp in stamps)
    return count / (last - first), whole


def _wait(job: Job) -> None:
    import torch

    if job.device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    out = os.dup(1)
    # What libraries print belongs to the log.
    os.dup2(2, 1)
    try:
        answer = run(msgspec.json.decode(sys.argv[1], type=Job))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(out, json.dumps(answer).encode())
    sys.stdout.flush()
    # A background thread of theirs that hangs must not keep the answer.
    os._exit(0)
