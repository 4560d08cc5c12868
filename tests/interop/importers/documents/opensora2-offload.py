grad_ckpt_buffer_size = 25 * 1024**3  # 25GB
