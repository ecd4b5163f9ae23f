"""The loss of a trained model: python measure_loss.py TREE OUT_DIR DEVICE

The code in TREE, of the base or of the change, loads the last checkpoint in OUT_DIR and gives
logits. The rest is this file's, the base's: it feeds the tokens of OUT_DIR/text.bin (uint32), but
no targets, and prints the mean loss in nats a token, or what makes the loss worthless.
"""

import random
import sys

import numpy as np
import torch
from torch.nn.functional import cross_entropy  # before TREE can put another in its place

BATCH_SIZE = 8
SAME = 1e-4  # of the logits' RMS: what rounding may change
chance = random.SystemRandom()  # that no code can foresee


@torch.no_grad()
def main(tree, out_dir, device):
    sys.path[0] = tree
    from plaingpt.training.checkpoint import find
    checkpoint = find(out_dir, 'latest')
    model = checkpoint.load_model(device, dropout=0.0).eval()
    T = checkpoint.state['model']['block_size']
    ids = torch.from_numpy(np.fromfile(f'{out_dir}/text.bin', '<u4').astype(np.int64)).to(device)
    n, total = (len(ids) - 1) // T * T, 0.0
    batches = (tokens.view(-1, T).split(BATCH_SIZE) for tokens in (ids[:n], ids[1:n + 1]))
    for idx, targets in zip(*batches, strict=True):  # (B, T) each
        logits = model(idx.clone())[0].float()  # (B, T, V), of a copy whose memory has no targets
        if not logits.isfinite().all():
            sys.exit('error: its logits are not finite: did it diverge?')
        # the softmax is taken here, so that probabilities sum to one
        total += cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='sum').item()
        examine(model, idx, logits)
    print(total / n)


def examine(model, idx, logits):
    """Ask again: of each sequence a beginning stays, of half of them nothing, and other tokens take
    the place of the rest. What is said of a token may depend on the tokens before it in its
    sequence, and on nothing else."""
    B, T, V = logits.shape
    lengths = [max(0, chance.randint(-T, T)) for _ in range(B)]
    lengths[chance.randrange(B)] = chance.randint(1, T)  # of one at least
    stays = (torch.arange(T) < torch.tensor(lengths)[:, None]).to(idx.device)  # (B, T)
    others = torch.tensor(chance.choices(range(V), k=B * T)).view(B, T).to(idx.device)
    before, after = logits[stays], model(torch.where(stays, idx, others))[0].float()[stays]
    if not (after - before).abs().max() <= SAME * before.square().mean().sqrt():
        sys.exit('error: what it says of a token depends on later tokens, on other sequences of '
                 'the batch, or on what it was asked before')


if __name__ == '__main__':
    main(*sys.argv[1:])
