"""Prompt refiners: expand short prompts with a causal language model in a local folder, or with a command.

Open-Sora-Plan's refiner is such a folder (LLaMA 3.1 8B Instruct, fine-tuned). It is asked through its chat template,
with a system message that names its role and a request that quotes the prompt; at most 512 tokens are made, and how
they are drawn is up to the folder's generation config. The rendered chat begins with one begin token, as in its
training; the published sampler gave it two.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.core.random import key
from frameloom.models.text.transformers_folder import quiet_transformers

Refiner = Callable[[str, int], str]
"""(prompt, seed) -> refined prompt"""

SYSTEM = "You are a caption refiner."
REQUEST = (
    'Expand the sentence "{prompt}" into one fluent description of a video that names the subject, what it does and '
    "the scene around it, and that is full of movement. You may add camera work, light and mood. Answer with the "
    "description alone."
)
MAX_NEW_TOKENS = 512
_TIMEOUT_S = 600
_MAX_CHARACTERS = 10_000


def refine_prompts(refine: Refiner, prompts: Sequence[str], *, seed: int = 0) -> list[str]:
    """All prompts refined, each from a seed of its own; an empty one stays empty."""
    return [refine(prompt, seed + number) if prompt.strip() else prompt for number, prompt in enumerate(prompts)]


def build_refiner(model: Path | None, command: str | None, *, max_new_tokens: int = MAX_NEW_TOKENS) -> Refiner:
    """The refiner of a folder or of a command; exactly one of them."""
    if (model is None) == (command is None):
        raise ConfigError("a refiner is a folder with a language model, or a command; name one of the two")
    if command is None:
        assert model is not None
        return load_refiner(model, max_new_tokens=max_new_tokens)
    words = shlex.split(command)
    if not words:
        raise ConfigError("the refiner's command is empty; name a program")
    return lambda prompt, seed: run_refiner(words, prompt)


def run_refiner(words: Sequence[str], prompt: str) -> str:
    """A program that reads the prompt from its input and writes the refined one to its output, without a shell."""
    where = f"refiner '{shlex.join(words)}'"
    try:
        done = subprocess.run(words, input=prompt, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be started ({error.strerror}); check the name of the program") from error
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{where}: gave no answer within {_TIMEOUT_S} s; it was stopped") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it wrote no message"]
        raise DataError(f"{where}: ended with code {done.returncode}: {last[0]}")
    return _check_answer(done.stdout, where)


def load_refiner(folder: Path, *, max_new_tokens: int = MAX_NEW_TOKENS, device: torch.device | str = "cpu") -> Refiner:
    """A causal language model with its tokenizer, in a folder as transformers writes it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: holds no language model (config.json is missing); name its folder")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder}: holds no .safetensors files; convert its weights, pickles are not opened")
    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: cannot be read as a language model ({error}); copy it again") from error
    model.to(device).eval()

    # The template of a chat writes the begin token itself.
    has_chat = tokenizer.chat_template is not None

    @torch.no_grad()
    def refine(prompt: str, seed: int) -> str:
        question = REQUEST.format(prompt=prompt)
        text = f"{SYSTEM}\n{question}\n"
        if has_chat:
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=not has_chat, return_tensors="pt").input_ids.to(model.device)
        # transformers draws tokens from the global generator, which is left as it was.
        with torch.random.fork_rng(), quiet_transformers():
            torch.manual_seed(key(seed, "refine") >> 1)
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )
        answer = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        return _check_answer(answer, f"refiner {folder}")

    return refine


def _check_answer(answer: str, where: str) -> str:
    """One line of text; an empty or endless answer is an error rather than a prompt."""
    text = " ".join(answer.split())
    if not text:
        raise DataError(f"{where}: gave an empty answer; try another prompt or seed, or leave the refiner out")
    return text[:_MAX_CHARACTERS]
