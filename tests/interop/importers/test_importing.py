"""Commands and configurations of other trainers become recipes that pass every check; mistakes are told together."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from frameloom.config.loading.recipe import load_recipe
from frameloom.config.rules.check import check_files
from frameloom.config.schema.recipe import Recipe
from frameloom.core.errors import ConfigError
from frameloom.interop.importers.arguments import load_system
from frameloom.interop.importers.importer import import_command

DOCUMENTS = sorted((Path(__file__).parent / "documents").iterdir())
COG = (
    "accelerate launch scripts/train.py --pretrained_model_name_or_path m/CogVideoX-Fun-2b-InP "
    "--train_data_meta d.json --train_mode inpaint --enable_bucket --video_repeat 1 --video_sample_n_frames 49 "
)
PLAN = "python opensora/train/train_t2v_diffusers.py --data d.txt --num_frames 93 --max_hxw 65536 "
LATTE = "python opensora/train/train_t2v.py --video_data v.txt "
VAE = "python opensora/train/train_causalvae.py --video_path clips "
SDXL = "python train.py --config configs/training/sd_xl_base_finetune_910b.yaml "
SORA = "torchrun scripts/diffusion/train.py configs/diffusion/train/stage1.py --dataset.data-path d.csv "


def bring(folder: Path, text: str, name: str = "train.sh", **options: Any) -> tuple[Recipe, str]:
    """The recipe of a command, loaded as a person would load it, and its text."""
    file = folder / name
    file.write_text(text)
    written = import_command(file, **options)
    target = folder / "imported.yaml"
    target.write_text(written)
    return load_recipe(target), written


def value_at(recipe: Recipe, dotted: str) -> Any:
    value: Any = recipe.model_dump(mode="json")
    for key in dotted.split("."):
        if isinstance(value, list):
            value = value[int(key)] if int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def make_files(recipe: Recipe) -> None:
    """The user's files and folders, where the recipe expects them; what they hold is not looked at."""
    named = [recipe.data.manifest, recipe.data.root, *(source.path for source in recipe.data.sources)]
    named += [recipe.model.weights, recipe.vae.weights, recipe.data.cache.latents, recipe.data.cache.text]
    named += [encoder.path for encoder in recipe.text.encoders]
    for path in [Path(name) for name in named if name and not Path(name).is_absolute()]:
        if not path.suffix or path.suffix[1:].isdigit() or "." in path.suffix[1:]:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_a_printed_command_becomes_a_recipe_that_passes_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, text = bring(tmp_path, file.read_text(), file.name)
    assert text.startswith(f"# Imported from {file.name}: ")
    with pytest.raises(ConfigError, match="does not exist"):
        check_files(recipe)
    make_files(recipe)
    check_files(recipe)


