  python train.py \
    ...
    --timestep_bias_multiplier 2 \
    --timestep_bias_strategy range \
    --timestep_bias_begin 200 \
    --timestep_bias_end 500 \
    --timestep_bias_portion 0.25
  