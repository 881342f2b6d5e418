from transformers import BertForMaskedLM, Trainer, TrainingArguments

if __name__ == "__main__":
    model = BertForMaskedLM.from_pretrained("google-bert/bert-base-uncased")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="out",
            per_device_train_batch_size=32,
            fp16=True,
            max_steps=1000,
        ),
    )
    trainer.train()
