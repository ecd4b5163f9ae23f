# Put this after another recipe to give its model the architecture of Qwen3, which llama.cpp and
# Ollama run too.
#   python train.py config/quickstart.py config/qwen3_shape.py
#   python export.py out-quickstart-qwen3 --dest=python-gpt

out_dir += '-qwen3'

rotary = True
rmsnorm = True
qk_norm = True
mlp = 'swiglu'
bias = False
conv = 0
ngram_rows = 0
value_embeddings = False
