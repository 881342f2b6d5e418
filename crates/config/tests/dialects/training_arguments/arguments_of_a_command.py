import sys
from transformers import AutoModelForCausalLM, TrainingArguments

size = int(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", torch_dtype="bfloat16")
args = TrainingArguments("out", per_device_train_batch_size=size, gradient_accumulation_steps=4, bf16=True)
