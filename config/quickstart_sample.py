# What the quickstart's model writes.
#   python sample.py config/quickstart_sample.py

out_dir = 'out-quickstart'
start = 'def'  # no space behind: in a BPE the space belongs to the next word
num_samples = 2
max_new_tokens = 300
temperature = 0.8
