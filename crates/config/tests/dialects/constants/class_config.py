from dataclasses import dataclass


@dataclass
class Config:
    batch_size: int = 4  # Was 32
    max_seq_len: int = 256
    learning_rate: float = 1e-4
    use_fp16: bool = True
    gradient_checkpointing: bool = False
    window_size: int = 64

    def tokens(self):
        return self.batch_size * self.max_seq_len
