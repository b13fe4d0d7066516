"""Makes the quickstart's model: a tokenizer of 18 words, 0.1 M parameters, and a short supervised warm start.

    python examples/quickstart/prepare.py runs/quickstart-model [seed]

It learns from worked examples, first as many that think as answer at once, then nine in ten that answer at once:
it begins with some success, the means to do better, and little inclination to use them.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from days import WORDS, lazy, prompt, thinking, unseen
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.models import CausalLM, ModelConfig, PackedContext, random_model, save_model

STEPS, BATCH, LEARNING_RATE = 700, 32, 3e-3
END = "<end>"


def thinking_share(step: int) -> float:
    return 0.5 if step < 0.7 * STEPS else 0.1


def make_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", END, *WORDS])}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def make_model(tokenizer: Tokenizer, seed: int) -> CausalLM:
    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "initializer_range": 64**-0.5,
            "eos_token_id": tokenizer.token_to_id(END),
        }
    )
    model = random_model(config, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config.num_layers) ** -0.5)
    return model


def warm_start(model: CausalLM, tokenizer: Tokenizer, seed: int) -> float:
    """Supervised steps on the mixture; returns the last loss."""
    dice, examples = random.Random(seed), unseen(seed + 1)
    end = tokenizer.token_to_id(END)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    begun, loss = time.monotonic(), torch.zeros(())
    for step in range(STEPS):
        sequences, targets = [], []
        for riddle in islice(examples, BATCH):
            asked = tokenizer.encode(prompt(riddle)).ids
            told = tokenizer.encode((thinking if dice.random() < thinking_share(step) else lazy)(riddle)).ids
            sequences.append([*asked, *told, end])
            targets.append([False] * (len(asked) - 1) + [True] * (len(told) + 1) + [False])
        context = PackedContext([len(s) for s in sequences])
        tokens = torch.tensor([token for s in sequences for token in s])
        kept = torch.tensor([keep for t in targets for keep in t])
        hidden = model(tokens, context.positions, context)[kept]
        logprobs, _ = model.ops.token_logprobs(hidden, model.head_weight, tokens.roll(-1)[kept])
        loss = -logprobs.mean()
        rate = min(1, (step + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            left = (time.monotonic() - begun) / (step + 1) * (STEPS - step - 1)
            end_of_line = "\n" if step + 1 == STEPS else "\r"
            note = f"warm start {step + 1}/{STEPS}  loss {loss.item():.3f}  {left:4.0f} s left"
            print(note, end=end_of_line, file=sys.stderr, flush=True)
    return loss.item()


def main() -> None:
    folder = Path(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if (folder / "config.json").exists():
        print(f"{folder} is there already; remove it to make it anew", file=sys.stderr)
        return
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    model = make_model(tokenizer, seed)
    warm_start(model, tokenizer, seed)
    save_model(model, model.config, folder)


if __name__ == "__main__":
    main()
