import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

model_id = "mistralai/Mistral-7B-v0.1"
lora_r = 64


def main():
    bnb_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=bnb_config, torch_dtype=torch.bfloat16)
    peft_config = LoraConfig(r=lora_r, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    args = SFTConfig(
        output_dir="out",
        max_length=1024,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        optim="paged_adamw_8bit",
        bf16=True,
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=None, peft_config=peft_config)
    trainer.train()


main()
