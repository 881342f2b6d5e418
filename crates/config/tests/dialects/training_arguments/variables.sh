per_device_train_batch_size=4
gradient_accumulation_steps=4

python train.py --model_name_or_path Qwen/Qwen2.5-0.5B --max_seq_length 2048 --num_train_epochs 1 --bf16 True \
    --per_device_train_batch_size ${per_device_train_batch_size} \
    --gradient_accumulation_steps $gradient_accumulation_steps
