python run_clm.py --model_name_or_path openai-community/gpt2 --block_size=256 \
  --per_device_train_batch_size=16 --num_train_epochs 1 --gradient_checkpointing --fp16
