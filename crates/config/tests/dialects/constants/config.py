"""Settings of the fine-tuning run."""

MODEL_NAME = "Qwen/Qwen2.5-0.5B"
BATCH_SIZE = 8
EVAL_BATCH = BATCH_SIZE * 4
GRAD_ACCUM = 2
MAX_LEN = 512  # tokens
LEARNING_RATE = 5e-5
USE_BF16 = True
LORA_R = 8
LORA_TARGET_MODULES = ["q_proj", "v_proj"]
