"""Prompt refiners: a real language model of a few thousand weights, and real programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from frameloom.core.errors import CheckpointError, ConfigError, DataError
from frameloom.models.text.transformers_folder import quiet_transformers
from frameloom.sampling.refine import REQUEST, SYSTEM, build_refiner, load_refiner, refine_prompts
from tests.faults.warm import run_frameloom

CHAT = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(folder: Path, *, chat: bool = True, draws: bool = False) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([SYSTEM, REQUEST, "a cat by the sea, the camera moves slowly"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    if chat:
        tokenizer.chat_template = CHAT
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.5,
            bos_token_id=0,
            eos_token_id=1,
        )
        model = LlamaForCausalLM(config)
        settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9} if draws else {"do_sample": False}
        model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, **settings)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("refiner"), draws=True)


def test_answers_are_what_the_model_generates_after_the_chat(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "greedy")
    refiner = load_refiner(folder, max_new_tokens=12)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = f"<s><system>{SYSTEM}</s><user>{REQUEST.format(prompt='a cat')}</s><assistant>"
    ids = tokenizer(chat, add_special_tokens=False, return_tensors="pt").input_ids
    assert (ids == 0).sum() == 1
    with torch.no_grad():
        for _ in range(12):
            best = model(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    expected = tokenizer.decode(ids[0, -12:], skip_special_tokens=True)
    assert refiner("a cat", 0) == " ".join(expected.split())
    assert refiner("a cat", 0) != refiner("two dogs by a very long river", 0)


def test_a_model_that_draws_words_repeats_them_by_seed(drawing: Path) -> None:
    refiner = build_refiner(drawing, None, max_new_tokens=12)
    before = torch.random.get_rng_state()
    first, again, other = (refine_prompts(refiner, ["a cat", "a dog"], seed=seed) for seed in (1, 1, 5))
    assert first == again != other
    assert torch.equal(before, torch.random.get_rng_state())
    assert refine_prompts(refiner, [""], seed=1) == [""]


def test_a_model_without_a_chat_template_is_asked_in_plain_text(tmp_path: Path) -> None:
    assert load_refiner(make_model(tmp_path / "plain", chat=False), max_new_tokens=8)("a cat", 0)


def test_a_command_reads_the_prompt_and_writes_the_answer() -> None:
    program = f"{sys.executable} -c \"print(input().upper(), '\\n on a hill')\""
    assert refine_prompts(build_refiner(None, program), ["a cat; $(id)"]) == ["A CAT; $(ID) on a hill"]


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("no-such-program", ConfigError, "cannot be started"),
        ("", ConfigError, "empty"),
        (f"{sys.executable} -c \"raise SystemExit('broken')\"", DataError, "ended with code 1: broken"),
        (f"{sys.executable} -c pass", DataError, "empty answer"),
    ],
)
def test_a_command_that_fails_is_told(command: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        refine_prompts(build_refiner(None, command), ["a cat"])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no language model"):
        build_refiner(tmp_path, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="pickles are not opened"):
        build_refiner(tmp_path, None)
    with pytest.raises(ConfigError, match="name one of the two"):
        build_refiner(None, None)


@pytest.mark.slow
def test_the_command_prints_refined_prompts(drawing: Path) -> None:
    done = run_frameloom("refine", "a cat", "--model", drawing, "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == refine_prompts(build_refiner(drawing, None, max_new_tokens=8), ["a cat"])[0]
