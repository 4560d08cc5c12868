"""Moves tests so that they mirror the package, and rewrites their dotted names, paths and depths."""

import re
import subprocess
from pathlib import Path

ROOT = Path.cwd()
RULES = """
checkpoint/test_deferred.py weights/
checkpoint/test_safetensors_file.py weights/
checkpoint/test_weight_files.py weights/
checkpoint/test_pickle_reader.py weights/
checkpoint/test_background.py checkpoint/test_async_saving.py
checkpoint/test_store.py checkpoint/test_writer.py
checkpoint/test_stored.py checkpoint/test_resharding.py
config/arguments interop/importers/arguments
config/imports interop/importers
core/test_ranks.py distributed/
core/test_json_objects.py core/test_text_files.py
config/test_spelling.py core/
data/policies data/buckets
data/test_buckets.py data/buckets/
data/test_cache.py data/cache/
data/test_foreign_cache.py data/cache/test_external.py
data/test_shards.py data/cache/
data/test_caption_notes.py data/manifest/
data/test_filters.py data/manifest/
data/test_manifest.py data/manifest/
data/test_shard_table.py data/manifest/
data/test_sources.py data/manifest/
data/test_check.py data/curation/
data/test_scan.py data/curation/
data/test_clip_view.py data/media/
data/test_decode.py data/media/
data/test_frames.py data/media/
data/test_media.py data/media/test_writing.py
data/test_members.py data/media/test_tar_members.py
data/test_probe.py data/media/
data/test_torchcodec_backend.py data/media/
data/test_transforms.py data/media/
data/test_ledger.py data/order/test_usage.py
data/test_plan.py data/order/
data/test_plan_properties.py data/order/
data/test_loader.py data/loading/
data/test_prefetch.py data/loading/
data/test_reader.py data/loading/
data/test_reader_control.py data/loading/
data/test_workers.py data/loading/
data/test_shapes.py demo/
data/test_shapes_set.py demo/
data/test_shapes_score.py demo/
data/test_rank_assignment.py data/order/
data/test_shares.py data/order/test_rank_assignment.py
train/parallel/test_shares.py data/order/test_rank_assignment.py
train/parallel/test_launch.py training/launch/test_launch.py
train/parallel/test_agreement.py training/test_agreement.py
train/parallel distributed
generate/test_convert.py interop/
generate/test_convert_pipeline.py interop/
generate/test_export.py interop/
generate/test_reconstruct.py evaluate/
generate/test_sample_folder.py evaluate/
generate/test_score.py demo/
generate/test_single_file_run.py builders/
generate/test_text_pipeline.py builders/test_text.py
generate sampling
train/test_demo.py demo/
train/test_caching.py training/
train/test_adversarial.py training/tasks/
train/test_autoencoder.py training/tasks/
train/test_control.py training/tasks/
train/test_dreambooth.py training/tasks/
train/test_families.py training/tasks/
train/test_known_text.py training/tasks/test_text_table.py
train/test_level_grid.py training/tasks/
train/test_lora.py training/tasks/
train/test_noising.py training/tasks/
train/test_draws.py training/tasks/
train/test_text_training.py training/tasks/
train/test_textual_inversion.py training/tasks/
train/test_overfit.py training/tasks/
train/test_optimizer.py training/optim/
train/test_optimizer_kinds.py training/optim/test_kinds.py
train/test_parameter_groups.py training/optim/test_groups.py
train/test_schedules.py training/optim/
train/test_clipping.py training/optim/
train/test_ema.py training/optim/
train/test_loss_scale.py training/optim/
train/test_precision.py training/optim/
train/test_compiling.py training/memory/
train/test_recompute.py training/memory/
train/test_garbage.py training/memory/
train/test_halving.py training/memory/test_oom_split.py
train/test_rehearsal.py training/memory/test_preflight.py
train/test_host_buffer.py training/memory/test_activation_offload.py
train/test_parking.py training/memory/test_encoder_offload.py
train/test_state_offload.py training/memory/test_optimizer_offload.py
train/test_data_changes.py training/run/
train/test_resuming.py training/run/
train/test_resume.py training/run/
train/test_replay.py training/run/test_reproduce.py
train/test_run_length.py training/run/test_length.py
train/test_trackers.py training/logging/
train/test_samples.py training/logging/
train/test_profiling.py training/logging/
train training
plan planner
evaluate/test_clip_measures.py evaluate/test_clip_metrics.py
evaluate/test_measures.py evaluate/test_pair_metrics.py
diffusion/test_masks.py diffusion/test_region_masks.py
diffusion/test_end_masks.py diffusion/test_frame_masks.py
models/test_half_precision.py models/test_precision.py
models/layers/test_rope.py models/layers/test_positions.py
models/layers/test_position_tables.py models/layers/
models/test_lora.py models/lora/test_adapters.py
models/test_lora_keys.py models/lora/test_keys.py
models/denoisers/test_sequence.py models/denoisers/
"""
moved = {}


