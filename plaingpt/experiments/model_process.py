"""Answer for a trained model in a process of its own: python model_process.py TREE OUT_DIR DEVICE

The code in TREE loads the last checkpoint in OUT_DIR. A question on stdin is a line [n, B, T] and n
tensors (B, T) of int64: idx, or idx and targets. The answer on stdout is a line with its shape and
float32: logits (B, T, V), or the model's own loss. What the code prints goes to stderr.
"""

import json
import os
import sys


def main(tree, out_dir, device):
    answers = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)
    sys.path[0] = tree
    import numpy as np
    import torch

    from plaingpt.training.checkpoint import find
    model = find(out_dir, 'latest').load_model(device, dropout=0.0).eval()
    while line := sys.stdin.buffer.readline():
        n, B, T = json.loads(line)
        numbers = np.frombuffer(bytearray(sys.stdin.buffer.read(8 * n * B * T)), '<i8')
        with torch.no_grad():
            logits, loss = model(*torch.from_numpy(numbers).to(device).view(n, B, T))
        answer = (logits if n == 1 else loss).float().cpu().numpy()
        answers.write(json.dumps(answer.shape).encode() + b'\n' + answer.astype('<f4').tobytes())
        answers.flush()


if __name__ == '__main__':
    main(*sys.argv[1:])