EXPECTED = {
    "cogvideox_fun-train.sh": {
        "model.size": "2b-inpaint",
        "data.ratio_tokens.token_sample_size": 512,
        "data.ratio_tokens.random_frame_crop": True,
        "optim.name": "came",
        "optim.weight_decay": 0.0,
        "optim.clip_norm": 0.05,
        "optim.clip_fade": {"ratio": 5.0, "fade_steps": 1000},
        "optim.schedule.warmup_steps": 100,
        "train.epochs": 100,
        "train.steps": None,
        "known.law": "regions",
        "vae.mini_batch": 1,
        "parallel.zero": 0,
    },
    "cogvideox_fun-deepspeed.sh": {"parallel.zero": 1, "optim.name": "came"},
    "opensora_plan-stage1.sh": {
        "data.grouped.max_height": 256,
        "data.grouped.force_resolution": True,
        "model.weights": "path/to/last/stage/ckpt",
        "parallel.zero": 2,
        "train.recompute": True,
        "sample.height": 256,
    },
    "opensora_plan-validation.sh": {
        "validation.every": "1 epoch",
        "parallel.sequence": 8,
        "data.grouped.sp_size": 8,
        "data.grouped.max_hxw": 409600,
    },
    "opensora_plan-wfvae.sh": {"task": "autoencoder", "data.root": "path/to/downloaded/dataset", "optim.lr": 1e-5},
    "latte-defaults.sh": {
        "model.overrides.video_length": 5,
        "optim.schedule.name": "cosine",
        "optim.schedule.min_share": 0.1,
        "train.ema.decay": 0.9999,
        "train.save_every": 500,
        "train.keep": 10,
        "train.max_device_memory": "59GiB",
        "vae.precision": "fp16",
        "seed": 3407,
    },
    "opensora2-stage1.sh": {"model.weights": None, "data.manifest": "datasets/pexels_45k_necessary.csv"},
    "opensora2-finetune.sh": {"model.weights": "ckpts/Open_Sora_v2.safetensors", "optim.lr": 5e-5},
    "opensora2-resume.sh": {"run.folder": "outputs", "name": "your_experiment", "run.resume": "latest"},
    "opensora2-restart.sh": {"model.weights": "outputs/your_experiment", "name": "opensora2-stage1-again"},
    "opensora2-buckets.py": {"data.buckets.256px.33": [1.0, 12], "data.buckets.1024px.1": [0.5, 7]},
    "opensora2-recompute.py": {"train.recompute": True},
    "opensora2-offload.py": {"train.recompute.offload": True},
    "sdxl-bias.sh": {
        "objective.bias.strategy": "range",
        "objective.bias.begin": 200,
        "objective.bias.end": 500,
        "train.precision": "fp16",
        "train.loss_scale.initial": 1024,
    },
    "sdxl-snr.sh": {"objective.min_snr_gamma": 5.0, "objective.bias": None},
    "sdxl-cache.sh": {"data.cache.latents": "./cache_data/latents", "data.frame_start": "first"},
    "sdxl-first-stage.yaml": {"vae.precision": "fp32"},
    "sdxl-configure.yaml": {
        "optim.lr": 1e-6,
        "optim.betas": [0.9, 0.999],
        "optim.schedule.warmup_steps": 500,
        "objective.noise_offset": 0.05,
        "objective.noise_offset_per": "sample",
        "train.steps": 100000,
        "data.fixed.height": 1024,
    },
    "sdxl-every-argument.sh": {"optim.clip_norm": 1.0, "train.accumulate": 2, "objective.bias.portion": 0.25},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_printed_command_keeps_its_settings(tmp_path: Path, name: str) -> None:
    file = next(file for file in DOCUMENTS if file.name == name)
    recipe, _ = bring(tmp_path, file.read_text(), name)
    assert {key: value_at(recipe, key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize(
    ("command", "key", "value", "without"),
    [
        (COG + "--video_repeat 3", "data.sources.0.repeat", 3.0, None),
        (COG + "--video_repeat 0", "data.where", {"kind": "image"}, {}),
        (COG + "--trainable_modules attn ff", "optim.trainable", ["*attn*", "*ff*"], None),
        (COG + "--use_8bit_adam", "optim.name", "adamw8bit", "adamw"),
        (COG + "--low_vram", "train.encoder_offload", True, False),
        (SORA + "--async-io True", "train.async_save", True, False),
        (COG + "--use_ema", "train.ema.decay", 0.9999, None),
        (COG + "--max_train_steps 70", "train.steps", 70, None),
        (COG + "--lr_scheduler cosine --lr_warmup_steps 7", "optim.schedule.warmup_steps", 7, 0),
        (COG + "--train_mode normal", "known.law", None, "regions"),
        (COG + "--train_mode normal", "model.size", "2b", "2b-inpaint"),
        (COG + "--validation_prompts 'a cat' 'a dog'", "validation.samples.prompts", ["a cat", "a dog"], None),
        (PLAN + "--rf_scheduler", "objective.kind", "flow", "epsilon"),
        (PLAN + "--sparse1d --sparse_n 4", "model.overrides.sparse_n", 4, None),
        (PLAN + "--use_ema True", "train.ema.decay", 0.999, None),
        (PLAN + "--snr_gamma 5.0", "objective.min_snr_gamma", 5.0, None),
        (PLAN + "--parallel_mode optim", "parallel.zero", 1, 0),
        (PLAN + "--vae_fp32", "vae.precision", "fp32", "fp16"),
        (LATTE + "--use_image_num 4 --use_img_from_vid True", "data.use_image_num", 4, 0),
        (LATTE + "--image_data i.txt --use_image_num 4", "data.sources.1.path", "i.txt", None),
        (LATTE + "--precision fp16 --scale_window 50", "train.loss_scale.window", 50, None),
        (LATTE + "--precision fp16 --loss_scaler_type static", "train.loss_scale.mode", "static", None),
        (LATTE + "--lr_scheduler polynomial_decay", "optim.schedule.power", 0.9, 1.0),
        (LATTE + "--use_recompute True --num_no_recompute 4", "train.recompute.skip", 4, None),
        (LATTE + "--profile True", "train.profile.steps", 3, None),
        (LATTE + "--ckpt_save_interval 2", "train.save_every", "2 epochs", "1 epoch"),
        (LATTE + "--ckpt_save_interval 2 --step_mode True", "train.save_every", 2, "1 epoch"),
        (LATTE + "--enable_flip True", "data.flip", 0.5, 0.0),
        (LATTE + "--vae_keep_gn_fp32 True", "vae.fp32_norms", True, False),
        (LATTE + "--group_strategy not_grouping", "optim.decay_norms", True, False),
        (VAE + "--disc_weight 0.3 --disc_start 9", "autoencoder.discriminator.weight", 0.3, None),
        (VAE + "--perceptual_weight 0.1", "autoencoder.lpips.weight", 0.1, None),
        (VAE + "--wavelet_weight 0.2", "autoencoder.wavelet_weight", 0.2, 0.1),
        (VAE + "--kl_weight 1e-5", "autoencoder.kl_weight", 1e-5, 1e-6),
        (SDXL + "--use_ema", "train.ema.decay", 0.9999, None),
        (SDXL + "--lpw True --max_embeddings_multiples 2", "text.encoders.1.max_length", 152, 77),
        (SDXL + "--ms_amp_level O0", "train.precision", "fp32", "fp16"),
        (SORA + "--optim.lr 2e-5", "optim.lr", 2e-5, 5e-5),
        (SORA + "--lr 2e-5", "optim.lr", 2e-5, 5e-5),
        (SORA + "--wandb True", "run.trackers", ["jsonl", "wandb"], ["jsonl", "tensorboard"]),
        (SORA + "--ema_decay 0.99", "train.ema.decay", 0.99, None),
        (SORA + "--grad_ckpt_settings '(8, 100)'", "train.recompute.blocks.double_blocks", 8, 8),
        (SORA + "--plugin hybrid --plugin_config.sp_size 4", "parallel.sequence", 4, 1),
    ],
)
def test_an_argument_sets_its_key(tmp_path: Path, command: str, key: str, value: Any, without: Any) -> None:
    """The control is the same command without what was added."""
    start = next(prefix for prefix in (COG, PLAN, LATTE, VAE, SDXL, SORA) if command.startswith(prefix))
    assert value_at(bring(tmp_path, command)[0], key) == value
    assert value_at(bring(tmp_path, start)[0], key) == without


TYPICAL = {"switch": "True", "integer": "1", "number": "0.5", "numbers": "0.9 0.999", "text": "x", "texts": "."}
PARTICULAR = {
    "pretrained_model_name_or_path": "m/CogVideoX-Fun-2b-InP",
    "train_mode": "inpaint",
    "mixed_precision": "bf16",
    "precision": "bf16",
    "report_to": "wandb",
    "video_repeat": "1",
    "max_device_memory": "59GB",
    "optimizer": "adamw",
    "timestep_bias_strategy": "range",
    "config": "configs/sd_xl_base_finetune_910b.yaml",
}


@pytest.mark.parametrize("start", [COG, PLAN, LATTE, VAE, SDXL])
def test_every_argument_with_a_key_is_read(tmp_path: Path, start: str) -> None:
    """What nobody reads is told as `see KEY`; nothing that has a key may be."""
    script = next(word for word in start.split() if word.endswith(".py"))
    arguments = next(
        programs[script]
        for name in ("latte", "opensora_plan", "cogvideox_fun", "sdxl")
        if script in (programs := load_system(name).programs)
    )
    words = [f"{start.partition('.py')[0]}.py"]
    for name, argument in arguments.items():
        default = argument.default
        usual = TYPICAL[argument.kind] if default is None or isinstance(default, list | bool) else str(default)
        words.append(f"--{name} {PARTICULAR.get(name, usual)}")
    file = tmp_path / "all.sh"
    file.write_text(" ".join(words))
    text = import_command(file, is_lenient=True)
    assert re.findall(r"^# - (--\S+) .*: see ", text, flags=re.MULTILINE) == []
    assert "--" in text


CONFIGURED = {
    "model.type": "flux",
    "ae.type": "hunyuan_vae",
    "optim.cls": "HybridAdam",
    "plugin": "hybrid",
    "dtype": "bf16",
    "dataset.transform_name": "resize_crop",
    "bucket_config": {"256px": {"1": [1.0, 2]}},
    "condition_config": {"t2v": 1},
    "exp_name": "named",
    "model.target": "gm.models.diffusion.DiffusionEngine",
    "version": "SDXL-base-1.0",
    "data.total_step": 9,
    "optim.optimizer_config.target": "mindspore.nn.AdamWeightDecay",
    "optim.scheduler_config.target": "gm.lr_scheduler.LambdaWarmUpCosineScheduler",
    "data.dataset_config.params.target_size": 1024,
    "data.dataset_config.params.transforms": [{"target": "gm.data.mappers.Resize"}],
    "data.dataset_config.params.batched_transforms": [],
    "data.dataset_config.params.multi_aspect": [[1024, 1024]],
    "model.params.conditioner_config.params.emb_models": [{"is_trainable": False}],
}


@pytest.mark.parametrize(
    ("system", "program", "name"),
    [("opensora2", "scripts/diffusion/train.py", "all.py"), ("sdxl", "configuration", "all.yaml")],
)
def test_every_key_of_a_configuration_is_read(tmp_path: Path, system: str, program: str, name: str) -> None:
    usual = {"switch": True, "integer": 2, "number": 0.5, "numbers": [2, 4, 2], "text": "x", "any": [8, 100]}
    values: dict[str, Any] = {}
    for key, argument in load_system(system).programs[program].items():
        if argument.kind == "section" or key.startswith(("(", "_", "emb_models.", "transforms.")) or "_tuple" in key:
            continue
        default = usual.get(argument.kind) if argument.default is None else argument.default
        put(values, key, CONFIGURED.get(key, default))
    for key in [key for key in CONFIGURED if key.startswith("optim.") and system == "sdxl" and key.endswith("target")]:
        put(values, key, CONFIGURED[key])
    is_python = name.endswith(".py")
    text = "\n".join(f"{key} = {value!r}" for key, value in values.items()) if is_python else yaml.safe_dump(values)
    (tmp_path / name).write_text(text)
    printed = import_command(tmp_path / name, is_lenient=True)
    assert re.findall(r"^# - (\S+) .*: see ", printed, flags=re.MULTILINE) == []
    assert "unknown" not in printed


def put(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


def test_a_whole_configuration_of_open_sora_is_read(tmp_path: Path) -> None:
    (tmp_path / "image.py").write_text(
        'lr = 1e-5\ngrad_ckpt_settings = (8, 100)\ndataset = dict(type="video_text", transform_name="resize_crop",\n'
        "    fps_max=24, vmaf=True)\n"
        'model = dict(type="flux", from_pretrained="flux.safetensors", guidance_embed=False, fused_qkv=False,\n'
        "    cond_embed=True, hidden_size=3072, depth=19, axes_dim=[16, 56, 56], qkv_bias=True,\n"
        "    grad_ckpt_settings=grad_ckpt_settings)\n"
        "dropout_ratio = {'t5': 0.3, 'clip': 0.3}\n"
        'ae = dict(type="hunyuan_vae", from_pretrained="vae.safetensors", layers_per_block=2, latent_channels=16)\n'
        'optim = dict(cls="HybridAdam", lr=lr, eps=1e-15, weight_decay=0.0, adamw_mode=True)\nwarmup_steps = 0\n'
        'plugin = "zero2"\nplugin_config = dict(reduce_bucket_size_in_m=128)\nepochs = 1000\nckpt_every = 100\n'
        'bucket_config = {"256px": {1: (1.0, 50)}}\ndtype = "bf16"\nema_decay = None\n'
    )
    stage = (
        '_base_ = ["image.py"]\nbucket_config = {"_delete_": True, "256px": {5: ((0.5, 0.5), 12)}}\n'
        "optim = dict(lr=5e-5)\ncondition_config = dict(t2v=1, i2v_head=5)\ngrad_ckpt_buffer_size = 25 * 1024**3\n"
    )
    recipe, text = bring(tmp_path, stage, "stage9.py")
    expected = {
        "name": "opensora2-stage9",
        "optim.lr": 5e-5,
        "optim.eps": 1e-15,
        "data.buckets": {"256px": {"5": [[0.5, 0.5], 12]}},
        "known.shares": {"t2v": 1.0, "i2v_head": 5.0},
        "model.overrides": {"cond_embed": True},
        "train.recompute.blocks": {"double_blocks": 8},
        "train.recompute.offload": True,
        "train.epochs": 1000,
        "parallel.zero": 2,
        "text.dropout": 0.3,
    }
    found = recipe.model_dump(mode="json")
    assert {key: value_at(recipe, key) for key in expected} | {"data.buckets": _plain(found)} == expected
    assert "reduce_bucket_size_in_m 128: PyTorch's own sizes" in text


def test_a_setting_that_another_one_reads_counts(tmp_path: Path) -> None:
    text = (
        'model = dict(type="flux")\nckpt_every = 200\nlog_every = ckpt_every\nepochs = 5\nkeep_n_latest = epochs\n'
        'lr = 1e-5\noptim = dict(lr=lr * 2)\nbucket_config = {"256px": {1: (1.0, 2)}}\nshared = "x.csv"\n'
        "dataset = dict(data_path=shared)\n"
    )
    recipe, _ = bring(tmp_path, text, "c.py")
    section = recipe.train
    assert (section.epochs, section.steps, section.keep) == (5, None, 5)
    assert (section.save_every, section.log_every) == (200, 200)
    assert (recipe.optim.lr, recipe.data.manifest) == (2e-5, "x.csv")


def _plain(found: dict[str, Any]) -> Any:
    return {name: {str(n): cell for n, cell in cells.items()} for name, cells in found["data"]["buckets"].items()}


def test_the_configuration_that_a_command_names_is_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "optim: {base_learning_rate: 2.0e-5}\ndata: {per_batch_size: 3, total_step: 70, num_parallel_workers: 1}\n"
    )
    recipe, _ = bring(tmp_path, "python train.py --config c.yaml --per_batch_size 5 --snr_gamma 5")
    assert [value_at(recipe, key) for key in ("optim.lr", "data.fixed.batch", "train.steps")] == [2e-5, 5, 70]


def test_lists_with_embeddings_bring_their_folder(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("clips,clips_emb,clips.json\n")
    recipe, _ = bring(tmp_path, PLAN)
    assert recipe.data.cache.external == "open_sora_plan" and recipe.data.cache.external_folders == ("clips_emb",)
    (tmp_path / "d.txt").write_text("clips,clips.json\n")
    assert bring(tmp_path, PLAN)[0].data.cache.external is None


def test_the_cache_of_the_original_is_read_where_it_is(tmp_path: Path) -> None:
    command = SDXL + "--cache_latent True --cache_text_embedding True --cache_path cached"
    assert bring(tmp_path, command)[0].data.cache.external is None
    (tmp_path / "cached" / "latent_cache").mkdir(parents=True)
    assert bring(tmp_path, command)[0].data.cache.external == "sdxl"


def test_the_stage_of_deepspeed_comes_from_its_file(tmp_path: Path) -> None:
    command = COG.replace("launch", "launch --use_deepspeed --deepspeed_config_file z.json")
    (tmp_path / "z.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert bring(tmp_path, command)[0].parallel.zero == 3
    (tmp_path / "z.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert bring(tmp_path, command)[0].parallel.zero == 1


@pytest.mark.parametrize("front", ["env A=b", "srun -N 2 --label", "nohup", "time -p", "CUDA_VISIBLE_DEVICES=0"])
def test_words_before_the_launcher_change_nothing(tmp_path: Path, front: str) -> None:
    options = "launch --mixed_precision=fp16 --use_deepspeed --deepspeed_config_file zero_stage2.json"
    command = COG.replace("launch", options)
    recipe, text = bring(tmp_path, f"{front} {command}")
    assert (recipe.train.precision, recipe.parallel.zero) == ("fp16", 2)
    assert text == bring(tmp_path, command)[1]


def test_squares_keep_the_stride_and_the_trained_side(tmp_path: Path) -> None:
    command = COG.replace("--enable_bucket ", "") + "--image_sample_size 1024 --video_sample_size 256 "
    for stride, most in ((1, 1000), (3, 10.0), (4, 7.5), (13, 2.3077)):
        recipe, text = bring(tmp_path, f"{command} --video_sample_stride {stride} --token_sample_size 512")
        assert recipe.data.fps_max == most and math.ceil(30 / min(30, most)) == stride
        assert "--video_sample_stride" not in text.partition("# Without")[2]
    assert (recipe.data.fixed.height, recipe.sample.height, recipe.sample.width) == (256, 256, 256)  # type: ignore[union-attr]
    assert "--image_sample_size 1024: clips and images have one size here, --video_sample_size" in text
    assert "--token_sample_size 512: belongs to buckets" in text
    images = bring(tmp_path, f"{command} --video_repeat 0")[0]
    assert (images.data.fixed.height, images.sample.height) == (1024, 1024)  # type: ignore[union-attr]


def test_flags_in_a_variable_are_read(tmp_path: Path) -> None:
    text = f"OUT=exp/run1/\nEXTRA='--use_ema --seed 7'\n{COG} $EXTRA --output_dir=${{OUT%/}}"
    recipe, _ = bring(tmp_path, text)
    assert (recipe.run.folder, recipe.name, recipe.seed) == ("exp", "run1", 7) and recipe.train.ema is not None


def test_a_process_count_that_only_a_shell_knows_is_not_told(tmp_path: Path) -> None:
    command = COG.replace("launch", "launch --num_processes $N --num_machines 2 --main_process_port 9000")
    assert "# Started as the original is: frameloom launch RECIPE --port 9000\n" in bring(tmp_path, command)[1]


def test_the_processes_of_the_launcher_are_told(tmp_path: Path) -> None:
    start = "frameloom launch RECIPE"
    for launcher, told in (
        ("torchrun --nproc_per_node 8", f"{start} --nproc 8"),
        ("colossalai run --hostfile hosts --nproc_per_node 4", f"{start} --nproc 4 --hostfile hosts"),
        ("msrun --worker_num=2 --master_port=9000", f"{start} --nproc 2 --port 9000"),
        ("accelerate launch --num_processes 16 --num_machines 2", f"{start} --nproc 8"),
    ):
        assert told in bring(tmp_path, PLAN.replace("python", launcher, 1))[1]
    assert start not in bring(tmp_path, PLAN)[1]


def test_the_original_on_pytorch_has_its_own_defaults(tmp_path: Path) -> None:
    ours = bring(tmp_path, PLAN)[0].optim
    theirs = bring(tmp_path, PLAN.replace("python", "accelerate launch"))[0].optim
    assert (ours.eps, theirs.eps) == (1e-8, 1e-15) and (ours.clip_norm, theirs.clip_norm) == (None, 1.0)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            COG + "--learning_rat 1 --bogus 2",
            ["--learning_rat is unknown to .*did you mean --learning_rate", "--bogus"],
        ),
        (COG + "--learning_rate fast --seed 1.5", ["--learning_rate is fast; expected a number", "--seed is 1.5"]),
        (COG + "--lr_scheduler wavy", ["--lr_scheduler wavy: unknown; known: constant"]),
        (COG + "--video_sample_n_frames 48", ["the recipe would not do: .*video_sample_n_frames is 48", "--lenient"]),
        (COG.replace("2b", "x"), ["does not tell the model's size"]),
        ("accelerate launch scripts/train.py --train_batch_size 4", ["--train_data_meta is missing"]),
        (COG + "--seed $SEED", [r"train\.sh:1: \$SEED is not set in this file"]),
        (COG + "--output_dir ${OUT:?say it}", [r"\$\{OUT:\?say it\} is not set in this file"]),
        (COG + "--output_dir ${L[0]}", [r"train\.sh:1: \$\{L\[0\]\}: this expansion is not read; write its value"]),
        (COG.replace("launch", "launch --mixed_precision=$P"), [r"\$P is not set in this file"]),
        (COG + "--video_sample_stride 0", ["video_sample_stride is 0"]),
        (COG.replace("--enable_bucket", "--video_sample_stride 0"), ["--video_sample_stride 0: expected 1 or more"]),
        (COG + "--video_repeat None --seed inf", ["--video_repeat is None; expected a whole number", "--seed is inf"]),
        (COG + "--checkpoints_total_limit inf", ["--checkpoints_total_limit is inf; expected a whole number"]),
        (LATTE + "--num_frames None", ["--num_frames is None; expected a whole number"]),
        (LATTE + "--start_learning_rate 0 --lr_scheduler cosine_decay", ["the recipe would not do: .*optim.lr"]),
        (LATTE + "--start_learning_rate None", ["--start_learning_rate is None; expected a number"]),
        (PLAN + "--sp_size None", ["--sp_size is None; expected a whole number"]),
        (PLAN + "--max_hxw -1", ["the recipe would not do: .*max_hxw"]),
        (VAE + "--sample_rate None", ["--sample_rate is None; expected a whole number"]),
        (SDXL + "--max_embeddings_multiples None --lpw True", ["--max_embeddings_multiples is None"]),
        (SDXL + "--cache_path None --cache_latent True", ["--cache_path None: expected a folder"]),
        (SORA + "--plugin_config.sp_size None", ["sp_size is null; expected a whole number"]),
        (COG + "\n" + PLAN, ["2 commands train .line 1: scripts/train.py; line 2: opensora/train/train_t2v_diff"]),
        ("python opensora/sample/sample.py --fps 18", ["no command here trains: .*which here is `frameloom sample`"]),
        ("python examples/rec_video.py --fps 18", ["which here is `frameloom vae reconstruct`"]),
        ("ls", ["no command here trains: found no Python program"]),
        ("python train.py --config gone.yaml", ["the configuration 'gone.yaml' is not there"]),
        ("torchrun scripts/diffusion/train.py [path/to/config]", ["is not there; .*stage1.py"]),
        ("torchrun scripts/diffusion/train.py --lr 1", ["no configuration is named"]),
        (SORA + "--model.from_pretraind x", ["did you mean --model.from_pretrained"]),
        (LATTE + "--max_device_memory lots", ["expected an amount such as 59GB"]),
    ],
)
def test_mistakes_are_told_together(tmp_path: Path, text: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        bring(tmp_path, text)
    for message in messages:
        assert re.search(message, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.py", "epochs = 1e400", "epochs is .*; expected a whole number"),
        ("c.yaml", "data: {total_step: 9, dataset_config: {params: {target_size: []}}}", r"target_size is \[\]; exp"),
        (
            "c.yaml",
            "data: {total_step: 9, dataset_config: {params: {multi_aspect: true}}}",
            "multi_aspect is true; exp",
        ),
        (
            "c.yaml",
            "data: {total_step: 9, dataset_config: {params: {multi_aspect: [1, 2]}}}",
            r"\[1, 2\]; expected a l",
        ),
    ],
)
def test_wrong_values_of_a_configuration_are_told(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bring(tmp_path, text, name)


def test_none_switches_off_what_open_sora_switches_off_by_it(tmp_path: Path) -> None:
    names = ("grad_clip", "warmup_steps", "grad_ckpt_buffer_size", "ema_decay")
    start = 'model = dict(type="flux")\nbucket_config = {"256px": {1: (1.0, 2)}}\n'
    recipe, _ = bring(tmp_path, start + "".join(f"{name} = None\n" for name in names), "c.py")
    assert recipe.optim.clip_norm is None and recipe.optim.schedule.warmup_steps == 0


def test_a_list_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(b"clips,caf\xe9_emb,clips.json\n")
    with pytest.raises(ConfigError, match=r"d\.txt: cannot be read .*utf-8.*; expected a list of folders in UTF-8"):
        bring(tmp_path, PLAN)


def test_a_lenient_import_keeps_what_it_does_not_understand(tmp_path: Path) -> None:
    recipe, text = bring(tmp_path, COG + "--bogus 2 --learning_rat 1", is_lenient=True)
    assert "# - --bogus 2: unknown" in text and "did you mean --learning_rate?" in text
    assert recipe.optim.lr == 1e-4


def test_a_system_can_be_named_where_it_does_not_show(tmp_path: Path) -> None:
    text = "python train.py --gradient_accumulation_steps 2"
    assert bring(tmp_path, text, system="sdxl")[0].model.family == "sdxl"
    with pytest.raises(ConfigError, match="--train_data_meta is missing"):
        bring(tmp_path, text, system="cogvideox_fun")
    with pytest.raises(ConfigError, match=r"no such system; did you mean 'sdxl'"):
        bring(tmp_path, text, system="sdxxl")


def test_comments_tell_what_was_changed_ignored_or_has_no_place(tmp_path: Path) -> None:
    command = (
        COG + "--use_came --adam_epsilon 1e-10 --multi_stream --noise_offset 0.1 --resume_from_checkpoint checkpoint-9"
    )
    _, text = bring(tmp_path, command)
    left, _, unused = text.partition("# Without a key here:")[2].partition("# Without effect in the original:")
    assert "--multi_stream" in left and "--adam_epsilon 1e-10" in unused and "--noise_offset 0.1" in unused
    assert "# --resume_from_checkpoint checkpoint-9: a run goes on from its own folder" in text


def test_a_text_encoder_that_trains_in_a_configuration_trains_here(tmp_path: Path) -> None:
    given = (Path(__file__).parent / "documents" / "sdxl-configure.yaml").read_text()
    for count, wanted in ((0, []), (1, ["clip_l"])):
        text = given.replace("is_trainable: False", "is_trainable: True", count)
        recipe, _ = bring(tmp_path, text, f"{count}.yaml")
        assert [encoder.name for encoder in recipe.text.encoders if encoder.train] == wanted
