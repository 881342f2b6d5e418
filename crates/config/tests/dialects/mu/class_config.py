"""MU-SOTA training configuration."""


class MUSOTAConfig:
    # Model
    n_layers = 24
    n_heads = 8
    vocab_size = 50000
    dropout = 0.1

    # Training
    batch_size = 4  # Was 32
    max_seq_len = 256  # Was 512
    learning_rate = 1e-4
    weight_decay = 0.01
    warmup_steps = 1000
    num_epochs = 5
    max_grad_norm = 1.0
    use_amp = True
