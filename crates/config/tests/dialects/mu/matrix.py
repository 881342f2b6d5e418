"""Names that mean a length elsewhere."""

import torch


class MUSOTAConfig:
    # Matrix structure
    matrix_size = 8
    num_semantic_blocks = 16
    block_size = 2  # 2×2 blocks

    n_layers = 12
    n_heads = 8
    vocab_size = 50000
    max_seq_len = 256
    batch_size = 12
    gradient_accumulation_steps = 8
    use_mixed_precision = True
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
