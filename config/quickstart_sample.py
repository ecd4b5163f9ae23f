# Sample from the quickstart's model.
#   python sample.py config/quickstart_sample.py

out_dir = 'out-quickstart'
start = 'def get'
num_samples = 2
max_new_tokens = 200
temperature = 0.8
repetition_penalty = 1.2  # without it, a model this small repeats itself
