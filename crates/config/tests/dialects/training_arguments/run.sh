#!/bin/bash
set -e
MODEL=Qwen/Qwen2.5-3B
BATCH=4
EVAL_BATCH=$((BATCH * 2))
export WANDB_DISABLED=true

torchrun --nproc_per_node=2 finetune.py \
    --model_name_or_path $MODEL \
    --model_max_length 1024 \
    --per_device_train_batch_size $BATCH \
    --per_device_eval_batch_size $EVAL_BATCH \
    --gradient_accumulation_steps 4 \
    --bf16 True \
    --gradient_checkpointing False \
    --learning_rate 1e-5 --num_train_epochs 2
