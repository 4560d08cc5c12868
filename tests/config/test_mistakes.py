"""Mistakes that people make in recipes: each is refused with the key and the way out, before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import frameloom
from frameloom.config.loading.recipe import load_recipe
from frameloom.core.errors import ConfigError

RIGHT = """\
name: tiny
task: denoiser
vae: {weights: vae.safetensors}
data:
  manifest: clips.parquet
  where: {split: train}
  buckets:
    64px: {1: [1.0, 8], 9: [1.0, 4]}
optim:
  lr: 1e-4
train:
  steps: 100
"""

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join([f'*{chr(97 + level)}'] * 9)}]\n" for level in range(12)
)


@dataclass(frozen=True)
class Mistake:
    """`text` is the whole file; `more` is appended to the right one; `old`/`new` change a piece of it."""

    name: str
    fragments: tuple[str, ...]
    text: str | bytes | None = None
    more: str = ""
    old: str = ""
    new: str = ""
    words: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        assert self.old in RIGHT, self.name
        text = RIGHT.replace(self.old, self.new, 1) + self.more if self.text is None else self.text
        file = folder / "my.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file


def more(name: str, text: str, *fragments: str) -> Mistake:
    return Mistake(name, fragments, more=text)


def swap(name: str, old: str, new: str, *fragments: str) -> Mistake:
    return Mistake(name, fragments, old=old, new=new)


def whole(name: str, text: str | bytes, *fragments: str) -> Mistake:
    return Mistake(name, fragments, text=text)


MISTAKES = [
    # names of keys
    swap(
        "typo",
        "lr: 1e-4",
        "leraning_rate: 1e-4",
        "my.yaml:10:",
        "optim has no key 'leraning_rate'",
        "did you mean 'lr'?",
    ),
    swap("other trainer's name", "lr: 1e-4", "learning_rate: 1e-4", "did you mean 'lr'?"),
    swap("key in the wrong section", "steps: 100", "steps: 100\n  lr: 1e-4", "'lr' belongs to optim: optim.lr"),
    swap("key at the top", "task: denoiser", "task: denoiser\nsteps: 3", "'steps' belongs to train or sample"),
    swap("section typo", "optim:", "optm:", "my.yaml:9:", "the recipe has no key 'optm'", "did you mean 'optim'?"),
    swap("required key misspelt", "steps: 100", "stpes: 100", "did you mean 'steps'?"),
    swap("upper case", "optim:", "Optim:", "did you mean 'optim'?"),
    swap("dash for underscore", "lr: 1e-4", "weight-decay: 0", "did you mean 'weight_decay'?"),
    more(
        "misspelt field of the model",
        "model: {overrides: {hiden_size: 64}}",
        "model.overrides has 'hiden_size'",
        "did you mean 'hidden_size'?",
    ),
    more("text for a width", "model: {overrides: {depth: two}}", "model.overrides.depth is 'two'", "a whole number"),
    more("yes for a width", "model: {overrides: {depth: true}}", "model.overrides.depth is true", "a whole number"),
    more("a number for a list", "model: {overrides: {axes_dim: 16}}", "model.overrides.axes_dim is 16", "a list"),
    Mistake(
        "misspelt field of the autoencoder",
        ("vae.overrides has 'latent_chanels'", "did you mean 'latent_channels'?"),
        old="vae: {weights: vae.safetensors}",
        new="vae: {weights: vae.safetensors, overrides: {latent_chanels: 8}}",
    ),
    more(
        "key of a nested section",
        "text: {encoders: [{nmae: minilm}]}",
        "text.encoders.0 has no key 'nmae'",
        "did you mean 'name'?",
    ),
    more("batch size", "batch_size: 4", "did you mean data.buckets?"),
    more("nothing like it", "banana: 4", "the recipe has no key 'banana'", "known keys: name, task"),
    more("base inside a section", "sample: {_base_: x}", "'_base_' stands inside a section", "at the top"),
    # missing keys
    swap("no name", "name: tiny\n", "", "the recipe needs the key 'name'", "name: my-run"),
    swap("no steps", "  steps: 100", "  log_every: 3", "my.yaml:11: train needs the key 'steps'", "e.g. steps: 1000"),
    swap("no manifest", "manifest: clips.parquet", "root: .", "data needs the key 'manifest'", "clips.parquet"),
    # types
    swap(
        "text for a number",
        "steps: 100",
        "steps: many",
        "train.steps is 'many'",
        "expected a whole number of at least 1",
    ),
    swap("number in quotes", "steps: 100", "steps: '100'", "train.steps is '100'", "write the number without quotes"),
    swap("float steps", "steps: 100", "steps: 100.0", "train.steps is 100.0", "write 100"),
    swap("steps with exponent", "steps: 100", "steps: 1e3", "train.steps is 1000.0", "write 1000"),
    swap("half a step", "steps: 100", "steps: 100.5", "train.steps is 100.5", "whole number"),
    swap("zero steps", "steps: 100", "steps: 0", "train.steps is 0", "at least 1"),
    swap(
        "yes for true",
        "steps: 100",
        "steps: 100\n  recompute: yes",
        "train.recompute is 'yes'",
        "write true or false, without quotes",
    ),
    swap("on for true", "steps: 100", "steps: 100\n  recompute: on", "train.recompute is 'on'", "write true or false"),
    swap(
        "true in quotes", "steps: 100", "steps: 100\n  recompute: 'true'", "train.recompute is 'true'", "without quotes"
    ),
    swap("one for true", "steps: 100", "steps: 100\n  recompute: 1", "train.recompute is 1", "expected true or false"),
    swap("number for a name", "name: tiny", "name: 2024", "name is 2024", "put it in quotes: '2024'"),
    swap("name with a slash", "name: tiny", "name: a/b", "name is 'a/b'", "letters, digits"),
    swap(
        "list for a section",
        "optim:\n  lr: 1e-4",
        "optim: [adamw, 1e-4]",
        "optim is [adamw, 1e-4]",
        "a section with the keys name, lr",
    ),
    swap(
        "empty section", "optim:\n  lr: 1e-4", "optim:", "optim is null", "indent its keys below it or remove the line"
    ),
    swap("not indented", "optim:\n  lr: 1e-4", "optim:\nlr: 1e-4", "'lr' belongs to optim"),
    more(
        "one tracker without brackets",
        "run: {trackers: jsonl}",
        "run.trackers is 'jsonl'",
        "write it as a list: [jsonl]",
    ),
    more("unknown tracker", "run: {trackers: [jsonl, mlflow]}", "run.trackers.1 is 'mlflow'", "wandb or trackio"),
    more("wrong choice", "objective: {kind: flwo}", "objective.kind is 'flwo'", "flow, v, epsilon, sample or edm"),
    more(
        "word for a union",
        "objective: {shift: big}",
        "objective.shift is 'big'",
        "a number above 0, open_sora2, sd3 or null",
    ),
    more("device", "sample: {fps: fast}", "sample.fps is 'fast'", "a number above 0"),
    swap(
        "unknown device",
        "steps: 100",
        "steps: 100\n  device: gpu",
        "train.device is 'gpu'",
        "auto, cpu, cuda or cuda:N",
    ),
    more("no encoders", "text: {encoders: []}", "text.encoders is []", "it is empty"),
    more("condition is a list", "validation: {where: {split: [a, b]}}", "validation.where.split is [a, b]"),
    # models, conditions and text encoders
    more(
        "known without an input",
        "model: {family: sdxl}\nknown: {law: ends}",
        "known is set, but sdxl has no inpaint models",
    ),
    more(
        "unknown kind of what is known",
        "known: {law: ends, shares: {i2v_heads: 1}}",
        "known.shares has 'i2v_heads', which law ends does not know",
        "did you mean 'i2v_head'?",
    ),
    swap(
        "known with a latent cache",
        "optim:",
        "  cache: {latents: cache}\nknown: {law: frames}\noptim:",
        "no pixels to take known parts from",
        "remove the latent cache",
    ),
    swap("images beside clips", "optim:", "  use_image_num: 2\noptim:", "opensora2 takes no images beside"),
    swap("images of no number", "optim:", "  use_img_from_vid: true\noptim:", "data.use_image_num is 0"),
    more(
        "a share that the law does not draw by",
        "known: {law: ends, known_share: [0.1, 0.2]}",
        "known.known_share is [0.1, 0.2], which only law frames uses",
    ),
    more(
        "an option of an encoder without any",
        "text: {encoders: [{name: minilm, padding: attend}]}",
        "text.encoders.0.padding is set, but minilm is used in one way only",
    ),
    more(
        "noise cannot be predicted at zero signal",
        "objective: {kind: epsilon, zero_terminal_snr: true}",
        "epsilon says nothing of the picture",
        "set kind: v",
    ),
    more(
        "encoder without its folder",
        "text: {encoders: [{name: t5, max_length: 226}]}",
        "no package carries t5",
        "name the folder",
    ),
    more(
        "half a window",
        "text: {encoders: [{name: clip_l, max_length: 100, path: clip}]}",
        "reads windows of 75 tokens",
        "write 77 or 152",
    ),
    more(
        "frames that fill no token",
        "model: {family: cogvideox_fun, size: 5b-1.5}\nobjective: {kind: v}",
        "cogvideox_fun 5b-1.5 takes 1 or 8n+5; write 5 or 13",
    ),
    swap("infinite rate", "lr: 1e-4", "lr: 1e999", "my.yaml:10:", "the number 1e999 is too large"),
    swap("nan", "lr: 1e-4", "lr: .nan", "optim.lr is '.nan'", "a number above 0"),
    # lists and buckets
    swap("short betas", "lr: 1e-4", "betas: [0.9]", "optim.betas is [0.9]", "a list of 2"),
    swap("long betas", "lr: 1e-4", "betas: [0.9, 0.99, 0.999]", "optim.betas is [0.9, 0.99, 0.999]", "a list of 2"),
    swap("beta of one", "lr: 1e-4", "betas: [0.9, 1.0]", "optim.betas.1 is 1.0", "below 1"),
    swap("cell without batch", "1: [1.0, 8]", "1: [1.0]", "data.buckets.64px.1 is [1.0]", "[probability, batch size]"),
    swap("cell is a number", "1: [1.0, 8]", "1: 8", "data.buckets.64px.1 is 8", "[probability, batch size]"),
    swap(
        "cell turned round", "1: [1.0, 8]", "1: [8, 1.0]", "data.buckets.64px.1.0 is 8", "data.buckets.64px.1.1 is 1.0"
    ),
    swap("probability in percent", "1: [1.0, 8]", "1: [50, 8]", "data.buckets.64px.1.0 is 50", "from 0 to 1"),
    swap("pair out of range", "1: [1.0, 8]", "1: [[0.5, 1.5], 8]", "data.buckets.64px.1.0", "from 0 to 1"),
    swap("pair of three", "1: [1.0, 8]", "1: [[0.5, 0.5, 0.5], 8]", "data.buckets.64px.1.0 is [0.5, 0.5, 0.5]"),
    swap("batch of zero", "1: [1.0, 8]", "1: [1.0, 0]", "data.buckets.64px.1.1 is 0", "at least 1"),
    swap("frames in words", "1: [1.0, 8]", "one: [1.0, 8]", "data.buckets.64px has the key 'one'", "whole number"),
    swap("empty bucket", "64px: {1: [1.0, 8], 9: [1.0, 4]}", "64px: {}", "data.buckets.64px is {}", "it is empty"),
    swap("no buckets", "    64px: {1: [1.0, 8], 9: [1.0, 4]}", "    {}", "data.buckets is {}", "it is empty"),
    swap("resolution without unit", "64px:", "64:", "the resolution '64'", "256px"),
    swap("resolution as a size", "64px:", "64x64:", "the resolution '64x64'", "720p"),
    swap("resolution in capitals", "64px:", "64PX:", "the resolution '64PX'"),
    swap("ratio without a size", "64px:", "256px_ar7:3:", "my.yaml:8:", "no size of ratio 7:3", "16:9"),
    swap("resolution too large", "64px:", "100000px:", "the resolution '100000px' is too large", "99999px"),
    swap("skip of images", "1: [1.0, 8]", "1: [[0.5, 0.5], 8]", "no shorter length", "write one number"),
    swap("resolution too small", "64px:", "8px:", "smaller than one token", "32px or more"),
    swap("frames off the rule", "9: [1.0, 4]", "10: [1.0, 4]", "my.yaml:8:", "10 frames", "4n+1", "write 9 or 13"),
    swap("frames a power of two", "9: [1.0, 4]", "16: [1.0, 4]", "write 13 or 17"),
    swap("nothing is kept", "{1: [1.0, 8], 9: [1.0, 4]}", "{1: [0, 8], 9: [[0, 0], 4]}", "only probabilities of 0"),
    # units
    swap("lr without the minus", "lr: 1e-4", "lr: 1e4", "optim.lr is 10000.0", "did you mean 1e-4?"),
    swap("lr of ten", "lr: 1e-4", "lr: 10", "optim.lr is 10", "did you mean 1e-5?"),
    swap("negative lr", "lr: 1e-4", "lr: -1e-4", "optim.lr is -1e-4", "above 0"),
    more("percent for a share", "text: {dropout: 10}", "text.dropout is 10", "for 10 percent write 0.1"),
    swap("ema in percent", "steps: 100", "steps: 100\n  ema: {decay: 99.9}", "train.ema.decay is 99.9", "write 0.999"),
    swap(
        "milliseconds",
        "manifest: clips.parquet",
        "manifest: clips.parquet\n  timeout_s: 60000",
        "data.timeout_s is 60000",
        "seconds",
        "did you mean 60.0?",
    ),
    # names of models
    more("unknown family", "model: {family: opensora3}", "model.family is 'opensora3'", "did you mean 'opensora2'?"),
    more("unknown size", "model: {size: tiney}", "model.size is 'tiney'", "did you mean 'tiny'?"),
    more("far size", "model: {size: 70b}", "model.size is '70b'", "known sizes of opensora2: tiny"),
    swap(
        "unknown vae",
        "vae: {weights: vae.safetensors}",
        "vae: {weights: w, name: wfave}",
        "vae.name is 'wfave'",
        "did you mean 'wfvae'?",
    ),
    swap(
        "unknown vae size",
        "vae: {weights: vae.safetensors}",
        "vae: {weights: w, size: 4ch}",
        "vae.size is '4ch'",
        "8ch",
    ),
    more(
        "unknown encoder",
        "text: {encoders: [{name: minlm}]}",
        "text.encoders.0.name is 'minlm'",
        "did you mean 'minilm'?",
    ),
    # impossible combinations
    more("sample height", "sample: {height: 70}", "sample.height is 70", "multiple of 16", "write 64 or 80"),
    more("sample width", "sample: {width: 10}", "sample.width is 10", "write 16"),
    more("sample frames", "sample: {frames: 8}", "sample.frames is 8", "write 5 or 9"),
    more(
        "long text", "text: {encoders: [{max_length: 1024}]}", "max_length is 1024", "at most 512", "write 512 or less"
    ),
    more(
        "encoder twice",
        "text: {encoders: [{name: minilm}, {name: minilm}]}",
        "text.encoders.1 is the same encoder as text.encoders.0",
    ),
    swap(
        "warm-up longer than the run",
        "lr: 1e-4",
        "schedule: {warmup_steps: 100}",
        "warmup_steps is 100",
        "train.steps 100",
    ),
    swap("constant that falls", "lr: 1e-4", "schedule: {min_share: 0.1}", "min_share is 0.1", "set name: cosine"),
    swap(
        "cache of random clips",
        "manifest: clips.parquet",
        "manifest: c\n  cache: {latents: l}",
        "data.frame_start is random",
        "first or center",
    ),
    swap(
        "cache of mirrored clips",
        "manifest: clips.parquet",
        "manifest: c\n  frame_start: first\n  flip: 0.5\n  cache: {latents: l}",
        "data.flip is 0.5",
        "use 0",
    ),
    swap("no autoencoder", "vae: {weights: vae.safetensors}\n", "", "vae.weights is null", "task: autoencoder"),
    more("flow setting with v", "objective: {kind: v, shift: 3.0}", "objective.shift is 3.0", "only kind flow uses"),
    more(
        "law with v",
        "objective: {kind: v, distribution: uniform}",
        "objective.distribution is uniform",
        "set kind: flow",
    ),
    more("v setting with flow", "objective: {min_snr_gamma: 5}", "objective.min_snr_gamma is 5,", "set kind: v"),
    more(
        "validation on training rows",
        "validation: {where: {split: train}}",
        "validation clips would be trained on",
        "split: val",
    ),
    more("adapters of nothing", "lora: {rank: 0}", "lora.rank is 0", "at least 1"),
    more("adapters with dropout", "lora: {dropout: 0.1}", "lora.dropout is 0.1", "write 0"),
    more("strength of no adapters", "sample: {lora_scale: 0.5}", "sample.lora_scale is 0.5", "sample.lora"),
    swap("adapters of a VAE", "task: denoiser", "task: autoencoder\nlora: {}", "lora is set", "task: denoiser"),
    more("validation on all rows", "validation: {}", "validation.where is {}", "validation clips would be trained on"),
    more("rows not kept apart", "validation: {where: {source: web}}", "validation clips would be trained on"),
    swap("one checkpoint", "steps: 100", "steps: 100\n  keep: 1", "train.keep is 1", "at least 2"),
    # inheritance
    more("missing base", "_base_: nowhere.yaml", "my.yaml:13:", "the _base_ 'nowhere.yaml' does not exist", "my.yaml"),
    more("base of itself", "_base_: my.yaml", "_base_ goes in a circle", "my.yaml -> "),
    more("base is a number", "_base_: 3", "_base_ is neither a name nor a list of names"),
    more("base is a mapping", "_base_: {a: b}", "_base_ is neither a name nor a list of names"),
    more("delete in words", "sample: {_delete_: yes}", "_delete_ is 'yes'", "write true"),
    # the file itself
    whole("empty file", "", "my.yaml: the file is empty", "name: my-run"),
    whole("comments only", "# nothing\n", "the file is empty"),
    whole("list for a recipe", "- name: tiny\n", "the file is a list"),
    whole("a word", "tiny", "the file is a single value"),
    more("key twice", "name: other", "my.yaml:13: the key 'name' stands twice, first on line 1"),
    swap(
        "nested key twice",
        "lr: 1e-4",
        "lr: 1e-4\n  lr: 1e-5",
        "my.yaml:11: the key 'lr' stands twice, first on line 10",
    ),
    swap("tab", "  lr: 1e-4", "\tlr: 1e-4", "my.yaml:10:", "indent with spaces, not with tabs"),
    swap("no space after the colon", "lr: 1e-4", "lr:1e-4", "optim is 'lr:1e-4'", "a section with the keys"),
    swap("wrong indentation", "  lr: 1e-4", "  lr: 1e-4\n eps: 1e-8", "my.yaml:", "not valid YAML"),
    swap("open bracket", "[1.0, 8]", "[1.0, 8", "not valid YAML", "bracket"),
    swap("open quote", "name: tiny", "name: 'tiny", "not valid YAML", "quote was opened"),
    swap("colon in text", "clips.parquet", "a: b: c", "my.yaml:5:", "put text that holds ': ' in quotes"),
    more("two documents", "---\nname: other\n", "my.yaml:13:", "a second document"),
    whole("not UTF-8", RIGHT.encode() + b"# caf\xe9\n", "my.yaml:13: not UTF-8 text (byte 0xe9)"),
    whole("binary file", bytes(range(256)), "not UTF-8 text"),
    whole("null byte", RIGHT + "x: \0\n", "my.yaml:13: character 0x0 is not text"),
    whole("huge file", "# " + "x" * 300_000, "a recipe has at most 262144"),
    whole(
        "thousands of unknown keys", "".join(f"key_{n}: 1\n" for n in range(9000)), "no key 'key_0'", "more problems"
    ),
    whole("endless key", f"? {'k' * 200_000}\n: 1\n", "has no key 'kkkk", "..."),
    whole("endless number", f"name: {'9' * 100_000}\n", "the number 9999", "... is too large"),
    whole("alias bomb", BOMB, "more than 10000 values", "aliases counted in full"),
    whole("alias in itself", "a: &a [*a]\n", "*a has no finished &a"),
    whole("alias of nothing", "a: *b\n", "*b has no finished &b"),
    whole("deep nesting", "[" * 5000, "nest deeper than 32"),
    more(
        "python object",
        "x: !!python/object/apply:os.system ['echo']",
        "my.yaml:13:",
        "the tag !!python/object/apply:os.system",
    ),
    more("python name", "x: !!python/name:os.system", "recipes hold plain values only"),
    more("own tag", "x: !env HOME", "the tag !env"),
    more("merge key", "<<: {a: 1}", "'<<' is not read", "_base_"),
    more("list as a key", "? [a, b]\n: 1", "a key is not plain text"),
    # the command line
    Mistake("override without a value", ("--optim.lr: a value is missing",), words=("--optim.lr",)),
    Mistake("override of nothing", ("--foo.bar: the recipe has no key 'foo'",), words=("--foo.bar", "1")),
    Mistake("override of the wrong kind", ("--optim.lr: optim.lr is 'fast'",), words=("--optim.lr", "fast")),
    Mistake("override makes it impossible", ("--sample.frames: sample.frames is 8",), words=("--sample.frames=8",)),
]


def run_mistake(mistake: Mistake, folder: Path) -> str:
    """The message of the refusal; AssertionError when the recipe is accepted or anything else is raised."""
    try:
        load_recipe(mistake.write(folder), mistake.words)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{mistake.name}: accepted")


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
@pytest.mark.timeout(10)
def test_mistake_is_refused_with_the_way_out(mistake: Mistake, tmp_path: Path) -> None:
    message = run_mistake(mistake, tmp_path)
    for fragment in mistake.fragments:
        assert fragment in message
    for noise in ("pydantic", "Input should", "validation error", "literal[", "constrained"):
        assert noise not in message


def test_the_recipe_that_the_mistakes_start_from_is_right(tmp_path: Path) -> None:
    load_recipe(Mistake("none", ()).write(tmp_path))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="this is a folder; name a recipe file"):
        load_recipe(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe("a\0b")
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe("x" * 5000)
    with pytest.raises(ConfigError, match="not an ordinary file"):
        load_recipe(os.devnull)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    file = Mistake("none", ()).write(tmp_path)
    file.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(file)


def test_no_mistake_needs_torch() -> None:
    """The same table in a fresh process, which must not have imported the heavy packages at the end."""
    root = Path(frameloom.__file__).parent.parent
    code = f"import runpy; runpy.run_path({__file__!r}, run_name='mistakes')"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{len(MISTAKES)} mistakes without torch"


if __name__ == "mistakes":
    for each in MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            found = run_mistake(each, Path(folder))
            assert all(fragment in found for fragment in each.fragments), each.name
    assert not {"torch", "numpy", "transformers", "diffusers", "polars", "av"} & set(sys.modules)
    print(f"{len(MISTAKES)} mistakes without torch")
