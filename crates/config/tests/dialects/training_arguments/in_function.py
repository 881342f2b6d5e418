import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

MODEL_ID = "meta-llama/Llama-3.2-1B"
MAX_LENGTH = 2048  # tokens


def load():
    tokenizer = AutoTokenizer.from_pretrained(MODEL_ID)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL_ID,
        torch_dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )
    return model, tokenizer


def train(data):
    model, tokenizer = load()
    batch_size = 4
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=8,  # 32 a step
        bf16=True,
        learning_rate=2e-5,
        num_train_epochs=1,
    )
    Trainer(model=model, args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    train([])