def move(src, dst):
    if dst.is_dir() and src.is_dir():
        for p in sorted(src.iterdir()):
            if p.is_file() or any(x.is_file() and "__pycache__" not in x.parts for x in p.rglob("*")):
                if p.name != "__pycache__":
                    move(p, dst / p.name)
        return
    dst.parent.mkdir(parents=True, exist_ok=True)
    files = [p for p in src.rglob("*") if p.is_file() and "__pycache__" not in p.parts] if src.is_dir() else [src]
    for f in files:
        moved[f] = dst / f.relative_to(src) if src.is_dir() else dst
    if dst.exists():
        raise SystemExit(f"exists: {dst}")
    subprocess.run(["git", "mv", str(src), str(dst)], check=True)


for line in RULES.split("\n"):
    if not line.strip():
        continue
    a, b = line.split()
    src, dst = ROOT / "tests" / a, ROOT / "tests" / b
    if not src.exists():
        print("absent", a)
        continue
    if b.endswith("/"):
        dst = dst / src.name
    if src != dst:
        move(src, dst)
final = {}
for a, b in moved.items():
    root = a
    final[a] = b
# chains: a file that moved within a folder that moved afterwards
dots = {}
paths = {}
for a, b in final.items():
    ra, rb = a.relative_to(ROOT), b.relative_to(ROOT)
    paths[str(ra)] = str(rb)
    if a.suffix == ".py":
        dots[".".join(ra.with_suffix("").parts)] = ".".join(rb.with_suffix("").parts)
keys = sorted(dots, key=len, reverse=True)
dot_re = re.compile(r"\b(" + "|".join(map(re.escape, keys)) + r")\b")
pkeys = sorted(paths, key=len, reverse=True)
path_re = re.compile(r"(?<![\w/])(" + "|".join(map(re.escape, pkeys)) + r")\b")
short = {k.removeprefix("tests."): v.removeprefix("tests.") for k, v in dots.items()}
files = [
    p
    for g in (
        "tests/**/*.py",
        "benchmarks/**/*.py",
        "docs/**/*.py",
        "docs/**/*.md",
        "*.md",
        "Makefile",
        "pyproject.toml",
        "frameloom/**/*.md",
    )
    for p in ROOT.glob(g)
]
for p in files:
    text = p.read_text()
    fresh = path_re.sub(lambda m: paths[m.group(1)], dot_re.sub(lambda m: dots[m.group(1)], text))

    # from tests.train import runs
    def from_folder(m):
        out = []
        for n in m.group(2).split(","):
            key = f"{m.group(1)}.{n.strip()}"
            if key not in dots:
                return m.group(0)
            out.append("from {} import {}".format(*dots[key].rsplit(".", 1)))
        return "\n".join(out)

    fresh = re.sub(r"from (tests(?:\.\w+)*) import (\w+(?:, \w+)*)", from_folder, fresh)
    if fresh != text:
        p.write_text(fresh)
for a, b in final.items():
    if b.suffix == ".py":
        delta = len(b.relative_to(ROOT).parts) - len(a.relative_to(ROOT).parts)
        depth = len(a.relative_to(ROOT).parts) - 2  # parents[depth] is tests/
        if delta:
            text = b.read_text()
            fresh = re.sub(
                r"(Path\(__file__\)(?:\.resolve\(\))?\.parents)\[(\d)\]",
                lambda m: f"{m.group(1)}[{int(m.group(2)) + delta}]" if int(m.group(2)) >= depth else m.group(0),
                text,
            )
            for m in re.finditer(r"Path\(__file__\)[^\n]*", fresh):
                print("check", b.relative_to(ROOT), m.group(0)[:90])
            if fresh != text:
                b.write_text(fresh)
print(
    "folders left:",
    sorted(
        {
            d.relative_to(ROOT).as_posix()
            for d in (ROOT / "tests").rglob("*")
            if d.is_dir() and not any(x for x in d.rglob("*") if x.is_file() and "__pycache__" not in x.parts)
        }
    ),
)
for d in sorted((ROOT / "tests").rglob("*"), reverse=True):
    if d.is_dir() and not any(x for x in d.rglob("*") if x.is_file() and "__pycache__" not in x.parts):
        subprocess.run(["rm", "-rf", str(d)])
