"""Settings of a run."""

n_layers = 12  # Half the layers, half the memory
n_heads = 8
vocab_size = 50000
dropout = 0.1

batch_size = 32
max_seq_len = 512
learning_rate = 1e-4
num_epochs = 5
temperature = 0.8
top_k = 50
