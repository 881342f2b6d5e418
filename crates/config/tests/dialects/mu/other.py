"""A model with a width is another."""

n_layers = 12
d_model = 768
vocab_size = 50000
batch_size = 32
max_seq_len = 512
