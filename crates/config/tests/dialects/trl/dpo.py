from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer


def main():
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
    args = DPOConfig(output_dir="out", per_device_train_batch_size=2, logging_steps=10)
    DPOTrainer(model=model, args=args, train_dataset=[]).train()
