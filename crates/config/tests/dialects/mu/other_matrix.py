class MUConfig:
    matrix_size = 16
    block_size = 4
    n_layers = 12
    vocab_size = 50000
    max_seq_len = 256
    batch_size = 12
