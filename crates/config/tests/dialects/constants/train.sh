#!/usr/bin/env bash
BATCH=16
python train.py --model_name openai-community/gpt2 --batch_size "$BATCH" --seq_len 256 --lr 1e-4 --use_bf16 true
