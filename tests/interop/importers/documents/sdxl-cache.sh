  python train.py \
    --task cache \
    --cache_latent True \
    --cache_text_embedding True \
    --cache_path ./cache_data \
    ...
  