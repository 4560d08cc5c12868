NUM_FRAME=1
WIDTH=256
HEIGHT=256
python opensora/train/train_t2v_diffusers.py \
    --data "scripts/train_data/image_data_v1_2.txt" \
    --num_frames ${NUM_FRAME} \
    --force_resolution \
    --max_height ${HEIGHT} \
    --max_width ${WIDTH} \
    --gradient_checkpointing \
    --pretrained path/to/last/stage/ckpt \
    --parallel_mode "zero" \
    --zero_stage 2 \
    # pass other arguments
