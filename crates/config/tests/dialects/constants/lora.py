"""Configuration of the baseline."""

from pathlib import Path

ROOT = Path(__file__).parent
OUTPUT_DIR = str(ROOT / "outputs")

MODEL_NAME = "Qwen/Qwen2.5-7B-Instruct"
MAX_SEQ_LENGTH = 1024

LORA_CONFIG = {
    "r": 64,
    "lora_alpha": 128,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}

TRAINING_CONFIG = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "fp16": True,
    "optim": "adamw_torch",
}
