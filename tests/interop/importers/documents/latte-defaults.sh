# The document prints no command: this one has every argument of it, at its documented default where it has one.
python opensora/train/train_t2v.py \
    --image_data scripts/train_data/image_data.txt --video_data scripts/train_data/video_data.txt \
    --max_image_size 512 --num_frames 17 --use_img_from_vid False --use_image_num 0 --text_embed_cache True \
    --enable_flip False --model_max_length 300 --filter_nonexistent True --pretrained pretrained/65x512x512 \
    --text_encoder_name DeepFloyd/t5-v1_1-xxl --ae CausalVAEModel_4x8x8 --ae_path LanguageBind/Open-Sora-Plan-v1.1.0 \
    --dataset t2v --use_rope False --compress_kv False --compress_kv_factor 1 --model LatteT2V-XL/122 \
    --multi_scale False --enable_tiling False --tile_overlap_factor 0.25 --use_recompute False --num_no_recompute 0 \
    --precision bf16 --amp_level O1 --text_encoder_precision bf16 --vae_precision fp16 --vae_keep_gn_fp32 False \
    --loss_scaler_type dynamic --loss_scale_factor 2 --scale_window 2000 --init_loss_scale 65536 \
    --dataset_sink_mode False --sink_size -1 --dataloader_num_workers 4 --max_rowsize 4 --batch_size 32 \
    --dataloader_prefetch_size 2 --optim adamw --betas 0.9 0.999 --optim_eps 1e-8 --group_strategy norm_and_bias \
    --clip_grad False --max_grad_norm 1.0 --use_ema True --ema_decay 0.9999 --gradient_accumulation_steps 1 \
    --weight_decay 0.01 --lr_scheduler cosine_decay --start_learning_rate 1e-5 --end_learning_rate 1e-6 \
    --lr_warmup_steps 0 --lr_decay_steps 0 --scale_lr False --device Ascend --max_device_memory 59GB --mode 0 \
    --use_parallel False --parallel_mode data --seed 3407 --mempool_block_size 9GB --optimizer_weight_shard_size 8 \
    --max_train_steps 1000 --epochs 10 --step_mode False --resume_from_checkpoint False --ckpt_save_interval 1 \
    --checkpointing_steps 500 --ckpt_max_keep 10 --log_level logging.INFO --log_interval 1 --profile False
