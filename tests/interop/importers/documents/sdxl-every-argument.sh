# Every script parameter of the document, at values that it names.
python train.py \
    --config configs/training/sd_xl_base_finetune_910b.yaml \
    --weight checkpoints/sd_xl_base_1.0.safetensors --data_path datasets/pictures --per_batch_size 1 \
    --gradient_accumulation_steps 2 --clip_grad True --max_grad_norm 1.0 --use_ema --scale_lr False \
    --max_device_memory 59GB --is_parallel True --data_sink False --sink_size 100 --sink_queue_size 2 \
    --resume_step 1000 --optimizer_weight optimizer.ckpt --save_optimizer True --ms_amp_level O2 --param_fp16 False \
    --timestep_bias_strategy earlier --timestep_bias_multiplier 2 --timestep_bias_begin 200 --timestep_bias_end 500 \
    --timestep_bias_portion 0.25 --snr_gamma 5.0 --task txt2img --cache_latent False --cache_text_embedding False \
    --cache_path ./cache_data
